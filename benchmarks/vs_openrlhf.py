"""OpenRLHF 0.11.2 and this project on one command line, in turn: `python -m benchmarks.vs_openrlhf [--case NAME] [--size SIZE]`.

OpenRLHF runs on CPU cores after small changes (`peers/openrlhf_port.py`), in an environment that is made at the first run. Cases: GRPO
with a reward file; the same in its asynchronous mode, without and with partial rollouts; PPO with a critic and a reward model; an agent
file with two turns. At 0.7 M parameters the policy is the quickstart's, and both results are evaluated on the same held-out prompts. At
11 M and 494 M policy and reward model are random, and only times and memory count; at 11 M responses end by chance, on average after 70
tokens. Both write TensorBoard logs under the same names, which are what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import ROOT
from benchmarks.common.run_process import run_process
from benchmarks.peers.openrlhf_port import ENVIRONMENT, FLAGS, FOLDER, compile_operators, openrlhf_python
from benchmarks.peers.shared_work import END, HALF_BILLION, LARGE, SYMBOLS

OPENRLHF, OURS = "OpenRLHF", "rlhfless_ray"
CASES, SIZES = ("grpo", "async", "partial", "ppo", "agent"), ("0.7M", "11M", "494M")
SWITCHES = {
    "async": ("train.async_enable",),
    "partial": ("train.async_enable", "train.partial_rollout_enable"),
    "ppo": ("reward.normalize_enable",),
}
MICRO_BATCH = 32  # sequences, of the small policies
DROP = 2  # first steps, which are not steady state
LAST = 4  # steps whose mean is the reached reward
ENOUGH_LETTERS = 0.3  # share of a random response's characters; about two thirds have less, and get a second turn
SEEDS_APART = 0.03  # difference of final accuracies that seeds alone make
LOGGED = {
    "reward": "train/reward",
    "response_length": "train/response_length",
    "policy_loss": "train/policy_loss",
    "actor_grad_norm": "train/actor_grad_norm",
    "actor_lr": "train/actor_lr",
    "critic_loss": "train/critic_loss",
    "critic_grad_norm": "train/critic_grad_norm",
    "critic_lr": "train/critic_lr",
    "generation_s": "train/timing/generation",
    "ppo_train_s": "train/timing/ppo_train",
    "broadcast_s": "train/timing/broadcast",
}
CURVES = ("reward", "response_length", "actor_grad_norm", "actor_lr", "critic_loss", "critic_grad_norm", "critic_lr")

RIGHT = """import sys

sys.path.append({root!r})
from rlhfless_ray.prompts.builtin_tasks import Chain


def judge(text, label):
    return Chain().verify(text, {{"answer": label}})
"""

LETTERS = """def judge(text, label):
    return sum("a" <= c.lower() <= "m" for c in text) / max(1, len(text))
"""

REWARD = """{judge}

def reward_func(queries, prompts, labels, **kwargs):
    import torch

    texts = [query[len(prompt):].removesuffix({end!r}) for query, prompt in zip(queries, prompts)]
    rewards = torch.tensor([judge(*row) for row in zip(texts, labels)])
    return {{"rewards": rewards, "scores": rewards, "extra_logs": {{}}}}
"""

AGENT = '''{judge}

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    """A second try after a response that is not good enough, for half of its reward."""

    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        score = judge(states["action_text"].removesuffix({end!r}), states["label"])
        reward = torch.tensor(score / self.turn)
        done = score >= {enough} or self.turn == 2
        feedback = "" if done else ";" + states["observation_text"]
        return {{"rewards": reward, "scores": reward, "environment_feedback": feedback, "done": done,
                 "sampling_params": states["sampling_params"], "extra_logs": {{"turns": torch.tensor(float(self.turn))}}}}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
'''


@dataclass(frozen=True)
class Work:
    """Files of one case at one size, and the command's sizes."""

    folder: Path
    parameters: int
    prompts: int
    group: int
    max_tokens: int
    max_len: int
    learning_rate: float
    micro_batch: int  # sequences
    learns: bool  # whether held-out accuracy means something


@dataclass(frozen=True)
class SystemRun:
    """One run. Rows of `steps`: step_s, core_s, and those of LOGGED that the case has."""

    system: str
    seed: int
    first_step_s: float  # from the start of the command to the end of its first step
    steps: list[dict[str, float]]
    peak_mb: float
    processes: int
    wall_s: float
    accuracy: float | None = None  # greedy, on held-out prompts

    def steady(self, name: str) -> Spread:
        return Spread.of(row[name] for row in self.steps[DROP:])

    def reached(self) -> float:
        return float(np.mean([row["reward"] for row in self.steps[-LAST:]]))


def prepare(size: str, steps: int, folder: Path, ppo: bool) -> Work:
    """Make policy, prompts, reward and agent files in `folder`, and for PPO a reward model."""
    folder.mkdir(parents=True)
    if size != "0.7M":
        # OpenRLHF asks for at least one token, for which vLLM masks the end of the sequence: it must be in the vocabulary
        shared = replace(LARGE, vocabulary=len(SYMBOLS) + 2, micro_sequences=MICRO_BATCH) if size == LARGE.name else HALF_BILLION
        made = shared.write(folder / "work")
        shutil.move(made.policy, folder / "model")
        rows = [{"prompt": row["prompt"], "label": "0"} for row in made.rows()]
        _write_rows(folder / "data.jsonl", rows[: shared.prompts * steps])
        write_rewards(folder, LETTERS, END, ENOUGH_LETTERS)
        if ppo:
            write_random_reward_model(folder / "model", folder / "reward_model")
        sizes = shared.prompts, shared.group, shared.max_tokens, shared.longest_prompt + shared.max_tokens
        return Work(folder, made.parameters, *sizes, shared.learning_rate, shared.micro_sequences, False)
    from benchmarks.learning.train_reward_model import verdicts
    from benchmarks.learns import RECIPE, VERDICT_STEPS, warm_policy
    from rlhfless_ray import Recipe
    from rlhfless_ray.prompts.builtin_tasks import Chain
    from rlhfless_ray.weights.load_policy import load_tokenizer, warm_start_key
    from rlhfless_ray.weights.model_folder import parameter_count, write_folder

    recipe = Recipe.load(RECIPE, [])
    files = warm_policy(recipe)
    write_folder(folder / "model", files)
    rows = Chain().rows(recipe.prompts.batch_prompts * steps, 0, "train")
    _write_rows(folder / "data.jsonl", [{"prompt": row["prompt"], "label": row["answer"]} for row in rows])
    write_rewards(folder, RIGHT.format(root=str(ROOT)), load_tokenizer(files, False).eos_token, 1.0)
    if ppo:
        shutil.copytree(verdicts(files, warm_start_key(recipe), VERDICT_STEPS).folder, folder / "reward_model")
    rollout, rate = recipe.rollout, recipe.learner.learning_rate
    sizes = recipe.prompts.batch_prompts, rollout.samples_per_prompt, rollout.max_tokens, rollout.max_tokens + 32
    return Work(folder, parameter_count(files), *sizes, rate, MICRO_BATCH, True)


def write_rewards(folder: Path, judge: str, end: str, enough: float) -> None:
    """Write reward.py and agent.py. `judge`: source of the function that scores a text without its end token `end`."""
    (folder / "reward.py").write_text(REWARD.format(judge=judge, end=end))
    (folder / "agent.py").write_text(AGENT.format(judge=judge, end=end, enough=enough))


def write_random_reward_model(policy: Path, folder: Path) -> None:
    """Write a sequence classifier of the policy's shape and tokenizer, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = AutoConfig.from_pretrained(policy, num_labels=1)
    torch.manual_seed(1)  # the policy's is 0
    model = AutoModelForSequenceClassification.from_config(config)
    model.config.mean, model.config.std = 0.0, 0.5  # about those of its values, by which --reward.normalize_enable scales
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def flags(case: str, work: Work, out: Path, seed: int) -> list[str]:
    """Return the command's flags, the same for both systems."""
    folder, samples = work.folder, work.prompts * work.group
    chosen: dict[str, Any] = {
        "actor.model_name_or_path": folder / "model",
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "checkpoints",
        "data.prompt_dataset": folder / "data.jsonl",
        "data.input_key": "prompt",
        "data.label_key": "label",
        "data.max_len": work.max_len * (2 if case == "agent" else 1),
        "algo.advantage.estimator": "gae" if case == "ppo" else "group_norm",
        "algo.kl.init_coef": 0.01 if case == "ppo" else 0,
        "rollout.batch_size": work.prompts,
        "rollout.n_samples_per_prompt": work.group,
        "rollout.micro_batch_size": work.micro_batch,
        "train.batch_size": samples,
        "train.micro_batch_size": work.micro_batch,
        "train.seed": seed,
        "actor.adam.lr": work.learning_rate,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 1,
        "ds.zero_stage": 2,
        "ds.param_dtype": "bf16",
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "logger.tensorboard_dir": out / "logs",
        "logger.wandb.run_name": "run",
    }
    if case == "agent":
        chosen["train.agent_func_path"] = folder / "agent.py"
    else:
        chosen["rollout.max_new_tokens"] = work.max_tokens
    if case in ("grpo", "async", "partial"):
        chosen["reward.remote_url"] = folder / "reward.py"
    if case == "ppo":
        chosen |= {"reward.model_name_or_path": folder / "reward_model", "critic.model_name_or_path": folder / "reward_model"}
        chosen |= {f"{part}.{name}": 1 for part in ("critic", "reward", "ref") for name in ("num_nodes", "num_gpus_per_node")}
        chosen |= {"critic.adam.lr": 3 * work.learning_rate, "algo.advantage.lambd": 0.95, "algo.kl.estimator": "k1"}
    switches = [f"--{name}" for name in SWITCHES.get(case, ())]
    return [part for name, value in chosen.items() for part in (f"--{name}", str(value))] + switches + list(FLAGS)


def run_system(system: str, case: str, work: Work, seed: int, scratch: Path, environment: Path) -> SystemRun:
    out = scratch / system / f"seed-{seed}"
    out.mkdir(parents=True)
    line = ["-m", "openrlhf.cli.train_ppo_ray", *flags(case, work, out, seed)]
    variables = {**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1"}
    if system == OPENRLHF:
        variables.pop("PYTHONPATH", None)
        # two threads that wait for each other are slower than one
        variables |= {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(scratch / "ray")}
        command: list[Any] = [openrlhf_python(environment), *line]
    else:
        command = [sys.executable, "-m", "rlhfless_ray", "run", "--", "python", *line]
        variables["PYTHONPATH"] = str(ROOT)
    began_s = time.time()
    ended = run_process(command, scratch / f"{system}.log", environment=variables, cores=True, folder=out, timeout_s=1800)
    assert ended.cores is not None
    ends, rows = logged(out / "logs" / "run")
    starts = [began_s, *ends]
    for row, start_s, end_s in zip(rows, starts, ends, strict=False):
        row |= {"step_s": end_s - start_s, "core_s": ended.cores.between(start_s, end_s)}
    return SystemRun(system, seed, ends[0] - began_s, rows, ended.peak_mb, ended.processes, ended.wall_s)


def logged(folder: Path) -> tuple[list[float], list[dict[str, float]]]:
    """Return when each step ended, and what was logged of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = {name: events.Scalars(tag) for name, tag in LOGGED.items() if tag in events.Tags()["scalars"]}
    return [one.wall_time for one in found["reward"]], [
        {name: row[i].value for name, row in found.items() if i < len(row)} for i in range(len(found["reward"]))
    ]


def accuracies(models: list[Path], prompts: int, folder: Path) -> list[float]:
    """Return the greedy accuracy of each model on held-out prompts, 0 to 1. `folder`: of the evaluation, which does not exist yet."""
    arguments = [part for path in models for part in ("--model", str(path))]
    settings = {
        "prompts.task": "chain",
        "reward.function": "task",
        "rollout.max_tokens": 160,
        "evaluate.temperature": 0,
        "evaluate.prompts": prompts,
        "run.root": folder.parent,
        "run.name": folder.name,
    }
    command = [sys.executable, "-m", "rlhfless_ray", "evaluate", *arguments, *(f"{key}={value}" for key, value in settings.items())]
    run_process(command, folder.with_suffix(".log"), environment={**os.environ, "PYTHONPATH": str(ROOT)}, memory=False)
    found = json.loads((folder / "evaluation.json").read_text())["scores"]
    assert len(found) == len(models)
    return [one["mean"] for one in found]


def show(runs: list[SystemRun], start: float | None, title: str, console: Console) -> None:
    table = Table(
        "",
        "reward, first → last",
        "length",
        "accuracy",
        "step, s",
        "core-s a step",
        "start-up and first step, s",
        "peak GB, processes",
        title=title,
    )
    for run in runs:
        lengths = [row["response_length"] for row in run.steps]
        table.add_row(
            f"{run.system}, seed {run.seed}",
            f"{run.steps[0]['reward']:.3f} → {run.reached():.3f}",
            f"{lengths[0]:.0f} → {np.mean(lengths[-LAST:]):.0f}",
            "" if run.accuracy is None or start is None else f"{100 * start:.1f} → {100 * run.accuracy:.1f} %",
            run.steady("step_s").show(),
            run.steady("core_s").show(),
            f"{run.first_step_s:.0f}",
            f"{run.peak_mb / 1e3:.1f}, {run.processes}",
        )
    console.print(table)


def show_curves(runs: list[SystemRun], console: Console) -> None:
    """Show what was logged of learning, step by step: means over the seeds, OpenRLHF's / this project's."""
    by = {system: [run.steps for run in runs if run.system == system] for system in (OPENRLHF, OURS)}
    names = [name for name in CURVES if all(name in rows[0] for seeds in by.values() for rows in seeds)]
    table = Table("step", *names, title=f"{OPENRLHF} / {OURS} by step, means over the seeds")
    for i in range(min(len(run.steps) for run in runs)):
        table.add_row(
            str(i + 1), *(" / ".join(f"{np.mean([rows[i][name] for rows in seeds]):.3g}" for seeds in by.values()) for name in names)
        )
    console.print(table)


def targets(runs: list[SystemRun]) -> list[Target]:
    by = {system: [run for run in runs if run.system == system] for system in (OPENRLHF, OURS)}

    def ratio(name: str) -> float:
        ours, theirs = (Spread.of(row[name] for run in by[system] for row in run.steps[DROP:]).median for system in (OURS, OPENRLHF))
        return ours / theirs

    peak = max(run.peak_mb for run in by[OURS]) / max(run.peak_mb for run in by[OPENRLHF])
    found = [
        Target("step time over OpenRLHF's", ratio("step_s"), most=1.0, unit="×"),
        Target("core-seconds over OpenRLHF's", ratio("core_s"), most=1.0, unit="×"),
        Target("peak memory over OpenRLHF's", peak, most=1.0, unit="×"),
    ]
    reached = {system: [run.accuracy for run in mine if run.accuracy is not None] for system, mine in by.items()}
    if all(reached.values()):
        apart = abs(float(np.mean(reached[OURS]) - np.mean(reached[OPENRLHF])))
        found.append(Target("difference of held-out accuracy", 100 * apart, most=100 * SEEDS_APART, unit=" points"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="grpo")
    parser.add_argument("--size", choices=SIZES, default="0.7M", help="494M: not ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--environment", type=Path, default=FOLDER, help="folder of OpenRLHF's environment")
    parser.add_argument("--keep", type=Path, help="folder for logs and models, which stays")
    parser.add_argument("--quick", action="store_true", help="three steps: shows that it runs, measures nothing")
    options = parser.parse_args()
    if options.size == "494M" and options.case == "ppo":
        parser.error("--case ppo --size 494M needs some 30 GB in OpenRLHF: its learner and engine alone took 18.8 GB")
    steps = 3 if options.quick else options.steps
    console = make_console()
    python = openrlhf_python(options.environment)
    scratch = options.keep or Path(tempfile.mkdtemp(prefix="vs-openrlhf-"))
    runs: list[SystemRun] = []
    start = None
    try:
        work = prepare(options.size, steps, scratch / "work", options.case == "ppo")
        compile_operators(python, scratch)
        for seed in options.seeds:
            pair = [run_system(system, options.case, work, seed, scratch, options.environment) for system in (OPENRLHF, OURS)]
            if work.learns:
                models = [work.folder / "model", *(scratch / run.system / f"seed-{seed}" / "model" for run in pair)]
                start, *judged = accuracies(models, 32 if options.quick else 256, scratch / f"judged-{seed}")
                pair = [replace(run, accuracy=accuracy) for run, accuracy in zip(pair, judged, strict=True)]
            runs += pair
            store(options.case, options.size, work, start, runs, console, options.quick)  # a later seed may fail
    finally:
        if options.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)
    show(runs, start, f"{options.case}, {work.parameters / 1e6:.1f} M parameters, {work.prompts} × {work.group} samples", console)
    show_curves(runs, console)
    show_targets(console, targets(runs))


def store(case: str, size: str, work: Work, start: float | None, runs: list[SystemRun], console: Console, quick: bool) -> None:
    line = ["-m", "openrlhf.cli.train_ppo_ray", *flags(case, replace(work, folder=Path("work")), Path("out"), 0)]
    content = {
        "case": case,
        "parameters": work.parameters,
        "command": " ".join(["python", *line]),
        "accuracy_before": start,
        "runs": [{**asdict(run), "step_s": run.steady("step_s"), "core_s": run.steady("core_s")} for run in runs],
    }
    save(f"vs_openrlhf_{case}_{size}", content, targets(runs), console=console, quick=quick)


if __name__ == "__main__":
    main()
