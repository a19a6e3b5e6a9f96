"""`extract_boxed_answer` and `grade_answer`, which reward files import from `openrlhf.utils`."""

from __future__ import annotations

from rlhfless_ray.reward.math_answer import last_box
from rlhfless_ray.reward.math_compare import UnreadableReference, is_equal


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last box, or None if there is none or its brace is never closed."""
    return last_box(solution, "\\boxed", "\\fbox")


def grade_answer(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers without their boxes are equal. A broken truth equals nothing."""
    if not given_answer or not ground_truth:
        return given_answer == ground_truth == ""
    try:
        return is_equal(str(ground_truth), str(given_answer))
    except UnreadableReference:
        return False
