"""The `math` reward: 1 if the response's final answer equals the reference, else 0.

The reference is the text after the last `####` of the row's answer, or the whole answer. The response's answer is the first
of these that exists: the rest of the line after its last `####`, the content of its last `\\boxed{…}`, its last number.

Two plain numbers are compared exactly. A plain number may be surrounded only by words (`18 apples`), a currency or per cent
sign, thousands separators, `x =` or a final full stop: `$1,250.00` equals `1250 dollars`, `50%` equals `50`, `1/2` equals
`0.5`. All other answers are compared by math-verify.
"""

from __future__ import annotations

import logging
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_MONEY = r"[$€£]?\s?"
# A minus directly after a digit, letter or bracket is a subtraction, not a sign.
_NUMBER = re.compile(rf"(?:(?<![\w)\].])[-+−]\s?)?{_MONEY}{_DIGITS}(?:\s?/\s?{_DIGITS})?")
_WORDS = r"[^\W\d_]+(?:[\s'’-]+[^\W\d_]+)*"
_PLAIN = re.compile(rf"(?:{_WORDS}:?\s+)?([-+−]?\s?{_MONEY}{_DIGITS})(?:\s?/\s?({_DIGITS}))?\s?%?(?:\s*{_WORDS})?")
# Words that change the value, so they are not units. Single letters do as well: `18x` is not 18.
_CHANGES = re.compile(
    r"(?<![^\W\d_])(?:[^\W\d_]|pi|sqrt|log|ln|sin|cos|tan|minus|negative|half|percent of|dozen|hundred|thousand|million|"
    r"billion|trillion)s?(?![^\W\d_])",
    re.IGNORECASE,
)


def math_reward(prompt: str, response: str, row: dict[str, Any], answer_column: str = "answer") -> float:
    """Return 1.0 if the answers are equal, else 0.0. Raises ValueError if the reference cannot be read."""
    gold = reference_answer(row, answer_column)
    answer = final_answer(response)
    if not answer:
        return 0.0
    equal = equal_numbers(gold, answer)
    if equal is None:
        equal = verified(gold, answer)
    if equal is None:
        raise ValueError(f"math-verify cannot read the reference answer {gold!r}")
    return float(equal)


def reference_answer(row: dict[str, Any], column: str) -> str:
    """Return a row's reference answer. Raises ValueError for another type, NaN and an empty one."""
    reference = row[column]
    if isinstance(reference, bool) or not isinstance(reference, (str, int, float)):
        raise ValueError(f"the reference answer in column `{column}` is of type {type(reference).__name__}")
    if isinstance(reference, float) and not math.isfinite(reference):  # a table writes NaN where a number is missing
        raise ValueError(f"the reference answer in column `{column}` is {reference}, not a finite number")
    text = format(Decimal(str(reference)), "f") if isinstance(reference, float) else str(reference).strip()
    gold = _after_mark(text)
    gold = text if gold is None else gold
    if not gold:
        raise ValueError(f"the reference answer in column `{column}` is empty")
    return gold


def prepare() -> None:
    """Import and warm up math-verify, so that this does not count towards the first sample's time limit."""
    verified("\\frac{1}{2}", "0.5")


def final_answer(response: str) -> str | None:
    """Return the part of a response that is compared, or None or "" if it has no answer."""
    marked = _after_mark(response)
    if marked is not None:
        return (last_box(marked, "\\boxed") or marked).strip()
    box = last_box(response, "\\boxed")
    if box is not None:
        return box.strip()
    numbers = _NUMBER.findall(response.replace("{,}", ","))
    return numbers[-1].strip() if numbers else None


def _after_mark(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def last_box(text: str, *commands: str) -> str | None:
    """Return the content of the last box that one of these commands makes, or None if there is none or its brace is never closed."""
    start, command = max((text.rfind(command + "{"), command) for command in commands)
    depth = 0
    for i in range(start + len(command), len(text)) if start >= 0 else ():
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len(command) + 1 : i]
    return None


def _plain(text: str) -> Fraction | None:
    """Return the text's value, or None if it is not a plain number."""
    bare = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\!", "").strip(" \t*`")
    if len(bare) > 2 and bare[0] == bare[-1] == "$":
        bare = bare[1:-1]
    name, equals, value = bare.rpartition("=")
    if equals and re.fullmatch(r"\s*[^\W\d_]+\s*", name):
        bare = value
    bare = bare.strip().rstrip(".")
    match = _PLAIN.fullmatch(bare)
    if match is None or _CHANGES.search(bare):
        return None
    above, below = _fraction(match[1]), _fraction(match[2] or "1")
    return above / below if below else None


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s,$€£]", "", text).replace("−", "-"))


def equal_numbers(gold: str, answer: str) -> bool | None:
    """Return whether two plain numbers are equal, or None if one of them is not plain."""
    gold_number, number = _plain(gold), _plain(answer)
    return None if gold_number is None or number is None else gold_number == number


def verified(gold: str, answer: str) -> bool | None:
    """Return math-verify's verdict, or None if it cannot read the reference."""
    import math_verify

    # Its time limits use SIGALRM, which time_limit.py uses too: None switches them off and prints a warning.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    configs = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    parsed = [
        math_verify.parse(text if "$" in text else f"${text}$", configs, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, answer)
    ]
    return bool(math_verify.verify(parsed[0], parsed[1], timeout_seconds=None)) if parsed[0] else None
