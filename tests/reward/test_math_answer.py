"""The `math` reward on a table of cases, judged by hand."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from rlhfless_ray.reward.math_answer import final_answer, is_reference_understood, math_reward, prepare

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
    ("18", "first \\boxed{17}, no: \\fbox{18}, as in (2)"),
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
PAIRS = (Path(__file__).parent / "math_pairs.txt").read_text(encoding="utf-8").splitlines()
HOSTILE = {
    "tower": "7^{7^{7^{7}}}",
    "tower without braces": "8^8^8^8",
    "tower of roots": "\\sqrt[7]{7^{7^{9}}}",
    "factorials": "2000000!",
    "factorial of a factorial": "12!!!",
    "expansion": "(a+b+c+d)^{900}",
    "expansions": "((x+1)^{60}+1)^{60}",
    "power of e": "e^{e^{e^{e^{e}}}}",
    "scientific": "1e999999999",
    "binomial": "\\binom{10^9}{5\\cdot 10^8}",
    "sine": "\\sin(10^{10^{10}})",
    "sines": "+".join(f"\\sin {i}" for i in range(190)),
    "letters": "+".join("abcdefghijklmnopqrstuvwxyz" * 15),
    "round brackets": "(" * 4000 + "1" + ")" * 4000,
    "braces": "{" * 4000 + "1" + "}" * 4000,
    "open brackets": "[(" * 9000,
    "fractions": "\\frac{1}{" * 300 + "1" + "}" * 300,
    "nested functions": "\\sin" * 900 + "x",
    "fractions without braces": "\\frac\\log" * 400 + "1",
    "bars": "|" * 3000,
    "30,000 digits": "7" * 30_000,
    "digits of a fraction": "\\frac{" + "7" * 9000 + "}{" + "3" * 9000 + "}",
    "decimals": "0." + "3" * 20_000,
    "repeating": "0.\\overline{" + "12" * 1500 + "}",
    "null characters": "6\0" * 4000,
    "lone surrogate": "\ud83d",
    "combining marks": "6" + "\u0301" * 5000,
    "superscripts": "6" + "²" * 5000,
    "commas": "1," * 20_000,
    "long list": ", ".join(map(str, range(900))),
    "both signs": ",".join(["\\pm 1"] * 500),
    "equations": "=".join(["1"] * 1500),
    "relations": "<".join("x" * 1000),
    "unions": "\\cup".join(["(1,2)"] * 400),
    "minus signs": "-" * 20_000 + "1",
    "words": "word " * 600,
    "units": "6 " + "kg " * 700,
    "nested text": "\\text{" * 3000,
    "matrices": "\\begin{pmatrix}" * 300,
    "commands": "\\foo" * 3000,
    "zero division": "\\frac{1}{0}",
}
GOLDS = [
    "5",
    "x+1",
    "1,2,3",
    "(1,2)",
    "x>3",
    "\\text{no}",
    "\\{1,2\\}",
    "y=2x+1",
    "\\sqrt{2}+x^2",
    "A",
    "1,2,\\ldots,n",
    "5 cm",
    "\\emptyset",
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
        ("?", "neither letters nor digits"),
        ("7/0", "it has no value"),
        ("(2, 3/0)", "it has no value"),
        ("\\frac{3}{7", "a bracket is not closed"),
        ("(2, 3", "a bracket is not closed"),
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


@pytest.mark.parametrize("line", PAIRS, ids=[line.split(" ")[0] for line in PAIRS])
def test_pairs(line: str) -> None:
    """Each line of the file is a reference, with answers that equal it after ≡ and others after ≢."""
    reference, *answers = re.split(" (?=[≡≢] )", line)
    rewards = {answer: math_reward("", f"#### {answer[2:]}", {"answer": reference}) for answer in answers}
    assert rewards == {answer: float(answer[0] == "≡") for answer in answers}


@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\u202f", "\\,", "\\;", "~", "\\ ", "{,}", " "])
def test_spaces_between_groups_of_digits(space: str) -> None:
    answer = space.join(("31", "415", "926"))
    assert math_reward("", f"\\boxed{{{answer}}}", {"answer": "31415926"}) == 1.0
    assert math_reward("", f"So it is {answer}.", {"answer": "31415926"}) == 1.0
    assert math_reward("", f"\\boxed{{{answer}}}", {"answer": "31415927"}) == 0.0


@pytest.mark.parametrize(
    ("prompt", "is_right"),
    [
        ("Name the roots.", True),
        ("List the lengths in increasing order.", False),
        ("Arrange them from smallest to largest.", False),
        ("In ascending order? No, in any order.", True),
    ],
)
def test_a_list_has_the_order_that_the_prompt_asks_for(prompt: str, is_right: bool) -> None:
    assert math_reward(prompt, "\\boxed{5, 2, 9}", {"answer": "2, 5, 9"}) == is_right
    assert math_reward(prompt, "\\boxed{\\{5, 2, 9\\}}", {"answer": "\\{2, 5, 9\\}"}) == 1.0
    assert math_reward(prompt, "\\boxed{(5, 2, 9)}", {"answer": "(2, 5, 9)"}) == 0.0


@pytest.mark.parametrize("prompt", ["Rank the runners.", "Which letters?"])
def test_letters_and_words_have_an_order_unless_the_prompt_says_that_any_will_do(prompt: str) -> None:
    assert math_reward(prompt, "\\boxed{C, A}", {"answer": "A, C"}) == 0.0
    assert math_reward("Select all that apply.", "\\boxed{C, A}", {"answer": "A, C"}) == 1.0


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_no_answer_breaks_the_judge(answer: str) -> None:
    prepare()
    for gold in GOLDS:
        start = time.process_time()
        assert math_reward("", f"#### {answer}", {"answer": gold}) == 0.0
        assert time.process_time() - start < 0.1, gold


def test_large_answers_that_are_right() -> None:
    digits = "".join(str(i % 10) for i in range(20_000))
    assert math_reward("", f"\\boxed{{{digits}}}", {"answer": digits}) == 1.0
    assert math_reward("", f"\\boxed{{{digits[:-1]}1}}", {"answer": digits}) == 0.0
    assert math_reward("", "#### 9^{9^{9}}", {"answer": "9^{(9^9)}"}) == 0.0  # too large: compared as text
    assert math_reward("", "#### 2^{9999}", {"answer": str(2**9999)}) == 1.0


def test_references_that_are_compared_as_text() -> None:
    known = {gold: is_reference_understood({"answer": gold}, "answer") for gold in ("7", "(B)", "x>2", "\\int_1^2 f", "\\overline{PQ}")}
    assert known == {"7": True, "(B)": True, "x>2": True, "\\int_1^2 f": False, "\\overline{PQ}": False}
    assert math_reward("", "\\boxed{\\overline{ PQ }}", {"answer": "\\overline{PQ}"}) == 1.0
