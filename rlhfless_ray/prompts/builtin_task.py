"""Interface of built-in tasks: rows from a seed, supervised responses for a warm start, and an exact verifier."""

from __future__ import annotations

import math
import zlib
from typing import Any, Literal, Protocol

import numpy as np

Split = Literal["train", "heldout"]
Row = dict[str, Any]


class Task(Protocol):
    """A built-in task. Instances hold no state: everything follows from the arguments."""

    name: str
    symbols: tuple[str, ...]  # vocabulary of prompts and responses, one token each
    max_response_tokens: int  # limit of a supervised response, end-of-sequence token included

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Return `n` rows with the keys "prompt" and "answer".

        The first rows do not depend on `n`. No prompt occurs in both splits, whatever the seeds.
        """
        ...

    def example(self, row: Row, rng: np.random.Generator) -> str:
        """Return a supervised response to the row, without the end-of-sequence token."""
        ...

    def verify(self, response: str, row: Row) -> float:
        """Return 1.0 for an exactly correct response (without special tokens), else 0.0."""
        ...


def seeded(seed: int, split: Split) -> np.random.Generator:
    """Return the random generator of a split's rows."""
    return np.random.default_rng([seed % 2**63, 0 if split == "train" else 1])


def is_in_split(prompt: str, split: Split) -> bool:
    """Return whether the prompt belongs to the split. A quarter of all prompts, chosen by checksum, is held out."""
    return (zlib.crc32(prompt.encode()) % 4 == 0) == (split == "heldout")


def heavy_tailed_count(rng: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    """Draw a log-normal count until it lies in [low, high]."""
    while True:
        count = round(rng.lognormal(math.log(median), sigma))
        if low <= count <= high:
            return count
