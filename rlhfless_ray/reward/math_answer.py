"""The `math` reward: 1 if the response's final answer equals the reference, else 0.

The reference is the text after the last `####` of the row's answer, or else the content of its last box, or the whole answer. The
response's answer is the first of these that exists: the rest of the line after its last `####`, the content of its last `\\boxed{…}` or
`\\fbox{…}`, its last number.
What the response contains is never an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.reward.math_compare import UnreadableReference, is_equal, is_understood

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")

_DIGITS = r"(?:(?:\d{1,3}(?:(?:,|\{,\}|\\[,;: ]|[~\u00a0\u2009\u202f ])\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_MONEY = r"(?:\\?[$€£]\s?)?"
_SIGNED = r"(?:\{\s?[-+−]?\d+\s?\}|[-+−]?\d+)"
_POWER_OF_TEN = rf"(?:[eE][-+]?\d+(?!\w)|\s?(?:\\times|\\cdot|×|\*)\s?10\s?(?:\^|\*\*)\s?{_SIGNED}|[½⅓⅔¼¾⅕⅛])"
_FRACTION = r"\\[dt]?frac\s?(?:\{\d+\}\s?\{\d+\}|\d\d)"
# A minus directly after a digit, letter or bracket is a subtraction, not a sign.
_NUMBER = re.compile(
    rf"(?:(?<![\w)\].}}])[-+−]\s?)?(?:{_MONEY}{_DIGITS}(?:\s?{_FRACTION}|{_POWER_OF_TEN}|\s?/\s?{_DIGITS}|(?:\s\d+/\d+))?|{_FRACTION}|[½⅓⅔¼¾⅕⅛])"
    r"(?:\s(?:hundred|thousand|million|billion|trillion|dozen)\b|\s?\\?%)?"
)
_ASKED_ORDER = re.compile(
    r"\b(?:(?:in|by) [a-z ]{0,30}order\b|(?:from|in order of) (?:the )?(?:least|smallest|lowest|shortest|youngest|earliest|largest|"
    r"greatest|highest|longest|oldest|increasing|decreasing)|arrange|rank the)",
    re.IGNORECASE,
)
_ANY_ORDER = re.compile(r"\b(?:in any order|order does(?: not|n't) matter|(?:select|choose|mark|list) all)", re.IGNORECASE)
_PROMPT_CHARS = 20_000


def math_reward(prompt: str, response: str, row: JsonObject, answer_column: str = "answer") -> float:
    """Return 1.0 if the answers are equal, else 0.0. Raises ValueError if the reference cannot be read."""
    gold = reference_answer(row, answer_column)
    answer = final_answer(response)
    if not answer:
        return 0.0
    with _named(gold):
        return float(is_equal(gold, answer, asked_order(prompt)))


def is_reference_understood(row: JsonObject, column: str) -> bool:
    """Return whether a row's reference is compared by its value, not only as text. Raises ValueError if it is broken."""
    gold = reference_answer(row, column)
    with _named(gold):
        return is_understood(gold)


@contextmanager
def _named(gold: str) -> Iterator[None]:
    try:
        yield
    except UnreadableReference as error:
        raise ValueError(f"cannot read the reference answer {gold[:200]!r}: {error}") from None


def asked_order(prompt: str) -> bool | None:
    """Return whether a prompt asks for a list in an order, or in any, or None if it says neither."""
    prompt = prompt[-_PROMPT_CHARS:]
    return False if _ANY_ORDER.search(prompt) else True if _ASKED_ORDER.search(prompt) else None


def reference_answer(row: JsonObject, column: str) -> str:
    """Return a row's reference answer. Raises ValueError for another type, NaN and an empty one."""
    reference = row[column]
    if isinstance(reference, bool) or not isinstance(reference, (str, int, float)):
        raise ValueError(f"the reference answer in column `{column}` is of type {type(reference).__name__}")
    if isinstance(reference, float) and not math.isfinite(reference):  # a table writes NaN where a number is missing
        raise ValueError(f"the reference answer in column `{column}` is {reference}, not a finite number")
    text = format(Decimal(str(reference)), "f") if isinstance(reference, float) else str(reference).strip()
    gold = _after_mark(text)
    if gold is None:  # a whole solution, as in MATH, ends with its answer in a box
        gold = extract_boxed_answer(text) or text
    if not gold:
        raise ValueError(f"the reference answer in column `{column}` is empty")
    return gold


def prepare() -> None:
    """Import and warm up mpmath, so that this does not count towards the first sample's time limit."""
    is_equal("\\sqrt{2}n!", "\\sqrt{3}n!")


def final_answer(response: str) -> str | None:
    """Return the part of a response that is compared, or None or "" if it has no answer."""
    marked = _after_mark(response)
    if marked is not None:
        return (extract_boxed_answer(marked) or marked).strip()
    box = extract_boxed_answer(response)
    if box is not None:
        return box.strip()
    numbers = [match[0] for match in _NUMBER.finditer(response)]
    return numbers[-1].strip() if numbers else None


def _after_mark(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last `\\boxed` or `\\fbox`, or None if there is none or its brace is never closed.

    Reward files import this and `grade_answer` from `openrlhf.utils`.
    """
    starts = [match.end() for match in _BOX.finditer(solution)]
    if not starts:
        return None
    start, depth = starts[-1], 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(solution, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return solution[start : match.start()]
    return None


def grade_answer(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers without their boxes are equal. A broken truth equals nothing."""
    if not given_answer or not ground_truth:
        return given_answer == ground_truth == ""
    try:
        return is_equal(str(ground_truth), str(given_answer))
    except UnreadableReference:
        return False
