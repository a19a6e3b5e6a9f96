"""The form of an answer: one value, words, a list, a region of numbers, an equation or a matrix.

Text here has the notation of `normalize_notation`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from rlhfless_ray.reward.math_expression import ExpressionEvaluation, TooLarge, UnreadableExpression, parse_expression, variables
from rlhfless_ray.reward.math_notation import FUNCTIONS, join_comma_groups, plain_words

Kind = Literal["value", "words", "items", "region", "equation", "inequality", "matrix"]
OPENERS = {"(": ")", "[": "]", "\\{": "\\}", "{": "}", "\\langle": "\\rangle"}
CLOSERS = {closer: opener for opener, closer in OPENERS.items()}
_TOKENS = re.compile(r"\\begin ?\{|\\end ?\{|\\text ?\{[^{}]*\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_NAME = r"(?:[A-Za-z]|\\[A-Za-z]+)(?: ?_ ?(?:\w|\{[^{}]*\}))?"
_NAMED = re.compile(
    rf" ?(?P<name>{_NAME}|\\text ?\{{[^{{}}]*\}}|[A-Za-z ]{{2,}}|{_NAME}? ?\( ?{_NAME}(?: ?, ?{_NAME})* ?\)|[A-Za-z]'|(?:{_NAME}|[|:{{}} ]|\\frac)+) ?"
)
_RELATION = {"<", ">", "\\le", "\\ge", "\\ne"}
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
_JOINED = re.compile(r"\\text ?\{ ?(or|and) ?\}|(?<![A-Za-z\\{])(or|and)(?![A-Za-z}])")
_ALL_NUMBERS = re.compile(r"\\mathbb ?\{? ?R ?\}?|all real numbers|real numbers|R", re.IGNORECASE)
_NOTHING = {"\\emptyset", "emptyset", "nosolution", "nosolutions", "norealsolution", "norealsolutions"}
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
    items: list[str] = field(default_factory=list)  # of a list, a row of a matrix, or the sides of a relation
    pieces: list[Piece] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    name: str = ""  # of a named value or of a region's variable
    relation: str = ""


def nesting(text: str) -> int:
    """Return the greatest depth of brackets, and of powers of powers."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def read_form(text: str) -> Form:
    """Return the form of a text. What is no other form is one value."""
    text = text.strip()
    if re.sub(r"[\s{}\\]|text", "", text).lower() in {name.replace("\\", "") for name in _NOTHING} or re.fullmatch(r"\\\{ ?\\\}", text):
        return Form("region", text)
    if (words := words_of(text)) is not None:
        return Form("words", words)
    joined = _JOINED.sub(lambda match: f" \\l{match[1] or match[2]} ", text)
    if (region := _read_region(joined)) is not None:
        return region
    matrix = re.fullmatch(r"\\begin ?\{([pbvBV]?matrix|array)\}(?: ?\{[clr|]*\})?(.*)\\end ?\{\1\}", text, re.DOTALL)
    if matrix:
        rows = [row for row in split_top(matrix[2].replace("\\hline", ""), {"\\\\"}) if row.strip()]
        return Form("matrix", text, bracket=matrix[1][0], rows=[split_top(row, {"&"}) for row in rows])
    inside = _inside(joined)
    if inside is not None:
        bracket, content = inside
        items = _items(content)
        if len(items) > 1:
            return Form("items", text, bracket="" if bracket == "{" else bracket, items=items)
        return read_form(content)
    items = _items(joined)
    if (len(items) == 1 and "\\pm" in items[0]) or len(items) > 1:
        signs = [each for item in items for each in both_signs(item)]
        return Form("items", text, items=signs)
    sides = split_top(_without_rounding(joined), {"="})
    if len(sides) > 1:
        name = _NAMED.fullmatch(sides[0])
        return Form("equation", text, items=[side.strip() for side in sides], name=name["name"].strip() if name else "")
    sides, relations = _split_relations(joined)
    if len(sides) == 2:
        return Form("inequality", text, items=sides, relation=relations[0])
    sides = split_top(joined, {":"})
    if len(sides) > 1 and all(re.search(r"\w", side) and not re.search(r"[A-Za-z]{2} *$", side) for side in sides):
        return Form("items", text, bracket=":", items=sides)
    return Form("value", _without_rounding(text))


def _without_rounding(text: str) -> str:
    """Return the exact part of `x = 1/3 \\approx 0.33`; `x \\approx 11` is an equation."""
    exact, rounded, value = text.partition("\\approx")
    return exact if "=" in exact or re.search(r"\d", exact) else f"{exact}={value}" if rounded and exact.strip() else value or text


def words_of(text: str) -> str | None:
    """Return a text's letters if it consists of words, else None. `xy` is a product, `no` and `BCEDA` are words."""
    plain = plain_words(text)
    if "\\" in plain or not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s'’.:!?\-/()&])*", plain):
        return None
    runs = re.findall(r"[^\W\d_]+", plain)
    letters = "".join(re.sub(r"^(?:the|an?) (?=\w{3})", "", plain.casefold()).split())
    letters = "".join(re.findall(r"[^\W\d_]", letters))
    if "\\text" in text:
        return letters
    words = [run for run in runs if len(run) > 1 and run not in FUNCTIONS and run not in ("pi", "infty") and not set(run) <= set("xyz")]
    if re.search(r"[-/(]", plain):
        return letters if any(len(word) > 3 for word in words) else None
    return letters if words or (len(runs) > 1 and all(len(run) == 1 for run in runs)) else None


def split_top(text: str, separators: set[str]) -> list[str]:
    """Split a text at separators outside of all brackets."""
    parts, depth, start = [], 0, 0
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token.startswith("\\begin"):
            depth += 2  # the environment, and the brace around its name
        elif token in OPENERS or token in ("\\lfloor", "\\lceil"):
            depth += 1
        elif token in CLOSERS or token in ("\\rfloor", "\\rceil"):
            depth -= 1
        elif depth <= 0 and token in separators:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def both_signs(item: str) -> list[str]:
    """Return the two values of a text with `\\pm`."""
    if "\\pm" not in item:
        return [item]
    return [
        re.sub(r"^([^=]*= ?|)\+", r"\1", item.replace("\\pm", "+").replace("\\mp", "-")),
        item.replace("\\pm", "-").replace("\\mp", "+"),
    ]


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
    text = text.strip().removesuffix(",")
    bare = re.sub(r"\\l(or|and) ", ", ", re.sub(r", ?\\l(or|and) ", ", ", text))
    if re.search(r", ", bare):
        bare = ", ".join(join_comma_groups(part) for part in bare.split(", "))
    elif join_comma_groups(bare) != bare and re.fullmatch(r"[^,]*[\d,]+[^,]*", bare):
        return [join_comma_groups(bare)]
    return [item.strip() for item in split_top(bare, {",", ";"})]


def _inside(text: str) -> tuple[str, str] | None:
    """Return the opening bracket and the content of a text that one pair of brackets encloses."""
    opener = next((opener for opener in OPENERS if text.startswith(opener)), None)
    if opener is None or not text.endswith(OPENERS[opener]):
        return None
    depth = 0
    for match in _TOKENS.finditer(text):
        depth += (match[0] in OPENERS) - (match[0] in CLOSERS)
        if depth == 0:
            return (opener, text[len(opener) : match.start()].strip()) if match.end() == len(text) else None
    return None


def _split_relations(text: str) -> tuple[list[str], list[str]]:
    sides = [side.strip() for side in split_top(text, _RELATION)]
    relations, depth = [], 0
    for match in _TOKENS.finditer(text):
        depth += (match[0] in OPENERS) - (match[0] in CLOSERS)
        if depth <= 0 and match[0] in _RELATION:
            relations.append(match[0])
    return sides, relations


def _read_region(text: str) -> Form | None:
    """Read intervals, their unions, and inequalities of one variable with plain bounds."""
    inside = _inside(text)
    if inside and inside[0] in ("\\{", "{"):  # `{x | x > 2}`
        head, separator, condition = inside[1].partition("|")
        if not separator:
            head, separator, condition = inside[1].partition(":")
        if separator and re.fullmatch(rf"{_NAME}(?: ?\\in .*)?", head.strip()):
            return _read_region(condition.strip())
    member = re.match(rf"({_NAME}) ?\\in(?![A-Za-z]) ?", text)
    if member:
        rest = text[member.end() :].strip()
        form = read_form(rest)
        pieces = as_region(form) if not (form.kind == "value") else [Piece(rest, rest, True, True)]
        return Form("region", text, pieces=pieces, name=member[1]) if pieces is not None else None
    parts = split_top(text, {"\\cup", "\\lor"})
    is_union = len(split_top(text, {"\\cup"})) > 1
    if len(parts) == 1 and split_top(text, {"\\land"})[1:]:
        return _both(split_top(text, {"\\land"}), text)
    pieces, names = [], set()
    for part in parts:
        read = _read_pieces(part.strip(), is_alone=not is_union)
        if read is None:
            return None
        pieces += read[0]
        names |= {read[1]}
    if len(names) > 1:
        return None
    sides, relations = _split_relations(text)
    relation = relations[0] if len(relations) == len(parts) == 1 else ""
    return Form("region", text, items=sides, pieces=pieces, name=names.pop(), relation=relation)


def _both(parts: list[str], text: str) -> Form | None:
    """Join `x > 1` and `x < 3`."""
    read = [_read_pieces(part.strip(), is_alone=True) for part in parts]
    if len(read) != 2 or read[0] is None or read[1] is None or read[0][1] != read[1][1] or len(read[0][0]) + len(read[1][0]) != 2:
        return None
    first, second = sorted((read[0][0][0], read[1][0][0]), key=lambda piece: piece.low.startswith("-\\infty"))
    if first.high != _INFINITY or second.low != f"-{_INFINITY}":
        return None
    return Form("region", text, pieces=[Piece(first.low, second.high, first.has_low, second.has_high)], name=read[0][1])


def _read_pieces(text: str, is_alone: bool) -> tuple[list[Piece], str] | None:
    if _ALL_NUMBERS.fullmatch(plain_words(text)) and (text != "R"):
        return [Piece(f"-{_INFINITY}", _INFINITY)], ""
    without = re.fullmatch(r"\\mathbb ?\{ ?R ?\} ?(?:\\setminus|-) ?\\?\{(.*?)\\?\}", text)
    if without:
        return _all_but(_items(without[1])), ""
    ends = re.fullmatch(r"([(\[]) ?(.*?) ?([)\]])", text, re.DOTALL)
    if ends and len(items := split_top(ends[2], {","})) == 2 and (not is_alone or ends[1] + ends[3] in ("(]", "[)")):
        return [Piece(items[0].strip(), items[1].strip(), ends[1] == "[", ends[3] == "]")], ""
    inside = _inside(text)
    if inside and inside[0] == "\\{" and not is_alone:
        return [Piece(item, item, True, True) for item in _items(inside[1])], ""
    sides, relations = _split_relations(text)
    if len(sides) == 2 and relations == ["\\ne"] and re.fullmatch(_NAME, sides[0]):
        return _all_but(_items(sides[1])), sides[0]
    if len(sides) == 2 and not re.fullmatch(_NAME, sides[0]):
        sides, relations = sides[::-1], [FLIPPED[relations[0]]]
    if len(sides) == 2 and re.fullmatch(_NAME, sides[0]) and _is_constant(sides[1]):
        if relations[0] in (">", "\\ge"):
            return [Piece(sides[1], _INFINITY, relations[0] == "\\ge")], sides[0]
        if relations[0] in ("<", "\\le"):
            return [Piece(f"-{_INFINITY}", sides[1], False, relations[0] == "\\le")], sides[0]
    if len(sides) == 3 and re.fullmatch(rf"{_NAME}(?: ?\( ?{_NAME} ?\))?", sides[1]):
        if {*relations} <= {">", "\\ge"}:
            sides, relations = sides[::-1], [FLIPPED[relation] for relation in relations[::-1]]
        if {*relations} <= {"<", "\\le"}:
            return [Piece(sides[0], sides[2], relations[0] == "\\le", relations[1] == "\\le")], sides[1]
    return None


def _is_constant(text: str) -> bool:
    if "\\infty" in text:
        return True
    try:
        return not variables(parse_expression(text))
    except (UnreadableExpression, TooLarge):
        return False


def _all_but(numbers: list[str]) -> list[Piece]:
    def size(text: str) -> float:
        try:
            return float(ExpressionEvaluation().value(parse_expression(text)))
        except (ValueError, TypeError, OverflowError):
            return 0.0

    ends = [f"-{_INFINITY}", *sorted(numbers, key=size), _INFINITY]
    return [Piece(low, high) for low, high in zip(ends, ends[1:], strict=False)]
