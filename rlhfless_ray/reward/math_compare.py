"""Compare two answers: words as words, lists item by item, numbers exactly, other expressions at fixed points.

What is too long, too deep, too large or not understood is compared as text. Only a broken reference is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

from rlhfless_ray.reward.math_evaluation import ExpressionEvaluation, Number, is_equal_value, is_real, ratio
from rlhfless_ray.reward.math_expression import MAX_DEPTH, Node, TooLarge, UnreadableExpression, parse_expression, variables
from rlhfless_ray.reward.math_form import FLIPPED, Form, Piece, as_region, read_form, words_of
from rlhfless_ray.reward.math_notation import join_comma_groups, normalize_notation, without_spaces
from rlhfless_ray.reward.math_units import Quantity, read_quantity

MAX_CHARS = 30_000
MAX_FORM_CHARS = 4000  # of an answer that is more than its text
MAX_UNORDERED = 64  # items that are compared in any order
MAX_COMPARISONS = 1000  # of parts of two answers
POINTS = 4
_CHOICE = re.compile(r"(?:(?:option|choice|answer):? )?\(?((?-i:[A-J]))\)?", re.IGNORECASE)
_CHOSEN = re.compile(r"\(?([A-J])[).:] ?\S.*", re.DOTALL)

_Part = TypeVar("_Part")


class UnreadableReference(ValueError):
    """The reference answer is broken."""


def is_equal(gold: str, answer: str, is_ordered: bool | None = None) -> bool:
    """Return whether the answer equals the reference.

    Args:
        is_ordered: Whether bare lists have an order; None if the prompt does not say so.

    Raises:
        UnreadableReference: The reference is broken.
    """
    reference = _reference(gold)[0]
    if "".join(gold.split()) == "".join(answer.split()) and not re.search(r"\d\s+\d", gold + answer):
        return True
    if len(answer) > MAX_CHARS:
        return False
    answer = normalize_notation(answer)
    if without_spaces(reference) == without_spaces(answer):
        return True
    if max(len(reference), len(answer)) > MAX_FORM_CHARS or max(_nesting(reference), _nesting(answer)) > MAX_DEPTH:
        return join_comma_groups(reference) == join_comma_groups(answer)
    for one, other in ((reference, answer), (answer, reference)):
        if (choice := _CHOICE.fullmatch(one)) and (chosen := _CHOICE.fullmatch(other) or _CHOSEN.fullmatch(other)):
            return choice[1] == chosen[1]
    return _Comparison(is_ordered).texts(reference, answer)


def is_understood(gold: str) -> bool:
    """Return whether a reference is compared by its value, not only as text. Raises UnreadableReference if it is broken."""
    return _reference(gold)[1]


@lru_cache(1024)
def _reference(text: str) -> tuple[str, bool]:
    """Return a reference's normal form, and whether it is understood."""
    text = normalize_notation(text)
    if not re.search(r"[^\W_]|\\", text):
        raise UnreadableReference("it has neither letters nor digits")
    if _CHOICE.fullmatch(text) or re.fullmatch(r"-?\d[\d,]*", text):
        return text, True
    bare = re.sub(r"\\\\|\\[{}]", "", text)
    is_closed = bare.count("{") == bare.count("}") and len(re.findall(r"[(\[]", bare)) == len(re.findall(r"[)\]]", bare))
    if not is_closed and words_of(text) is None:
        raise UnreadableReference("a bracket is not closed")
    if len(text) > MAX_FORM_CHARS or _nesting(text) > MAX_DEPTH:
        return text, False
    return text, _Comparison(None, by_text=False).texts(text, text)


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


class _Comparison:
    def __init__(self, is_ordered: bool | None, by_text: bool = True) -> None:
        self.is_ordered, self.by_text = is_ordered, by_text
        self.left_comparisons = MAX_COMPARISONS
        self.gold, self.answer = ExpressionEvaluation(), ExpressionEvaluation()

    def texts(self, gold: str, answer: str) -> bool:
        self.left_comparisons -= 1
        if self.left_comparisons < 0:
            return False
        gold, answer = gold.strip().removeprefix("+"), answer.strip().removeprefix("+")
        if self.by_text and without_spaces(gold) == without_spaces(answer):
            return True
        return self.forms(read_form(gold), read_form(answer))

    def forms(self, gold: Form, answer: Form) -> bool:
        kinds = {gold.kind, answer.kind}
        if len(kinds) == 1:
            return bool(getattr(self, f"_{gold.kind}")(gold, answer))
        if gold.relation and answer.relation:
            return self._inequality(gold, answer)
        if "region" in kinds:
            pieces = as_region(gold), as_region(answer)
            return pieces[0] is not None and pieces[1] is not None and _matches(pieces[0], pieces[1], self.is_same_piece)
        if answer.kind == "equation":
            return self.chain(gold, answer.items[1:]) if answer.name else gold.kind in ("value", "items") and self.chain(gold, answer.items)
        if gold.kind == "equation":
            return bool(gold.name) and self.forms(read_form(gold.items[-1]), answer)
        if kinds == {"items", "value"}:
            return _is_decimal_comma(gold, answer) or _is_decimal_comma(answer, gold)
        if kinds == {"items", "words"}:
            items, words = (gold, answer) if gold.kind == "items" else (answer, gold)
            return all(len(item) == 1 for item in items.items) and "".join(items.items).casefold() == words.text
        # Letters are a product if the other side is one.
        return kinds == {"words", "value"} and "\\cdot" in gold.text + answer.text and self._value(gold, answer)

    def chain(self, gold: Form, parts: list[str]) -> bool:
        """Compare with `3*4 = 12`: all parts must be equal, not only the last one."""
        return all(self.forms(gold, read_form(part)) for part in parts)

    def _words(self, gold: Form, answer: Form) -> bool:
        return gold.text == answer.text

    def _items(self, gold: Form, answer: Form) -> bool:
        brackets = {gold.bracket, answer.bracket}
        if len(brackets) > 1 and (":" in brackets or ("\\{" in brackets and "" not in brackets)):
            return False
        if brackets == {"(", "["} and len(gold.items) == 2:
            return False
        if brackets <= {"", "\\{"} and not self.has_order(gold, answer):
            if brackets == {""} and len(gold.items) > len(answer.items):  # a list that repeats a number asks for it twice
                return False
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
        has_same_name = not gold.name or not answer.name or gold.name == answer.name
        return has_same_name and _matches(gold.pieces, answer.pieces, self.is_same_piece)

    def is_same_piece(self, gold: Piece, answer: Piece) -> bool:
        is_same_end = (gold.has_low, gold.has_high) == (answer.has_low, answer.has_high)
        return is_same_end and self.texts(gold.low, answer.low) and self.texts(gold.high, answer.high)

    def _matrix(self, gold: Form, answer: Form) -> bool:
        return [len(row) for row in gold.rows] == [len(row) for row in answer.rows] and all(
            map(self.texts, (cell for row in gold.rows for cell in row), (cell for row in answer.rows for cell in row))
        )

    def _equation(self, gold: Form, answer: Form) -> bool:
        is_long = any(len(form.name) > 1 and not form.name.startswith("\\") for form in (gold, answer))  # `Area`: any name will do
        if gold.name and answer.name and (gold.name == answer.name or is_long):
            last = read_form(answer.items[-1])
            return self.forms(read_form(gold.items[-1]), last) and self.chain(last, answer.items[1:-1])
        return len(gold.items) == len(answer.items) == 2 and self.is_proportional(gold.items, answer.items, needs_positive=False)

    def _inequality(self, gold: Form, answer: Form) -> bool:
        if gold.relation == answer.relation:
            return self.is_proportional(gold.items, answer.items, needs_positive=gold.relation != "\\ne")
        return FLIPPED[gold.relation] == answer.relation and self.is_proportional(gold.items, answer.items[::-1], needs_positive=True)

    def _value(self, gold_form: Form, answer_form: Form) -> bool:
        gold, gold_tree = _read(gold_form.text)
        answer, answer_tree = _read(answer_form.text)
        if gold_tree is None or answer_tree is None:
            return not self.by_text and re.fullmatch(r"-?\\infty|\\dots", gold_form.text) is not None
        units = [dict(quantity.unit[1]) if quantity.unit else {} for quantity in (gold, answer)]
        is_angle = [unit == {"degree": 1} for unit in units]
        if is_angle[0] != is_angle[1] and ("rad" in {**units[0], **units[1]} or "\\pi" in gold.value + answer.value):
            gold_tree, answer_tree = (
                ("product", tree, ("degree",)) if degrees else tree
                for tree, degrees in zip((gold_tree, answer_tree), is_angle, strict=True)
            )
        elif gold.unit and answer.unit and units[0] and units[1]:
            if units[0] != units[1]:
                return False
            gold_tree, answer_tree = _scaled(gold_tree, gold.unit[0]), _scaled(answer_tree, answer.unit[0])
        gold_tree, answer_tree = _scaled(gold_tree, Fraction(gold.scale)), _scaled(answer_tree, Fraction(answer.scale))
        factors = [Fraction(1)]
        if answer.is_percent and not gold.is_percent:
            value = self.at(gold_tree, 0, is_gold=True)
            is_share = isinstance(value, Fraction) and 0 < abs(value) < 1
            factors = [Fraction(1, 100)] if is_share else [Fraction(1), Fraction(1, 100)]
        elif gold.is_percent and not answer.is_percent:
            factors = [Fraction(1), Fraction(100)]
        return any(self.is_equal_tree(gold_tree, _scaled(answer_tree, factor)) for factor in factors)

    def at(self, tree: Node, point: int, is_gold: bool) -> Number:
        """Return the value at a point, None if there is none, NaN if it is too large."""
        try:
            return (self.gold if is_gold else self.answer).at(tree, point)
        except TooLarge:
            return math.nan

    def is_equal_tree(self, gold: Node, answer: Node) -> bool:
        """Compare two expressions at the points where both are real, or at all if there is none."""
        points = range(POINTS if variables(gold) | variables(answer) else 1)
        golds = [self.at(gold, point, is_gold=True) for point in points]
        if all(value is None for value in golds):
            raise UnreadableReference("it has no value")
        pairs = []
        for point, left in zip(points, golds, strict=True):
            right = self.at(answer, point, is_gold=False)
            if left != left or right != right or (left is None) != (right is None):
                return False
            if left is not None:
                pairs.append((left, right))
        real = [pair for pair in pairs if is_real(pair[0]) and is_real(pair[1])]
        return all(is_equal_value(*pair) for pair in real or pairs)

    def is_proportional(self, gold: list[str], answer: list[str], needs_positive: bool) -> bool:
        """Return whether the differences of the sides of two relations have a constant ratio."""
        trees: list[Node] = []
        for sides in (gold, answer):
            left, right = (_read(side)[1] for side in sides)
            if left is None or right is None:
                return False
            trees.append(("sum", left, ("negative", right)))
        ratios: list[Number] = []
        for point in range(POINTS):
            values = [self.at(tree, point, is_gold) for tree, is_gold in zip(trees, (True, False), strict=True)]
            if None in values or any(value != value for value in values) or (values[0] == 0) != (values[1] == 0):
                return False
            if values[0] != 0:
                ratios.append(ratio(*values))
        if not ratios or not all(is_equal_value(ratios[0], other) for other in ratios[1:]):
            return False
        return not needs_positive or bool(is_real(ratios[0]) and ratios[0] > 0)


@lru_cache(256)
def _read(text: str) -> tuple[Quantity, Node | None]:
    """Return a text's quantity, and its tree if it can be read."""
    quantity = read_quantity(text)
    try:
        return quantity, parse_expression(join_comma_groups(quantity.value))
    except (UnreadableExpression, TooLarge):
        return quantity, None


def _matches(gold: list[_Part], answer: list[_Part], is_same: Callable[[_Part, _Part], bool]) -> bool:
    """Return whether two lists have the same members in any order. Lists of unequal length may name members twice."""
    missing = list(answer)
    if not len(gold) <= 2 * len(answer) <= 4 * len(gold):
        return False
    for left in gold:
        same = [right for right in (missing if len(gold) == len(answer) else answer) if is_same(left, right)]
        if not same:
            return False
        if len(gold) == len(answer):
            missing.remove(same[0])
        else:
            missing = [right for right in missing if right not in same]
    return not missing


def _is_decimal_comma(items: Form, value: Form) -> bool:
    is_written_so = items.bracket == "" and re.fullmatch(r"-?\d+,\d+", items.text) and re.fullmatch(r"-?\d+\.\d+", value.text)
    return bool(is_written_so) and Fraction(items.text.replace(",", ".")) == Fraction(value.text)


def _scaled(tree: Node, factor: Fraction) -> Node:
    return tree if factor == 1 else ("product", ("number", factor), tree)
