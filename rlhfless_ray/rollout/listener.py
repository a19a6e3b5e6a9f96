"""The driver's work beside a rollout: make samples of finished responses, and find work for slots that engines have left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from placement.scaling.resize_policy import Decision
from rlhfless_ray.agent.episode_samples import EpisodeSamples
from rlhfless_ray.common.deadlines import wait_any
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.rollout.samples import ResponseSamples
from rlhfless_ray.types import Sample

LOOK_S = 1.0  # longest time between two looks at work: its own deadlines need them

OnSamples = Callable[[list[Sample]], None]


class WorkBeside(Protocol):
    """Work on finished samples while engines still generate others, see `OverlapScheduler` and `BesideUpdate`."""

    @property
    def broker(self) -> SlotBroker: ...

    def add_samples(self, samples: list[Sample]) -> None: ...

    def wants_slot(self) -> bool: ...

    def refs(self) -> list[Any]: ...

    def poll(self, seconds: float) -> None: ...

    def finish(self) -> None: ...

    def metrics(self) -> dict[str, Any]: ...


class RolloutListener:
    def __init__(
        self,
        samples: ResponseSamples | EpisodeSamples,
        overlap: WorkBeside | None,
        park: Callable[[Instance], list[Lease]],
        handover_s: float,
        on_samples: OnSamples = lambda new: None,
    ) -> None:
        """`overlap`: None if slots stay with their engines. `park`: parks an engine and returns its leases. `handover_s`: time
        until another process works under them. `on_samples`: called with finished samples."""
        self.samples, self.overlap, self.on_samples = samples, overlap, on_samples
        self.park, self.handover_s = park, handover_s

    def add(self, ended: Iterable[Any]) -> None:
        """Make samples of finished completions or episodes."""
        new = self.samples.add(ended)
        self.on_samples(new)
        if self.overlap is not None:
            self.overlap.add_samples(new)

    def take(self, instance: Instance, seconds: float) -> bool:
        """Take over the slot of an idle engine if there is work for it while others decode for `seconds`. Returns whether it did."""
        if self.overlap is None or seconds < self.handover_s or not instance.started or not self.overlap.wants_slot():
            return False
        self.overlap.broker.put(self.park(instance))
        return True

    def release(self) -> None:
        """Release the slots that engines have left and that have no work, even if the next phase needs them."""
        if self.overlap is not None:
            self.overlap.poll(0.0)
            self.overlap.broker.release()

    def finish(self, seconds: float) -> None:
        """Wait until the work on slots that engines have left is done, and release them. Raises RunError after `seconds`."""
        end_s = time.monotonic() + seconds
        while refs := self.refs():
            what = "the end of work beside the rollout, which may hold the only slot that is left"
            wait_any(refs, end_s - time.monotonic(), what, within_s=LOOK_S, of_s=seconds)
            self.release()

    def refs(self) -> list[Any]:
        return self.overlap.refs() if self.overlap is not None else []

    def poll(self, seconds: float, decide_lease: Callable[[int], Decision]) -> None:
        """Collect finished work, start more, and release slots without work.

        `seconds`: time for which engines will continue. `decide_lease`: decides about a lease, given the number of free ones.
        """
        if self.overlap is None:
            return
        self.overlap.poll(seconds)
        if (free := len(self.overlap.broker.free)) and decide_lease(free).action == "Release":
            self.overlap.broker.release()
