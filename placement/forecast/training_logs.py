"""Read response lengths and times of steps from the logs of verl, OpenRLHF and TRL.

verl's console prints `step:1 - response_length/mean:288.698 - timing_s/gen:12.3` (github.com/verl-project/verl/issues/2060), and newer
versions `np.float64(288.698)` for a number. TRL prints a Python dictionary a step, with numbers as texts since transformers 5, and
trainer_state.json has the same ones in `log_history`. OpenRLHF's trainer logs `response_length` and `timing/*`, newer versions with
`timing/step_total`. Metrics as JSON lines, flat or under `data`, are read too.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

from placement.forecast.recorded_lengths import MAX_TOKENS

LENGTHS = {  # of each system: its names for the mean and the longest response, the step's time, and the beginning of its phases' times
    "verl": ("response_length/mean", "response_length/max", "timing_s/step", "timing_s/"),
    "TRL": ("completions/mean_length", "completions/max_length", "step_time", ""),
    "OpenRLHF": ("response_length", "", "timing/step_total", "timing/"),
}
CONSOLE = re.compile(r"([\w/@.-]+):(?:np\.float\d+\()?(-?[\d.]+(?:e[+-]?\d+)?)\)?(?= - |\s*$)")


@dataclass(frozen=True)
class TrainingLog:
    """Medians over the steps of a log.

    mean_tokens, max_tokens: of a step's responses; max_tokens is None where the log lacks it. phases_s: seconds by the log's own
    names, without names that are inside another. step_s: seconds of a step, None where the log lacks it or has 0.
    """

    system: str
    steps: int
    mean_tokens: float
    max_tokens: float | None
    phases_s: dict[str, float]
    step_s: float | None

    def lengths(self, prompts: int, samples: int) -> np.ndarray:
        """Return log-normal lengths with the log's mean and longest response, shape (prompts, samples).

        Raises ValueError if the log lacks the longest response, or if no lengths have these two.
        """
        if self.max_tokens is None:
            raise ValueError(f"a log of {self.system} without the longest response: its lengths cannot be drawn")
        if not self.mean_tokens <= self.max_tokens <= MAX_TOKENS:
            both = f"a mean of {self.mean_tokens:g} tokens and a longest response of {self.max_tokens:g}"
            raise ValueError(f"a log of {self.system} with {both}: no lengths have both")
        count = prompts * samples
        likely = NormalDist().inv_cdf(count / (count + 1))  # of the longest of them
        spread = likely - math.sqrt(max(0.0, likely**2 - 2 * math.log(self.max_tokens / self.mean_tokens)))
        quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
        drawn = np.exp(spread * quantiles)
        drawn = np.clip(np.round(drawn * self.mean_tokens / drawn.mean()), 1, self.max_tokens)
        return np.random.default_rng(0).permutation(drawn).reshape(prompts, samples)


def read_log(path: Path) -> TrainingLog:
    """Read a log. Raises ValueError with one sentence for a file that is none."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a log ({type(error).__name__})") from None
    rows = list(_rows(text))
    system = next((system for system, (mean, *_) in LENGTHS.items() if any(row.get(mean, 0) > 0 for row in rows)), None)
    if system is None:
        names = ", ".join(f"`{names[0]}` ({one})" for one, names in LENGTHS.items())
        raise ValueError(f"{path}: no step of a known system in it; looked for {names}")
    mean, longest, step, phase = LENGTHS[system]
    steps = [row for row in rows if row.get(mean, 0) > 0]

    def middle(name: str) -> float | None:
        found = [row[name] for row in steps if name in row]
        return median(found) if found else None

    named = sorted({name for row in steps for name in row if phase and name.startswith(phase) and name not in (step, phase)})
    phases = {name.removeprefix(phase): float(middle(name) or 0) for name in named if "/" not in name.removeprefix(phase)}
    return TrainingLog(system, len(steps), float(middle(mean) or 0), middle(longest), phases, middle(step) or None)


def _rows(text: str) -> Iterator[dict[str, float]]:
    """Return the numbers of each step by name."""
    whole = _json(text)
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        yield from (_numbers(entry) for entry in whole["log_history"] if isinstance(entry, dict))
        return
    for line in text.splitlines():
        if (begin := line.find("{")) >= 0 and isinstance(row := _json(line[begin:].strip()), dict):
            yield _numbers({**row, **row["data"]} if isinstance(row.get("data"), dict) else row)
        elif "step:" in line:
            yield {name: float(value) for name, value in CONSOLE.findall(line)}


def _json(text: str) -> Any:
    """Parse JSON or a Python literal. Returns None for neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError):
            continue
    return None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, x in row.items():
        with suppress(ValueError):  # a text that is no number
            if isinstance(x, int | float | str) and math.isfinite(number := float(x)):
                found[name.removeprefix("train/")] = number  # as loggers of OpenRLHF and TRL name them
    return found
