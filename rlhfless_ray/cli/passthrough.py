"""Subcommands whose arguments are another program's command line, which is not parsed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand

from rlhfless_ray.common.errors import UserError


class PassthroughCommand(TyperCommand):
    """Keep the arguments unchanged, `--` included, in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] in ("--help", "-h"):
            typer.echo(self.get_help(ctx))
            ctx.exit()
        ctx.args = list(args)
        return ctx.args


def split_options(args: list[str], *known: str, valued: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """Return the known options at the front, and the arguments after them and after an optional `--`.

    `valued`: options that take a value, as the next argument or after `=`. Switches have an empty one. Raises UserError for one without.
    """
    chosen: dict[str, str] = {}
    rest = list(args)
    while rest:
        name, equals, value = rest[0].partition("=")
        if name in valued:
            rest.pop(0)
            if not equals and (not rest or rest[0] == "--"):
                raise UserError(f"{name}: give a value")
            chosen[name] = value if equals else rest.pop(0)
        elif rest[0] in known:
            chosen[rest.pop(0)] = ""
        else:
            break
    if rest and rest[0] == "--":
        rest = rest[1:]
    return chosen, rest
