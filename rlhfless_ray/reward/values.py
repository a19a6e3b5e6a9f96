"""What users' functions return and raise, as numbers and in words."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING

from rlhfless_ray.errors import typed_line

if TYPE_CHECKING:
    from rlhfless_ray.reward.user_file import UserFile

MESSAGE_CHARACTERS = 300


def finite(value: object) -> float:
    """Any kind of real number as a float. Raises ValueError that says what it is instead, to follow "… returned "."""
    number = real(value)
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return number


def real(value: object) -> float:
    """As `finite`, but NaN and infinities are numbers too."""
    if not isinstance(value, (numbers.Real, bool)) and type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{type(value).__name__} {value!r:.100}, not a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError("a number too large for a float") from None


def late(timeout_s: float) -> str:
    return f"took longer than reward.timeout_s = {timeout_s:g} s"


def named(error: BaseException, file: UserFile | None) -> str:
    """What was raised, and where in the user's file."""
    line = file.line_of(error) if file is not None else None
    where = f" ({file.path}, line {line})" if file is not None and line is not None else ""
    return f"{typed_line(error, MESSAGE_CHARACTERS)}{where}"
