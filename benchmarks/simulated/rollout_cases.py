"""The rollouts that `benchmarks.rollout_policies` plays: recorded and synthetic lengths, and what is forecast of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placement.forecast.recorded_lengths import read_lengths

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
GSM8K = "gsm8k_response_lengths.json"

Drawn = tuple[np.ndarray, np.ndarray]  # true lengths (n,) and scenarios (n, S)


@dataclass(frozen=True)
class RolloutCase:
    """One rollout to play: true lengths (n,), scenarios (n, S), and what is charged. again: lengths and scenarios of the same kind,
    by seed (None: there are no others)."""

    name: str
    truth: np.ndarray
    scenarios: np.ndarray
    actors: int = 16
    migrate_s: float = 0.0
    start_s: float = 0.0
    again: Callable[[int], Drawn] | None = None


def siblings(table: np.ndarray, seed: int = 0, draws: int = 64) -> Drawn:
    """True lengths and scenarios of recorded answers, table (prompts, answers): each is forecast by the others' mean."""
    table = np.maximum(table, 2).round()
    forecast = ((table.sum(1, keepdims=True) - table) / (table.shape[1] - 1)).ravel()
    noise = np.random.default_rng(seed).normal(-0.06, 0.35, (table.size, draws))
    return table.ravel(), np.maximum(2, forecast[:, None] * np.exp(noise))


def weakly(truth: np.ndarray, seed: int = 0, draws: int = 64) -> Drawn:
    """Scenarios that know little: their centre is 30 % of the way from the median to the truth, and they are wide."""
    rng = np.random.default_rng(seed)
    centre = 0.3 * np.log(truth) + 0.7 * np.log(np.median(truth)) + rng.normal(0, 0.5, len(truth))
    return truth, np.maximum(2, np.exp(centre[:, None] + rng.normal(0, 0.9, (len(truth), draws))))


def lognormal(n: int, seed: int = 0, *, known: bool = True, median: float = 226.0, sigma: float = 0.6, draws: int = 64) -> Drawn:
    """n responses, eight to a prompt. known: the forecast has the prompt's own mean; otherwise another prompt's (useless)."""
    rng = np.random.default_rng(seed)
    prompt = rng.normal(0, np.sqrt(0.65) * sigma, -(-n // 8))
    said = prompt if known else rng.permutation(prompt)
    spread = np.sqrt(0.35) * sigma
    truth = np.maximum(1, np.round(median * np.exp(np.repeat(prompt, 8)[:n] + rng.normal(0, spread, n))))
    return truth, np.maximum(1, median * np.exp(np.repeat(said, 8)[:n, None] + rng.normal(0, spread, (n, draws))))


def read(path: Path) -> Drawn:
    """Read a CSV with a column `response_tokens`, or a table of answers (`answers`). Raises ValueError naming the file if it is neither."""
    return weakly(tokens(path)[:512]) if path.suffix == ".csv" else siblings(answers(path))


def tokens(path: Path) -> np.ndarray:
    """Return the column `response_tokens` of a CSV."""
    return read_lengths(path, "response_tokens").tokens


def answers(path: Path) -> np.ndarray:
    """Return (prompts, answers) tokens of a JSON list of lists, or of the recorded GSM8K file (characters, 3.5 to a token)."""
    is_recorded = path.name == GSM8K
    recorded = read_lengths(path, "response_chars" if is_recorded else None)
    counts = np.bincount(recorded.group)
    if counts.min() != counts.max() or counts[0] < 2:
        raise ValueError(f"{path}: wants [[lengths of the answers to one prompt], …], as many for each, at least two")
    return recorded.tokens.reshape(len(counts), -1) / (3.5 if is_recorded else 1.0)


def problems(table: np.ndarray, seed: int, count: int = 330) -> Drawn:
    """Some of the prompts of a table (prompts, answers), at random."""
    return siblings(table[np.random.default_rng(seed).permutation(len(table))[:count]], seed)


def window(lengths: np.ndarray, seed: int, count: int = 512) -> Drawn:
    """The seed-th further window of a recording; the first is a case of its own."""
    first = count * (1 + seed) % max(1, len(lengths) - count)
    return weakly(lengths[first : first + count], seed)


def cases(lengths: Path | None, quick: bool, traces: Path = TRACES) -> list[RolloutCase]:
    if lengths:
        return [RolloutCase(lengths.stem, *read(lengths))]

    def drawn(n: int, first: int, **how: Any) -> Callable[[int], Drawn]:
        return lambda seed: lognormal(n, first + seed, **how)

    found = (
        []
        if quick
        else [
            RolloutCase("log-normal 512", *lognormal(512), again=drawn(512, 1000)),
            RolloutCase("log-normal 512, useless forecast", *lognormal(512, 1, known=False), again=drawn(512, 2000, known=False)),
            RolloutCase("log-normal 512, moves 0.1 s, starts 0.3 s", *lognormal(512), migrate_s=0.1, start_s=0.3, again=drawn(512, 3000)),
        ]
    )
    found.append(RolloutCase("log-normal 128, 8 actors", *lognormal(128, 3), actors=8, again=None if quick else drawn(128, 4000)))
    recorded = traces / GSM8K
    if recorded.exists() and not quick:
        table = answers(recorded)
        found += [
            RolloutCase("GSM8K, four models, all 660 problems", *siblings(table), again=lambda seed: problems(table, 5000 + seed)),
            RolloutCase("GSM8K, even problems", *siblings(table[::2])),
            RolloutCase("GSM8K, odd problems", *siblings(table[1::2])),
            RolloutCase(
                "GSM8K, moves 0.1 s, starts 0.3 s",
                *siblings(table),
                migrate_s=0.1,
                start_s=0.3,
                again=lambda seed: problems(table, 6000 + seed),
            ),
        ]
    conversations = traces / "conversation_lengths.csv"
    if conversations.exists() and not quick:
        every = tokens(conversations)
        found.append(RolloutCase("conversation trace, 512", *weakly(every[:512]), again=lambda seed: window(every, seed)))
    return found
