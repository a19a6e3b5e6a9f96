"""Small plots for notebooks: SVG without a drawing library, of curves, a plan's frontier and a ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rlhfless_ray.report.cost_charts import ACTIVITIES
from rlhfless_ray.report.formatting import round_up

if TYPE_CHECKING:
    from placement import Plan

COLOURS = ("#3b6fb5", "#c8553d", "#4b9b6a", "#8a5ab0", "#c79a2b", "#5f6b7a")
SHADES = dict(zip(ACTIVITIES, (1.0, 0.65, 0.4, 0.2), strict=True))
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 22, 34


@dataclass(frozen=True)
class Html:
    """HTML that a notebook shows."""

    text: str

    def _repr_html_(self) -> str:
        return self.text

    def __add__(self, other: Html) -> Html:
        """Put another figure to the right."""
        return Html(f'<div style="display:inline-block">{self.text}</div><div style="display:inline-block">{other.text}</div>')


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, x: str = "step", y: str = "", points: bool = False, width: int = 380
) -> Html:
    """Draw y against x of each named line. `points`: dots instead of a line. `x`, `y`: labels of the axes."""
    lines = {name: line for name, line in lines.items() if len(line[0])}
    if not lines:
        return Html("")
    height = 220
    xs, ys = ([value for line in lines.values() for value in line[axis]] for axis in (0, 1))
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))

    def at(a: float, b: float) -> tuple[float, float]:
        return (
            LEFT + (a - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (width - LEFT - RIGHT),
            height - BOTTOM - (b - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (height - TOP - BOTTOM),
        )

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">']
    for tick in x_ticks:
        left, _ = at(tick, y_ticks[0])
        parts.append(f'<path d="M{left:.1f} {TOP}V{height - BOTTOM}" stroke="#8884"/>')
        parts.append(f'<text x="{left:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle" fill="#777">{tick:g}</text>')
    for tick in y_ticks:
        _, top = at(x_ticks[0], tick)
        parts.append(f'<path d="M{LEFT} {top:.1f}H{width - RIGHT}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{top + 4:.1f}" text-anchor="end" fill="#777">{tick:g}</text>')
    parts.append(f'<text x="{(LEFT + width - RIGHT) / 2}" y="{height - 4}" text-anchor="middle" fill="#777">{escape(x)}</text>')
    if y:
        middle = (TOP + height - BOTTOM) / 2
        parts.append(f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle" fill="#777">{escape(y)}</text>')
    begin = LEFT
    for (name, line), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
        places = [at(a, b) for a, b in zip(*line, strict=True)]
        if points or len(places) == 1:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
        else:
            path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(
            f'<circle cx="{begin + 4}" cy="10" r="4" fill="{colour}"/><text x="{begin + 12}" y="14" fill="#777">{escape(name)}</text>'
        )
        begin += 26 + 6 * len(name)
    return Html("".join([*parts, "</svg>"]))


def plan_html(reason: str, plans: Sequence[Plan], chosen: Plan | None) -> str:
    """Return a plan's reason and frontier as HTML. `chosen`: one of the plans, if any."""
    lines = {
        f"{count} engine{'s' * (count > 1)}": [p for p in plans if p.actors == count] for count in sorted({plan.actors for plan in plans})
    }
    drawn = {name: ([p.time_s for p in plans_of_size], [p.cost for p in plans_of_size]) for name, plans_of_size in lines.items()}
    if chosen is not None:
        drawn["chosen"] = [chosen.time_s], [chosen.cost]
    return f"<p>{escape(reason)}</p>{curves(drawn, x='rollout (s)', y='cost', points=True, width=460).text}"


def ledger_html(table: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of slot-seconds. `table`: function → activity → slot-seconds."""
    largest = max((sum(cells.values()) for cells in table.values()), default=0.0)
    lines = []
    for (kind, cells), colour in zip(table.items(), COLOURS * len(table), strict=False):
        bars = "".join(
            f'<span title="{activity}: {cells[activity]:.2f} slot-s" style="display:inline-block;height:12px;'
            f'width:{220 * cells[activity] / largest:.1f}px;background:{colour};opacity:{SHADES.get(activity, 0.2)}"></span>'
            for activity in ACTIVITIES
            if cells.get(activity)
        )
        whole = sum(cells.values())
        lines.append(f"<tr><th>{escape(kind)}</th><td>{bars}</td><td>{whole:.1f}</td><td>{cells.get('work', 0.0) / whole:.0%}</td></tr>")
    head = "<tr><th></th><th>work, transfer, start, idle</th><th>slot-s</th><th>work</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from at most `low` to at least `high`."""
    span = max(high - low, 1e-9 * max(abs(high), 1e-9), 1e-12)
    step = round_up(span / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]
