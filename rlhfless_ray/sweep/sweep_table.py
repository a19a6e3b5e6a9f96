"""The table of a sweep, live on a terminal, else a line for each change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rlhfless_ray.report.formatting import DASH, duration, money, number, slot_time
from rlhfless_ray.sweep.sweep_file import Sweep
from rlhfless_ray.sweep.sweep_folder import RunState, best_first, short_name

GONE = (OSError, SystemExit)  # raised if the terminal is gone or the pipe closed, of which rich makes a SystemExit; no run ends for that
FILE_WIDTH = 140  # columns where the output is no terminal
STYLES = {"running": "cyan", "done": "green", "ended early": "yellow", "stopped": "yellow", "failed": "red", "waiting": "dim"}


def cells(state: RunState) -> list[str]:
    """Return a run's row: name, state, steps, metric, time, cost, and savings compared with the run alone."""
    steps = f"{state.step}/{state.steps}" if state.steps else str(state.step)
    values = [state.name, state.state, steps, number(state.metric, 4), duration(state.seconds), slot_time(state.slot_s), money(state.money)]
    return [*values, state.saved_text or DASH]


def heads(metric: str) -> list[str]:
    return ["run", "state", "step", short_name(metric), "time", "cost", "money", "saved against alone"]


def sweep_table(sweep: Sweep, states: Sequence[RunState]) -> Table:
    """Return the table of all runs, the best first."""
    file, has_alone = sweep.file, any(state.alone for state in states)
    table = Table(title=f"{file.name}: {sum(s.state == 'done' for s in states)} of {len(states)} runs done", title_justify="left")
    for i, head in enumerate(heads(file.metric)[: None if has_alone else -1]):
        table.add_column(head, justify="left" if i < 2 else "right")
    for state in best_first(states, file.direction):
        table.add_row(*cells(state)[: len(table.columns)], style=STYLES[state.state])
    return table


class SweepDisplay:
    """Show a sweep on the terminal. Messages stay above the table."""

    def __init__(self, sweep: Sweep, states: Sequence[RunState]) -> None:
        self.sweep, self.states, self.console = sweep, states, Console(file=sys.stdout)
        if not self.console.is_terminal:
            self.console = Console(file=sys.stdout, width=FILE_WIDTH)
        self.live: Live | None = None
        if self.console.is_terminal:
            self.live = Live(get_renderable=lambda: sweep_table(sweep, states), console=self.console, refresh_per_second=2)
            self.live.start()

    def message(self, text: str) -> None:
        with suppress(*GONE):
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the final table."""
        with suppress(*GONE):
            if self.live is not None:
                self.live.stop()
            else:
                self.console.print(sweep_table(self.sweep, self.states))
