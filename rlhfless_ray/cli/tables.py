"""What the commands that print tables share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 140  # columns where the output is no terminal


def table_console(width: int = FILE_WIDTH) -> Console:
    """Return a console with the terminal's width, or of `width` columns where the output is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=width, highlight=False)


def rows_to_show(count: int, most: int, chosen: int) -> list[int]:
    """Return the rows of a long table to show: both ends, the chosen one, and others evenly spaced."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)} | {chosen})
