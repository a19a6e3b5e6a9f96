"""A second built-in task: sort the letters. `qkab=` is answered by `abkq`, so the prompt determines the length.

In many supervised responses two neighbours are swapped. A warm-started policy makes the same mistake as often, and
reinforcement learning has to remove it.
"""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.builtin_task import Row, Split, heavy_tailed_count, is_in_split, seeded

SWAP_CHANCE = 0.6  # probability that two neighbours of a supervised response are swapped


class Sort:
    name = "sort"
    symbols = (*string.ascii_lowercase, "=")
    max_response_tokens = 25

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Return rows with "prompt", "answer" and "letters" (2 … 24, about log-normal with median 6)."""
        rng = seeded(seed, split)
        rows: list[Row] = []
        while len(rows) < n:
            count = heavy_tailed_count(rng, median=6.0, sigma=0.6, low=2, high=24)
            letters = [string.ascii_lowercase[i] for i in rng.integers(26, size=count)]
            prompt = "".join(letters) + "="
            if is_in_split(prompt, split):
                rows.append({"prompt": prompt, "answer": "".join(sorted(letters)), "letters": count})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        letters = list(row["answer"])
        if rng.random() < SWAP_CHANCE:
            at = int(rng.integers(len(letters) - 1))
            letters[at : at + 2] = reversed(letters[at : at + 2])
        return "".join(letters)

    def verify(self, response: str, row: Row) -> float:
        """Return 1.0 if the response is exactly the sorted letters, else 0.0."""
        return float(response == row["answer"])
