"""Commands whose arguments are somebody else's command line: nothing in it is ours to parse."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class PassthroughCommand(TyperCommand):
    """Leaves its arguments as they are, `--` included, in `ctx.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] in ("--help", "-h"):
            typer.echo(self.get_help(ctx))
            ctx.exit()
        ctx.args = list(args)
        return ctx.args


def options(args: list[str], *known: str) -> tuple[set[str], list[str]]:
    """Our own switches at the front, and what follows them (after `--` where there is one)."""
    chosen = set()
    rest = list(args)
    while rest and rest[0] in known:
        chosen.add(rest.pop(0))
    if rest and rest[0] == "--":
        rest = rest[1:]
    return chosen, rest
