"""Convert values and exceptions of users' functions to numbers and messages."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import one_line, one_line_with_type

if TYPE_CHECKING:
    from rlhfless_ray.reward.user_file import UserFile

MAX_MESSAGE_CHARS = 300
MAX_FLOAT32 = 3.4028234663852886e38  # the learner's advantages are float32


def to_finite_float(value: object) -> float:
    """Convert any real number to a finite float in float32's range. The message of its ValueError continues "… returned "."""
    number = to_float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"{number:g}, too large for a 32-bit float")
    return number


def to_float(value: object) -> float:
    """Convert any real number to a float, which may be NaN or infinite. An array or tensor without dimensions is a number, too."""
    if getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{type(value).__name__} {one_line(repr(value), 100)}, not a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError("a number too large for a float") from None


def unwrap(value: object) -> Any:
    """Unwrap arrays, tensors and lists with one element, such as the rows of a tensor of shape (n, 1)."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return value


def timeout_message(timeout_s: float) -> str:
    return f"took longer than reward.timeout_s = {timeout_s:g} s"


def describe_exception(error: BaseException, file: UserFile | None) -> str:
    """Describe an exception and the line of the user's file that raised it."""
    line = file.line_of(error) if file is not None else None
    where = f" ({file.path}, line {line})" if file is not None and line is not None else ""
    return f"{one_line_with_type(error, MAX_MESSAGE_CHARS)}{where}"
