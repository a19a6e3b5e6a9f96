"""Small real runs of every rollout mode whose results do not depend on time, for `benchmarks.fingerprint --runs`.

A partial rollout cuts responses where a clock says so. Such a run repeats the recorded orders of completion of another one, which with the
seed determine its tokens. Work in the tail of a rollout is off. Agents are left out of partial rollouts: where an episode was cut is not
recorded token by token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np

from benchmarks.common.call_hooks import surround
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.session.weight_timing import WeightTiming
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import UNFINISHED, Completion, Sample, Scored

STEPS = 3
LOGPROB_DIGITS = 5  # decimals: engines compute logits in batches whose sizes depend on time
WEIGHT_DIGITS = 6
Orders = dict[str, dict[str, Any]]  # name of a rollout → its recorded order of completion

REWARD = "def shorter(prompt, response, row):\n    return -len(response) / 10\n"
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turns, self.last = 0, 1 + sum(str(states["label"]).encode()) % 3
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        return {"rewards": -len(states["action_text"]) / 10, "scores": 0.5, "environment_feedback": f"{states['label']};",
                "done": self.turns > self.last, "sampling_params": states["sampling_params"]}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
PARTIAL: dict[str, Any] = {"partial": "continue", "max_lag_steps": 2, "oversample": 2, "max_tokens": 400, "stream_interval_s": 0.02}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one step off": {"max_lag_steps": 1},
    "partial, continue": PARTIAL,
    "partial, restart": {**PARTIAL, "partial": "restart"},
    "beside the update": {**PARTIAL, "ahead": True, "max_lag_steps": 1, "oversample": 1},
}


def recipe_of(mode: str, agent: bool, folder: Path, name: str = "run") -> Recipe:
    """Return the recipe of a small run, with one engine and a policy of 0.1 M parameters from scratch."""
    (folder / "reward_file.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    tree: dict[str, Any] = {
        "run": {"name": name, "root": str(folder / "runs"), "steps": STEPS, "seed": 3},
        "policy": {"hidden_size": 64, "layers": 2},
        "prompts": {"task": "chain", "batch_prompts": 8, "rows": 64},
        "evaluate": {"prompts": 0},
        "rollout": {
            "samples_per_prompt": 4,
            "max_tokens": 40,
            "stop": ["17", "4\n", "9+"],
            "kv_cache_mb": 64,
            "max_running": 64,
            "max_actors": 1,
            **MODES[mode],
        },
        "functions": {"elastic": False},
        "reward": {"function": f"{folder / 'reward_file.py'}:shorter"},
        "learner": {"learning_rate": 0.001},
        "checkpoint": {"every_steps": 1, "keep": 9},
        "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},
    }
    if agent:
        tree |= {"reward": {}, "agent": {"path": str(folder / "agent.py"), "max_tokens": 120, "turn_tokens": 30}}
    return Recipe.parse(tree)


class LateEnd(Runtime):
    """Updates end, for the rollout beside them, once some of its responses are finished: on an idle machine they would end first."""

    def __enter__(self) -> Self:
        run = super().__enter__()
        surround(run.parts.session, "update_is", lambda update_is, update: update_is(replace(update, is_ready=lambda: False)))
        return run


class RepeatedRun(Runtime):
    """Ends each response where another run cut it."""

    def __init__(self, recipe: Recipe, orders: Orders) -> None:
        super().__init__(recipe)
        self.orders = orders

    def __enter__(self) -> Self:
        run = super().__enter__()
        surround(run.parts.session, "generate", self.generate)
        return run

    def generate(self, roll_out: Callable[..., list[Sample]], step: Step, *more: Any) -> list[Sample]:
        batch, session = step.batch, self.parts.session
        if not batch.cuts:
            return roll_out(step, *more)
        order = self.orders[session.groups.rollout_name(step.number, session.update is not None)]
        groups = [[group.prompt.index, group.begun] for group in batch.groups]
        assert groups == order["groups"], f"other groups in step {step.number}: {groups} instead of {order['groups']}"
        cut = {(row, number): tokens for row, number, tokens in order["cut"]}
        names = {key: (name.row, name.number) for key, name in enumerate(batch.ids)}
        cuts = {key: cut[name] for key, name in names.items() if name in cut}
        asked = batch.requests(session.context.recipe)
        most = [max(cuts.get(one.key, one.max_tokens), batch.made[one.key] + 1) for one in asked]
        limited = [replace(one, max_tokens=int(tokens)) for one, tokens in zip(asked, most, strict=True)]
        with (
            patch.object(batch, "requests", lambda recipe: limited),
            patch.object(batch, "is_enough", lambda finished: len(finished) == len(asked)),
        ):
            batch.chosen = order["trained"]
            samples = roll_out(step, *more)
        for key, tokens in cuts.items():
            samples[key] = replace(samples[key], completion=cut_at(samples[key].completion, tokens))
        return samples


def cut_at(done: Completion, tokens: int) -> Completion:
    """Return the completion with its first tokens only, unfinished."""
    left, versions = tokens, []
    for version, count in done.versions:
        versions += [(version, min(count, left))] if left else []
        left -= min(count, left)
    parts: dict[str, Any] = {"token_ids": done.token_ids[:tokens], "logprobs": done.logprobs[:tokens], "versions": tuple(versions)}
    return replace(done, finish_reason=UNFINISHED, **parts)


def orders_of(run: Path) -> Orders:
    """Return the orders of completion that a run recorded."""
    return {file.stem.removeprefix("order_"): json.loads(file.read_text()) for file in sorted((run / "samples").glob("order_*.json"))}


def record(mode: str, folder: Path) -> Orders:
    """Return the orders of completion of a new run."""
    recipe = recipe_of(mode, False, folder, "recorded")
    ends = patch.object(WeightTiming, "ends", lambda timing, rollout: len(rollout.result.completions) >= 12)
    beside = mode == "beside the update"
    with ends if beside else nullcontext(), (LateEnd if beside else Runtime)(recipe) as run:
        for _ in run:
            pass
    return orders_of(folder / "runs" / "recorded")


def hashes(mode: str, agent: bool, folder: Path, orders: Orders) -> dict[str, str]:
    """Run a mode, and return hashes by step of samples, log-probabilities and weights, of the ledger and of the orders of completion."""
    recipe, found = recipe_of(mode, agent, folder), dict[str, str]()
    run_folder = folder / "runs" / "run"
    ends = patch.object(WeightTiming, "ends", lambda timing, rollout: False)
    with ends, RepeatedRun(recipe, orders) as run:
        for step in run:
            found[f"samples of step {step.number}"] = _hash(map(_described, step.samples))
            logprobs = [np.round(s.completion.logprobs.astype(float), LOGPROB_DIGITS).tolist() for s in step.samples]
            found[f"log-probabilities of step {step.number}"] = _hash(logprobs)
    for version in range(1, STEPS + 1):
        found[f"weights {version}"] = _weights(run_folder / "checkpoints" / f"step_{version}" / "model.safetensors")
    kinds = {(row.kind, row.activity) for row in read_ledger(run_folder / "ledger.csv")}
    return found | {"ledger": _hash(sorted(kinds)), "orders": _hash([orders_of(run_folder)])}


def _described(sample: Scored) -> list[Any]:
    done = sample.completion
    mask = None if sample.action_mask is None else sample.action_mask.tolist()
    reward = None if sample.reward is None else round(sample.reward, 9)
    return [sample.id.row, sample.id.number, done.token_ids.tolist(), done.versions, done.finish_reason, reward, mask]


def _hash(values: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]


def _weights(path: Path) -> str:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return _hash([name, np.round(tensors[name].astype(float), WEIGHT_DIGITS).tolist()] for name in sorted(tensors))
