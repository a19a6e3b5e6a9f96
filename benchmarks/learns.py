"""Does every way to credit a response learn? `python -m benchmarks.learns [--quick] [--only NAME …] [section.key=value …]`.

One run of the quickstart's task and warm-started policy for each estimator, shorter than the quickstart, on the same prompts and
seed; then group_norm with engines in int8, one step off, and with partial rollouts, where importance weights correct; then PPO as it
is usually meant: a critic, a KL penalty in the reward and a reward model (`train_reward_model.py`) in the verifier's place. On-policy
distillation has the quickstart's policy learn from the one that DPO makes of it. Accuracy is the verifier's in all of them, on
held-out prompts, before the first step and after the last one. Supervised stages (`supervised_stages.py`) come first, with two rounds of
online DPO on pairs that the verifier judges. All runs share this process, and those with rollouts one Ray. Curves do not depend on what
else the machine does; times do, and are not reported.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.charts import sparkline
from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.learning.supervised_stages import STAGES, StageResult, train_stages
from benchmarks.learning.train_reward_model import RewardModelTraining, in_order, verdicts
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.learn.warm_start import warm_start
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.prompts.builtin_tasks import Chain
from rlhfless_ray.types import Sample, Scored
from rlhfless_ray.weights.load_policy import cache_policy, initial_policy, warm_start_key
from rlhfless_ray.weights.model_folder import write_folder

LEAST = 10.0  # points that held-out accuracy, sampled, has to rise
VERDICT_STEPS = 1000
LEAST_VERDICTS = 85.0  # percent of pairs of a right and a wrong response that the reward model is to tell
RECIPE = ROOT / "recipes" / "quickstart.yaml"
COMMON = (
    "run.steps=16",
    "rollout.max_tokens=96",
    "objective.prefer=1",
    "checkpoint.every_steps=1000000",
    "watch.progress='plain'",
    "watch.tensorboard=false",
    "watch.wandb='off'",
    "watch.samples_per_step=1",
)
CRITIC = ("critic.learning_rate=1.0e-3", "critic.schedule=constant", "critic.warmup_share=0", "algorithm.advantage.lambd=0.95")
DISTILLATION = "on_policy_distill"
DISTILLED = RECIPE.parent / "on_policy_distillation.yaml"
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce", DISTILLATION)
INT8 = "group_norm, int8 engines"
LAG = "group_norm, one step off"
PARTIAL = "group_norm, partial rollouts"
PPO = "ppo, critic and reward model"


@dataclass(frozen=True)
class Curve:
    """Accuracies (0 to 1) on held-out prompts by the verifier; `rewards`: mean of each step, whoever gave them. `tells`: share
    of pairs of a right and a wrong sampled response of which a reward model likes the right one better, before and after."""

    name: str
    before: dict[str, float]
    after: dict[str, float]
    rewards: list[float]
    value_error: list[float] | None = None  # |mean value - mean return| of each step, with a critic
    tells: tuple[float, float] | None = None
    mismatch: float | None = None  # largest mean |difference of log-probabilities| of engines and learner in a step, in nats

    @property
    def rise(self) -> float:
        """Points, sampled."""
        return 100 * (self.after["sampled"] - self.before["sampled"])


def settings(name: str, model: RewardModelTraining | None, root: Path = Path()) -> list[str]:
    """Overrides of the recipe. `root`: folder with the quickstart's policy and the one that DPO makes of it."""
    if name == DISTILLATION:
        return [f"policy.path={root / 'policy'}", f"reference.path={root / 'dpo' / 'model'}", "run.steps=40", "rollout.max_tokens=160"]
    if name == INT8:
        return ["algorithm.advantage.estimator=group_norm", "rollout.quantization=int8"]
    if name == LAG:
        return ["algorithm.advantage.estimator=group_norm", "rollout.max_lag_steps=1", "learner.max_slots_per_rank=1"]
    if name == PARTIAL:
        return ["algorithm.advantage.estimator=group_norm", "rollout.partial=continue", "rollout.max_lag_steps=2"]
    if name != PPO:
        return [f"algorithm.advantage.estimator={name}", *(CRITIC if name == "gae" else ())]
    assert model is not None
    return [
        "algorithm.advantage.estimator=gae",
        *CRITIC,
        "reward.function=",
        f"reward.model_path={model.folder}",
        "reward.normalize=true",
        "reward.clip_range=[-1,1]",
        "algorithm.kl.coefficient=0.01",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.place=reward",
    ]


def right(samples: Sequence[Sample]) -> np.ndarray:
    """What the verifier says of each, (n,) of 0.0 and 1.0."""
    return np.array([Chain().verify(sample.text, sample.prompt.row) for sample in samples])


def run(name: str, recipe: Recipe) -> Curve:
    """Train, and judge what the runtime's own evaluations sampled."""
    evaluations: list[list[Scored]] = []
    prompts = recipe.evaluate.prompts
    with Runtime(recipe) as runtime:
        score = runtime.parts.stages.score.score

        def kept(samples: Sequence[Sample], step: int, name: str = "step") -> list[Scored]:
            scored = score(samples, step, name)
            if name == "evaluation":
                evaluations.append(scored)
            return scored

        runtime.parts.stages.score.score = kept  # type: ignore[method-assign]
        rows = [step.metrics for step in runtime]
    first, last = evaluations[0], evaluations[-1]
    before, after = ({"sampled": float(right(s[:prompts]).mean()), "greedy": float(right(s[prompts:]).mean())} for s in (first, last))
    errors = [abs(row["critic/value_mean"] - row["critic/return_mean"]) for row in rows if "critic/value_mean" in row]
    tells = None
    if recipe.reward.model_path:
        start, end = (in_order(np.array([x.reward or 0.0 for x in s[:prompts]]), right(s[:prompts])) for s in (first, last))
        tells = start, end
    mismatch = max(row["learn/mismatch_mean"] for row in rows)
    return Curve(name, before, after, [row["reward/mean"] for row in rows], errors or None, tells, mismatch)


def warm_policy(recipe: Recipe) -> dict[str, bytes]:
    """The policy that every run begins with, made and kept if there is none yet."""
    files, owed = initial_policy(recipe)
    if owed:
        files = warm_start(files, recipe, torch.get_num_threads())
        cache_policy(recipe, files)
    return files


def targets(curves: list[Curve], model: RewardModelTraining | None) -> list[Target]:
    found = [Target(f"{curve.name}: rise of held-out accuracy, sampled", curve.rise, least=LEAST, unit=" points") for curve in curves]
    if model is not None:
        found.append(Target("reward model: pairs told, held-out", 100 * model.supervised, least=LEAST_VERDICTS, unit=" %"))
    return found


def show(curves: list[Curve], console: Console) -> None:
    table = Table(
        "",
        "sampled, %",
        "rise",
        "greedy, %",
        "reward by step",
        "|value - return|",
        "model tells, %",
        "mismatch",
        title="Held-out accuracy by the verifier: before → after",
        title_justify="left",
    )
    for c in curves:
        pair = {how: f"{100 * c.before[how]:.1f} → {100 * c.after[how]:.1f}" for how in c.after}
        edge = max(1, len(c.rewards) // 8)
        error = c.value_error and f"{np.mean(c.value_error[:edge]):.2f} → {np.mean(c.value_error[-edge:]):.2f}"
        tells = c.tells and " → ".join(f"{100 * share:.1f}" for share in c.tells)
        curve = sparkline(c.rewards, min(c.rewards), max(c.rewards), 20)
        table.add_row(c.name, pair["sampled"], f"{c.rise:+.1f}", pair["greedy"], curve, error or "", tells or "", f"{c.mismatch:.1g}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    choices = [*STAGES, *ESTIMATORS, "int8", "lag", "partial", "ppo"]
    parser.add_argument("--only", nargs="+", choices=choices, help="some of the runs")
    parser.add_argument("--quick", action="store_true", help="two runs of 3 steps from a policy that knows little, and a stage of 2 steps")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of this process: two that wait for each other crawl where anything else runs
    console = make_console()
    names = [{"int8": INT8, "lag": LAG, "partial": PARTIAL, "ppo": PPO}.get(name, name) for name in options.only or choices]
    small = ["run.steps=3", "evaluate.prompts=32", "warm_start.steps=30"] if options.quick else []
    if options.quick and not options.only:
        names = [STAGES[0], *names[-2:]]
    overrides = [*COMMON, *small, *options.overrides]
    root = Path(tempfile.mkdtemp(prefix="rlhfless-learns-"))
    base = Recipe.load(RECIPE, overrides)
    files = warm_policy(base)
    policy = write_folder(root / "policy", files)
    cluster = RayCluster(base)
    curves: list[Curve] = []
    try:
        chosen = [name for name in STAGES if name in names or (name == "dpo" and DISTILLATION in names)]
        stages = train_stages(chosen, policy, root, options.quick) if chosen else []
        model = verdicts(files, warm_start_key(base), 30 if options.quick else VERDICT_STEPS) if PPO in names else None
        finish(stages, curves, names, model, overrides, console, quick=options.quick)
        runs = [name for name in names if name not in STAGES]
        if runs:
            cluster.start()
        for name in runs:
            console.print(name, highlight=False)
            here = [f"run.root={root}", f"run.name=run-{len(curves)}"]
            own = [*here, *overrides, *settings(name, model, root), *small, *options.overrides]
            curves.append(run(name, Recipe.load(DISTILLED if name == DISTILLATION else RECIPE, own)))
            finish(stages, curves, names, model, overrides, console, quick=options.quick)
    finally:
        cluster.stop()
        shutil.rmtree(root, ignore_errors=True)


def show_stages(stages: list[StageResult], console: Console) -> None:
    title = "Supervised stages: held-out accuracy by the verifier, sampled (of the policy that they are compared with)"
    table = Table("", "steps", "loss", "accuracy, %", "pairs told, %", title=title, title_justify="left")
    for stage in stages:
        table.add_row(*stage.row())
    console.print(table)


def finish(
    stages: list[StageResult],
    curves: list[Curve],
    asked: list[str],
    model: RewardModelTraining | None,
    overrides: list[str],
    console: Console,
    *,
    quick: bool,
) -> None:
    """Show and write down what there is: after every run, so that one that is cut short leaves the others."""
    if stages:
        show_stages(stages, console)
    if curves:
        show(curves, console)
    reached = [*(stage.target() for stage in stages), *targets(curves, model)]
    show_targets(console, reached)
    content: dict[str, Any] = {
        "recipe": RECIPE.name,
        "overrides": overrides,
        "asked": asked,
        "settings": {name: [one for one in settings(name, model) if "_path" not in one] for name in asked if name not in STAGES},
        "stages": [asdict(stage) for stage in stages],
        "runs": [{**asdict(curve), "rise_points": curve.rise} for curve in curves],
        "reward_model": None if model is None else {k: v for k, v in asdict(model).items() if k != "folder"},
    }
    save("learns", content, reached, console=console, quick=quick)


if __name__ == "__main__":
    main()
