"""What a run left in its folder, its policy under the weights of any of its checkpoints, and runs that tests look into."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from benchmarks.common.call_hooks import surround
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Prompt, Request, Sample, Scored


def with_reward(sample: Sample, reward: float | None) -> Scored:
    """Return the sample with this reward, or with an error."""
    return Scored(**vars(sample), reward=reward, error="no" if reward is None else None)


def rows(run: Path, first_step: int = 0) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl from `first_step` on."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["step"] >= first_step]


class CheckpointPolicy:
    """The policy of a run, whose checkpoints hold the weights of each version."""

    def __init__(self, recipe: Recipe, run: Path) -> None:
        from rlhfless_ray.learn.policy_model import load_model
        from rlhfless_ray.weights.load_policy import initial_policy
        from rlhfless_ray.weights.model_folder import as_folder

        self.run = run
        with as_folder(initial_policy(recipe)[0]) as initial:
            self.model = load_model(initial, "float32", False)

    def load(self, version: int) -> None:
        """Take the weights of a version."""
        import torch
        from safetensors.numpy import load_file

        weights = load_file(self.run / "checkpoints" / f"step_{version}" / "model.safetensors")
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)

    def logprobs(self, sample: Sample) -> np.ndarray:
        """Return the log-probabilities of the response's tokens under the loaded weights."""
        import torch

        prompt, response = sample.prompt.token_ids, sample.completion.token_ids
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).numpy()[np.arange(len(response)), response]


@contextmanager
def watched_phases(run: Runtime, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` inside the block whenever the run shows how far it is."""
    progress = run.parts.stages.context.record.progress
    phase = progress.phase

    def show(what: str) -> None:
        phase(what)
        look()

    progress.phase = show  # type: ignore[method-assign]
    try:
        yield
    finally:
        progress.phase = phase  # type: ignore[method-assign]


@contextmanager
def engines_in_step() -> Iterator[None]:
    """Inside the block, an engine goes on only after the driver has read its last report, however late that is on a busy machine."""
    from ray.actor import ActorMethod

    options = ActorMethod.options

    def one_ahead(method: Any, **more: Any) -> Any:
        streams = more.get("num_returns") == "streaming"
        return options(method, **more, **({"_generator_backpressure_num_objects": 1} if streams else {}))

    ActorMethod.options = one_ahead
    try:
        yield
    finally:
        ActorMethod.options = options


class HookedRun(Runtime):
    """A run whose `generate` surrounds each call of `RolloutSession.generate`, which is `roll_out`."""

    def __enter__(self) -> Self:
        run = super().__enter__()
        surround(self.parts.session, "generate", lambda inner, step, *more: self.generate(step, lambda: inner(step, *more)))
        return run

    def generate(self, step: Step, roll_out: Callable[[], list[Sample]]) -> list[Sample]:
        return roll_out()

    @property
    def is_beside_update(self) -> bool:
        return self.parts.session.update is not None


def step_requests(recipe: Recipe, step: int, *rounds: list[Prompt]) -> list[Request]:
    """Return the requests of a step's last round of prompts. Earlier rounds had groups that were dropped."""
    groups = GroupsInFlight(recipe)
    for n, prompts in enumerate(rounds):
        source: Any = SimpleNamespace(missing=len(prompts), draw=lambda *_, p=prompts: p, redraw=lambda p=prompts: p)
        requests = groups.begin(step, 1, source, refills=n > 0).requests(recipe)
    return requests
