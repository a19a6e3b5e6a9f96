"""An argparse parser for each version, which handles abbreviations, `--flag=value`, repeats and arity."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from rlhfless_ray.compat.openrlhf.flags import TYPES, Spec, flags_of

PROGRAM = "train_ppo_ray.py"


class Refused(Exception):
    """The message that argparse would print before it exits with code 2."""


@dataclass
class Given:
    """Flags and values of a command line, under the names used there."""

    values: dict[str, Any] = field(default_factory=dict)
    """Flag → value; a repeated flag has its last one."""
    order: list[str] = field(default_factory=list)
    """Flags in their order, each once."""


class _Store(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _record(namespace, self.option_strings[0], values)


class _Set(argparse.Action):
    """Record that a store_true or store_false flag was given."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _record(namespace, self.option_strings[0], True)


def _record(namespace: argparse.Namespace, flag: str, value: Any) -> None:
    given: Given = namespace.given
    given.values[flag] = value
    if flag not in given.order:
        given.order.append(flag)


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


@cache
def parser_of(version: str, others: tuple[Spec, ...] = ()) -> FlagParser:
    """Return the parser of one version. `others`: definitions of other versions that are added or replace its own."""
    parser = FlagParser(prog=PROGRAM, argument_default=argparse.SUPPRESS, add_help=False)
    parser.add_argument("-h", "--help", action=_Set)
    for spec in {**flags_of(version), **{spec.flag: spec for spec in others}}.values():
        if spec.takes_value:
            parser.add_argument(
                spec.flag, action=_Store, type=TYPES[spec.type], nargs=spec.nargs, choices=spec.choices, default=argparse.SUPPRESS
            )
        else:
            parser.add_argument(spec.flag, action=_Set)
    return parser


def parse(parser: FlagParser, tokens: Sequence[str]) -> Given:
    """Parse tokens. Raises Refused with argparse's message."""
    namespace = argparse.Namespace(given=Given())
    parser.parse_args(list(tokens), namespace)
    return namespace.given


def usage(version: str) -> str:
    return parser_of(version).format_usage()
