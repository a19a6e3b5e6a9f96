"""The options `--resume`, `--resume=previous` and `--resume-changed`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

RESUME = "--resume"


class From(StrEnum):
    """The checkpoint that a run continues from."""

    NEWEST = "newest"
    PREVIOUS = "previous"


class ResumeCommand(TyperCommand):
    """Accept `--resume` with and without a value, which typer has no option for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, rest = [], list(args)
        while rest:
            token = rest.pop(0)
            if token == RESUME:
                token = f"{RESUME}={rest.pop(0) if rest and rest[0] in list(From) else From.NEWEST}"
            given.append(token)
        return super().parse_args(ctx, given)


ResumeOption = Annotated[
    From | None,
    typer.Option(
        RESUME,
        help="Continue the latest run of this name from its checkpoint. --resume=previous: from the one before that.",
        show_default=False,
    ),
]
ChangedOption = Annotated[
    bool, typer.Option("--resume-changed", help="Continue it although the recipe changes what is learned or counted; implies --resume.")
]


def resume_of(option: From | None, changed: bool) -> bool | Literal["previous"]:
    """Return the argument `resume` of a run."""
    return "previous" if option == From.PREVIOUS else option is not None or changed
