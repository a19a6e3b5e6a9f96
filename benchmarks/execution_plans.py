"""What do calls of a step side by side gain? `python -m benchmarks.execution_plans [--steps N] [--rounds N] [section.key=value …]`.

PPO with a critic, a KL reference and a reward model on four logical slots of this machine, all of them real processes. The models are
untrained. In each round, runs alternate between two orders: calls of the learn phase take turns (`plan.search: fixed`, the order of
earlier versions), and calls run side by side where the planner finds that it pays. Steps in which it still tries both are left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_process import train
from benchmarks.migrate import policy
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tiny_model import folder_files

LEAST = 1.4  # times the steps per second of calls in turn
IN_TURN, BESIDE = "in turn", "side by side"
ORDERS = {IN_TURN: ["plan.search=fixed"], BESIDE: ["plan.search=auto"]}
SLOTS, PROMPTS, SAMPLES = 4, 16, 8


def reward_model(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return an untrained reward model with the policy's shape and tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from rlhfless_ray.weights.load_policy import load_tokenizer

    config = Qwen2Config.from_dict(json.loads(files["config.json"]) | {"num_labels": 1})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return folder_files(Qwen2ForSequenceClassification(config), load_tokenizer(files, False))


def write_recipe(root: Path, models: dict[str, Path], steps: int) -> Path:
    tree = {
        "run": {"steps": steps},
        "policy": {"path": str(models["policy"])},
        "prompts": {"task": "chain", "batch_prompts": PROMPTS, "rows": 64},
        "evaluate": {"prompts": 0},
        "reward": {"model_path": str(models["reward"])},
        "rollout": {"samples_per_prompt": SAMPLES, "max_tokens": 256},
        "algorithm": {"advantage": {"estimator": "gae"}, "kl": {"coefficient": 0.01, "estimator": "k1", "place": "reward"}},
        "learner": {"learning_rate": 1e-9},  # lengths stay as they are
        "critic": {"learning_rate": 1e-9},
        "cluster": {"cpus": SLOTS},
        "watch": {"tensorboard": False, "wandb": "off", "samples_per_step": 1},
    }
    root.mkdir(parents=True)
    recipe = root / "recipe.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    return recipe


def measure(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return figures of a run's steps."""

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows) / len(rows)

    return {
        "steps_per_s": 1 / mean("step_s"),
        "slot_s_per_step": mean("cost/full_slot_s"),
        "learn_s": mean("phase/learn_s"),
        "overlap_s": mean("learn/overlap_s"),
        "share_side_by_side": sum("calls run side by side" in row["pool/learn_reason"] for row in rows) / len(rows),
        **{name.removeprefix("learn/call_s/") + "_s": mean(name) for name in rows[0] if name.startswith("learn/call_s/")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--drop", type=int, default=6, help="first steps of each run that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = make_console()
    found: dict[str, list[dict[str, float]]] = {order: [] for order in ORDERS}
    reasons: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="rlhfless-plans-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        files = policy(ends=True)
        models = {"policy": write_folder(root / "policy", files), "reward": write_folder(root / "reward", reward_model(files))}
        for number in range(options.rounds):
            for order, overrides in ORDERS.items():
                folder = root / f"{number}-{order.replace(' ', '-')}"
                rows = train(write_recipe(folder, models, options.steps), [*options.overrides, *overrides], folder)[1]
                rows = [row for row in rows if row["step"] > options.drop]
                found[order].append(measure(rows))
                reasons[order] = rows[-1]["pool/learn_reason"]
                console.print(number, order, {key: round(value, 3) for key, value in found[order][-1].items()}, highlight=False)
    report(found, reasons, options, console)


def report(found: dict[str, list[dict[str, float]]], reasons: dict[str, str], options: argparse.Namespace, console: Any) -> None:
    """Show both orders, and save their ratios by round."""
    table = Table("", "steps/s", "slot-s a step", "learn phase s", "overlap s", "steps side by side", title="Orders of calls")
    for order, runs in found.items():
        shown = [Spread.of(one[name] for one in runs).show() for name in ("steps_per_s", "slot_s_per_step", "learn_s", "overlap_s")]
        table.add_row(order, *shown, f"{100 * Spread.of(one['share_side_by_side'] for one in runs).median:.0f} %")
    console.print(table)
    for order, reason in reasons.items():
        console.print(f"{order}: {reason}", highlight=False)
    pairs = list(zip(found[BESIDE], found[IN_TURN], strict=True))
    faster = Spread.of(one["steps_per_s"] / base["steps_per_s"] for one, base in pairs)
    learn = Spread.of(base["learn_s"] / one["learn_s"] for one, base in pairs)
    cost = Spread.of(one["slot_s_per_step"] / base["slot_s_per_step"] for one, base in pairs)
    targets = [
        Target("steps per second, side by side over in turn", faster.median, least=LEAST, unit="×"),
        Target("learn phases per second", learn.median, least=LEAST, unit="×"),
        Target("slot-seconds of a step", cost.median, most=1.0, unit="×"),
    ]
    show_targets(console, targets)
    content = {**vars(options), "orders": ORDERS, "runs": found, "reasons": reasons}
    save("execution_plans", content, targets, console=console)


if __name__ == "__main__":
    main()
