"""Numbers with their spread, targets with pass or miss, and the JSON file they end up in."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.run_metadata import provenance

BUSY = 0.5  # load per core from which a measurement is not to be trusted
FOLDER = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and count of repeated measurements (NaN when there are none)."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        numbers = np.asarray(list(values), float)
        if not len(numbers):
            return cls(float("nan"), float("nan"), float("nan"), 0)
        low, median, high = np.quantile(numbers, [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high), len(numbers))

    def show(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}g} ({self.low:.{digits}g} … {self.high:.{digits}g})"


def processor_ms(work: Callable[[], Any]) -> float:
    """Return processor time: on a machine that others use too, elapsed time would count their work."""
    gc.collect()
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


@dataclass(frozen=True)
class Target:
    """A target and its measurement. why: the reason of a miss."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None
    unit: str = ""
    why: str = ""

    @property
    def met(self) -> bool:
        above = self.least is None or self.value >= self.least
        return bool(above and (self.most is None or self.value <= self.most))

    def row(self) -> tuple[str, str, str, str]:
        wanted = f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"
        colour = "green" if self.met else "red"
        verdict = f"[{colour}]{'pass' if self.met else 'miss'}[/{colour}]"
        return self.name, f"{self.value:.3g}{self.unit}", f"{wanted}{self.unit}", verdict


def make_console() -> Console:
    """Create a console, wide if the output is no terminal. Warn if the machine is busy."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY * cores:
        console.print(f"[yellow]the load was {load:.1f} on {cores} cores before this began: figures will be noisy[/yellow]")
    return console


def show_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table("target", "measured", "wanted", "", title="Targets", title_justify="left")
    explained = any(target.why for target in targets)
    if explained:
        table.add_column("why", ratio=1)
    for target in targets:
        table.add_row(*target.row(), *([target.why] if explained else []))
    console.print(table)


def result_folder(quick: bool) -> Path:
    """A quick run's results go to a folder of their own: a smoke test never replaces a measurement."""
    return FOLDER / "quick" if quick else FOLDER


def save(name: str, content: dict[str, Any], targets: Sequence[Target] = (), *, console: Console, quick: bool = False) -> Path:
    """Write <name>.json with where and with what it was measured, and say where it is."""
    folder = result_folder(quick)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    rows = [{**asdict(target), "met": target.met} for target in targets]
    whole = {"benchmark": name, "quick": quick, **provenance(), "targets": rows, **content}
    path.write_text(json.dumps(_plain(whole), indent=1, ensure_ascii=False) + "\n")
    console.print(f"written: {path.relative_to(FOLDER.parent.parent)}", highlight=False)
    return path


def _plain(value: Any) -> Any:
    """JSON values: dataclasses as objects, floats to six digits, not-a-number as null."""
    if isinstance(value, Spread):
        return {key: _plain(item) for key, item in asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
