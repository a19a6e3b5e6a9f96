"""Small self-contained charts: lines as SVG, and one line of block characters for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

COLOURS = ("#b45309", "#1d4ed8", "#047857", "#7c3aed")
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 56, 44


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(lines: Sequence[Line], *, title: str, x: str, y: str) -> str:
    """Lines over a common pair of axes, each with its name in the legend."""
    right = max(max(line.x) for line in lines) or 1.0
    low, high = min(min(line.y) for line in lines), max(max(line.y) for line in lines)
    low, high = low - 0.05 * (high - low or 1.0), high + 0.05 * (high - low or 1.0)

    def at_x(value: float) -> float:
        return LEFT + value / right * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in ticks(low, high):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}" stroke="#e5e7eb"/>'
            f'<text x="{LEFT - 6}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in ticks(0.0, right):
        parts.append(f'<text x="{at_x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="12" y="{TOP - 12}">{escape(y)}</text>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{at_x(a):.1f},{at_y(b):.1f}" for a, b in zip(line.x, line.y, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 140 * number + 60}" y="40" fill="{colour}">— {escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers in low … high."""
    step = 10.0 ** np.floor(np.log10((high - low) / 2))
    step *= next(factor for factor in (5, 2, 1, 0.5) if (high - low) / (step * factor) >= 3)
    return [float(round(i * step, 10)) for i in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]


def sparkline(values: Sequence[float], low: float, high: float, width: int = 40) -> str:
    """Block characters; more values than `width` are averaged in equal shares."""
    shares = [float(np.mean(part)) for part in np.array_split(np.asarray(values, float), min(width, len(values)))]
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in shares)
