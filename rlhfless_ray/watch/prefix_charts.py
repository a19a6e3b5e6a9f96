"""Charts of prefix KV: what prompts ask, what of it is computed, and whether that pays, step by step."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from rlhfless_ray.watch.charts import Chart, Row, line, rounded, series
from rlhfless_ray.watch.cost_charts import total
from rlhfless_ray.watch.units import finite, number


def decided(rows: Sequence[Row]) -> list[Row]:
    """The steps in which there was something to decide: prefix KV was neither off by the recipe nor impossible."""
    return [row for row in rows if finite(row.get("prefix/asked_tokens")) is not None]


def tokens(rows: Sequence[Row]) -> Chart | None:
    rows, data = decided(rows), []
    for key, name, colour, dash in (
        ("asked_tokens", "asked", "@muted", "dot"), ("off_tokens", "computed if off", "@learn", "solid"),
        ("distinct_tokens", "distinct", "@score", "dash"),
    ):
        xs, ys = series(rows, f"prefix/{key}")
        if xs:
            data.append(line(xs, ys, name, colour, style={"dash": dash}, width=1.6, mode="lines", hovertemplate="%{y:,.0f} tokens"))
    for key, name, colour, symbol in (
        ("computed_tokens", "computed once", "@rollout", "circle"), ("loaded_tokens", "loaded", "@eval", "diamond"),
    ):
        xs, ys = series(rows, f"prefix/{key}")
        if xs:  # points: there are steps without
            data.append(line(xs, ys, name, colour, mode="markers", hovertemplate="%{y:,.0f} tokens") | {
                "marker": {"symbol": symbol, "size": 6, "color": colour}
            })  # fmt: skip
    if not data:
        return None
    note = (
        "Of a step: asked in the prompts of all requests; what engines would compute by themselves; distinct, each block prefix "
        "once in the cluster. Where the service is on, what it computed, and what all engines loaded of that."
    )
    ys = [y for trace in data for y in trace["y"] if y > 0]
    wide = bool(ys) and max(ys) > 50 * min(ys)
    layout: Row = {"yaxis": {"title": "tokens", **({"type": "log", "dtick": 1} if wide else {"rangemode": "tozero"})}}
    return Chart("prefix-tokens", "Prompt tokens, asked and computed", note, data, layout, height=300)


def saved(rows: Sequence[Row]) -> Chart | None:
    """Engine-seconds as the planner expected it before the step, and as it was."""
    rows = decided(rows)
    xs, ys = series(rows, "prefix/saved_engine_s")
    if not xs:
        return None
    by_step = {row["step"]: row for row in rows}
    on = [bool(finite(by_step[x].get("prefix/on"))) for x in xs]
    data: list[Row] = []
    for state, name, symbol in ((True, "expected, on", "circle"), (False, "expected, left off", "circle-open")):
        some = [i for i, one in enumerate(on) if one is state]
        if some:
            data.append({
                "type": "scatter", "mode": "markers", "name": name, "x": [xs[i] for i in some], "y": [ys[i] for i in some],
                "marker": {"symbol": symbol, "size": 7, "color": "@rollout"}, "cliponaxis": False,
                "customdata": [_reason(by_step[xs[i]]) for i in some], "hovertemplate": "%{customdata}<extra></extra>",
            })  # fmt: skip
    mx, my = series(rows, "prefix/measured_saved_engine_s")
    if mx:
        data.append({
            "type": "scatter", "mode": "markers", "name": "measured", "x": mx, "y": my, "hovertemplate": "%{y:.3~g} engine-s",
            "marker": {"symbol": "x", "size": 8, "color": "@score"}, "cliponaxis": False,
        })  # fmt: skip
    note = (
        "Prefill that engines were spared, less what pages cost: computing, copying, fetching. Below zero the service would cost "
        "more than it saves. Point at a step for the decision and its reason."
    )
    layout: Row = {"yaxis": {"title": "engine-s saved", "zeroline": True, "rangemode": "tozero"}, "hovermode": "closest"}
    return Chart("prefix-saved", "Does it pay?", note, data, layout, height=300)


def break_even(rows: Sequence[Row]) -> Chart | None:
    """Tokens that all prompts of a step begin with, and how many would be enough."""
    rows, data = decided(rows), []
    for key, name, colour, dash in (
        ("header_tokens", "shared by all prompts", "@rollout", "solid"), ("break_even_tokens", "needed to pay", "@learn", "dash"),
    ):
        xs, ys = series(rows, f"prefix/{key}")
        if xs:
            data.append(line(xs, ys, name, colour, style={"dash": dash}, width=1.8, hovertemplate="%{y:,.0f} tokens"))
    never = sum(finite(row.get("prefix/break_even_tokens")) is None for row in rows)
    if not data:
        return None
    note = "What all prompts of a step begin with, in whole blocks, and the length from which the service would pay."
    if never:
        note += f" In {never} of {len(rows)} steps no length would have been enough."
    layout: Row = {"yaxis": {"title": "tokens", "rangemode": "tozero"}}
    return Chart("prefix-even", "The break-even", note, data, layout, height=240)


def sentences(rows: Sequence[Row]) -> list[str]:
    """What was decided, why, and what it came to; of moves, how contexts went. Empty where there was nothing of either."""
    told = [row for row in rows if row.get("prefix/reason") and "prefix/on" in row]
    said = []
    if told:
        on = sum(bool(finite(row["prefix/on"])) for row in told)
        said.append(f"On in {on} of {len(told)} steps. Step {told[-1]['step']}: {told[-1]['prefix/reason']}.")
    computed, distinct = total(rows, "prefix/computed_tokens"), sum(
        finite(row.get("prefix/distinct_tokens")) or 0.0 for row in rows if row.get("prefix/computed_tokens") is not None
    )
    if computed and distinct:
        without = sum(finite(row.get("prefix/off_tokens")) or 0.0 for row in rows if row.get("prefix/computed_tokens") is not None)
        said.append(
            f"In these steps prefill instances computed {number(rounded(computed))} tokens of {number(rounded(distinct))} distinct "
            f"ones; engines by themselves would have computed {number(rounded(without))}."
        )
    if lost := sum(total(rows, f"prefix/{name}") or 0.0 for name in ("lost", "foreign", "damaged", "failed", "no_room")):
        said.append(f"Bundles or pages that were lost, refused or without room: {number(lost)}; what they held was computed.")
    if moved := total(rows, "rollout/moved"):
        pages, back = (total(rows, f"rollout/{name}") or 0.0 for name in ("moved_by_pages", "move_fallbacks"))
        said.append(
            f"{number(moved)} responses moved between engines, {number(pages)} of them with their KV pages"
            + (f", {number(back)} of which had to be computed again all the same." if back else ".")
        )
    return said


def _reason(row: Row) -> str:
    words = f"step {row['step']}: {row.get('prefix/reason', '')}"
    return "<br>".join(html.escape(part) for part in textwrap.wrap(words, 60))
