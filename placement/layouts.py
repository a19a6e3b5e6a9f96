"""Layouts: how the ranks of a call, or the engines of a rollout, share a model and its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Ranks of a call, by what they share.

    A rollout has `data` engines of `tensor` slots. Tensor parallelism and sequence parallelism stay inside a node.

    Parameters
    ----------
    data : int
        Copies of the model, each with its share of the batch. With ZeRO they share the model's state.
    tensor, sequence : int
        Ranks that share each matrix, and ranks that share each sequence.
    zero_stage : int
        What the copies share of the state (ZeRO, arXiv 1910.02054).
    offload : bool
        Whether gradients and the optimizer's state stay in host memory.
    threads : int
        Slots of a rank: threads on CPU, 1 on GPU.
    """

    data: int = 1
    tensor: int = 1
    sequence: int = 1
    zero_stage: int = 0
    offload: bool = False
    threads: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.sequence

    @property
    def slots(self) -> int:
        return self.ranks * self.threads

    def __str__(self) -> str:
        counts = {"data": self.data, "tensor": self.tensor, "sequence": self.sequence}
        shared = " × ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        rest = [f"{shared} parallel"] * bool(shared) + [f"ZeRO {self.zero_stage}"] * (self.zero_stage > 0) + ["offloaded"] * self.offload
        rest += [f"{self.threads} threads a rank"] * (self.threads > 1)
        return f"{self.slots} slot{'s' * (self.slots > 1)}" + f" ({', '.join(rest)})" * bool(rest)
