"""`extract_boxed_answer` and `grade_answer`, which reward files import from `openrlhf.utils`."""

from __future__ import annotations

import re

from rlhfless_ray.reward.math_answer import equal_numbers, last_box, verified

SPACING = ("\\!", "\\,", "\\;", "\\left", "\\right")


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box, or None if there is none or its brace is never closed."""
    return last_box(solution, "\\boxed", "\\fbox")


def grade_answer(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers without their boxes are equal as text without spacing, as numbers, or by math-verify."""
    if given_answer is None or ground_truth is None:
        return False
    given, truth = (_normalise(str(answer)) for answer in (given_answer, ground_truth))
    if "".join(given.split()) == "".join(truth.split()):
        return True
    if not given or not truth:
        return False
    equal = equal_numbers(truth, given)
    return verified(truth, given) is True if equal is None else equal


def _normalise(text: str) -> str:
    text = text.strip().strip("$")
    for word in SPACING:
        text = text.replace(word, "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").removesuffix(".").strip()
    return re.sub(r"(?<=\d) +(?=\d)", "+", text)  # mixed numbers: `1 1/2` is not `11/2`
