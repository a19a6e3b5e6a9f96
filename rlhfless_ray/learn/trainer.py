"""The interface of what trains a model. Losses of the learner, the critic and the supervised stages are written on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batches import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhfless_ray.types import Span
    from rlhfless_ray.weights.tensor_file import Files

FIRST: MicroBatch = [np.arange(1)]


class OptimizerStep(NamedTuple):
    """An optimizer step. `grad_norm`: before clipping. `skipped`: why it was not applied, empty if it was."""

    grad_norm: float
    learning_rate: float
    next_learning_rate: float
    skipped: str


class Trainer(Protocol):
    """One rank of a group that trains a model. Every rank makes the same calls in the same order.

    `tests/learn/trainer_conformance.py` is what every backend passes. A group is resized by `open`: of another number of ranks, with the
    state that `state_files` of all earlier ranks returned.
    """

    engine: Any  # called for a forward pass of the opened module

    def open(self, wrapped: nn.Module, state: dict[str, Any] | None, task: str | None = None) -> None:
        """Train `wrapped.model`, from `state` if there is one (see `read_state`). `task`: peft's task type of adapters."""

    def passes(self, forward: Callable[[dict[str, Tensor]], Tensor], batch: Batch, cuts: Sequence[MicroBatch]) -> Tensor:
        """Return the value of `forward` for each response token of these micro-batches, without gradients, 0 for other tokens."""

    def accumulate(self, batch: Batch, cuts: Sequence[MicroBatch], loss_of: Callable[[dict[str, Tensor], MicroBatch], Tensor]) -> None:
        """Add the gradients of micro-batches. Each is a part of the whole step's loss, and the parts of all ranks add up."""

    def update(self, loss_is_finite: bool) -> OptimizerStep:
        """Clip the accumulated gradients and make an optimizer step, unless loss or gradient is not finite."""

    def weights(self, place: int | None = None, count: int | None = None) -> Mapping[str, Any]:
        """Return this rank's slices of the weights that engines get, by their names in a file."""

    def state_files(self) -> Files:
        """Return this rank's part of a snapshot. Needs no device."""

    def leave_device(self) -> list[Span]:
        """Move all state to the host."""

    def return_to_device(self) -> list[Span]:
        """Undo `leave_device`."""
