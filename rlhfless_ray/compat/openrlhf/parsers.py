"""An argparse parser for each launcher and version, which handles abbreviations, `--flag=value`, repeats and arity."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NoReturn

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER, TYPES, Spec, flags_of

Given = JsonObject
"""Full flag → value, in the order of the command line. A repeated flag has its last value, and a switch that is given
has True, also one that turns something off."""


class Refused(Exception):
    """The message that argparse would print before it exits with code 2."""


class QuotingParser(argparse.ArgumentParser):
    """A parser whose message about arguments that it does not know shows blanks and control characters."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, others = self.parse_known_args(args, namespace)
        if others:
            words = [shlex.quote(word) if word.isprintable() else repr(word) for word in others]
            self.error(f"unrecognized arguments: {' '.join(words)}")
        return known


class FlagParser(QuotingParser):
    def __init__(self, launcher: str, specs: Iterable[Spec], *, has_help: bool = False, allow_abbrev: bool = True) -> None:
        super().__init__(prog=f"{launcher}.py", argument_default=argparse.SUPPRESS, add_help=False, allow_abbrev=allow_abbrev)
        if has_help:
            self.add_argument("-h", "--help", action="store_true")
        for spec in specs:
            dest = spec.flag[2:]
            if spec.takes_value:
                kind = TYPES[spec.type]
                self.add_argument(spec.flag, dest=dest, type=kind, nargs=spec.nargs, const=spec.const, choices=spec.choices)
            else:
                switch = argparse.BooleanOptionalAction if spec.action == "boolean" else "store_true"
                self.add_argument(spec.flag, dest=dest, action=switch)

    def error(self, message: str) -> NoReturn:
        raise Refused(message)

    def read(self, tokens: Sequence[str]) -> Given:
        """Parse tokens. Raises Refused."""
        given = vars(self.parse_args(list(tokens)))
        given.pop("help", None)
        return {f"--{name}": value for name, value in given.items()}


@cache
def parser_of(version: str, others: tuple[Spec, ...] = (), launcher: str = LAUNCHER) -> FlagParser:
    """Return the parser of one version of a launcher. `others`: definitions of other versions that are added or replace its own."""
    specs = {**flags_of(version, launcher), **{spec.flag: spec for spec in others}}
    return FlagParser(launcher, specs.values(), has_help=launcher == LAUNCHER)
