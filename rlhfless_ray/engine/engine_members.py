"""The further members of an engine, as its own process sees them.

This module does not import vLLM, so that all members can import it at the same time.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhfless_ray.local.member_process import MemberProcess

STEP_CALLS = ("execute_model", "sample_tokens")

started: list[EngineMember] = []  # ahead of the engine, whose executor vLLM itself creates


class EngineMember(MemberProcess):
    def __init__(self, on_cpu: bool, architectures: Sequence[str]) -> None:
        super().__init__("rlhfless_ray.engine.engine_member", str(int(on_cpu)), *architectures)

    def send_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Send tensors one by one, so that no process holds a second copy of all."""
        for name, array in weights.items():
            pickle.dump((name, array.dtype, array.shape), self.writer)
            self.writer.write(bytes_of(np.ascontiguousarray(array)))
        pickle.dump(None, self.writer)
        self.writer.flush()


def start_members(count: int, on_cpu: bool, architectures: Sequence[str] = ()) -> None:
    """Start the processes of further members up to `count`. They end with this process. `architectures`: as in `prepare`."""
    started.extend(EngineMember(on_cpu, architectures) for _ in range(count - len(started)))


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
