"""Charts of prefix KV by step: tokens of prompts, tokens computed, and whether it pays."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless_ray.report.charts import Chart, Row, hover_text, line_charts, lines, markers, rounded, series
from rlhfless_ray.report.formatting import finite, number, total


def decided(rows: Sequence[Row]) -> list[Row]:
    """Return the steps with a decision about prefix KV: neither switched off nor impossible."""
    return [row for row in rows if finite(row.get("prefix/asked_tokens")) is not None]


def tokens(rows: Sequence[Row]) -> Chart | None:
    rows = decided(rows)
    metrics = (
        ("prefix/asked_tokens", "asked", "@muted", "dot"),
        ("prefix/off_tokens", "computed if off", "@learn", "solid"),
        ("prefix/distinct_tokens", "distinct", "@score", "dash"),
    )
    data = lines(rows, metrics, width=1.6, mode="lines", hovertemplate="%{y:,.0f} tokens")
    for key, name, colour, symbol in (
        ("computed_tokens", "computed once", "@rollout", "circle"),
        ("loaded_tokens", "loaded", "@eval", "diamond"),
    ):
        xs, ys = series(rows, f"prefix/{key}")
        if xs:  # markers only, because some steps have none
            data.append(markers(xs, ys, name, colour, symbol, 6, cliponaxis=False, hovertemplate="%{y:,.0f} tokens"))
    if not data:
        return None
    note = (
        "Tokens per step: in the prompts of all requests; computed by engines without the service; distinct, with each block prefix "
        "once per cluster. With the service on: computed by the service, and loaded by all engines."
    )
    ys = [y for trace in data for y in trace["y"] if y > 0]
    use_log_scale = bool(ys) and max(ys) > 50 * min(ys)
    layout: Row = {"yaxis": {"title": "tokens", **({"type": "log", "dtick": 1} if use_log_scale else {"rangemode": "tozero"})}}
    return Chart("prefix-tokens", "Prompt tokens, asked and computed", note, data, layout, height=300)


def saved(rows: Sequence[Row]) -> Chart | None:
    """Draw saved engine-seconds as predicted before the step and as measured."""
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
            reasons = [hover_text("", f"step {xs[i]}: {by_step[xs[i]].get('prefix/reason', '')}") for i in some]
            hover = {"customdata": reasons, "hovertemplate": "%{customdata}<extra></extra>", "cliponaxis": False}
            data.append(markers([xs[i] for i in some], [ys[i] for i in some], name, "@rollout", symbol, 7, **hover))
    mx, my = series(rows, "prefix/measured_saved_engine_s")
    if mx:
        data.append(markers(mx, my, "measured", "@score", "x", cliponaxis=False, hovertemplate="%{y:.3~g} engine-s"))
    note = (
        "Prefill time that engines saved, less the cost of pages: computing, copying, fetching. Below zero the service costs more "
        "than it saves. Hover over a step for the decision and its reason."
    )
    layout: Row = {"yaxis": {"title": "engine-s saved", "zeroline": True, "rangemode": "tozero"}, "hovermode": "closest"}
    return Chart("prefix-saved", "Does it pay?", note, data, layout, height=300)


def break_even(rows: Sequence[Row]) -> Chart | None:
    """Draw the length of the prefix shared by all prompts of a step, and the length needed to pay."""
    rows = decided(rows)
    charts = line_charts("break_even", rows)
    if charts and (never := sum(finite(row.get("prefix/break_even_tokens")) is None for row in rows)):
        charts[0].note += f" In {never} of {len(rows)} steps no length would have been enough."
    return charts[0] if charts else None


def sentences(rows: Sequence[Row]) -> list[str]:
    """Return sentences about decisions, results and moves of KV pages; empty if there were none."""
    explained = [row for row in rows if row.get("prefix/reason") and "prefix/on" in row]
    texts = []
    if explained:
        on, last = sum(bool(finite(row["prefix/on"])) for row in explained), explained[-1]
        texts.append(f"On in {on} of {len(explained)} steps. Step {last['step']}: {last['prefix/reason']}.")
    served = [row for row in rows if row.get("prefix/computed_tokens") is not None]
    computed, distinct, without = (total(served, f"prefix/{name}_tokens") or 0.0 for name in ("computed", "distinct", "off"))
    if computed and distinct:
        texts.append(
            f"In these steps prefill instances computed {number(rounded(computed))} tokens of {number(rounded(distinct))} distinct "
            f"ones; engines by themselves would have computed {number(rounded(without))}."
        )
    if lost := sum(total(rows, f"prefix/{name}") or 0.0 for name in ("lost", "foreign", "damaged", "failed", "no_room")):
        texts.append(f"Bundles or pages that were lost, refused or without room: {number(lost)}; engines computed their content.")
    if moved := total(rows, "rollout/moved"):
        pages, back = (total(rows, f"rollout/{name}") or 0.0 for name in ("moved_by_pages", "move_fallbacks"))
        texts.append(
            f"{number(moved)} responses moved between engines, {number(pages)} of them with their KV pages"
            + (f", {number(back)} of which still had to be computed again." if back else ".")
        )
    return texts
