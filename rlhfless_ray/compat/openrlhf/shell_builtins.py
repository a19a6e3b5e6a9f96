"""Builtins of the shell that set variables: `declare`, `getopts` and `read`."""

from __future__ import annotations

import re
from itertools import zip_longest

from rlhfless_ray.compat.openrlhf.shell_values import NAME, Scope

DECLARES = ("export", "declare", "local", "readonly", "typeset")


def make_local(scope: Scope, declares: str, name: str) -> None:
    """Have a variable get its value back at the end of the current function."""
    if scope.locals and declares in ("local", "declare", "typeset"):
        scope.locals[-1].setdefault(name, scope.variables.get(name))


def is_associative(words: list[str]) -> bool:
    """Return whether a command declares associative arrays."""
    return words[:1] != [] and words[0] in DECLARES and any(word.startswith("-") and "A" in word for word in words)


def take_option(scope: Scope, letters: str, name: str) -> bool | None:
    """Take the next option from the script's arguments, as `getopts` does, and shift it. Returns whether there was one."""
    if scope.arguments is None:
        return None
    option, *rest = [*scope.arguments, ""]
    letter, value = option[1:2], option[2:]
    if not option.startswith("-") or not letter.isalnum():
        return False
    if f"{letter}:" in letters:
        scope.arguments = scope.arguments[1 if value else 2 :]
        scope.variables["OPTARG"] = [value or rest[0]]
    else:
        scope.arguments = [*([f"-{value}"] if value else []), *scope.arguments[1:]]
    scope.variables |= {name: [letter if letter in letters else "?"], "OPTIND": ["1"]}
    return True


def read_text(scope: Scope, words: list[str], text: str) -> None:
    """Assign the fields of a text as `read` does, without options or with `-r` and `-a`. A text that is not known assigns nothing."""
    options = "".join(word for word in words if word.startswith("-"))
    names = [word for word in words if NAME.fullmatch(word)]
    if not names or set(options) - set("-ra") or re.search("[$`]", text):
        return
    separators, most = "".join(scope.variables.get("IFS", [" "])), 0 if "a" in options else len(names) - 1
    line = text.partition("\n")[0]
    if separators.isspace():
        fields = line.strip().split(None, most or -1) if most or "a" in options else [line.strip()]
    elif separators and (most or "a" in options):
        fields = re.split(f"[{re.escape(separators)}]", line, maxsplit=most)
    else:
        fields = [line]
    if "a" in options:
        scope.variables[names[0]] = fields[:-1] if fields[-1:] == [""] else fields
    else:
        scope.variables |= {name: [value] for name, value in zip_longest(names, fields, fillvalue="")}
