"""What a built-in task is: rows made from a seed, supervised responses for a warm start, and an exact verifier."""

from __future__ import annotations

import math
import zlib
from typing import Any, Literal, Protocol

import numpy as np

Split = Literal["train", "heldout"]
Row = dict[str, Any]


class Task(Protocol):
    """What a built-in task offers. Instances hold no state: everything follows from the arguments."""

    name: str
    symbols: tuple[str, ...]  # the vocabulary of its prompts and responses, each one token
    max_response_tokens: int  # of a supervised response, the end-of-sequence token included

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """`n` rows with the keys "prompt" and "answer". The first rows do not depend on `n`, and no prompt occurs in
        both splits, whatever the seeds."""
        ...

    def example(self, row: Row, rng: np.random.Generator) -> str:
        """A supervised response to the row, without the end-of-sequence token."""
        ...

    def verify(self, response: str, row: Row) -> float:
        """1.0 for an exactly right response (special tokens removed), else 0.0."""
        ...


def seeded(seed: int, split: Split) -> np.random.Generator:
    """The generator behind a split's rows."""
    return np.random.default_rng([seed % 2**63, 0 if split == "train" else 1])


def belongs(prompt: str, split: Split) -> bool:
    """Whether the prompt may be a row of the split: a quarter of all prompts, by their checksum, is held out."""
    return (zlib.crc32(prompt.encode()) % 4 == 0) == (split == "heldout")


def heavy_tailed_count(rng: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    """A log-normal count, drawn again until it lies in low … high."""
    while True:
        count = round(rng.lognormal(math.log(median), sigma))
        if low <= count <= high:
            return count
