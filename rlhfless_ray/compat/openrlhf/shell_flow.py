"""Decide which commands of a script run: `if`, `case`, loops, `&&` and `||` with tests of texts and numbers."""

from __future__ import annotations

import fnmatch
import operator
import re
from dataclasses import dataclass, field

from rlhfless_ray.compat.openrlhf.shell_values import Scope

CLOSES = {"]": "[", "]]": "[["}
NUMBERS = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le}
UNSET = re.compile(r"\$\{?[A-Za-z_]\w*\}?")


@dataclass
class _Frame:
    """An open `if`, `case`, loop, `{` or `(`."""

    kind: str
    active: bool = True
    taken: bool = False
    """Whether one of its branches certainly ran."""
    subject: str | None = None
    """The word that a `case` compares; None if unknown."""
    wants_pattern: bool = False
    hit: bool = False
    ends_on: bool | None = None
    """The status of its test that ends a loop, or the status in front of a group."""
    unknown: bool = False
    """Whether one of its tests has no known result."""
    text: str = ""
    head: int = 0
    """Position of a loop in `text`."""
    arguments: int = 0
    """Length of the script's arguments at its head."""
    name: str = ""
    """The variable of a `for` loop over the script's arguments, or what closes a group."""
    rest: list[str] = field(default_factory=list)
    """The arguments of its other iterations."""

    def begin_at(self, text: str, head: int, scope: Scope) -> None:
        self.text, self.head, self.arguments = text, head, _length(scope.arguments)


@dataclass
class Flow:
    frames: list[_Frame] = field(default_factory=list)
    status: bool | None = None
    """Whether the last command succeeded; None if unknown."""
    guarded: bool = False
    """Whether `&&` or `||` skips the next command."""
    joined: str = ""

    @property
    def runs(self) -> bool:
        return not self.guarded and all(frame.active for frame in self.frames)

    @property
    def is_certain(self) -> bool:
        """Whether every test around the next command has a known result."""
        return not any(frame.unknown for frame in self.frames)

    def next_iteration(self, text: str, scope: Scope) -> int | None:
        """Return where the next iteration of a loop begins that takes the script's arguments one by one. None at its end."""
        frame = self.frames[-1] if self.frames else None
        if frame is None or frame.kind != "loop" or frame.text is not text or not self.runs or scope.arguments is None:
            return None
        if frame.rest:
            scope.variables[frame.name] = [frame.rest.pop(0)]
            return frame.head
        return self.frames.pop().head if _length(scope.arguments) < frame.arguments and not frame.name else None  # a test decides

    def open_group(self, closes: str) -> None:
        """Begin a group of commands, all of which `&&` or `||` may skip."""
        self.frames.append(_Frame("group", active=not self.guarded, name=closes, ends_on=self.status))
        self.guarded, self.joined = False, ""

    def close_group(self, closes: str) -> None:
        top = self.frames[-1] if self.frames else None
        if top is not None and top.kind == "group" and top.name == closes:
            self.frames.pop()
            self.status = self.status if top.active else top.ends_on

    def end_at(self, name: str) -> None:
        """Handle the operator after a command."""
        self.joined = name if name in ("&&", "||") else ""
        self.guarded = (name == "&&" and self.status is False) or (name == "||" and self.status is True)
        if name == ";;" and self.frames and self.frames[-1].kind == "case":
            self.frames[-1].wants_pattern, self.frames[-1].active = True, False

    def record_status(self, status: bool | None) -> None:
        """Record the status of a command that ran."""
        if self.joined and self.status is None and status is (self.joined == "&&"):
            status = None
        self.status = status

    def strip_keywords(self, words: list[str], ends: str, scope: Scope) -> list[str]:
        """Handle leading keywords and return the words after them. Patterns and the heads of loops leave none."""
        while words:
            top = self.frames[-1] if self.frames else None
            if top is not None and top.wants_pattern and words[0] != "esac":
                self._match_pattern(top, words, ends)
                return []
            word, rest = words[0], words[1:]
            if word == "if":
                self.frames.append(_Frame("if"))
            elif word in ("then", "elif", "else") and top is not None and top.kind == "if":
                self._enter_branch(top, word)
            elif word in ("fi", "done", "esac") and top is not None:
                self.frames.pop()
            elif word in ("while", "until", "for", "select"):
                self.frames.append(_Frame("loop", ends_on={"while": False, "until": True}.get(word)))
                self.status = None
                if rest[1:2] == ["in"] and self.runs:
                    scope.variables[rest[0]] = rest[2:3] or [""]
                    if scope.arguments and rest[2:] == scope.arguments:
                        self.frames[-1].name, self.frames[-1].rest = rest[0], rest[3:]
                if word in ("for", "select"):
                    return []
            elif word == "case" and rest[1:2] == ["in"]:
                self.frames.append(_Frame("case", active=False, subject=(compared := _text(rest[0])), wants_pattern=True))
                self.frames[-1].unknown = compared is None
                rest = rest[2:]
            elif word == "do" and top is not None and top.kind == "loop":
                top.active = top.ends_on is None or self.status is not top.ends_on
                self.guarded, self.status = False, None
            elif word == "{":
                self.open_group("}")
            elif word == "}":
                self.close_group("}")
            elif word != "do":
                return words
            words = rest
        return words

    def _enter_branch(self, frame: _Frame, word: str) -> None:
        if word == "then":
            frame.unknown |= self.status is None
            frame.active = not frame.taken and self.status is not False
            frame.taken |= frame.active and self.status is True
        else:
            frame.active = not frame.taken
        self.guarded, self.status = False, None

    def _match_pattern(self, frame: _Frame, words: list[str], ends: str) -> None:
        if ends in (")", "|"):
            frame.hit |= frame.subject is None or any(fnmatch.fnmatchcase(frame.subject, word) for word in words)
        if ends == ")":
            frame.active = frame.hit and not frame.taken
            frame.taken |= frame.active and frame.subject is not None
            frame.wants_pattern = frame.hit = False


def _length(arguments: list[str] | None) -> int:
    """Return a number that gets smaller with each argument that is taken, or letter of a group of options."""
    return sum(len(argument) + 1 for argument in arguments or [])


def is_success(words: list[str]) -> bool | None:
    """Return whether a command succeeds: `true`, `false`, and tests of texts and numbers. None if unknown."""
    if words[0] in ("true", ":"):
        return True
    if words[0] == "false":
        return False
    opens = words[0]
    if opens not in ("[", "[[", "test"):
        return None
    if opens != "test":
        if CLOSES.get(words[-1]) != opens:
            return None
        words = words[:-1]
    return _test(words[1:], globs=opens == "[[")


def _test(words: list[str], *, globs: bool) -> bool | None:
    """Evaluate a test. `globs`: it is one of `[[`, with patterns, regular expressions, `&&` and `||`."""
    either, both = ("||", "&&") if globs else ("-o", "-a")
    for name, decides in ((either, True), (both, False)):
        parts = _split_test(words, name)
        if len(parts) > 1:
            results = [_test(part, globs=globs) for part in parts]
            return decides if decides in results else None if None in results else not decides
    if words[:1] == ["!"]:
        inner = _test(words[1:], globs=globs)
        return None if inner is None else not inner
    if globs and words[:1] == ["("] and words[-1:] == [")"]:
        return _test(words[1:-1], globs=globs)
    if globs and len(words) == 3 and words[1] == "=~":
        return _matches(_text(words[0]), words[2])
    texts = [_text(word) for word in words]
    if any(text is None for text in texts):
        return None
    known = [text for text in texts if text is not None]
    if len(known) == 1:
        return bool(known[0])
    if len(known) == 2 and known[0] in ("-n", "-z"):
        return bool(known[1]) == (known[0] == "-n")
    if len(known) != 3:
        return None
    left, how, right = known
    if how in ("=", "==", "!="):
        same = fnmatch.fnmatchcase(left, right) if globs else left == right
        return same == (how != "!=")
    if how in NUMBERS and all(re.fullmatch(r"-?\d+", x) for x in (left, right)):
        return bool(NUMBERS[how](int(left), int(right)))
    return None


def _split_test(words: list[str], name: str) -> list[list[str]]:
    """Split a test at an operator, outside parentheses."""
    parts: list[list[str]] = [[]]
    depth = 0
    for index, word in enumerate(words):
        depth += (word == "(") - (word == ")")
        if word == name and not depth and 0 < index < len(words) - 1:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _matches(text: str | None, expression: str) -> bool | None:
    if text is None or re.search(r"\$[\w{(]|`", expression):
        return None
    try:
        return re.search(expression, text) is not None
    except re.error:
        return None


def _text(word: str) -> str | None:
    """Return a word as a test sees it: a variable without a value is empty. None if it holds a substitution."""
    if UNSET.fullmatch(word):
        return ""
    return None if "$" in word or "`" in word else word
