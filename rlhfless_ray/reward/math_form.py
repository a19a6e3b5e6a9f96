"""The form of an answer: one value, words, a list, a region of numbers, an equation or a matrix.

Text here has the notation of `normalize_notation`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rlhfless_ray.reward.math_evaluation import ExpressionEvaluation
from rlhfless_ray.reward.math_expression import parse_expression, variables
from rlhfless_ray.reward.math_notation import FUNCTIONS, join_comma_groups, plain_words
from rlhfless_ray.reward.math_units import number_from_words

Kind = Literal["value", "words", "items", "region", "equation", "inequality", "matrix"]
_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}", "{": "}", "\\langle": "\\rangle", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_CLOSERS = set(_BRACKETS.values())
_TOKENS = re.compile(r"\\(?:begin|end) ?\{\w*\}|\\text ?\{[^{}]*\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_NAME = r"(?:[A-Za-z]|\\[A-Za-z]+)(?: ?_ ?(?:\w|\{[^{}]*\}))?"
_NAMES = rf"\( ?{_NAME}(?: ?, ?{_NAME})* ?\)"
_NAMED = re.compile(
    rf" ?(?P<name>{_NAME}|\\text ?\{{[^{{}}]*\}}|[A-Za-z ]{{2,}}|(?:{_NAME})? ?{_NAMES}|[A-Za-z]'|(?:{_NAME}|[|:{{}} ]|\\frac)+) ?"
)
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
_JOINED = re.compile(r"\\text ?\{ ?(or|and) ?\}|(?<![A-Za-z\\{])(or|and)(?![A-Za-z}])")
_ALL_NUMBERS = re.compile(r"\\mathbb ?\{? ?R ?\}?|(?:all )?real(?: number)?s|R", re.IGNORECASE)
_NOTHING = re.compile(r"(?:\\text)?\{?(?:\\?emptyset|\\\{\\\}|(?:thereis|thereare)?no(?:real)?solutions?|none)\}?", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin ?\{((?:[pbvBV]|small)?matrix|array|cases)\}(?: ?\{[clr|]*\})?(.*)\\end ?\{\1\}", re.DOTALL)
_INFINITY = "\\infty"


@dataclass(frozen=True)
class Piece:
    """An interval of a region; a single number is closed at both ends."""

    low: str
    high: str
    has_low: bool = False
    has_high: bool = False


@dataclass
class Form:
    kind: Kind
    text: str
    bracket: str = ""  # of items: what opened them, "" for a bare list
    items: list[str] = field(default_factory=list)  # of a list, or the sides of a relation
    pieces: list[Piece] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    name: str = ""  # of a named value or of a region's variable
    relation: str = ""


def scan(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield (token, depth of brackets after it, start, end)."""
    depth = 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        depth += (token in _BRACKETS or token.startswith("\\begin")) - (token in _CLOSERS or token.startswith("\\end"))
        yield token, depth, match.start(), match.end()


def split_top(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """Return the parts between separators outside of all brackets, and the separators."""
    parts, found, begin = [], [], 0
    for token, depth, start, end in scan(text):
        if depth <= 0 and token in separators:
            parts.append(text[begin:start].strip())
            found.append(token)
            begin = end
    return [*parts, text[begin:].strip()], found


def read_form(text: str) -> Form:
    """Return the form of a text. What is no other form is one value."""
    if _NOTHING.fullmatch(re.sub(r"\s", "", text)):
        return Form("region", text)
    joined = _JOINED.sub(lambda match: f" \\l{match[1] or match[2]} ", text)
    if (region := _read_region(joined)) is not None:
        return region
    if (words := words_of(text)) is not None:
        return Form("words", words)
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in split_top(re.sub(r"\\hline|(?<=\\\\)\[\w*\]", "", matrix[2]), {"\\\\"})[0] if row]
        if matrix[1] == "cases" and "&" not in matrix[2]:
            return Form("items", text, items=rows)
        return Form("matrix", text, rows=[split_top(row, {"&"})[0] for row in rows])
    bracket, content = _inside(joined)
    items = _items(content)
    if bracket and len(items) == 1 and bracket != "\\{":
        return read_form(content)
    if bracket or len(items) > 1 or "\\pm" in items[0]:
        if not bracket:
            items = [each for item in items for each in _both_signs(item)]
        return Form("items", text, bracket="" if bracket == "{" else bracket, items=items)
    sides = split_top(_without_rounding(joined), {"="})[0]
    if len(sides) > 1:
        name = _NAMED.fullmatch(sides[0])
        return Form("equation", text, items=sides, name=name["name"].strip() if name else "")
    sides, relations = split_top(joined, set(FLIPPED))
    if len(sides) == 2:
        return Form("inequality", text, items=sides, relation=relations[0])
    sides = split_top(joined, {":"})[0]
    if len(sides) > 1 and all(re.search(r"\w", side) and not re.search(r"[A-Za-z]{2}$", side) for side in sides):
        return Form("items", text, bracket=":", items=sides)
    return Form("value", _without_rounding(text))


def _without_rounding(text: str) -> str:
    """Return the exact part of `x = 1/3 \\approx 0.33`; `x \\approx 11` is an equation."""
    exact, rounded, value = text.partition("\\approx")
    return exact if "=" in exact or re.search(r"\d", exact) else f"{exact}={value}" if rounded and exact.strip() else value or text


def words_of(text: str) -> str | None:
    """Return a text's letters if it consists of words, else None. `xy` is a product, `no` and `BCEDA` are words."""
    plain = plain_words(text)
    if "\\" in plain or not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s'’.:!?\-/()&])*", plain) or number_from_words(plain) is not None:
        return None
    runs = re.findall(r"[^\W\d_]+", plain)
    letters = "".join(re.findall(r"[^\W\d_]", re.sub(r"^(?:the|an?) (?=\w{3})", "", plain.casefold())))
    if "\\text" in text:
        return letters
    words = [run for run in runs if len(run) > 1 and run not in FUNCTIONS and run not in ("pi", "infty") and not set(run) <= set("xyz")]
    if re.search(r"[-/(]", plain):
        return letters if any(len(word) > 3 for word in words) else None
    return letters if words or (len(runs) > 1 and all(len(run) == 1 for run in runs)) else None


def _both_signs(item: str) -> list[str]:
    """Return the two values of a text with `\\pm`."""
    if "\\pm" not in item:
        return [item]
    plus = re.sub(r"^([^=]*= ?|)\+", r"\1", item.replace("\\pm", "+").replace("\\mp", "-"))
    return [plus, item.replace("\\pm", "-").replace("\\mp", "+")]


def as_region(form: Form) -> list[Piece] | None:
    """Return the region that a form may stand for: a pair in brackets is an interval, a set its numbers."""
    if form.kind == "region":
        return form.pieces
    if form.kind == "items" and form.bracket in ("(", "[") and len(form.items) == 2:
        return [Piece(form.items[0], form.items[1], form.bracket == "[", form.bracket == "[")]
    if form.kind == "items" and form.bracket in ("\\{", ""):
        return [Piece(item, item, True, True) for item in form.items]
    return None


def _items(text: str) -> list[str]:
    """Split a list. Commas before a space separate; others may also group digits, as in `1,000, 2,000`."""
    bare = re.sub(r"\\l(?:or|and) ", ", ", re.sub(r", *\\l(?:or|and) ", ", ", text.strip().removesuffix(",")))
    if ", " in bare:
        bare = ", ".join(join_comma_groups(part) for part in bare.split(", "))
    elif join_comma_groups(bare) != bare and re.fullmatch(r"[^,]*[\d,]+[^,]*", bare):
        return [join_comma_groups(bare)]
    return split_top(bare, {",", ";"})[0]


def _inside(text: str) -> tuple[str, str]:
    """Return the opening bracket, and what one pair of brackets around all of a text holds; "" and the text if there is none."""
    opener = next((opener for opener in list(_BRACKETS)[:5] if text.startswith(opener)), None)
    if opener is None or not text.endswith(_BRACKETS[opener]):
        return "", text
    _, _, start, end = next((found for found in scan(text) if found[1] == 0), ("", 0, 0, 0))
    return (opener, text[len(opener) : start].strip()) if end == len(text) else ("", text)


def _read_region(text: str) -> Form | None:
    """Read intervals, their unions, and inequalities of one variable with plain bounds."""
    bracket, inside = _inside(text)
    if bracket in ("\\{", "{"):  # `{x | x > 2}`
        head, _, condition = inside.partition("|" if "|" in inside else ":")
        if condition and re.fullmatch(rf"{_NAME}(?: ?\\in .*)?", head.strip()):
            return _read_region(condition.strip())
    if member := re.match(rf"({_NAME}) ?\\in(?![A-Za-z]) ?", text):
        rest = text[member.end() :].strip()
        form = read_form(rest)
        pieces = as_region(form) if form.kind != "value" else [Piece(rest, rest, True, True)]
        return Form("region", text, pieces=pieces, name=member[1]) if pieces is not None else None
    parts, separators = split_top(text, {"\\cup", "\\lor"})
    if not separators and split_top(text, {"\\land"})[1]:
        return _both(split_top(text, {"\\land"})[0], text)
    pieces, names = [], set()
    for part in parts:
        read = _read_pieces(part, is_alone="\\cup" not in separators)
        if read is None:
            return None
        pieces += read[0]
        names |= {read[1]}
    if len(names) > 1:
        return None
    sides, relations = split_top(text, set(FLIPPED))
    return Form(
        "region", text, items=sides, pieces=pieces, name=names.pop(), relation=relations[0] if len(relations) == len(parts) == 1 else ""
    )


def _both(parts: list[str], text: str) -> Form | None:
    """Join `x > 1` and `x < 3`."""
    read = [each for part in parts if (each := _read_pieces(part, is_alone=True)) and len(each[0]) == 1]
    if len(parts) != 2 or len(read) != 2 or read[0][1] != read[1][1]:
        return None
    first, second = sorted((read[0][0][0], read[1][0][0]), key=lambda piece: piece.low == f"-{_INFINITY}")
    if first.high != _INFINITY or second.low != f"-{_INFINITY}":
        return None
    return Form("region", text, pieces=[Piece(first.low, second.high, first.has_low, second.has_high)], name=read[0][1])


def _read_pieces(text: str, is_alone: bool) -> tuple[list[Piece], str] | None:
    """Return one part of a union, and its variable's name. `(1, 2)` alone may be a pair."""
    if _ALL_NUMBERS.fullmatch(plain_words(text)) and text != "R":
        return [Piece(f"-{_INFINITY}", _INFINITY)], ""
    if without := re.fullmatch(r"\\mathbb ?\{ ?R ?\} ?(?:\\setminus|-) ?\\?\{(.*?)\\?\}", text):
        return _all_but(_items(without[1])), ""
    ends = re.fullmatch(r"([(\[\]]) ?(.*?) ?([)\[\]])", text, re.DOTALL)
    if ends and len(items := split_top(ends[2], {","})[0]) == 2 and (not is_alone or ends[1] + ends[3] not in ("()", "[]")):
        return [Piece(items[0], items[1], ends[1] == "[", ends[3] == "]")], ""
    bracket, inside = _inside(text)
    if bracket == "\\{" and not is_alone:
        return [Piece(item, item, True, True) for item in _items(inside)], ""
    sides, relations = split_top(text, set(FLIPPED))
    if len(sides) == 2 and not re.fullmatch(rf"{_NAME}|\| ?{_NAME} ?\|", sides[0]):
        sides, relations = sides[::-1], [FLIPPED[relations[0]]]
    if len(sides) == 2 and re.fullmatch(_NAME, sides[0]):
        if relations[0] == "\\ne":
            return _all_but(_items(sides[1])), sides[0]
        if _constant(sides[1]) is not None:
            is_above, is_closed = relations[0] in (">", "\\ge"), relations[0] in ("\\ge", "\\le")
            above, below = Piece(sides[1], _INFINITY, is_closed), Piece(f"-{_INFINITY}", sides[1], False, is_closed)
            return [above if is_above else below], sides[0]
    if len(sides) == 2 and (name := re.fullmatch(rf"\| ?({_NAME}) ?\|", sides[0])) and _constant(sides[1]) is not None:
        is_closed, negative = relations[0] in ("\\ge", "\\le"), f"-({sides[1]})"
        if relations[0] in ("<", "\\le"):
            return [Piece(negative, sides[1], is_closed, is_closed)], name[1]
        return [Piece(f"-{_INFINITY}", negative, False, is_closed), Piece(sides[1], _INFINITY, is_closed)], name[1]
    if len(sides) == 3 and re.fullmatch(rf"{_NAME}(?: ?\( ?{_NAME} ?\))?", sides[1]):
        if {*relations} <= {">", "\\ge"}:
            sides, relations = sides[::-1], [FLIPPED[relation] for relation in relations[::-1]]
        if {*relations} <= {"<", "\\le"}:
            return [Piece(sides[0], sides[2], relations[0] == "\\le", relations[1] == "\\le")], sides[1]
    return None


def _constant(text: str) -> float | None:
    """Return the value of an expression without letters, None for another text."""
    if _INFINITY in text:
        return math.inf
    try:
        tree = parse_expression(text)
        return None if variables(tree) else float(ExpressionEvaluation().value(tree))
    except (ValueError, TypeError):
        return None
    except OverflowError:
        return math.inf


def _all_but(numbers: list[str]) -> list[Piece]:
    ends = [f"-{_INFINITY}", *sorted(numbers, key=lambda number: _constant(number) or 0.0), _INFINITY]
    return [Piece(low, high) for low, high in itertools.pairwise(ends)]
