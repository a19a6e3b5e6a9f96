"""Interface of all rewards: a picklable source, the worker that it creates in scoring processes, and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.types import Sample

Decode = Callable[[list[int]], str]  # token ids → text, special tokens kept
Item = tuple[Any, ...]  # input of a source's worker; the first element is the position in the step's samples
MakeItem = Callable[[int, "Sample"], Item]


@dataclass(frozen=True)
class Score:
    """Result for one sample: exactly one of `reward` and `error` is set."""

    key: int
    reward: float | None
    error: str | None = None
    score: float | None = None  # for dynamic filtering, if it differs from the reward
    extra_logs: Mapping[str, float] = field(default_factory=dict)


class Worker:
    """The part of a source that runs in a scoring process. `note`: for the user, about its processor, once it is open."""

    note = ""

    def score(self, items: list[Any], budget_s: float) -> list[Score]:
        """Return scores of the items that were finished within `budget_s`; none if a server does not answer."""
        raise NotImplementedError

    def open(self, threads: int) -> None:
        """Use `threads` CPU cores from now on."""

    def park(self) -> None:
        """Move everything off the device, because the slot goes to another function."""


class Source:
    """Everything that a scoring process needs, on any machine. It pickles."""

    pool_kind: ClassVar[str] = "score"  # pool of the processes that score
    on_device: ClassVar[bool] = False  # whether they use a device's memory

    def item(self, key: int, sample: Sample, decode: Decode) -> Item:
        """Convert a sample to a worker's input, which begins with `key`."""
        raise NotImplementedError

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        raise NotImplementedError

    def call_s(self, timeout_s: float) -> float:
        """Return the maximum seconds that a worker may need beyond its reply interval."""
        return timeout_s


def item_factory(source: Source, tokenizer: PreTrainedTokenizerBase) -> MakeItem:
    """Return the function that converts a sample, with its key, to the input of the source's worker."""
    return lambda key, sample: source.item(key, sample, lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False))
