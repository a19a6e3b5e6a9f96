"""Compare two answers: words as words, lists item by item, numbers exactly, other expressions at fixed points.

What the answer's side contains is never an error: an answer that is too long, too deep or too large is not equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

from rlhfless_ray.reward import math_library
from rlhfless_ray.reward.math_expression import (
    MAX_DEPTH,
    POINTS,
    ExpressionEvaluation,
    Node,
    TooLarge,
    UnreadableExpression,
    is_equal_value,
    parse_expression,
    variables,
)
from rlhfless_ray.reward.math_form import FLIPPED, Form, Piece, as_region, nesting, read_form, words_of
from rlhfless_ray.reward.math_notation import join_comma_groups, normalize_notation, without_spaces
from rlhfless_ray.reward.math_units import Quantity, read_quantity

MAX_CHARS = 50_000
MAX_FORM_CHARS = 3000  # of an answer that is not one number
MAX_UNORDERED = 64  # items that are compared in any order
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"\(?([A-J])[).:] ?\S.*|\(([A-J])\) ?\S.*", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d*")
_ONE, _HUNDREDTH = Fraction(1), Fraction(1, 100)

_Part = TypeVar("_Part")


class UnreadableReference(ValueError):
    """The reference answer cannot be read."""


def is_equal(gold: str, answer: str, is_ordered: bool | None = None) -> bool:
    """Return whether the answer equals the reference.

    Args:
        is_ordered: Whether bare lists have an order; None if the prompt does not say so.

    Raises:
        UnreadableReference: The reference cannot be read.
    """
    if "".join(gold.split()) == "".join(answer.split()) and not re.search(r"\d\s+\d", gold + answer):
        return True
    if len(answer) > max(MAX_CHARS, 4 * len(gold)):
        return False
    gold, answer = normalize_notation(gold), normalize_notation(answer)
    if not re.search(r"[^\W_]|\\", gold):
        raise UnreadableReference("it has neither letters nor digits")
    if without_spaces(gold) == without_spaces(answer):
        return True
    for text, is_gold in ((gold, True), (answer, False)):
        if (len(text) > MAX_FORM_CHARS and not _NUMBER.fullmatch(text)) or nesting(text) > MAX_DEPTH:
            if is_gold:
                raise UnreadableReference("it is too long or nested too deeply")
            return False
    if choice := _CHOICE.fullmatch(gold):
        chosen = _CHOSEN.fullmatch(answer)
        if chosen:
            return choice[1] == (chosen[1] or chosen[2])
    return _Comparison(is_ordered).texts(gold, answer)


class _Comparison:
    def __init__(self, is_ordered: bool | None) -> None:
        self.is_ordered = is_ordered
        self.left_calls = 2000  # comparisons of parts

    def texts(self, gold: str, answer: str) -> bool:
        self.left_calls -= 1
        if self.left_calls < 0:
            return False
        gold, answer = gold.strip().removeprefix("+"), answer.strip().removeprefix("+")
        if without_spaces(gold) == without_spaces(answer):
            return True
        return self.forms(read_form(gold), read_form(answer))

    def forms(self, gold: Form, answer: Form) -> bool:
        if gold.kind == answer.kind:
            return bool(getattr(self, f"_{gold.kind}")(gold, answer))
        if gold.relation and answer.relation:
            return self._inequality(gold, answer)
        if "region" in (gold.kind, answer.kind):
            pieces = as_region(gold), as_region(answer)
            if pieces[0] is not None and pieces[1] is not None:
                return self.pieces(pieces[0], pieces[1])
            return False
        if answer.kind == "equation":
            if answer.name:
                return self._chain(gold, answer.items[1:])
            return self._chain(gold, answer.items) if gold.kind in ("value", "items") else False
        if gold.kind == "equation":
            return self.forms(read_form(gold.items[-1]), answer) if gold.name else False
        if {gold.kind, answer.kind} == {"items", "value"}:
            return _is_decimal_comma(gold, answer) or _is_decimal_comma(answer, gold)
        if {gold.kind, answer.kind} == {"items", "words"}:
            items, words = (gold, answer) if gold.kind == "items" else (answer, gold)
            return all(len(item) == 1 for item in items.items) and "".join(items.items).casefold() == words.text
        if {gold.kind, answer.kind} == {"words", "value"}:
            return self._words_as_value(gold, answer)
        return False

    def _chain(self, gold: Form, parts: list[str]) -> bool:
        """Compare with `3*4 = 12`: all parts must be equal, not only the last one."""
        return all(self.forms(gold, read_form(part)) for part in parts)

    def _words(self, gold: Form, answer: Form) -> bool:
        return gold.text == answer.text

    def _items(self, gold: Form, answer: Form) -> bool:
        brackets = {gold.bracket, answer.bracket}
        if ":" in brackets and len(brackets) > 1:
            return False
        if brackets == {"\\{", "("} or (brackets == {"(", "["} and len(gold.items) == 2):
            return False
        if brackets <= {"", "\\{"} and not self.has_order(gold, answer):
            return _matches(gold.items, answer.items, self.texts)
        return len(gold.items) == len(answer.items) and all(map(self.texts, gold.items, answer.items))

    def has_order(self, gold: Form, answer: Form) -> bool:
        if any("\\dots" in item for item in (*gold.items, *answer.items)) or len(gold.items) > MAX_UNORDERED:
            return True
        if "\\{" in (gold.bracket, answer.bracket):
            return False
        if self.is_ordered is not None:
            return self.is_ordered
        return all(re.fullmatch(r"[A-Za-z]", item) or words_of(item) is not None for item in gold.items)

    def _region(self, gold: Form, answer: Form) -> bool:
        if gold.name and answer.name and gold.name != answer.name:
            return False
        return self.pieces(gold.pieces, answer.pieces)

    def _words_as_value(self, gold: Form, answer: Form) -> bool:
        """Compare `ab` with `a \\cdot b`: letters are a product if the other side is one."""
        texts = gold.text, answer.text
        return "\\cdot" in "".join(texts) and _same_quantity(*texts)

    def pieces(self, gold: list[Piece], answer: list[Piece]) -> bool:
        return _matches(gold, answer, self.is_same_piece)

    def is_same_piece(self, gold: Piece, answer: Piece) -> bool:
        return (
            (gold.has_low, gold.has_high) == (answer.has_low, answer.has_high)
            and self.texts(gold.low, answer.low)
            and self.texts(gold.high, answer.high)
        )

    def _matrix(self, gold: Form, answer: Form) -> bool:
        return [len(row) for row in gold.rows] == [len(row) for row in answer.rows] and all(
            self.texts(left, right)
            for gold_row, answer_row in zip(gold.rows, answer.rows, strict=True)
            for left, right in zip(gold_row, answer_row, strict=True)
        )

    def _equation(self, gold: Form, answer: Form) -> bool:
        is_value = [bool(form.name) and (len(form.name) > 1 and not form.name.startswith("\\")) for form in (gold, answer)]
        if gold.name and answer.name and (gold.name == answer.name or any(is_value)):
            if self.forms(read_form(gold.items[-1]), read_form(answer.items[-1])):
                return self._chain(read_form(answer.items[-1]), answer.items[1:-1])
            if any(is_value):
                return False
        if len(gold.items) != 2 or len(answer.items) != 2:
            return False
        return _is_proportional(gold.items, answer.items, needs_positive=False)

    def _inequality(self, gold: Form, answer: Form) -> bool:
        sides = gold.items, answer.items
        if gold.relation == answer.relation:
            return _is_proportional(*sides, needs_positive=gold.relation != "\\ne")
        if FLIPPED[gold.relation] == answer.relation:
            return _is_proportional(sides[0], sides[1][::-1], needs_positive=True)
        return False

    def _value(self, gold: Form, answer: Form) -> bool:
        return _same_quantity(gold.text, answer.text)


def _matches(gold: list[_Part], answer: list[_Part], is_same: Callable[[_Part, _Part], bool]) -> bool:
    """Return whether two lists have the same members, in any order."""
    missing = list(answer)
    for left in gold:
        same = [right for right in answer if is_same(left, right)]
        if not same:
            return False
        missing = [right for right in missing if right not in same]
    return not missing


def _is_decimal_comma(items: Form, value: Form) -> bool:
    return (
        items.kind == "items"
        and items.bracket == ""
        and re.fullmatch(r"-?\d+,\d+", items.text) is not None
        and re.fullmatch(r"-?\d+\.\d+", value.text) is not None
        and parse_expression(items.text.replace(",", ".")) == parse_expression(value.text)
    )


@lru_cache(256)
def _read(text: str) -> tuple[Quantity, Node | None, bool]:
    """Return a text's quantity, its tree if it can be read, and whether it is too large."""
    quantity = read_quantity(text)
    try:
        return quantity, parse_expression(join_comma_groups(quantity.value)), False
    except UnreadableExpression:
        return quantity, None, False
    except TooLarge:
        return quantity, None, True


def _same_quantity(gold_text: str, answer_text: str) -> bool:
    (gold, gold_tree, gold_is_large), (answer, answer_tree, answer_is_large) = _read(gold_text), _read(answer_text)
    if gold_is_large:
        raise UnreadableReference("it is too large")
    if answer_is_large:
        return False
    if gold_tree is None or answer_tree is None:
        if _NO_LIBRARY.search(gold_text):
            return False
        read = math_library.read(gold_text)
        if not read and gold_tree is None:
            raise UnreadableReference("neither this project nor math-verify reads it")
        return math_library.is_equal(read, gold_text, answer_text)
    sizes = [Fraction(gold.scale), Fraction(answer.scale)]
    if gold.unit and answer.unit and gold.unit[1] and answer.unit[1]:
        if gold.unit[1] != answer.unit[1]:
            return False
        sizes = [sizes[0] * gold.unit[0], sizes[1] * answer.unit[0]]
    left = _scaled(gold_tree, sizes[0])
    factors = [_ONE]
    if answer.is_percent and not gold.is_percent:
        factors = [_HUNDREDTH] if _is_proportion(gold_tree) else [_ONE, _HUNDREDTH]
    elif gold.is_percent and not answer.is_percent:
        factors = [_ONE, 1 / _HUNDREDTH]
    return any(_is_equal_tree(left, _scaled(answer_tree, sizes[1] * factor)) for factor in factors)


_NO_LIBRARY = re.compile(r"\\dots|\\infty$")


def _scaled(tree: Node, factor: Fraction) -> Node:
    return tree if factor == 1 else ("product", ("number", factor), tree)


def _is_proportion(tree: Node) -> bool:
    try:
        value = ExpressionEvaluation().value(tree)
    except (UnreadableExpression, TooLarge):
        return False
    return isinstance(value, Fraction) and abs(value) < 1 and value != 0


def _is_equal_tree(gold: Node, answer: Node) -> bool:
    """Compare two expressions at fixed points: those where both are real, or all if there is none."""
    names = variables(gold) | variables(answer)
    pairs = []
    is_readable = False
    for point in range(POINTS if names else 1):
        try:
            left = ExpressionEvaluation(point).value(gold)
            is_readable = True
        except UnreadableExpression:
            left = None
        except TooLarge as error:
            raise UnreadableReference(str(error)) from None
        try:
            right = ExpressionEvaluation(point).value(answer)
        except TooLarge:
            return False
        except UnreadableExpression:
            right = None
        if (left is None) != (right is None) and is_readable:
            return False
        if left is not None:
            pairs.append((left, right))
    if not is_readable:
        raise UnreadableReference("it has no value")
    real = [pair for pair in pairs if _is_real(pair[0]) and _is_real(pair[1])]
    return all(is_equal_value(*pair) for pair in real or pairs)


def _is_real(value: object) -> bool:
    return isinstance(value, Fraction) or not getattr(value, "imag", 0)


def _is_proportional(gold: list[str], answer: list[str], needs_positive: bool) -> bool:
    """Return whether the differences of the sides of two relations have a constant ratio."""
    trees = []
    for sides, is_gold in ((gold, True), (answer, False)):
        try:
            left, right = (parse_expression(join_comma_groups(side)) for side in sides)
        except (UnreadableExpression, TooLarge):
            if is_gold:
                raise UnreadableReference("an equation that cannot be read") from None
            return False
        trees.append(("sum", left, ("negative", right)))
    ratios = []
    for point in range(POINTS):
        try:
            values = [ExpressionEvaluation(point).value(tree) for tree in trees]
        except (UnreadableExpression, TooLarge):
            return False
        if values[0] == 0 or values[1] == 0:
            if values[0] != values[1]:
                return False
            continue
        evaluation = ExpressionEvaluation()
        ratios.append(
            values[0] / values[1]
            if all(isinstance(value, Fraction) for value in values)
            else evaluation.approximate(values[0]) / evaluation.approximate(values[1])
        )
    if not ratios or not all(is_equal_value(ratios[0], ratio) for ratio in ratios[1:]):
        return False
    return not needs_positive or (_is_real(ratios[0]) and ratios[0] > 0)
