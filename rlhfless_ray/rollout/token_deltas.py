"""What an engine says while it works: the tokens since its last word, of all its sequences in a few flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

GOES_ON, STOP, LENGTH, CUT = range(4)
ENDS = ("", "stop", "length", "cut")  # in this order; of vLLM's finish reasons the first two that end a response


@dataclass(frozen=True)
class TokenDeltas:
    """News of n sequences, m tokens in all; a sequence is in it once.

    version: weight version of the tokens; keys (n,): the requests; starts (n,): position in the response of the first token
    told here; counts (n,): tokens told; ends (n,) int8: index into `ENDS`; token_ids (m,) int32 and logprobs (m,) float32:
    sequence after sequence. computed: by key, of sequences that came from elsewhere and have their first token here, how much of
    their context was computed here; known where engines keep KV pages.
    """

    version: int
    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    computed: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, version: int, news: Sequence[tuple[int, int, int, int]], token_ids: Iterable[int] | np.ndarray, logprobs: np.ndarray
    ) -> TokenDeltas:
        """`news`: (key, start, count, end) of each sequence."""
        table = np.array(news, np.int64).reshape(-1, 4)
        return cls(
            version,
            table[:, 0],
            table[:, 1],
            table[:, 2],
            table[:, 3].astype(np.int8),
            np.asarray(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids), np.int32),
            np.asarray(logprobs, np.float32),
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def bounds(self) -> list[int]:
        """(n + 1,) where each sequence's tokens begin and end in the flat arrays."""
        return [0, *accumulate(self.counts.tolist())]
