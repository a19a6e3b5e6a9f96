"""A real argparse parser for each version: abbreviations, `--flag=value`, repeats and arity are argparse's own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from rlhfless_ray.compat.openrlhf.flags import TYPES, Spec, flags_of

PROGRAM = "train_ppo_ray.py"


class Refused(Exception):
    """What argparse would have printed before it exits with code 2."""


@dataclass
class Given:
    """What a command line says, in the names it was said in."""

    values: dict[str, Any] = field(default_factory=dict)
    """Flag → its value; of a repeated flag the last one."""
    order: list[str] = field(default_factory=list)
    """Flags as they were met, each once."""


class _Store(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _record(namespace, self.option_strings[0], values)


class _Set(argparse.Action):
    """store_true and store_false: the flag was given."""

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
    """The parser of one version; definitions of other versions may be added to its own or take their place (for mixtures)."""
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
    """Raises Refused with argparse's sentence."""
    namespace = argparse.Namespace(given=Given())
    parser.parse_args(list(tokens), namespace)
    return namespace.given


def usage(version: str) -> str:
    return parser_of(version).format_usage()
