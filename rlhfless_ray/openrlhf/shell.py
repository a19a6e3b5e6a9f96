"""As much of a shell's grammar as launch scripts use: words, quotes, variables and arrays, commands one after another.

Nothing is executed. A substitution `$(…)` and a variable without a value stay as they are written.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
DECLARES = ("export", "declare", "local", "readonly", "typeset")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a"}


@dataclass
class Reader:
    text: str
    variables: dict[str, list[str]] = field(default_factory=dict)
    at: int = 0
    commands: list[list[str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    word: str | None = None
    """Under construction; None between words."""


def simple_commands(text: str, environment: Mapping[str, str] = os.environ) -> list[list[str]]:
    """The commands of a script or of a `bash -c` text in the order they are written, as lists of words, without
    assignments and redirections."""
    reader = Reader(text, {name: [value] for name, value in environment.items()})
    while reader.at < len(reader.text):
        _step(reader)
    _end_command(reader)
    return reader.commands


def _step(r: Reader) -> None:
    char, rest = r.text[r.at], r.text[r.at :]
    if rest.startswith("\\\n"):
        r.at += 2
    elif char in " \t":
        _end_word(r)
        r.at += 1
    elif char in "\n;&|()":
        _operator(r)
    elif char == "#" and r.word is None:
        r.at += len(rest.partition("\n")[0])
    elif char in "<>":
        _redirection(r)
    elif char == "\\":
        _add(r, rest[1:2])
        r.at += 2
    elif rest.startswith("$'"):
        _ansi(r)
    elif char == "'":
        literal = rest[1:].partition("'")[0]
        _add(r, literal)
        r.at += len(literal) + 2
    elif char == '"':
        _double_quoted(r)
    elif char == "$":
        values, r.at = _expansion(r)
        (_add if rest.startswith("$(") else _add_split)(r, " ".join(values))
    elif char == "`":
        inner = rest[1:].partition("`")[0]
        _add(r, f"`{inner}`")
        r.at += len(inner) + 2
    else:
        _add(r, char)
        r.at += 1


def _add(r: Reader, text: str) -> None:
    r.word = (r.word or "") + text


def _add_split(r: Reader, text: str) -> None:
    """An expansion without quotes is split into words."""
    parts = text.split()
    for index, part in enumerate(parts):
        if index or (r.word is not None and text[:1].isspace()):
            _end_word(r)
        _add(r, part)


def _end_word(r: Reader) -> None:
    if r.word is not None:
        r.words.append(r.word)
    r.word = None


def _end_command(r: Reader) -> None:
    _end_word(r)
    words, r.words = r.words, []
    while words and (words[0] in DECLARES or ASSIGNMENT.match(words[0])):
        if match := ASSIGNMENT.match(words[0]):
            before = "".join(r.variables.get(match[1], [])[:1]) if match[2] else ""
            r.variables[match[1]] = [before + words[0][match.end() :]]
        words = words[1:]
    if words:
        r.commands.append(words)


def _operator(r: Reader) -> None:
    match = ASSIGNMENT.fullmatch(r.word) if r.word else None
    if r.text[r.at] == "(" and match:
        _array(r, match[1], append=bool(match[2]))
        return
    _end_command(r)
    r.at += 1


def _array(r: Reader, name: str, *, append: bool) -> None:
    inner = Reader(r.text, r.variables, r.at + 1)
    while inner.at < len(r.text) and r.text[inner.at] != ")":
        if r.text[inner.at] == "\n":
            _end_word(inner)
            inner.at += 1
        else:
            _step(inner)
    _end_word(inner)
    r.variables[name] = [*(r.variables.get(name, []) if append else []), *inner.words]
    r.at, r.word = inner.at + 1, None


def _redirection(r: Reader) -> None:
    if r.word is not None and r.word.isdigit():
        r.word = None
    heredoc = re.match(r"<<-?\s*(['\"]?)(\w+)\1", r.text[r.at :])
    if heredoc:
        _heredoc(r, heredoc[2], r.at + heredoc.end(), literal=bool(heredoc[1]))
        return
    target = re.match(r"(<<<|>>|[<>])&?\s*(\"[^\"]*\"|'[^']*'|[^\s;&|()]*)", r.text[r.at :])
    assert target is not None
    r.at += target.end()


def _heredoc(r: Reader, mark: str, at: int, *, literal: bool) -> None:
    """What `read … NAME` reads is that variable's value, and what a shell reads are commands; else it is somebody's data."""
    _end_word(r)
    line = r.text.find("\n", at)
    begin = len(r.text) if line < 0 else line + 1
    found = re.compile(rf"^\t*{mark}$", re.MULTILINE).search(r.text, begin)
    body = r.text[begin : found.start() if found else len(r.text)]
    if not literal:
        inner = Reader('"' + body.replace('"', '\\"') + '"', r.variables)
        _double_quoted(inner)
        body = inner.word or ""
    if r.words[:1] == ["read"] and NAME.fullmatch(r.words[-1]):
        r.variables[r.words[-1]] = [body.strip()]
    elif any(word.rpartition("/")[2] in ("bash", "sh") for word in r.words):
        r.words.append(body)  # as if it stood behind -c
    r.text, r.at = r.text[at:begin] + r.text[found.end() if found else len(r.text) :], 0


def _ansi(r: Reader) -> None:
    _add(r, "")
    r.at += 2
    while r.at < len(r.text) and r.text[r.at] != "'":
        if r.text[r.at] == "\\" and r.at + 1 < len(r.text):
            r.at += 1
            _add(r, ESCAPES.get(r.text[r.at], "\\" + r.text[r.at]))
        else:
            _add(r, r.text[r.at])
        r.at += 1
    r.at += 1


def _double_quoted(r: Reader) -> None:
    _add(r, "")
    r.at += 1
    while r.at < len(r.text) and r.text[r.at] != '"':
        char = r.text[r.at]
        if char == "\\" and r.text[r.at + 1 : r.at + 2] in ('"', "\\", "$", "`", "\n"):
            _add(r, r.text[r.at + 1].replace("\n", ""))
            r.at += 2
        elif char == "$":
            every = re.match(r"\$\{\w+\[@\]\}", r.text[r.at :])
            values, r.at = _expansion(r)
            for index, value in enumerate(values if every else [" ".join(values)]):
                if index:
                    _end_word(r)
                _add(r, value)
            if every and not values and r.word == "":
                r.word = None  # an empty array is no word at all
        else:
            _add(r, char)
            r.at += 1
    r.at += 1


def _expansion(r: Reader) -> tuple[list[str], int]:
    """The values of the `$…` at the reader's place, and where it ends."""
    rest = r.text[r.at :]
    if sum_ := re.match(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)", rest):
        return [_arithmetic(r, sum_[1]) or sum_[0]], r.at + sum_.end()
    if rest.startswith("$("):
        depth, end = 0, len(rest)
        for index, char in enumerate(rest):
            depth += (char == "(") - (char == ")")
            if char == ")" and not depth:
                end = index + 1
                break
        return [rest[:end]], r.at + end
    braced = re.match(r"\$\{([A-Za-z_]\w*|\d+)(\[[@*\d]+\])?(?::?-([^}]*))?\}", rest)
    plain = braced or re.match(r"\$([A-Za-z_]\w*)", rest)
    if plain is None:
        return [rest[:1]], r.at + 1
    known = r.variables.get(plain[1])
    if known is None:
        default = braced[3] if braced else None
        return [default if default is not None else plain[0]], r.at + plain.end()
    subscript = braced[2] if braced else None
    if subscript in ("[@]", "[*]"):
        return list(known), r.at + plain.end()
    place = int(subscript[1:-1]) if subscript else 0
    return known[place : place + 1], r.at + plain.end()


OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}


def _arithmetic(r: Reader, text: str) -> str:
    """The value of whole numbers and variables that hold some, under + - * / %; empty: anything else."""
    known = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", lambda name: "".join(r.variables.get(name[1], ["?"])[:1]), text)
    try:
        return str(_number(ast.parse(known.strip().replace("/", "//"), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError
