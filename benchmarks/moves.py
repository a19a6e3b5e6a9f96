"""Do moves between engines pay in the real runtime?  `python -m benchmarks.moves [--quick] [--only TASK …] [--seeds N] [--steps N]`

Each task runs with and without moves (`rollout.migrate` `auto` and `off`), with the same seeds and so the same tokens. Runs are in turn, in
the order off, auto, auto, off, so that what else the machine does falls on both. Steps are compared in pairs: the same step of both runs.

quickstart   recipes/quickstart.yaml, from its cached warm start
straggler    responses of about 100 tokens, and a few of 1,000 whose prompts give such ones now and then
natural      the recorded lengths of GSM8K answers (log-normal ones without `--traces`)

The last two have real engines and an untrained policy that never ends a response. The benchmark sets the length of each request. The
whole takes about 22 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import read_metrics, run_process, train
from benchmarks.migrate import policy
from benchmarks.simulated.rollout_cases import GSM8K, TRACES, answers

RULES = ("off", "auto")
PROMPTS, SAMPLES, ROWS = 16, 8, 48  # of a step, and of the data
LONG, SHORT = 1000, 100  # tokens of a straggler and of another response
MOST = 1200  # limit on tokens, which none reaches
DROP = 2  # first steps of a run that are not steady state


def straggler(rng: np.random.Generator) -> np.ndarray:
    """Return (ROWS, SAMPLES) tokens: every sixteenth prompt has a quarter of stragglers."""
    is_long = (np.arange(ROWS) % 16 == 0)[:, None] & (rng.random((ROWS, SAMPLES)) < 0.25)
    return np.where(is_long, LONG, SHORT) * np.exp(rng.normal(0, 0.1, (ROWS, SAMPLES)))


def natural(rng: np.random.Generator, traces: Path) -> np.ndarray:
    """Return (ROWS, SAMPLES) tokens: each prompt is a GSM8K problem, and its responses vary as the answers of one model may."""
    if not (traces / GSM8K).exists():
        return 220 * np.exp(rng.normal(0, 0.5, (ROWS, 1)) + rng.normal(0, 0.35, (ROWS, SAMPLES)))
    table = np.maximum(answers(traces / GSM8K)[:ROWS], 10)
    return rng.permuted(np.tile(table, (1, SAMPLES // table.shape[1])), axis=1) * np.exp(rng.normal(0, 0.1, (ROWS, SAMPLES)))


def lengths_of(task: str, seed: int, steps: int, traces: Path) -> list[list[list[int]]]:
    """Return tokens by step, row of the data and sample."""
    found = []
    for step in range(steps + 1):
        rng = np.random.default_rng((seed, step))
        drawn = straggler(rng) if task == "straggler" else natural(rng, traces)
        found.append(drawn.round().clip(2, MOST - 1).astype(int).tolist())
    return found


def recipe_of(model: Path, steps: int) -> dict[str, Any]:
    return {
        "run": {"steps": steps},
        "policy": {"path": str(model)},
        "prompts": {"task": "chain", "batch_prompts": PROMPTS, "rows": ROWS},
        "evaluate": {"prompts": 0},
        "reward": {"function": "task"},
        "rollout": {"samples_per_prompt": SAMPLES, "max_tokens": MOST, "kv_cache_mb": 512, "min_actors": 2, "max_actors": 2},
        "learner": {"learning_rate": 1e-9, "max_slots_per_rank": 2},
        "checkpoint": {"every_steps": 1000},
        "watch": {"tensorboard": False, "wandb": "off", "samples_per_step": 1, "progress": "plain"},
    }


def run_with_lengths(recipe: Path, lengths: Path, overrides: Sequence[str]) -> None:
    """Train in this process. Each request gets the length that the file has for its step, prompt and sample."""
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.runtime.runtime import Runtime
    from rlhfless_ray.step.rollout_batch import RolloutBatch
    from rlhfless_ray.types import Request

    table, make = json.loads(lengths.read_text()), RolloutBatch.requests

    def requests(batch: RolloutBatch, recipe: Recipe) -> list[Request]:
        of_step = table[batch.step % len(table)]
        made = make(batch, recipe)
        wanted = [of_step[batch.groups[g].prompt.index][key % batch.count] for key, g in enumerate(batch.group_of)]
        return [replace(request, max_tokens=tokens) for request, tokens in zip(made, wanted, strict=True)]

    RolloutBatch.requests = requests  # type: ignore[method-assign]
    with Runtime(Recipe.load(recipe, list(overrides))) as run:
        for _ in run:
            pass


def measure(task: str, rule: str, seed: int, steps: int, root: Path, traces: Path) -> list[dict[str, Any]]:
    """Run a task once, and return the metrics of its steps."""
    name = f"{task}-{seed}-{rule}"
    overrides = [f"run.seed={seed}", f"rollout.migrate='{rule}'"]
    if task == "quickstart":
        quick = [f"run.steps={steps}", "evaluate.prompts=0", "rollout.min_actors=2", "watch.tensorboard=false"]
        return train(ROOT / "recipes" / "quickstart.yaml", [*overrides, *quick], root, name=name)[1]
    recipe, lengths = root / "recipe.yaml", root / f"{task}-{seed}.json"
    recipe.write_text(json.dumps(recipe_of(root / "model", steps)))  # JSON is YAML
    lengths.write_text(json.dumps(lengths_of(task, seed, steps, traces)))
    own = [*overrides, f"run.root={root}", f"run.name={name}"]
    run_process([sys.executable, "-m", "benchmarks.moves", "--run", recipe, lengths, *own], root / f"{name}.log", timeout_s=600)
    return read_metrics(root / name)


def compare(found: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Compare the steps of the runs in pairs. `found`: by rule, the rows of each seed's run."""
    pairs = [
        (without, with_moves)
        for off, auto in zip(found["off"], found["auto"], strict=True)
        for without, with_moves in zip(off[DROP:], auto[DROP:], strict=True)
    ]
    for without, with_moves in pairs:
        if without["tokens/generated"] != with_moves["tokens/generated"]:
            raise RuntimeError(f"step {without['step']}: the runs have different responses, so they cannot be compared")
    moved = [(without, row) for without, row in pairs if row["rollout/moved"]]
    lost = [row["phase/rollout_s"] > without["phase/rollout_s"] for without, row in moved]
    return {
        "time": sum(row["phase/rollout_s"] for _, row in pairs) / sum(row["phase/rollout_s"] for row, _ in pairs),
        "step_time": sum(row["step_s"] for _, row in pairs) / sum(row["step_s"] for row, _ in pairs),
        "cost": sum(row["cost/rollout_slot_s"] for _, row in pairs) / sum(row["cost/rollout_slot_s"] for row, _ in pairs),
        "each": Spread.of(row["phase/rollout_s"] / without["phase/rollout_s"] for without, row in pairs),
        "where_moved": Spread.of(row["phase/rollout_s"] / without["phase/rollout_s"] for without, row in moved),
        "steps": len(pairs),
        "steps_with_moves": len(moved),
        "moves": sum(row["rollout/moved"] for _, row in pairs),
        "lost": float(np.mean(lost)) if lost else 0.0,
    }


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        run_with_lengths(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = ("quickstart", "straggler", "natural")
    parser.add_argument("--only", nargs="*", choices=tasks, default=list(tasks))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of gsm8k_response_lengths.json")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: shows that it runs, measures nothing")
    options = parser.parse_args()
    seeds, steps = (1, DROP + 2) if options.quick else (options.seeds, options.steps)
    console, content = make_console(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="rlhfless-moves-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch)
        from rlhfless_ray.weights.model_folder import write_folder

        write_folder(root / "model", policy(ends=False))
        for task in options.only:
            found: dict[str, list[list[dict[str, Any]]]] = {rule: [] for rule in RULES}
            for seed in range(seeds):
                for rule in RULES if seed % 2 == 0 else RULES[::-1]:
                    console.print(f"{task}, seed {seed}, migrate {rule}", highlight=False)
                    found[rule].append(measure(task, rule, seed, steps, root, options.traces))
            content[task] = compare(found)
    table = Table("task", "rollout time, with over without", "step", "cost", "steps with moves", "moves", "of these steps slower")
    targets = []
    for task, c in content.items():
        time = c["time"]
        share = f"{c['steps_with_moves']} of {c['steps']}"
        table.add_row(task, f"{time:.3f}", f"{c['step_time']:.3f}", f"{c['cost']:.3f}", share, str(c["moves"]), f"{c['lost']:.0%}")
        targets.append(Target(f"{task}: rollout time with moves over without", time, most=0.95 if task == "straggler" else 1.0, unit="×"))
        targets.append(Target(f"{task}: share of steps with moves that are slower", c["lost"], most=0.15))
    console.print(table)
    show_targets(console, targets)
    save("moves", {"seeds": seeds, "steps": steps, "tasks": content}, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
