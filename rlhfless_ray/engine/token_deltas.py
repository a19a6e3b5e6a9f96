"""An engine's report while it works: new tokens of all its sequences, in a few flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from placement.drafting.acceptance import News

GOES_ON, STOP, LENGTH, CUT = range(4)
ENDS = ("", "stop", "length", "cut")  # by index; "stop" and "length" are vLLM's finish reasons


@dataclass(frozen=True)
class TokenDeltas:
    """New tokens of n distinct sequences, m tokens in all.

    Attributes:
        version: weight version of the tokens.
        keys: (n,) keys of the requests.
        starts: (n,) position of the first new token in the response.
        counts: (n,) number of new tokens.
        ends: (n,) int8 index into `ENDS`.
        token_ids, logprobs: (m,) int32 and float32, sequence after sequence.
        computed: context tokens that this engine computed, by key, for moved sequences with their first token here. Only engines that
            keep KV pages report it.
        observed: accepted and rejected drafts, for `Acceptance.merge`.
        experts: `Completion.experts` of the responses that ended here, by key, if the engine records them.
    """

    version: int
    keys: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    computed: dict[int, int] = field(default_factory=dict)
    observed: Sequence[News] = ()
    experts: dict[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, version: int, news: Sequence[tuple[int, int, int, int]], token_ids: Sequence[int], logprobs: np.ndarray) -> TokenDeltas:
        """Build from `news`: (key, start, count, end) of each sequence."""
        table = np.array(news, np.int64).reshape(-1, 4)
        return cls(
            version,
            table[:, 0],
            table[:, 1],
            table[:, 2],
            table[:, 3].astype(np.int8),
            np.array(token_ids, np.int32),
            np.asarray(logprobs, np.float32),
        )

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def bounds(self) -> list[int]:
        """(n + 1,) positions in the flat arrays where sequences begin and end."""
        return [0, *accumulate(self.counts.tolist())]
