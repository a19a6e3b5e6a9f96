"""Subcommands whose arguments are another program's command line, which is not parsed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class PassthroughCommand(TyperCommand):
    """Keep the arguments unchanged, `--` included, in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] in ("--help", "-h"):
            typer.echo(self.get_help(ctx))
            ctx.exit()
        ctx.args = list(args)
        return ctx.args


def split_options(args: list[str], *known: str) -> tuple[set[str], list[str]]:
    """Return the known switches at the front, and the arguments after them and after an optional `--`."""
    chosen = set()
    rest = list(args)
    while rest and rest[0] in known:
        chosen.add(rest.pop(0))
    if rest and rest[0] == "--":
        rest = rest[1:]
    return chosen, rest
