"""What OpenRLHF calls `extract_boxed_answer` and `grade_answer`: reward files import them from `openrlhf.utils`."""

from __future__ import annotations

import re

from rlhfless_ray.reward.math_answer import equal_numbers, verified

COMMANDS = ("\\boxed", "\\fbox")
SPACING = ("\\!", "\\,", "\\;", "\\left", "\\right")


def extract_boxed_answer(solution: str) -> str | None:
    """The content of the last box, None where there is none or its brace is never closed."""
    start, command = max((solution.rfind(command + "{"), command) for command in COMMANDS)
    if start < 0:
        return None
    depth = 0
    for i in range(start + len(command), len(solution)):
        depth += (solution[i] == "{") - (solution[i] == "}")
        if depth == 0:
            return solution[start + len(command) + 1 : i]
    return None


def grade_answer(given_answer: str | None, ground_truth: str | None) -> bool:
    """Whether two answers, taken out of their boxes, are the same: as text without spacing, as numbers, or by math-verify."""
    if given_answer is None or ground_truth is None:
        return False
    given, truth = (_bare(str(answer)) for answer in (given_answer, ground_truth))
    if _dense(given) == _dense(truth):
        return True
    if not given or not truth:
        return False
    equal = equal_numbers(truth, given)
    return verified(truth, given) is True if equal is None else equal


def _bare(text: str) -> str:
    text = text.strip().strip("$")
    for word in SPACING:
        text = text.replace(word, "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").removesuffix(".").strip()
    return re.sub(r"(?<=\d) +(?=\d)", "+", text)  # mixed numbers: `1 1/2` is not `11/2`


def _dense(text: str) -> str:
    """Without spaces."""
    return "".join(text.split())
