"""What every backend of `Trainer` does: python trainer_conformance.py STAGE [STAGE …] checks DeepSpeed at these stages of ZeRO.

Each check gets `opened(files)`, which returns a trainer of the same small model, from the files of a snapshot if there are any.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batches import MicroBatch
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_model
from rlhfless_ray.learn.process_group import free_port
from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.rank_state import read_state
from rlhfless_ray.learn.trainer import Trainer
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tensor_file import Files
from tests.learn.tiny_policy import random_batch, tiny_policy

Opened = Callable[[Files | None], Trainer]
BATCH: Batch = random_batch(np.random.default_rng(5))
ROWS: MicroBatch = [np.array([i]) for i in range(len(BATCH))]
HALVES = [ROWS[: len(ROWS) // 2], ROWS[len(ROWS) // 2 :]]


def forward(trainer: Trainer) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda tensors: trainer.engine(1.0, **tensors)[0]


def loss_of(trainer: Trainer, factor: float = 1.0) -> Callable[[dict[str, Tensor], MicroBatch], Tensor]:
    return lambda tensors, cut: -factor * forward(trainer)(tensors).sum() / len(BATCH.logprobs)


def values(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return copies of the weights, whole, because there is one rank."""
    return {name: np.array(getattr(value, "values", value)).reshape(-1) for name, value in trainer.weights().items()}


def trained(opened: Opened, *cuts: list[MicroBatch], factor: float = 1.0) -> tuple[dict[str, np.ndarray], float]:
    """Make one step with the gradients of these calls of `accumulate`. Returns the weights and the gradient norm."""
    trainer = opened(None)
    for some in cuts:
        trainer.accumulate(BATCH, some, loss_of(trainer, factor))
    made = trainer.update(True)
    assert made.skipped == "" and made.learning_rate > 0
    return values(trainer), made.grad_norm


def check_passes(opened: Opened) -> None:
    """They return the values of the given sequences only, and leave no gradients."""
    trainer = opened(None)
    whole = trainer.passes(forward(trainer), BATCH, [ROWS])
    first = trainer.passes(forward(trainer), BATCH, [HALVES[0], []])
    count = int(BATCH.response_lengths[: len(HALVES[0])].sum())
    assert whole.shape == (len(BATCH.logprobs),) and not whole.requires_grad and bool((whole < 0).all())
    assert torch.allclose(first[:count], whole[:count], atol=1e-5) and not first[count:].any()
    trainer.accumulate(BATCH, [ROWS], loss_of(trainer))
    trainer.update(True)
    same(values(trainer), trained(opened, [ROWS])[0], 0)


def check_gradients_add_up(opened: Opened) -> None:
    """Over micro-batches, over calls, and with ranks' parts without work, which count nothing."""
    (whole, norm), others = trained(opened, [ROWS]), [trained(opened, HALVES), trained(opened, [HALVES[0]], [[], HALVES[1], []])]
    for weights, other_norm in others:
        same(weights, whole, 1e-4)
        assert abs(other_norm - norm) < 1e-3 * norm


def check_skipped_step(opened: Opened) -> None:
    """A loss that is not finite changes nothing, and its gradients are dropped."""
    trainer = opened(None)
    before = values(trainer)
    trainer.accumulate(BATCH, [ROWS], loss_of(trainer, 3.0))
    assert trainer.update(False).skipped == "the loss is not finite"
    same(values(trainer), before, 0)
    trainer.accumulate(BATCH, [ROWS], loss_of(trainer))
    assert trainer.update(True).skipped == ""
    same(values(trainer), trained(opened, [ROWS])[0], 0)


def check_snapshot(opened: Opened) -> None:
    """A trainer that is opened from one goes on as if nothing had happened. Parked, a trainer can make one too."""
    trainer = opened(None)
    trainer.accumulate(BATCH, [ROWS], loss_of(trainer))
    trainer.update(True)
    trainer.leave_device()
    files = {name: bytes(content) for name, content in trainer.state_files().items()}
    trainer.return_to_device()
    other = opened(files)
    same(values(other), values(trainer), 0)
    for one in (trainer, other):
        one.accumulate(BATCH, HALVES, loss_of(one))
        one.update(True)
    same(values(other), values(trainer), 0)


CHECKS = (check_passes, check_gradients_add_up, check_skipped_step, check_snapshot)


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == wanted.keys() and len(wanted) > 5
    for name, value in wanted.items():
        assert np.allclose(found[name], value, rtol=0, atol=tolerance), (name, np.abs(found[name] - value).max())


def deepspeed(folder: Path, stage: int, port: int) -> Opened:
    tree: dict[str, Any] = {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "learner": {"zero_stage": stage, "learning_rate": 1e-3, "adam_eps": 1e-3, "grad_clip": 0.0},
    }

    def opened(files: Files | None) -> Trainer:
        trainer = TrainerRank(learner_settings(Recipe.parse(tree)))
        trainer.join_process_group(("127.0.0.1", port))
        model = load_model(folder, "float32", False, maps=stage == 3)
        trainer.open(TokenLogprobs(model), None if files is None else read_state(files))
        return trainer

    return opened


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name) / "model", tiny_policy())
        port = free_port()
        for text in sys.argv[1:]:
            for check in CHECKS:
                check(deepspeed(Path(name) / "model", int(text), port))
                print(f"stage {text}: {check.__name__}", flush=True)
