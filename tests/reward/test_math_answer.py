"""The `math` reward on a table of cases, judged by hand."""

from __future__ import annotations

import pytest

from rlhfless_ray.reward.math_answer import final_answer, math_reward

RIGHT = [
    ("Natalia sold 48/2 = 24.\n#### 72", "So she sold 72.\n#### 72"),
    ("#### 72", "The answer is 72."),
    ("72", "\\boxed{72}"),
    ("#### 1,250", "That makes $1,250.00."),
    ("1000000", "It is $1{,}000{,}000$"),
    ("1000", "1,000 people"),
    ("#### 18", "#### 18 apples"),
    ("#### 18", "#### $18"),
    ("#### 18", "#### **18**"),
    ("#### 10", "#### 10 dollars per hour."),
    ("#### 2", "#### The answer is: 2."),
    ("#### 4", "#### x = 4"),
    ("50", "50%"),
    ("5", "\\boxed{5\\%}"),
    ("5", "\\boxed{5 \\text{ cm}}"),
    ("#### -5", "it is = -5"),
    ("-3", "−3"),
    ("-2", "#### -$2"),
    ("#### 5", "this is 10-5"),  # the minus subtracts: the last number is 5
    ("0.5", "#### 1/2"),
    ("0.5", "in all 1/2"),
    ("1/2", "\\boxed{\\frac{1}{2}}"),
    ("\\frac{3}{4}", "0.75"),
    ("3.50", "3.5."),
    ("3", "first 1, 2, then 3"),
    ("2", "#### 2\nand here is an extra 7"),
    ("12", "#### 3*4"),
    ("x+1", "\\boxed{1+x}"),
    ("\\sqrt{2}", "\\boxed{\\sqrt{2}}"),
    ("(1,2)", "\\boxed{(1, 2)}"),
    ("\\frac{1}{2}", "\\boxed{\\dfrac{1}{2}}"),
    ("18", "first \\boxed{17}, no: \\boxed{18}"),
    (7, "7.0"),
    (0.25, "1/4"),
    (1e16, "10000000000000000"),
]
WRONG = [
    ("18", "19"),
    ("18", "-18"),
    ("18", ""),
    ("18", "no idea"),
    ("18", "it is 18\n#### "),  # the mark is there, the answer is not
    ("18", "#### 17, or rather 18?\n#### 16"),
    ("1000", "#### 1000000"),
    ("1000", "1.000"),
    ("0.333", "#### 1/3"),
    ("18", "18 or maybe 20"),
    ("18", "it is \\boxed{17"),
    ("18", "#### 18x"),
    ("2", "#### 2 pi"),
    ("2", "#### 2 million"),
    ("2", "#### -$2"),
    ("5", "5/0"),
    ("\\sqrt{2}", "\\boxed{\\sqrt{3}}"),
    ("x+1", "\\boxed{x}"),
]


@pytest.mark.parametrize(("reference", "response"), RIGHT)
def test_right(reference: str | float, response: str) -> None:
    assert math_reward("", response, {"answer": reference}) == 1.0


@pytest.mark.parametrize(("reference", "response"), WRONG)
def test_wrong(reference: str, response: str) -> None:
    assert math_reward("", response, {"answer": reference}) == 0.0


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("", "is empty"),
        ("####", "is empty"),
        ([1], "is of type list"),
        (True, "is of type bool"),
        (float("nan"), "is nan, not a finite number"),
        ("?", "cannot read"),
    ],
)
def test_a_reference_that_cannot_be_read_is_an_error_not_a_zero(reference: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        math_reward("", "#### 1", {"answer": reference})


def test_the_answer_column_may_have_another_name() -> None:
    assert math_reward("", "8", {"solution": "8", "answer": "9"}, answer_column="solution") == 1.0


def test_what_is_compared() -> None:
    assert final_answer("5 then \\boxed{6} then\n#### 7 \nand 8") == "7"
    assert final_answer("5 then \\boxed{\\frac{6}{1}} and 8") == "\\frac{6}{1}"
    assert final_answer("5 then 6,000.50 end") == "6,000.50"
    assert final_answer("none") is None
