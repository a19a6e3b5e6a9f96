"""Does a whole workflow learn? `python -m benchmarks.online_dpo [--root FOLDER] [--seeds N …] [--quick]`.

Runs recipes/workflow.yaml: supervised fine-tuning, a reward model from judged responses, two rounds of online DPO by that reward model, and
PPO. Accuracy is the verifier's, of sampled responses to held-out prompts. `--root` keeps the runs, and continues those that are there.
Curves do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from rlhfless_ray import RunView, Workflow, run_workflow

RECIPE = ROOT / "recipes" / "workflow.yaml"
LEAST_POINTS, LEAST_PAIRS = 10.0, 95.0


def seeded(root: Path, seed: int, quick: bool) -> dict[str, Any]:
    """Return the recipe's tree with every stage's seed moved by 100 × `seed`."""
    tree: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    tree["run"] = {"root": str(root), "name": f"seed-{seed}"}
    tree["settings"] = {"watch": {"tensorboard": False, "wandb": "off", "progress": "plain"}}
    for stage in (inner for outer in tree["stages"] for inner in outer.get("stages", [outer])):
        recipe = stage.get("train") or stage.get("generate") or stage["evaluate"]
        run = recipe.setdefault("run", {})
        run["seed"] = f"{seed}{run.get('seed', 0)}" if seed else run.get("seed", 0)
        if quick:
            recipe.get("data", {}).update({"rows": 640} if "task" in recipe.get("data", {}) else {})
            recipe.get("prompts", {}).update({"rows": 64, "batch_prompts": 16})
            run.update({"steps": 2} if stage.get("name") == "ppo" else {})
    return tree


def measure(folder: Path) -> dict[str, Any]:
    """Return accuracies in percent by stage, and the share of held-out pairs that the reward model tells."""
    scores = json.loads((folder / "evaluation" / "evaluation.json").read_text())["scores"]
    pairs = [row["eval/accuracy"] for row in RunView.read(folder / "reward").metrics if "eval/accuracy" in row]
    return {"accuracy": {score["model"]: 100 * score["mean"] for score in scores}, "pairs_told": 100 * pairs[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="folder of the workflows' runs, which stays")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--quick", action="store_true", help="a policy that knows little, and a few rows")
    options = parser.parse_args()
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="rlhfless-online-dpo-") as scratch:
        root = options.root or Path(scratch)
        found = {}
        for seed in options.seeds:
            workflow = Workflow.parse(seeded(root, seed, options.quick))
            found[seed] = measure(run_workflow(workflow, resume=workflow.folder.is_dir(), say=console.print))
    table = Table("seed", "SFT, %", "DPO 1, %", "DPO 2, %", "PPO, %", "reward model tells, %")
    targets = []
    for seed, one in found.items():
        accuracy = one["accuracy"]
        table.add_row(str(seed), *(f"{accuracy[name]:.1f}" for name in ("sft", "dpo-1", "dpo-2", "ppo")), f"{one['pairs_told']:.1f}")
        rise = accuracy["dpo-2"] - accuracy["sft"]
        targets.append(Target(f"seed {seed}: rise by two rounds of online DPO", rise, least=LEAST_POINTS, unit=" points"))
        targets.append(Target(f"seed {seed}: pairs told by the reward model, held-out", one["pairs_told"], least=LEAST_PAIRS, unit=" %"))
    console.print(table)
    show_targets(console, targets)
    save("online_dpo", {"recipe": RECIPE.name, "seeds": found}, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
