"""What do partial rollouts gain on a long-tailed task? `python -m benchmarks.partial [--steps N] [--rounds N] [section.key=value …]`.

An untrained policy whose lengths are about geometric, on this machine's cores: in synchronous steps, with responses that go on in the
next step, and with responses that begin beside the update, where engines and learner hold a core each. Each round runs all modes
once. The first step of each run, with its cold starts, is left out. The last steps of a partial run finish what is in flight, so all
modes train the same number of whole groups.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_process import train
from benchmarks.migrate import PROMPTS, SAMPLES, policy, write_long_tailed
from rlhfless_ray.weights.model_folder import write_folder

LEAST = 1.3  # times the samples per second of synchronous steps
SYNCHRONOUS = "synchronous"
AHEAD = ["rollout.partial=continue", "rollout.ahead=true", "rollout.min_actors=1", "learner.max_slots_per_rank=1"]  # beside the update
MODES = {
    SYNCHRONOUS: [],
    "continue, lag 1": ["rollout.partial=continue", "rollout.max_lag_steps=1"],
    "continue, lag 2": ["rollout.partial=continue", "rollout.max_lag_steps=2", "rollout.oversample=2"],
    "continue, lag 2, KV kept": ["rollout.partial=continue", "rollout.max_lag_steps=2", "rollout.oversample=2", "rollout.partial_kv=keep"],
    "ahead, lag 1": [*AHEAD, "rollout.max_lag_steps=1"],
    "ahead, lag 2": [*AHEAD, "rollout.max_lag_steps=2", "rollout.oversample=2"],
    "restart, lag 2": ["rollout.partial=restart", "rollout.max_lag_steps=2", "rollout.oversample=2"],
}


def run(mode: str, model: Path, root: Path, steps: int, overrides: list[str]) -> dict[str, float]:
    """Train, and return rates and shares over the steps after the first."""
    recipe = write_long_tailed(root, model, steps, 2)
    rows = train(recipe, [*overrides, *MODES[mode]], root)[1][1:]
    seconds, tokens = sum(row["step_s"] for row in rows), sum(row["tokens/generated"] for row in rows)

    def by_token(name: str) -> float:
        return sum(row.get(name, 0.0) * row["tokens/generated"] for row in rows) / tokens

    return {
        "samples_per_s": len(rows) * PROMPTS * SAMPLES / seconds,
        "slot_s_per_sample": sum(row["cost/full_slot_s"] for row in rows) / (len(rows) * PROMPTS * SAMPLES),
        "rollout_s": sum(row["phase/rollout_s"] for row in rows) / len(rows),
        "learn_s": sum(row["phase/learn_s"] for row in rows) / len(rows),
        "lag_mean": by_token("lag/mean"),
        "lag_max": max(row.get("lag/max", 0.0) for row in rows),
        "old_share": by_token("lag/old_share"),
        "recomputed_share": sum(row.get("partial/recomputed_tokens", 0) for row in rows) / tokens,
        "forced_groups": sum(row.get("partial/forced_groups", 0) for row in rows) / (len(rows) * PROMPTS),
        "restarted_share": sum(row.get("partial/restarted_tokens", 0) for row in rows) / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = make_console()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="rlhfless-partial-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        model = write_folder(root / "policy", policy(ends=True))
        for number in range(options.rounds):
            for mode in MODES:
                found[mode].append(
                    run(mode, model, root / f"{number}-{mode.replace(', ', '-').replace(' ', '-')}", options.steps, options.overrides)
                )
                console.print(number, mode, {key: round(value, 3) for key, value in found[mode][-1].items()}, highlight=False)
    report(found, options, console)


def report(found: dict[str, list[dict[str, float]]], options: argparse.Namespace, console: Any) -> None:
    """Show and save ratios of each round to its synchronous run."""
    columns = ("samples_per_s", "slot_s_per_sample", "rollout_s", "learn_s")
    ratios = {
        mode: {name: Spread.of(one[name] / base[name] for one, base in zip(runs, found[SYNCHRONOUS], strict=True)) for name in columns}
        for mode, runs in found.items()
    }
    table = Table(
        "", "samples/s", "slot-s a sample", "rollout", "learner", "tokens old", title="Against synchronous steps", title_justify="left"
    )
    for mode, of in ratios.items():
        old = Spread.of(100 * one["old_share"] for one in found[mode])
        table.add_row(mode, *(f"{of[name].show()}×" for name in columns), f"{old.median:.0f} %")
    console.print(table)
    targets = [
        Target(f"{mode}: samples per second", ratios[mode]["samples_per_s"].median, least=LEAST, unit="×")
        for mode in MODES
        if mode.startswith(("continue", "ahead"))
    ]
    show_targets(console, targets)
    content = {"steps": options.steps, "overrides": options.overrides, "modes": MODES, "runs": found}
    save("partial", content, targets, console=console)


if __name__ == "__main__":
    main()
