"""Charts: matplotlib for SVG files, and one line of block characters for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"


def svg_pyplot() -> Any:
    """Return pyplot, set up for SVG files that do not differ from run to run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"font.size": 10, "svg.hashsalt": "rlhfless-ray", "hatch.linewidth": 0.6})
    from matplotlib import pyplot

    return pyplot


def save_svg(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def sparkline(values: Sequence[float], low: float, high: float, width: int = 40) -> str:
    """Return block characters. More values than `width` are averaged in equal shares."""
    shares = [float(np.mean(part)) for part in np.array_split(np.asarray(values, float), min(width, len(values)))]
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in shares)
