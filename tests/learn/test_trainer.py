"""Backends of `Trainer` pass its suite: DeepSpeed, and forty lines of plain torch, so that the suite asks nothing of DeepSpeed."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batch_tensors import padded, passed
from rlhfless_ray.learn.micro_batches import MicroBatch
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_model
from rlhfless_ray.learn.trainer import FIRST, OptimizerStep
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.types import Span
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tensor_file import Files
from tests.conftest import ROOT, environment
from tests.learn import trainer_conformance
from tests.learn.tiny_policy import tiny_policy


class PlainTrainer:
    """One process, torch's AdamW, and nothing else."""

    RATE = 1e-3
    engine: Any

    def open(self, wrapped: nn.Module, state: Mapping[str, Any] | None, task: str | None = None) -> None:
        self.engine = wrapped.train()
        self.optimizer = torch.optim.AdamW(wrapped.parameters(), lr=self.RATE, eps=1e-3, weight_decay=0.0)
        if state is not None:
            wrapped.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])

    def passes(self, forward: Callable[[dict[str, Tensor]], Tensor], batch: Batch, cuts: Sequence[MicroBatch]) -> Tensor:
        return passed(forward, batch, cuts, torch.device("cpu"))

    def accumulate(self, batch: Batch, cuts: Sequence[MicroBatch], loss_of: Callable[[dict[str, Tensor], MicroBatch], Tensor]) -> None:
        for cut in cuts:
            loss = loss_of(padded(batch, cut or FIRST, torch.device("cpu")), cut)
            (loss if cut else loss * 0.0).backward()

    def update(self, loss_is_finite: bool) -> OptimizerStep:
        gradients = [p.grad for p in self.engine.parameters() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        if loss_is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return OptimizerStep(norm, self.RATE, self.RATE, "" if loss_is_finite else "the loss is not finite")

    def weights(self, place: int | None = None, count: int | None = None) -> Mapping[str, np.ndarray]:
        return {name: p.detach().numpy() for name, p in self.engine.model.named_parameters()}

    def state_files(self) -> Files:
        content = io.BytesIO()
        torch.save({"weights": self.engine.state_dict(), "optimizer": self.optimizer.state_dict()}, content)
        return {"state.pt": content.getvalue()}

    def leave_device(self) -> list[Span]:
        return []

    return_to_device = leave_device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder / "model", tiny_policy())
    return folder / "model"


@pytest.mark.parametrize("check", trainer_conformance.CHECKS)
def test_plain_torch_passes_the_suite(model: Path, check: Callable[[trainer_conformance.Opened], None]) -> None:
    def opened(files: Files | None) -> PlainTrainer:
        trainer = PlainTrainer()
        state = None if files is None else torch.load(io.BytesIO(bytes(files["state.pt"])))
        trainer.open(TokenLogprobs(load_model(model, "float32", False)), state)
        return trainer

    check(opened)


def test_a_trainer_that_drops_a_part_of_the_gradients_does_not_pass(model: Path) -> None:
    class Forgetful(PlainTrainer):
        def accumulate(self, batch: Batch, cuts: Sequence[MicroBatch], loss_of: Any) -> None:
            self.optimizer.zero_grad()
            super().accumulate(batch, cuts, loss_of)

    def opened(files: Files | None) -> PlainTrainer:
        trainer = Forgetful()
        trainer.open(TokenLogprobs(load_model(model, "float32", False)), None)
        return trainer

    with pytest.raises(AssertionError):
        trainer_conformance.check_gradients_add_up(opened)


@pytest.mark.learner
def test_deepspeed_passes_the_suite_at_each_stage_of_zero(warm_processes: None) -> None:
    script = str(Path(trainer_conformance.__file__))
    done = subprocess.run(
        forked([sys.executable, script, "0", "1", "2", "3"]),
        cwd=ROOT,
        env={**environment(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.count("check_") == 4 * len(trainer_conformance.CHECKS), done.stderr[-3000:]
