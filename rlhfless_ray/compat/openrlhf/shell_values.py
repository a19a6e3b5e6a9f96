"""Expand a shell's `$…`: variables, arrays, arguments, `${…}` forms and arithmetic."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z_]\w*")
BLANK = re.compile(r"""("[^"]*"|'[^']*'|\\.)|[ \t;&|<>#]""", re.DOTALL)  # or an operator, outside quotes
BRACED = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#])(?:\[([^\]]+)\])?(?:(:?[-=+?]|%%?|##?|//?|,,?|\^\^?|:(?=[\s\w$(]))(.*))?", re.DOTALL)


@dataclass
class Scope:
    """State of a script while it is read."""

    variables: dict[str, list[str]]
    exported: set[str]
    arguments: list[str] | None
    """$1, $2, …; None if unknown."""
    functions: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    depth: int = 0
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Keys of associative arrays, in the order of their values in `variables`."""
    locals: list[dict[str, list[str] | None]] = field(default_factory=list)
    """Of each function that runs: the values that its local variables hide, None for none."""

    def environment(self) -> dict[str, str]:
        return {name: "".join(self.variables[name][:1]) for name in self.exported if name in self.variables}

    def restore(self, values: dict[str, list[str] | None]) -> None:
        """Give variables the values that they had before, None for none."""
        for name, value in values.items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value

    def values(self, name: str) -> list[str] | None:
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return None if self.arguments is None else [str(len(self.arguments))]
        if name.isdigit() and name != "0":
            return None if self.arguments is None else self.arguments[int(name) - 1 : int(name)]
        return self.variables.get(name)

    def place(self, name: str, subscript: str) -> int | None:
        """Return the position of an array's element; that of a new key is behind the last. None if it is unknown."""
        if name in self.keys:
            keys = self.keys[name]
            return keys.index(subscript) if subscript in keys else len(keys)
        number = arithmetic(self, subscript)
        if not number:
            return None
        return int(number) + (len(self.variables.get(name, [])) if int(number) < 0 else 0)


@dataclass
class Expansion:
    values: list[str]
    end: int
    """Position after it in the text."""
    is_list: bool = False
    """Whether each value is a word of its own even within quotes, as for `"${array[@]}"`."""
    is_whole: bool = False
    """Whether each value is a word already, so that its spaces do not split it."""


def expand(text: str, at: int, scope: Scope, words_of: Callable[[str, Scope], list[str]]) -> Expansion:
    """Expand the `$…` at a position. `words_of`: splits words inside braces."""
    rest = text[at:]
    if sum_ := re.match(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)", rest):
        return Expansion([arithmetic(scope, sum_[1]) or sum_[0]], at + sum_.end(), is_whole=True)
    if rest.startswith("$("):
        end = closing(rest, "(", ")")
        return Expansion([rest[:end]], at + end, is_whole=True)
    if rest.startswith("${"):
        end = closing(rest, "{", "}")
        return _expand_braced(rest[:end], at + end, scope, words_of)
    plain = re.match(r"\$([A-Za-z_]\w*|\d|[@*#])", rest)
    if plain is None:
        return Expansion([rest[:1]], at + 1)
    return _expand_braced(f"${{{plain[1]}}}", at + plain.end(), scope, words_of, unknown=plain[0])


def closing(text: str, opens: str, closes: str) -> int:
    """Return the position after the bracket that closes the first one."""
    depth = 0
    for index, char in enumerate(text):
        depth += (char == opens) - (char == closes)
        if char == closes and not depth:
            return index + 1
    return len(text)


def _expand_braced(whole: str, end: int, scope: Scope, words_of: Callable[[str, Scope], list[str]], unknown: str = "") -> Expansion:
    """Expand `whole`, a `${…}`. If its variable has no value, it stays as written, or becomes `unknown`."""
    parts = BRACED.fullmatch(whole[2:-1])
    if parts is None:
        return Expansion([whole], end, is_whole=True)
    measured, name, subscript, how, argument = parts.groups()
    if measured == "!" and subscript in ("@", "*") and name in scope.variables:
        return Expansion(scope.keys.get(name) or [str(number) for number in range(len(scope.variables[name]))], end, is_list=True)
    if measured == "!":  # indirect: the variable whose name this variable holds
        pointed = scope.values(name)
        if subscript or not pointed or NAME.fullmatch(pointed[0]) is None:
            return Expansion([whole], end)
        measured, name = "", pointed[0]
    known = scope.values(name)
    is_list = name == "@" or subscript == "@"
    every = is_list or name == "*" or subscript == "*"
    values = known
    if known is not None and not every:
        place = scope.place(name, " ".join(words_of(subscript, scope))) if subscript else 0
        values = None if place is None else known[place : place + 1]
    if measured:
        lengths = None if values is None else [str(len(values) if every else len("".join(values)))]
        return Expansion(lengths or [whole], end)
    kind = (how or "").removeprefix(":")
    if kind in ("-", "=", "+", "?") and how:
        there = bool(values) and (any(values) if how.startswith(":") else True)  # type: ignore[arg-type]
        if there if kind == "+" else (not there and kind in ("-", "=")):
            words = words_of(argument, scope)
            if kind == "=":
                scope.variables[name] = [" ".join(words)]
            return Expansion(words, end, is_whole=True)
        if kind == "+":
            return Expansion([], end)
    if values is None:
        return Expansion([unknown or whole], end)
    if how == ":":
        bounds = [arithmetic(scope, text) for text in argument.split(":", 1)]
        if not all(bounds):
            return Expansion([whole], end, is_whole=True)
        return Expansion(_slice(values, [int(bound) for bound in bounds], every, name), end, is_list)
    if kind and kind[0] in "%#/":
        if kind == "/" and argument[:1] in ("#", "%"):  # at the beginning or at the end only
            kind, argument = kind + argument[0], argument[1:]
        texts = argument.partition("/")[::2] if kind[0] == "/" else (argument, "")
        pattern, by = (" ".join(words_of(BLANK.sub(lambda found: found[1] or f"\\{found[0]}", text), scope)) for text in texts)
        values = [_edit(value, kind, pattern, by) for value in values]
    if kind and kind[0] in ",^" and not argument:
        change = str.lower if kind[0] == "," else str.upper
        values = [change(value) if len(kind) == 2 else change(value[:1]) + value[1:] for value in values]
    return Expansion(values, end, is_list)


def _slice(values: list[str], bounds: list[int], every: bool, name: str) -> list[str]:
    """Apply `:OFFSET` or `:OFFSET:LENGTH` to a list's elements (arguments count from 1) or to a text."""
    begin = bounds[0] - (name in ("@", "*") and bounds[0] > 0)

    def part(whole: list[str] | str) -> list[str] | str:
        rest = whole[begin:] if begin >= -len(whole) else whole[:0]
        return rest if len(bounds) == 1 else rest[: bounds[1]]

    return list(part(values)) if every else [str(part("".join(values)))]


def split_fields(text: str) -> list[str]:
    """Split an unquoted expansion into words. The unknown output of a substitution counts as one word."""
    words, at = [""], 0
    while at < len(text):
        end = at + 1
        if text.startswith("$(", at):
            end = at + closing(text[at:], "(", ")")
        elif text[at] == "`":
            end = text.find("`", at + 1) + 1 or len(text)
        if text[at].isspace():
            words.append("")
        else:
            words[-1] += text[at:end]
        at = end
    return [word for word in words if word]


def output_of(words: list[str]) -> str | None:
    """Return what `echo`, `basename`, `dirname`, or `expr` of two numbers, prints. None for other commands."""
    if words[0] == "echo" and not any(word.startswith("-") and word[1:].strip("neE") == "" for word in words[1:2]):
        return " ".join(words[1:])
    if words[:2] == ["echo", "-n"]:
        return " ".join(words[2:])
    if words[0] in ("basename", "dirname") and len(words) == 2 and words[1].strip("/") and not re.search("[$`]", words[1]):
        folder, _, name = words[1].rstrip("/").rpartition("/")
        return folder or "." if words[0] == "dirname" else name
    if words[0] == "expr" and len(words) == 4:
        return arithmetic(Scope({}, set(), None), " ".join(words[1:])) or None
    return None


def _edit(value: str, kind: str, pattern: str, by: str) -> str:
    """Apply `%`, `#` or `/`: remove the end or beginning that a pattern matches, or replace a match."""
    places = range(len(value) + 1)
    if kind[0] == "%":
        cuts = [i for i in places if fnmatch.fnmatchcase(value[i:], pattern)]
        return value[: (min if kind == "%%" else max)(cuts)] if cuts else value
    if kind[0] == "#":
        cuts = [i for i in places if fnmatch.fnmatchcase(value[:i], pattern)]
        return value[(max if kind == "##" else min)(cuts) :] if cuts else value
    expression = fnmatch.translate(pattern).removeprefix("(?s:").removesuffix(r")\Z")
    expression = rf"\A(?:{expression})" if kind == "/#" else rf"(?:{expression})\Z" if kind == "/%" else expression
    return re.sub(expression, lambda _: by, value, count=0 if kind == "//" else 1, flags=re.DOTALL)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def arithmetic(scope: Scope, text: str) -> str:
    """Evaluate + - * / %, comparisons, && and || of whole numbers and variables. Returns an empty string for anything else."""
    known = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda name: "".join(scope.variables.get(name[1], ["?"])[:1]), text)
    known = re.sub(r"\$\{?([\d#])\}?", lambda name: "".join(scope.values(name[1]) or ["?"]), known)
    try:
        known = known.strip().replace("/", "//").replace("&&", " and ").replace("||", " or ")
        return str(_number(ast.parse(known, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        return int(OPERATORS[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        return int((all if isinstance(node.op, ast.And) else any)([_number(value) for value in node.values]))
    raise ValueError
