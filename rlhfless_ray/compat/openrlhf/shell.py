"""Read the commands of a launch script without running it.

Bash itself, even without a PATH, would carry out redirections, builtins, and programs named by their path. This module evaluates
the part of the grammar that launch scripts use: words, quotes, braces, variables, arrays, functions, `((…))`, `if`, `case` and
loops. A file that the script sources is read, if it exists here. A variable without a value stays as written, and so does a
substitution `$(…)` except of `echo`, `expr`, `basename`, `dirname`, and `cat` of a here-document. The commands inside a substitution
are read too. Only the first iteration of a loop is read, unless the loop takes the script's arguments one by one. If the result of a
test is unknown, every branch is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rlhfless_ray.compat.openrlhf.shell_builtins import DECLARES, is_associative, make_local, read_text, take_option
from rlhfless_ray.compat.openrlhf.shell_flow import Flow, is_success
from rlhfless_ray.compat.openrlhf.shell_values import NAME, Expansion, Scope, arithmetic, closing, expand, output_of, split_fields

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]+)\])?(\+?)=")
ELEMENT = re.compile(r"\[([^\]]+)\]=(.*)", re.DOTALL)  # of an associative array
CALCULATION = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:([-+*/%]?)=(?!=)(.+)|([-+])\4)\s*", re.DOTALL)
BRACES = re.compile(r"""\{(?:([^{}\s'"`\\]*,[^{}\s'"`\\]*)|(0|-?[1-9]\d*)\.\.(0|-?[1-9]\d*))\}([^\s;&|()<>'"`\\]*)(?=[\s;&|<>)]|$)""")
BEFORE_TESTS = ("if", "elif", "then", "else", "while", "until", "do", "{", "!")
FUNCTION = re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\s*\)\s*\{|function\s+([A-Za-z_][\w-]*)\s*\{")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a"}
HOME = re.compile(r"~(?=[/\s;]|$)")
MAX_CALL_DEPTH = 20  # of functions that call functions
MAX_NUMBERS = 10_000  # of `{1..N}`


class Command(NamedTuple):
    words: list[str]
    environment: dict[str, str]
    """Exported variables, and assignments in front of the command."""


@dataclass
class Reader:
    text: str
    scope: Scope
    at: int = 0
    commands: list[Command] = field(default_factory=list)
    inner: list[Command] = field(default_factory=list)
    """Commands in the substitutions of the current command."""
    words: list[str] = field(default_factory=list)
    word: str | None = None
    """The word that is being built, or None between words."""
    flow: Flow = field(default_factory=Flow)
    begin: int = 0
    """Position of the current command."""
    given: str | None = None
    """What follows `<<<` in the current command."""


def simple_commands(text: str, environment: Mapping[str, str] = os.environ, arguments: Sequence[str] | None = None) -> list[Command]:
    """Return the commands of a script or of a `bash -c` text in their order, without assignments and redirections.

    The commands of functions that are never called come last. `arguments`: the script's own, None if they are unknown.
    """
    scope = Scope({name: [value] for name, value in environment.items()}, set(environment), None if arguments is None else list(arguments))
    commands = _read(text, scope, [])
    for name in [name for name in scope.functions if name not in scope.called]:
        scope.arguments = None
        _read(scope.functions[name], scope, commands)
    return commands


def _read(text: str, scope: Scope, commands: list[Command]) -> list[Command]:
    reader = Reader(text + "\n", scope, commands=commands)
    while reader.at < len(reader.text):
        _step(reader)
    return commands


def words_of(text: str, scope: Scope) -> list[str]:
    """Split and expand a text that is part of one command."""
    reader = Reader(text, scope)
    while reader.at < len(reader.text):
        _step(reader)
    _end_word(reader)
    return reader.words


def _step(r: Reader) -> None:
    char, rest = r.text[r.at], r.text[r.at :]
    if r.word is None and not r.words:
        r.begin = r.at
    if r.word is None and not r.words and (function := FUNCTION.match(rest)):
        _define_function(r, function[1] or function[2], r.at + function.end())
    elif rest.startswith("\\\n"):
        r.at += 2
    elif char in " \t":
        _end_word(r)
        r.at += 1
    elif r.word is None and rest.startswith("((") and rest[: closing(rest, "(", ")")].endswith("))"):
        end = closing(rest, "(", ")")
        _calculate(r, rest[2 : end - 2])
        r.at += end
    elif char in "\n&|()<>" and _is_open_test(r):
        _read_in_test(r)
    elif char in "\n;&|()":
        _end_at_operator(r)
    elif char == "#" and r.word is None:
        r.at += len(rest.partition("\n")[0])
    elif char in "<>":
        _skip_redirection(r)
    elif char == "\\":
        _add(r, rest[1:2])
        r.at += 2
    elif rest.startswith("$'"):
        _ansi_quoted(r)
    elif char == "'":
        literal = rest[1:].partition("'")[0]
        _add(r, literal)
        r.at += len(literal) + 2
    elif char == '"':
        _double_quoted(r)
    elif char == "$":
        expansion = _expand(r)
        r.at = expansion.end
        if _is_never_split(r):
            _add(r, " ".join(expansion.values))
        elif expansion.is_whole:
            _add_words(r, expansion.values)
        else:
            _add_unquoted(r, " ".join(expansion.values))
    elif char == "`":
        inner = rest[1:].partition("`")[0]
        if not inner.lstrip().startswith("#"):  # a comment between two lines of a command
            r.inner += _read_substitution(r.scope, inner)
            _add(r, f"`{inner}`")
        r.at += len(inner) + 2
    elif char == "{" and (braces := BRACES.match(rest)) and (r.words or not ASSIGNMENT.match(r.word or "")):
        _expand_braces(r, braces)
    elif char == "~" and r.word is None and HOME.match(rest) and r.scope.values("HOME"):
        _add(r, "".join(r.scope.variables["HOME"]))
        r.at += 1
    else:
        _add(r, char)
        r.at += 1


def _is_never_split(r: Reader) -> bool:
    """Return whether an expansion is one word even without quotes: as an assigned value, and within `[[ … ]]` and `case … in`."""
    if _is_open_test(r) or (r.words[-1:] == ["case"] and all(word in BEFORE_TESTS for word in r.words[:-1])):
        return True
    if r.word is None or not ASSIGNMENT.match(r.word):
        return False
    return "".join(r.words[:1]) in DECLARES or all(ASSIGNMENT.match(word) or word in BEFORE_TESTS for word in r.words)


def _expand(r: Reader) -> Expansion:
    expansion = expand(r.text, r.at, r.scope, words_of)
    text = r.text[r.at : expansion.end]
    if not text.startswith("$(") or text.startswith("$(("):
        return expansion
    inner = _read_substitution(r.scope, text[2:-1])
    r.inner += inner
    lines = [output_of(command.words) if is_success(command.words) is None else "" for command in inner]
    if not lines or None in lines:
        return expansion
    return Expansion(["\n".join(filter(None, lines))], expansion.end)


def _read_substitution(scope: Scope, text: str) -> list[Command]:
    """Return the commands of a substitution. Its assignments hold only inside it, as in a subshell."""
    return _read(text, replace(scope, variables={**scope.variables}, exported={*scope.exported}), [])


def _add(r: Reader, text: str) -> None:
    r.word = (r.word or "") + text


def _add_words(r: Reader, values: Sequence[str]) -> None:
    for index, value in enumerate(values):
        if index:
            _end_word(r)
        _add(r, value)


def _add_unquoted(r: Reader, text: str) -> None:
    """Add an unquoted expansion, which the shell splits into words."""
    if r.word is not None and text[:1].isspace():
        _end_word(r)
    _add_words(r, split_fields(text))


def _expand_braces(r: Reader, braces: re.Match[str]) -> None:
    """Add a word for each alternative of `{a,b}`, or for each number of `{1..3}`. Very many numbers stay as written."""
    listed, first, last, suffix = braces.groups()
    if listed is None and abs(int(last) - int(first)) >= MAX_NUMBERS:
        _add(r, "{")
        r.at += 1
        return
    if listed is None:
        step = 1 if int(first) <= int(last) else -1
        alternatives = [str(number) for number in range(int(first), int(last) + step, step)]
    else:
        alternatives = listed.split(",")
    prefix, r.word = r.word or "", None
    for alternative in alternatives:
        for word in words_of(alternative + suffix, r.scope) or [""] * bool(prefix):
            _end_word(r)
            r.word = prefix + word
    r.at += braces.end()


def _calculate(r: Reader, text: str) -> None:
    """Add `true` or `false` for `((…))`, or the text itself if its value is unknown. Of a loop's head only the first part is read."""
    r.words = _strip_keywords(r, "")
    if not r.flow.runs:
        return
    first, is_head, _ = text.partition(";")
    assigned = CALCULATION.fullmatch(first)
    if assigned:
        name, how, argument, twice = assigned.groups()
        first = argument if how == "" else f"{name} {how or twice} ({argument or 1})"
    value = arithmetic(r.scope, first)
    if assigned and value:
        r.scope.variables[assigned[1]] = [value]
    if not is_head:
        r.words.append(("true" if value != "0" else "false") if value else f"(({text}))")


def _end_word(r: Reader) -> None:
    if r.word is not None:
        r.words.append(r.word)
    r.word = None


def _end_command(r: Reader, ends: str = "\n") -> None:
    """Finish the current command. `ends`: the operator after it."""
    _end_word(r)
    if r.words[:1] == ["done"] and (head := r.flow.next_iteration(r.text, r.scope)) is not None:
        r.at, r.words = head, []
        return
    words, r.words = _strip_keywords(r, ends), []
    inner, r.inner = r.inner, []
    given, r.given = r.given, None
    if r.flow.runs:
        r.commands += inner
    if not words or not r.flow.runs:
        return
    negated = words[0] == "!"
    kept = _replaced_for_one_command(r.scope, words[negated:])
    words, environment, result = _apply_assignments(r, words[negated:])
    if words:
        result = True if words[0] == "echo" else is_success(words)
        if words[0] == "getopts" and len(words) == 3:
            result = take_option(r.scope, words[1], words[2])
        elif words[0] == "read" and given is not None:
            read_text(r.scope, words[1:], given)
        _run_command(r, words, environment)
        r.scope.restore(kept)
    r.flow.record_status(result if result is None else result != negated)


def _strip_keywords(r: Reader, ends: str) -> list[str]:
    """Handle the current command's leading keywords. Returns the words after them."""
    opens, depth = r.words[:1], len(r.flow.frames)
    words = r.flow.strip_keywords(r.words, ends, r.scope)
    if opens in (["while"], ["until"]) and len(r.flow.frames) > depth:
        r.flow.frames[depth].begin_at(r.text, r.begin, r.scope)
    elif opens == ["do"] and depth and r.flow.frames[depth - 1].name:
        r.flow.frames[depth - 1].begin_at(r.text, r.begin, r.scope)
    return words


def _is_open_test(r: Reader) -> bool:
    """Return whether the current command is a `[[` whose end is still to come."""
    if "[[" not in r.words or "]]" in (*r.words, r.word):
        return False
    return all(word in BEFORE_TESTS for word in r.words[: r.words.index("[[")])


def _read_in_test(r: Reader) -> None:
    """Read an operator within `[[ … ]]` as a word. In a regular expression it belongs to the word."""
    if r.words[-1] == "=~" and r.text[r.at] != "\n":
        _add(r, r.text[r.at])
        r.at += 1
        return
    _end_word(r)
    name = next((two for two in ("&&", "||") if r.text.startswith(two, r.at)), r.text[r.at])
    r.words += [name] * (name != "\n")
    r.at += len(name)


def _apply_assignments(r: Reader, words: list[str]) -> tuple[list[str], dict[str, str], bool | None]:
    """Apply leading assignments. Returns the words after them, the command's environment, and the exit status."""
    scope, environment = r.scope, r.scope.environment()
    if words and words[0] in DECLARES:
        options = {word for word in words[1:] if word.startswith("-")}
        for word in words[1:]:
            make_local(scope, words[0], word.partition("=")[0].removesuffix("+"))
        names = [_assign(r, word) or word for word in words[1:] if word not in options]
        if words[0] == "export" or "-x" in options:
            scope.exported.update(names)
        if is_associative(words):
            scope.keys |= {name: scope.keys.get(name, []) for name in names}
        return [], environment, True
    while words and ASSIGNMENT.match(words[0]):
        name = _assign(r, words[0])
        environment[name] = "".join(scope.variables.get(name, [])[:1])
        words = words[1:]
    return words, environment, True


def _replaced_for_one_command(scope: Scope, words: list[str]) -> dict[str, list[str] | None]:
    """Return the values that assignments in front of a command replace as long as it runs."""
    names = [match[1] for match in takewhile(bool, map(ASSIGNMENT.match, words)) if match]
    return {name: scope.variables.get(name) for name in names} if len(names) < len(words) else {}


def _assign(r: Reader, word: str) -> str:
    """Apply one assignment. Returns the variable's name, or an empty string if the word is no assignment."""
    match = ASSIGNMENT.match(word)
    if match is None:
        return ""
    name, subscript, plus = match.groups()
    old, new = r.scope.variables.get(name, []), word[match.end() :]
    if old and not r.flow.is_certain and ("$(" in new or "`" in new):
        return name  # a branch that may not run, and a value that is not known
    if subscript is not None:
        place, keys = r.scope.place(name, subscript), r.scope.keys.get(name)
        if place is not None:
            r.scope.variables[name] = [*old[:place], new, *old[place + 1 :]]
        if keys is not None and place == len(keys):
            keys.append(subscript)
    else:
        r.scope.variables[name] = [("".join(old[:1]) if plus else "") + new, *(old[1:] if plus else [])]
    return name


def _run_command(r: Reader, words: list[str], environment: dict[str, str]) -> None:
    scope = r.scope
    if words[0] == "shift" and scope.arguments is not None:
        scope.arguments = scope.arguments[int(words[1]) if words[1:2] and words[1].isdigit() else 1 :]
    elif words[0] in ("eval", "source", ".") and words[1:] and scope.depth < MAX_CALL_DEPTH:
        file = Path(words[1])
        scope.depth += 1
        if words[0] == "eval":
            _read(" ".join(words[1:]), scope, r.commands)
        elif file.is_file():  # as seen from here; `cd` is not followed
            before = scope.arguments
            scope.arguments = words[2:] or before
            _read(file.read_text(encoding="utf-8", errors="replace"), scope, r.commands)
            scope.arguments = before if words[2:] else scope.arguments
        scope.depth -= 1
    elif words[0] in scope.functions and scope.depth < MAX_CALL_DEPTH:
        scope.called.add(words[0])
        before, scope.arguments = scope.arguments, words[1:]
        scope.depth += 1
        scope.locals.append({})
        _read(scope.functions[words[0]], scope, r.commands)
        scope.restore(scope.locals.pop())
        scope.depth -= 1
        scope.arguments = before
    else:
        if words[:2] == ["set", "--"]:
            scope.arguments = words[2:]
        r.commands.append(Command(words, environment))


def _end_at_operator(r: Reader) -> None:
    match = ASSIGNMENT.fullmatch(r.word) if r.word else None
    if r.text[r.at] == "(" and match:
        _assign_array(r, match[1], append=bool(match[3]))
        return
    name = next((two for two in ("&&", "||", ";;") if r.text.startswith(two, r.at)), r.text[r.at])
    at, guarded = r.at, r.flow.guarded
    _end_command(r, name)
    if name == "(" and not (r.flow.frames and r.flow.frames[-1].wants_pattern):
        r.flow.guarded = guarded
        r.flow.open_group(")")
    elif name == ")":
        r.flow.close_group(")")
    else:
        r.flow.end_at(name)
    if r.at == at:  # else a loop goes on with its next iteration
        r.at += len(name)


def _assign_array(r: Reader, name: str, *, append: bool) -> None:
    inner = Reader(r.text, r.scope, r.at + 1)
    while inner.at < len(inner.text) and inner.text[inner.at] != ")":
        if inner.text[inner.at] == "\n":
            _end_word(inner)
            inner.at += 1
        else:
            _step(inner)
    _end_word(inner)
    r.words = _strip_keywords(r, "")  # a `then` may stand before the assignment
    if r.flow.runs:
        values, scope = inner.words, r.scope
        make_local(scope, "".join(r.words[:1]), name)
        if is_associative(r.words) or name in scope.keys:
            elements = [element for word in values if (element := ELEMENT.fullmatch(word))]
            scope.keys[name] = [*(scope.keys.get(name, []) if append else []), *(element[1] for element in elements)]
            values = [element[2] for element in elements]
        scope.variables[name] = [*(scope.variables.get(name, []) if append else []), *values]
        r.flow.record_status(True)
    r.text, r.at, r.word = inner.text, inner.at + 1, None  # reading a here-document removes the text before it


def _define_function(r: Reader, name: str, at: int) -> None:
    """Store a function's text, which is read at each call."""
    copy = Scope({**r.scope.variables}, set(), None)
    body, depth = Reader(r.text, copy, at), 0
    while body.at < len(body.text):
        at_start = body.word is None and not body.words
        brace = re.match(r"([{}])(?=[\s;&|)]|$)", body.text[body.at :]) if at_start else None
        depth += 0 if brace is None else (1 if brace[1] == "{" else -1)
        if depth < 0:
            break
        _step(body)
    end = len(r.text) - (len(body.text) - body.at)  # reading a here-document removes the text before it
    r.scope.functions[name] = r.text[at:end]
    r.at = end + 1


def _skip_redirection(r: Reader) -> None:
    if r.word is not None and r.word.isdigit():
        r.word = None
    heredoc = re.match(r"<<-?\s*(['\"]?)(\w+)\1", r.text[r.at :])
    if heredoc:
        _read_heredoc(r, heredoc[2], r.at + heredoc.end(), literal=bool(heredoc[1]))
        return
    target = re.match(r"(<<<|>>|[<>])&?\s*(\"[^\"]*\"|'[^']*'|[^\s;&|()]*)", r.text[r.at :])
    assert target is not None
    if target[1] == "<<<":
        r.given = " ".join(words_of(target[2], r.scope))
    r.at += target.end()


def _read_heredoc(r: Reader, mark: str, at: int, *, literal: bool) -> None:
    """Read a here-document: the value of `read … NAME`, or the commands of a shell. Other commands' input is skipped."""
    _end_word(r)
    line = r.text.find("\n", at)
    begin = len(r.text) if line < 0 else line + 1
    end_mark = re.compile(rf"^\t*{mark}$", re.MULTILINE).search(r.text, begin)
    body = r.text[begin : end_mark.start() if end_mark else len(r.text)]
    if not literal:
        quoted = re.sub(r'\\.|"', lambda found: {'"': '\\"', '\\"': '\\\\\\"'}.get(found[0], found[0]), body, flags=re.DOTALL)
        inner = Reader(f'"{quoted}"', r.scope)
        _double_quoted(inner)
        body = " ".join([*inner.words, inner.word or ""])  # an array in a here-document is one text
    if r.words[:1] == ["read"] and NAME.fullmatch(r.words[-1]):
        r.scope.variables[r.words[-1]] = [body.strip()]
    elif r.words[-1:] == ["cat"]:  # into a file, which another command may start, or as the value of a substitution
        r.words[-1:] = ["echo", body.rstrip("\n")]
    elif any(word.rpartition("/")[2] in ("bash", "sh") for word in r.words):
        r.words.append(body)  # as the text of `bash -c`
    r.text, r.at = r.text[at:begin] + r.text[end_mark.end() if end_mark else len(r.text) :], 0


def _ansi_quoted(r: Reader) -> None:
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
    was = r.word
    _add(r, "")
    r.at += 1
    begin = r.at
    while r.at < len(r.text) and r.text[r.at] != '"':
        char = r.text[r.at]
        if char == "\\" and r.text[r.at + 1 : r.at + 2] in ('"', "\\", "$", "`", "\n"):
            _add(r, r.text[r.at + 1].replace("\n", ""))
            r.at += 2
        elif char == "$":
            alone = r.at == begin
            expansion = _expand(r)
            r.at = expansion.end
            between = "".join(r.scope.variables.get("IFS", [" "]))[:1]
            _add_words(r, expansion.values if expansion.is_list else [between.join(expansion.values)])
            if alone and expansion.is_list and not expansion.values and r.text[r.at : r.at + 1] == '"':
                r.word = was  # an empty array makes no word
        else:
            _add(r, char)
            r.at += 1
    r.at += 1
