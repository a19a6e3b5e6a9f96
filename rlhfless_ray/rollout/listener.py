"""What the driver does beside a rollout: samples of what has ended, and work for the slots that engines have left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from placement.scaling.resize_policy import Decision
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.rollout.overlap import OverlapScheduler
from rlhfless_ray.types import Sample


class SampleSink(Protocol):
    """What makes samples of what has ended: of completions, or of episodes."""

    def add(self, ended: Iterable[Any], /) -> list[Sample]: ...


class RolloutListener:
    def __init__(
        self, samples: SampleSink, tail: OverlapScheduler | None, park: Callable[[Instance], list[Lease]], handing_over_s: float
    ) -> None:
        """`tail`: None where slots stay with their engines. `park`: makes an engine leave its slot; `handing_over_s`: what it
        takes until others work there."""
        self.samples, self.tail = samples, tail
        self.park, self.handing_over_s = park, handing_over_s

    def heard(self, ended: Iterable[Any]) -> None:
        new = self.samples.add(ended)
        if self.tail is not None:
            self.tail.heard(new)

    def take(self, instance: Instance, seconds: float) -> bool:
        """Whether the slot of an engine without work is put to use while others go on for `seconds`."""
        if self.tail is None or seconds < self.handing_over_s or not instance.started or not self.tail.wants_slot():
            return False
        self.tail.take(self.park(instance))
        return True

    def refs(self) -> list[Any]:
        return self.tail.refs() if self.tail is not None else []

    def poll(self, seconds: float, fate: Callable[[int], Decision]) -> None:
        """`seconds`: for how long engines go on; `fate` (slots without work) → what becomes of one."""
        if self.tail is None:
            return
        self.tail.poll(seconds)
        if (free := len(self.tail.broker.free)) and fate(free).action == "Release":
            self.tail.broker.release()
