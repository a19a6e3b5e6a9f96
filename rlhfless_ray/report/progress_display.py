"""Progress on the terminal: a panel that redraws itself, or a line per step."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Literal, TextIO

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.report.formatting import finite
from rlhfless_ray.report.progress_panel import ProgressState, decided, line, panel

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


class ProgressDisplay:
    """Show the run's progress on `stream`. It handles no signals and raises no exceptions.

    Args:
        mode: `live` redraws a panel four times a second in a thread of its own, so the methods only store values. `plain`
            prints a line per step, `off` prints messages only, `auto` is live on a terminal and plain elsewhere.
        steps: total number of steps.
        title: the run's name.
        stream: default sys.stdout.
    """

    def __init__(self, mode: Literal["auto", "live", "plain", "off"], steps: int, *, title: str = "", stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._state = ProgressState(title=title, steps=steps)
        self._live: Live | None = None
        self._once: set[str] = set()
        self.mode = _resolve(mode, self._stream)
        if self.mode == "live":
            self._start_live()

    def step(self, row: JsonObject) -> None:
        """Show a finished step from its metrics row. Step 0 is the evaluation before training."""
        state, row = self._state, dict(row)
        sampled, greedy = finite(row.get("eval/accuracy_sampled")), finite(row.get("eval/accuracy_greedy"))
        if sampled is not None or greedy is not None:
            state.accuracy = (int(finite(row.get("step")) or 0), sampled, greedy)
        reward = finite(row.get("reward/mean"))
        if reward is not None:
            state.rewards.append(reward)
        state.failed_rewards += int(finite(row.get("reward/failed")) or 0)
        state.replaced += int(finite(row.get("faults/replaced")) or 0)
        state.row_at_s = time.monotonic()
        state.row = row
        if self.mode == "plain":
            self._print(line(row, state.steps))
            if sentence := decided(row):
                self._print(sentence)

    def phase(self, name: str) -> None:
        """Show the current phase. This is cheap, so call it at every change."""
        self._state.phase, self._state.phase_at_s = name, time.monotonic()

    def message(self, text: str, *, once: bool = False) -> None:
        """Print a permanent line, above the panel if there is one. `once`: unless a line of the same text was printed so."""
        if not once or text not in self._once:
            self._print(text)
        if once:
            self._once.add(text)

    def close(self) -> None:
        """Leave the last state on the terminal and restore it. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            with contextlib.suppress(OSError, ValueError, SystemExit):  # the terminal is gone
                live.stop()

    def _print(self, text: str) -> None:
        try:
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)
        except UnicodeEncodeError:
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError, SystemExit):  # of a closed pipe rich makes a SystemExit
            self.mode = "off"  # neither it nor a terminal that is gone may end the run

    def _start_live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=4,
            transient=False,
            redirect_stdout=self._stream in (sys.stdout, sys.stderr),
            redirect_stderr=self._stream in (sys.stdout, sys.stderr),
        )
        atexit.register(self.close)  # a crash must not leave the terminal without a cursor
        self._live.start(refresh=True)

    def _render(self) -> RenderableType:
        from rich.text import Text

        live = self._live
        try:
            options = live.console.options if live is not None else None
            width = options.max_width if options else 80
            return panel(self._state, width, ascii_only=bool(options and options.ascii_only))
        except Exception as error:  # an exception in the refresh thread would freeze the panel
            return Text(f"progress cannot be drawn: {type(error).__name__}: {error}")

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _resolve(mode: Literal["auto", "live", "plain", "off"], stream: TextIO) -> Literal["live", "plain", "off"]:
    if mode != "auto":
        return mode
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):
        is_terminal = False
    return "live" if is_terminal and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI") else "plain"
