"""The interface of an engine, behind which a rollout generates responses. `docs/backends.md` says how to write one.

Backends: `exact` (`vllm_engine.py`), `stock` (`stock_engine.py`), and the replayed engine of the benchmarks. Each passes
`tests/engine/test_engine_contract.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhfless_ray.engine.control_queue import ControlQueue
from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.types import EngineStep, Request, Span


@dataclass(frozen=True)
class EngineStats:
    """The work of an engine since its last report.

    Attributes:
        steps: one record for each decode step.
        spans: intervals in which commands were carried out.
        until_s: end of the reported work on the wall clock, seconds since the epoch.
    """

    steps: list[EngineStep]
    spans: list[Span]
    until_s: float


class Engine(Protocol):
    """An engine in this process. It starts without weights. One thread calls it; another one may add commands to a `ControlQueue`.

    If it loses another process that it needs, it ends this one, see `exit_as_lost`: nothing waits for what will never come, and the pool
    replaces it as it replaces any lost process.
    """

    @property
    def version(self) -> int | None:
        """The loaded weight version. None before the first `load`, after `park`, and after a `load` that failed."""

    def load(self, version: int, weights: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray] | None = None) -> None:
        """Replace the weights. Between two reports of `generate`, running requests continue under the new version.

        Args:
            base: weights of the model below, if `weights` are an adapter's.

        Raises:
            ValueError: The model has weights that are not among these, or does not know some of them. The message names the first.
        """

    def generate(
        self, requests: Iterable[Request], interval_s: float = float("inf"), control_queue: ControlQueue | None = None
    ) -> Iterator[TokenDeltas]:
        """Yield new tokens about every `interval_s` seconds until every request has ended or was cut.

        The queue's commands cut requests and add others. The last tokens of a cut request, the first token of an added one and the end
        of an `awaited` one are reported at once. A request with `generated` tokens continues after them. If the caller stops iterating,
        all requests are dropped.

        Raises:
            RuntimeError: There are no weights, or a key is running already.
        """

    def take_stats(self) -> EngineStats:
        """Return the statistics since the last call."""

    def park(self) -> float:
        """Release the memory of weights and KV cache. Returns the device memory that stays allocated, in MB.

        Raises RuntimeError while requests are running.
        """

    def unpark(self) -> None:
        """Prepare a parked engine for `load`. Does nothing if it is not parked."""

    def memory_mb(self) -> float:
        """Return the host memory of this process and of the engine's other processes in MB."""

    def close(self) -> None:
        """End the engine's other processes."""
