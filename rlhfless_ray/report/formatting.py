"""Format numbers for people. Functions take SI base units and return a short text; None and NaN become a dash."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

DASH = "–"
Figure = SupportsFloat | str | None


def finite(value: Figure) -> float | None:
    """Return the value as a float, or None if it is missing, not a number, NaN or infinite."""
    try:
        number = float("nan" if value is None else value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def finite_values(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the finite values of a metric, without the rows that lack it."""
    return [value for value in (finite(row.get(key)) for row in rows) if value is not None]


def total(rows: Iterable[Mapping[str, object]], key: str) -> float | None:
    """Return the sum of a metric over the rows, or None if no row has it."""
    values = finite_values(rows, key)
    return sum(values) if values else None


def round_up(width: float) -> float:
    """Round up to the next of 1, 2, 5, 10 … times a power of ten, as ticks and bins are spaced."""
    unit = 10.0 ** math.floor(math.log10(width))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= width * 0.999)


def number(value: Figure, digits: int = 3) -> str:
    """Format with `digits` significant digits: 0.00123, 4.56, 1,235; very small and large numbers as 1.2e-07."""
    x = finite(value)
    if x is None:
        return DASH
    if x == 0:
        return "0"
    if abs(x) < 1e-4 or abs(x) >= 1e9:
        mantissa, _, exponent = f"{x:.{max(digits - 1, 0)}e}".partition("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    text = f"{x:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: Figure, decimals: int = 1) -> str:
    """Format a share (0 … 1) as a percentage."""
    x = finite(share)
    return DASH if x is None else f"{100 * x:.{decimals}f}%"


def are_shares(values: Iterable[float]) -> bool:
    """Return whether held-out rewards can be an accuracy: a user's reward may be any number."""
    return all(0 <= value <= 1 for value in values)


def duration(seconds: Figure) -> str:
    """Format seconds in up to two units: 0.42 s, 12.3 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    x = finite(seconds)
    if x is None:
        return DASH
    if abs(x) < 9.995:
        return f"{x:.2f} s"
    if abs(x) < 59.95:
        return f"{x:.1f} s"
    total = round(x)
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def slot_time(slot_seconds: Figure) -> str:
    """Format slot-seconds, from 10,000 on as slot-hours."""
    x = finite(slot_seconds)
    if x is None:
        return DASH
    return f"{number(x / 3600)} slot-h" if abs(x) >= 10_000 else f"{number(x)} slot-s"


def money(amount: Figure) -> str:
    """Format an amount of money. The recipe names no currency."""
    x = finite(amount)
    if x is None:
        return DASH
    return f"{x:,.2f}" if abs(x) >= 1 else number(x)


def short(value: Figure) -> str:
    """Format large counts with a suffix: 950, 12.3 k, 4.56 M."""
    x = finite(value)
    if x is None:
        return DASH
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(x) >= size:
            scale = 1e3 if suffix == " k" else size
            return f"{number(x / scale)}{suffix}"
    return number(x, 4) if x % 1 else f"{x:,.0f}"


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts `cpu 10` after `cpu 9`."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text)]
