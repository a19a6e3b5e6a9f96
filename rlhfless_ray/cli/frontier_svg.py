"""Draw the frontier as a self-contained SVG, without a drawing library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from rlhfless_ray.report.inline import ticks

if TYPE_CHECKING:
    from placement import Bounds, Plan

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 54, 56
FEW, MANY = (72, 60, 150), (240, 170, 50)  # colours of one actor and of the largest number of actors
CHOSEN = "#c03a4b"


def frontier_svg(plans: Sequence[Plan], bounds: Bounds, chosen: int, *, cost: str, title: str) -> str:
    """Draw cost against time, coloured by the number of actors, with dashed lower bounds and a ring around plan `chosen`.

    `cost`: label of the cost axis.
    """
    times, costs = [p.time_s for p in plans], [p.cost for p in plans]
    x_ticks, y_ticks = ticks(min(bounds.time_s, *times), max(times)), ticks(0.0, max([bounds.cost, *costs]))
    x_low, x_high, y_high = x_ticks[0], x_ticks[-1], y_ticks[-1]

    def x(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / y_high * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in x_ticks:
        parts.append(f'<path d="M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e8e8e8"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555">{tick:g}</text>')
    for tick in y_ticks:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e8e8e8"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#555">{tick:g}</text>')
    parts += [
        f'<path d="M{x(bounds.time_s):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#777" stroke-dasharray="4 4"/>',
        f'<path d="M{LEFT} {y(bounds.cost):.1f}H{WIDTH - RIGHT}" stroke="#777" stroke-dasharray="4 4"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">rollout time (s)</text>',
        f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{escape(cost)}</text>',
    ]
    # stairs, because no plan lies between two neighbours
    stairs = f"M{x(times[0]):.1f} {y(costs[0]):.1f}" + "".join(f"H{x(t):.1f}V{y(c):.1f}" for t, c in zip(times[1:], costs[1:], strict=True))
    parts.append(f'<path d="{stairs}" fill="none" stroke="#bbb"/>')
    max_actors = max(p.actors for p in plans)
    for plan in plans:
        share = (plan.actors - 1) / max(1, max_actors - 1)
        colour = ",".join(str(round(a + share * (b - a))) for a, b in zip(FEW, MANY, strict=True))
        parts.append(
            f'<circle cx="{x(plan.time_s):.1f}" cy="{y(plan.cost):.1f}" r="3.5" fill="rgb({colour})">'
            f"<title>{plan.actors} actors: {plan.time_s:.4g} s for {plan.cost:.4g}</title></circle>"
        )
    best = plans[chosen]
    parts.append(
        f'<circle cx="{x(best.time_s):.1f}" cy="{y(best.cost):.1f}" r="8" fill="none" stroke="{CHOSEN}" stroke-width="2" data-chosen="1"/>'
    )
    legend = [(FEW, "1 actor"), (MANY, f"{max_actors} actors")] if max_actors > 1 else [(FEW, "1 actor")]
    at = LEFT
    for rgb, text in legend:
        parts.append(f'<circle cx="{at + 5}" cy="38" r="4" fill="rgb{rgb}"/><text x="{at + 14}" y="42">{text}</text>')
        at += 24 + 7 * len(text)
    parts += [
        f'<circle cx="{at + 6}" cy="38" r="5" fill="none" stroke="{CHOSEN}" stroke-width="2"/>',
        f'<text x="{at + 17}" y="42">chosen</text>',
        f'<path d="M{at + 72} 38h18" stroke="#777" stroke-dasharray="4 4"/>',
        f'<text x="{at + 95}" y="42">lower bounds</text></svg>',
    ]
    return "\n".join(parts) + "\n"
