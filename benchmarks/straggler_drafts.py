"""What drafts gain if they know the straggler. `python -m benchmarks.straggler_drafts [--rounds N]`, about five minutes on one core.

One response in thirty is four times as long. Engines of one policy answer the same requests in turn: without drafts, with drafts for the
most tokens per second (`blind`: nothing is known of the lengths), and with drafts for the end of the rollout (`informed`: by a forecast
that is off by a third, as the draws of each length say). The policy computes as much as 27 M parameters, and its own small original drafts
for it. Times are of the processor. Then the same rule is computed token by token for engines of other sizes, beside the least time that
any drafts could take if lengths were known (`bound`): what there is to gain at all. `--picture` only draws docs/images/draft_budget.svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.table import Table

from benchmarks.common.charts import save_svg, svg_pyplot
from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.speculation import answer, drafters_of, engine, files_of, interval, prompts_of
from placement.drafting.acceptance import choose_lengths
from placement.drafting.token_values import REFRESH_STEPS, tokens_left, values_of

RESPONSES, SHORT, LONGER, WARM = 30, 40, 4, 3
DRAWS, ERROR = 16, 0.35  # draws of each length, and the standard deviation of log lengths about their forecast, and of that itself
MOST = 8  # drafted tokens of a sequence in a step


def draws_of(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return (n, DRAWS) draws of a forecast that is off by `ERROR`."""
    n = len(lengths)
    return np.asarray(lengths[:, None] * np.exp(rng.normal(0, ERROR, (n, 1)) + rng.normal(0, ERROR, (n, DRAWS))))


def measure(rounds: int, scratch: Path) -> dict[str, list[float]]:
    """Return the seconds of each round by engine."""
    from rlhfless_ray.engine.control_queue import DraftNews
    from rlhfless_ray.types import Request

    files, own = files_of("27M", scratch), drafters_of("27M", scratch)["own"]
    kinds = {"off": "off", "blind": "auto", "informed": "auto"}
    engines = {name: engine("27M", name, kind, files, scratch, None if kind == "off" else own) for name, kind in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    rng = np.random.default_rng(0)
    lengths = np.full(RESPONSES, SHORT)
    lengths[-1] *= LONGER
    for number in range(WARM + rounds):
        prompts = prompts_of("27M", files, RESPONSES, number)
        asked = [Request(key, prompts[key], 1000 * number + key, n, 1.0, min_tokens=n) for key, n in enumerate(lengths.tolist())]
        draws = draws_of(lengths, rng)
        engines["informed"].update_drafts(DraftNews({}, (), None, dict(enumerate(draws))))
        for name in rng.permutation(list(kinds)).tolist():
            _, taken = answer(engines[name], asked)
            if number >= WARM:
                seconds[name].append(taken)
        print({name: round(taken[-1], 3) for name, taken in seconds.items() if taken}, flush=True)
    return seconds


@dataclass(frozen=True)
class Computed:
    """Times of an engine over those with drafts for the most tokens per second. base: seconds of a step, in those of a row."""

    sequences: int
    base: int
    chance: float
    informed: float
    unknown: float
    bound: float


Record = Callable[[float, np.ndarray, np.ndarray], None]  # gets the end of a step, its sequences, and how much is drafted for each


def run(lengths: np.ndarray, base: float, chance: float, draws: np.ndarray | None, seed: int, record: Record = lambda *_: None) -> float:
    """Return an engine's time, in those of a row. draws: (n, S) of the lengths; None: drafts for the most tokens per second."""
    rng, made, total, steps = np.random.default_rng(seed), np.zeros(len(lengths)), 0.0, 0
    live, values = np.arange(len(lengths)), np.ones(len(lengths))
    survival = chance ** np.arange(1, MOST + 1)
    while len(live):
        n = len(live)
        if draws is not None and steps % REFRESH_STEPS == 0:
            left = tokens_left(draws[live], made[live], np.full(n, 1e9))
            values[live] = values_of(left, np.full(n, chance), base, 1.0)
        offered = survival * (np.arange(MOST) < (lengths[live] - made[live] - 1)[:, None])
        drafted = np.array(choose_lengths(offered, base + n, np.arange(1.0, n * MOST + 1), values=values[live]))
        accepted = np.minimum(np.cumprod(rng.random((n, MOST)) < chance, axis=1).sum(1), drafted)
        total += base + n + int(drafted.sum())
        record(total, live, drafted)
        made[live] += 1 + accepted
        live = live[made[live] < lengths[live]]
        steps += 1
    return total


def bound(lengths: np.ndarray, base: float, chance: float) -> float:
    """Return the least time for known lengths: in S steps, each sequence computes the fewest rows that end it by then."""
    tokens = np.cumsum(chance ** np.arange(MOST + 1))
    best = np.inf
    for steps in np.linspace(lengths.max() / tokens[-1], lengths.max(), 200):
        rows = np.interp(np.maximum(lengths / steps, 1.0), tokens, 1.0 + np.arange(MOST + 1))
        best = min(best, base * steps + float((np.minimum(steps, lengths) * rows).sum()))
    return best


def compute(sequences: int, base: int, chance: float, rounds: int = 3) -> Computed:
    rng, ratios = np.random.default_rng(1), []
    for seed in range(rounds):
        lengths = np.clip(np.exp(rng.normal(5, 0.6, sequences)), 4, 2000).astype(int)
        lengths[rng.random(sequences) < 1 / RESPONSES] *= LONGER
        spread = np.quantile(lengths, (np.arange(DRAWS) + 0.5) / DRAWS)
        unknown = np.array([rng.permutation(spread) for _ in lengths])
        blind = run(lengths, base, chance, None, seed)
        informed, without = (run(lengths, base, chance, draws, seed) for draws in (draws_of(lengths, rng), unknown))
        ratios.append((blind / informed, blind / without, blind / bound(lengths, base, chance)))
    return Computed(sequences, base, chance, *np.mean(ratios, axis=0).tolist())


def draw_budget() -> None:
    """Draw how many tokens each step of an engine drafts, for its longest response and for all others."""
    pyplot, rng = svg_pyplot(), np.random.default_rng(2)
    lengths = np.clip(np.exp(rng.normal(5, 0.3, 32)), 4, 2000).astype(int)
    lengths[-1] = LONGER * int(np.median(lengths))
    figure, panels = pyplot.subplots(2, 1, sharex=True, sharey=True, figsize=(7, 4))
    for panel, draws, title in zip(panels, (None, draws_of(lengths, rng)), ("most tokens per second", "earliest end"), strict=True):
        steps: list[tuple[float, int, int]] = []

        def record(end: float, live: np.ndarray, drafted: np.ndarray, steps: list[tuple[float, int, int]] = steps) -> None:
            longest = int(drafted[live == len(lengths) - 1].sum())
            steps.append((end, longest, int(drafted.sum()) - longest))

        run(lengths, 60, 0.8, draws, 0, record)
        ends, longest, others = zip(*steps, strict=True)
        panel.stackplot(ends, longest, others, step="post", colors=["#c0504d", "#9db8d9"], labels=["the longest response", "the other 31"])
        panel.set_title(f"drafts for the {title}: ends at {ends[-1]:.0f}", loc="left", fontsize=10)
        panel.set_ylabel("drafted tokens")
    panels[0].legend(loc="upper right", frameon=False)
    panels[1].set_xlabel("time, in rows of a step")
    save_svg(figure, ROOT / "docs" / "images" / "draft_budget.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    if options.picture:
        draw_budget()
        return
    console = make_console()
    computed = [compute(n, base, chance) for n in (32, 128, 256) for base in (30, 120, 400) for chance in (0.6, 0.8)]
    with TemporaryDirectory(prefix="straggler-") as scratch:
        seconds = measure(options.rounds, Path(scratch))
    ratios = {
        what: (sum(seconds[a]) / sum(seconds[b]), interval(seconds[a], seconds[b]))
        for what, a, b in (("blind over off", "off", "blind"), ("informed over blind", "blind", "informed"))
    }
    for what, (ratio, (low, high)) in ratios.items():
        console.print(f"{what}: {ratio:.2f}× ({low:.2f} to {high:.2f})")
    table = Table(
        "sequences", "step in rows", "acceptance", "informed", "nothing known", "bound", title="Speed over the most tokens per second"
    )
    for one in computed:
        table.add_row(*map(str, (one.sequences, one.base, one.chance)), *(f"{x:.2f}×" for x in (one.informed, one.unknown, one.bound)))
    console.print(table)
    targets = [
        Target("informed over blind, real engines", ratios["informed over blind"][0], least=1.3, unit="×"),
        Target("informed over blind, computed, mean", float(np.mean([one.informed for one in computed])), least=1.03, unit="×"),
        Target("nothing known, computed, least", min(one.unknown for one in computed), least=0.98, unit="×"),
    ]
    show_targets(console, targets)
    save("straggler_drafts", {"seconds": seconds, "computed": [asdict(one) for one in computed]}, targets, console=console)


if __name__ == "__main__":
    main()
