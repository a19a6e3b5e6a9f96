"""What every kind of reward is: a source that pickles, a worker that it makes where scoring runs, and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rlhfless_ray.types import Sample

Decode = Callable[[list[int]], str]  # token ids → text, special tokens kept


@dataclass(frozen=True)
class Score:
    """Exactly one of `reward` and `error` is set."""

    key: int
    reward: float | None
    error: str | None = None
    score: float | None = None  # for dynamic filtering, where it is told apart from the reward
    extra_logs: Mapping[str, float] = field(default_factory=dict)


class Worker:
    """What a scoring process holds."""

    def score(self, items: list[Any], budget_s: float) -> list[Score]:
        """Of as many items as were done in that time; of none where something is waited for."""
        raise NotImplementedError

    def open(self, threads: int) -> None:
        """Its slots have so many cores."""

    def park(self) -> None:
        """Leave the device: the slot goes to others."""


class Source:
    """Everything that scoring processes, on other machines too, need. It pickles."""

    pool_kind: ClassVar[str] = "score"  # the function whose processes score
    on_device: ClassVar[bool] = False  # whether they hold a device's memory

    def item(self, key: int, sample: Sample, decode: Decode) -> tuple[Any, ...]:
        """What a worker is given of a sample; `key` comes first."""
        raise NotImplementedError

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        raise NotImplementedError

    def call_s(self, timeout_s: float) -> float:
        """The longest that a worker may take beyond the time it was asked to answer in."""
        return timeout_s
