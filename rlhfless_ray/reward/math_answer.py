"""The `math` reward: is the response's final answer equal to the reference?

The reference is what follows the last `####` of the row's answer, or the whole answer. The response's answer is, in this
order: what follows its last `####` on that line; the content of its last `\\boxed{…}`; its last number. Two plain numbers
are compared exactly, after currency signs, per cent signs, thousands separators, a final full stop and a unit in words
are taken away (`$1,250.00` equals `1250 dollars`, `50%` equals `50`); everything else is left to math-verify.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGNED = rf"[-+−]?\s?[$€£]?\s?(?:{_NUMBER})"
# A minus directly after a digit, letter or bracket subtracts; it is no sign.
_LAST = re.compile(rf"(?:(?<![\w)\].])[-−]\s?)?[$€£]?(?:{_NUMBER})(?:\s?/\s?(?:{_NUMBER}))?")
_PLAIN = re.compile(rf"^({_SIGNED})(?:\s?/\s?({_NUMBER}))?\s?%?(?:\s*[^\W\d_][^\d+*/^=\\{{}}()]*)?$")


def math_reward(prompt: str, response: str, row: dict[str, Any], answer_column: str = "answer") -> float:
    """1.0 when the answers are equal, else 0.0. Raises ValueError when the reference itself cannot be read."""
    reference = row[answer_column]
    if isinstance(reference, bool) or not isinstance(reference, (str, int, float)):
        raise ValueError(f"the reference answer in column `{answer_column}` is of type {type(reference).__name__}")
    gold = _after_mark(str(reference))
    gold = str(reference).strip() if gold is None else gold
    if not gold:
        raise ValueError(f"the reference answer in column `{answer_column}` is empty")
    answer = final_answer(response)
    if not answer:
        return 0.0
    gold_number, number = _plain(gold), _plain(answer)
    if gold_number is not None and number is not None:
        return float(gold_number == number)
    return _math_verify(gold, answer)


def final_answer(response: str) -> str | None:
    """The part of a response that is compared; None when it gives no answer."""
    marked = _after_mark(response)
    if marked is not None:
        return _last_box(marked) or marked
    box = _last_box(response)
    if box is not None:
        return box
    numbers = _LAST.findall(response)
    return numbers[-1] if numbers else None


def _after_mark(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : i].strip()
    return None  # the response was cut inside the box


def _plain(text: str) -> Fraction | None:
    """The number, if the text is one number with at most a currency sign, a per cent sign or a unit in words."""
    bare = re.sub(r"\\(?=[$%])|\\!|\{,\}", lambda m: "," if m[0] == "{,}" else "", text.strip().strip("*`").strip())
    if len(bare) >= 2 and bare.startswith("$") and bare.endswith("$"):
        bare = bare[1:-1].strip()
    match = _PLAIN.match(bare.rstrip(".").strip())
    if match is None:
        return None
    value = _fraction(match[1])
    if match[2] is None:
        return value
    below = _fraction(match[2])
    return value / below if below else None


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s,$€£]", "", text).replace("−", "-"))


def _math_verify(gold: str, answer: str) -> float:
    import math_verify

    configs = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    # math-verify's own limits use SIGALRM, which is ours here (worker.py); None switches them off.
    parsed = [
        math_verify.parse(text if "$" in text else f"${text}$", configs, parsing_timeout=None) for text in (gold, answer)
    ]
    if not parsed[0]:
        raise ValueError(f"math-verify cannot read the reference answer {gold!r}")
    return float(math_verify.verify(parsed[0], parsed[1], timeout_seconds=None))
