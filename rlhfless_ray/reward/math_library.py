"""Compare what the own grammar does not read by math-verify: integrals, sums, limits. Its "equal" is checked here once more.

A text is given to it only if it is short and its numbers are small. A count of function calls bounds its work, so the verdict does
not depend on the machine's speed, and no signal is needed.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MAX_CHARS = 400
MAX_CALLS = 1_500_000  # about 2 s on one core
DIGITS = 40  # of the check; math-verify rounds to 6 decimals
_COMMANDS = re.compile(r"\\([A-Za-z]+)")
_CHECKED_COMMANDS = {
    "frac", "sqrt", "int", "sum", "prod", "lim", "to", "infty", "pi", "cdot", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos",
    "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg", "exp", "binom", "le", "ge", "ne", "in", "cup", "cap", "theta", "alpha", "beta",
    "gamma", "lambda", "mu", "phi", "omega", "sigma", "max", "min", "gcd", "lcm", "bmod", "pm", "mathbb", "emptyset", "setminus",
}  # fmt: skip
_HUGE = re.compile(r"\d{13}|\^ ?\{?[^{}]*\^|\^ ?\{? ?-?\d{4}|\d{4,} ?!|! ?!|\^[^+]*!|![^+]*\^|binom[^}]*\d{4}|(?:sum|prod)\D*[^}]*\d{5}")


class _TooManyCalls(BaseException):
    """Not an Exception, so that a library's `except Exception` does not catch it."""


def read(text: str) -> list[Any]:
    """Return what math-verify reads in a text: nothing, or an expression and its text."""
    if len(text) > MAX_CHARS or _HUGE.search(text):
        return []
    import math_verify

    # Its time limits use SIGALRM, which rewards must not depend on: None switches them off and prints a warning.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    configs = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    return _bounded(lambda: math_verify.parse(f"${text}$", configs, fallback_mode="no_fallback", parsing_timeout=None)) or []


def is_equal(gold: list[Any], gold_text: str, answer_text: str) -> bool:
    """Return whether math-verify finds the answer equal, and the check agrees."""
    answer = read(answer_text)
    if not gold or not answer or not set(_COMMANDS.findall(gold_text + answer_text)) <= _CHECKED_COMMANDS:
        return False
    import math_verify

    return bool(_bounded(lambda: math_verify.verify(gold, answer, timeout_seconds=None) and _agrees(gold, answer, gold_text, answer_text)))


def _agrees(gold: list[Any], answer: list[Any], gold_text: str, answer_text: str) -> bool:
    """Compare expressions numerically at two points, others by the numbers and letters that they are made of."""
    import sympy

    left, right = gold[0], answer[0]
    if not isinstance(left, sympy.Expr) or not isinstance(right, sympy.Expr):
        return _parts(gold_text) == _parts(answer_text)
    names = sorted((left.free_symbols | right.free_symbols), key=str)
    for offset in (3, 7):
        point = {name: sympy.sqrt(offset + 4 * i) for i, name in enumerate(names)}
        difference, size = (sympy.N(part.subs(point), DIGITS, maxn=1000) for part in (left - right, left))
        if not (difference.is_number and size.is_number and abs(difference) <= abs(size) * sympy.Float(10) ** (5 - DIGITS)):
            return False
    return True


def _parts(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+", _COMMANDS.sub(lambda match: f"\\{match[1]} ", text)))


def _bounded(function: Callable[[], Any]) -> Any:
    """Return the function's value, or None if it raises or makes more than `MAX_CALLS` calls."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1
        if calls > MAX_CALLS:
            raise _TooManyCalls

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return function()
    except (Exception, _TooManyCalls):
        return None
    finally:
        sys.setprofile(before)
