"""The live panel of a run on a terminal. Pure functions from the state to a rich renderable."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report.formatting import DASH, Figure, are_shares, duration, finite, number, percent, short, slot_time

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"


@dataclass
class ProgressState:
    """State of the panel. The driver assigns whole values and the refresh thread only reads, so no lock is needed."""

    title: str
    steps: int
    began_s: float = field(default_factory=time.monotonic)
    row: JsonObject = field(default_factory=dict)  # metrics of the last finished step
    row_at_s: float = 0.0
    phase: str = "starting"
    phase_at_s: float = field(default_factory=time.monotonic)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    accuracy: tuple[int, float | None, float | None] | None = None  # step, sampled, greedy
    failed_rewards: int = 0
    replaced: int = 0


def sparkline(values: list[float], width: int) -> str:
    """Draw the values as block characters, averaged to at most `width` of them."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high - low < 1e-12:
        return BARS[3] * len(values)
    return "".join(BARS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def line(row: JsonObject, steps: int) -> str:
    """Format a step as one line of text, without metrics that the row lacks."""
    width = len(str(steps))
    parts = [f"step {row.get('step')!s:>{width}}/{steps}"]
    if finite(row.get("reward/mean")) is not None:
        parts.append(f"reward {row['reward/mean']:.3f}")
    for key, what in (("learn/loss", "loss"), ("learn/accuracy", "accuracy"), ("learn/margin", "margin")):
        if finite(row.get(key)) is not None and "reward/mean" not in row:
            parts.append(f"{what} {number(row[key])}")
    parts += _accuracy(row.get("eval/accuracy_sampled"), row.get("eval/accuracy_greedy"))
    if finite(row.get("length/mean")) is not None:
        parts.append(f"length {number(row['length/mean'])} (p99 {number(row.get('length/p99'))})")
    if finite(row.get("pool/rollout_actors")) is not None:
        parts.append(f"pool {number(row['pool/rollout_actors'])}")
    if finite(row.get("plan/rollout_s")) is not None and finite(row.get("phase/rollout_s")) is not None:
        parts.append(f"rollout {duration(row['phase/rollout_s'])} ({duration(row['plan/rollout_s'])} planned)")
    if finite(row.get("step_s")) is not None:
        parts.append(duration(row["step_s"]))
    if finite(row.get("cost/full_slot_s")) is not None:
        busy, full = number(row.get("cost/busy_slot_s")), slot_time(row["cost/full_slot_s"])
        parts.append(f"busy {busy} of {full}, idle {percent(row.get('cost/idle_share'), 0)}")
    if finite(row.get("tokens/per_s")) is not None:
        parts.append(f"{short(row['tokens/per_s'])} tok/s")
    for key, what in (("reward/failed", "failed rewards"), ("learn/skipped", "skipped updates"), ("faults/replaced", "replaced instances")):
        if finite(row.get(key)):
            parts.append(f"{what}: {number(row[key])}")
    if finite(row.get("learn/mismatch_warning")):
        parts.append(mismatched(row))
    if finite(row.get("time_left_s")) is not None:
        parts.append(f"{duration(row['time_left_s'])} left")
    return "  ".join(parts)


def mismatched(row: JsonObject) -> str:
    """Describe the difference between engines and learner in this step."""
    mean, limit = finite(row.get("learn/mismatch_mean")), finite(row.get("learn/mismatch_tolerance"))
    return f"mismatch of engine and learner: {'not finite' if mean is None else f'{mean:.2g}'} nats (tolerance {number(limit)})"


def decided(row: JsonObject) -> str:
    """Return a sentence about a step that changed its pool or whose planning failed, else ""."""
    reason, steady = str(row.get("pool/reason") or ""), row.get("pool/decision") in (None, "Hold")
    if not reason or (steady and not row.get("plan/failed")):
        return ""
    return f"step {row.get('step')}: {row.get('pool/decision')}: {reason}"


def panel(state: ProgressState, width: int, ascii_only: bool = False) -> RenderableType:
    """Build the panel for a terminal of `width` columns."""
    from rich import box
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    now = time.monotonic()
    row = state.row
    done = int(finite(row.get("step")) or 0)
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    left = finite(row.get("time_left_s"))
    left = None if left is None else max(0.0, left - (now - state.row_at_s))
    head.add_row(
        Text(f"step {done}/{state.steps}", style="bold"),
        ProgressBar(total=max(1, state.steps), completed=min(done, state.steps), complete_style="cyan", finished_style="green"),
        Text(f"{duration(now - state.began_s)}" + ("" if left is None else f", {duration(left)} left"), style="dim"),
    )
    body = Table.grid(expand=True, padding=(0, 2, 0, 0))
    body.add_column(style="dim", no_wrap=True, width=9)
    body.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for label, text in _body(state, row, now, max(8, min(60, width - 34)), ascii_only):
        body.add_row(label, text)
    outer = Table.grid(expand=True)
    outer.add_row(head)
    outer.add_row(body)
    title = Text(state.title or "rlhfless", style="bold")
    return Panel(outer, title=title, title_align="left", border_style="cyan", box=box.ASCII if ascii_only else box.ROUNDED)


def _body(state: ProgressState, row: JsonObject, now: float, room: int, ascii_only: bool) -> list[tuple[str, Text]]:
    from rich.text import Text

    reward = Text(DASH if finite(row.get("reward/mean")) is None else f"{row['reward/mean']:.3f}", style="bold")
    if not ascii_only:
        reward.append("  " + sparkline(list(state.rewards), room), style="not bold green")
    accuracy = Text(DASH)
    if state.accuracy is not None:
        step, sampled, greedy = state.accuracy
        accuracy = Text(", ".join(_accuracy(sampled, greedy, word="")) or DASH, style="bold")
        accuracy.append(f"  at step {step}", style="not bold dim")
    lengths = Text(f"mean {number(row.get('length/mean'))}, p99 {number(row.get('length/p99'))} tokens")
    if finite(row.get("length/truncated_share")):
        lengths.append(f", {percent(row['length/truncated_share'])} cut", style="yellow")
    pool = Text(f"{number(row.get('pool/rollout_actors'))} rollout")
    if row.get("pool/reason"):
        pool.append(f"  {row.get('pool/decision', '')}: {row['pool/reason']}", style="dim")
    cost = Text(f"busy {slot_time(row.get('cost/total_busy_slot_s'))}, full {slot_time(row.get('cost/total_full_slot_s'))}")
    cost.append(f", idle {percent(row.get('cost/idle_share'), 0)} in the last step", style="dim")
    lines = [
        ("reward", reward),
        ("held out", accuracy),
        ("lengths", lengths),
        ("pool", pool),
        ("plan", _plan(row)),
        ("cost", cost),
        ("speed", Text(f"{short(row.get('tokens/per_s'))} tokens/s, {duration(row.get('step_s'))} a step")),
        ("now", Text(f"{state.phase}  {duration(now - state.phase_at_s)}", style="cyan")),
    ]
    troubles = [f"{what}: {n}" for what, n in (("failed rewards", state.failed_rewards), ("replaced instances", state.replaced)) if n]
    if finite(row.get("learn/mismatch_warning")):
        troubles.append(mismatched(row))
    if troubles:
        lines.append(("warnings", Text(", ".join(troubles), style="yellow")))
    return lines


def _plan(row: JsonObject) -> Text:
    """Format the rollout's predicted and measured time and cost, and the forecast's quality."""
    from rich.text import Text

    text = Text(f"rollout {duration(row.get('plan/rollout_s'))} planned, {duration(row.get('phase/rollout_s'))} measured")
    if finite(row.get("plan/cost_slot_s")) is not None:
        text.append(f"; {number(row['plan/cost_slot_s'])} planned, {slot_time(row.get('cost/rollout_slot_s'))} measured")
    if finite(row.get("forecast/coverage_90")) is not None:
        rank = "" if finite(row.get("forecast/spearman")) is None else f", rank quality {row['forecast/spearman']:.2f}"
        inside = percent(row["forecast/coverage_90"], 0)
        text.append(f"  forecast: {inside} of the lengths inside its 90% interval{rank}", style="dim")
    return text


def _accuracy(sampled: Figure, greedy: Figure, word: str = "eval ") -> list[str]:
    both = ((sampled, "sampled"), (greedy, "greedy"))
    there = [(value, name) for given, name in both if (value := finite(given)) is not None]
    words = percent if are_shares(value for value, _ in there) else number
    shown = [f"{words(value)} {name}" for value, name in there]
    return [word + ", ".join(shown)] if shown else []
