"""Pictures of cost against time. They need matplotlib, which is not installed with this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_picture(path: Path) -> None:
    """Raise UserError if no picture of this name can be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    if path.suffix[1:].lower() not in FigureCanvasBase.filetypes or not path.parent.is_dir():
        raise UserError(f"--plot {path}: cannot be written: give a file name that ends in .svg, .png or .pdf, in a folder that exists")


@contextmanager
def picture(path: Path, **labels: object) -> Iterator[Axes]:
    """Yield matplotlib axes, and write them as a picture whose kind is the file name's ending. Raises UserError if that is impossible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="tight")
    axes = figure.add_subplot()
    yield axes
    axes.set(**labels)
    axes.set_ylim(bottom=0)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written: {one_line(error)}") from None


def draw_bounds(axes: Axes, time_s: float, cost: float) -> None:
    axes.axvline(time_s, color="grey", linestyle=":", label="time bound")
    axes.axhline(cost, color="grey", linestyle="--", label="cost bound")
    axes.legend(fontsize=8)
