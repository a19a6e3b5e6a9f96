"""A second built-in task: sort the letters. `qkab=` is answered by `abkq`; lengths follow from the prompt.

Whoever wrote the supervised responses could sort but slipped now and then: two neighbours changed places. A warm-started policy
slips as often, and what reinforcement learning has to do is to leave that off.
"""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.task import Row, Split, belongs, heavy_tailed_count, seeded

SLIP = 0.6  # chance that two neighbours of a supervised response have changed places


class Sort:
    name = "sort"
    symbols = (*string.ascii_lowercase, "=")
    max_response_tokens = 25

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Rows with "prompt", "answer" and "letters" (2 … 24, about log-normal with median 6)."""
        rng = seeded(seed, split)
        rows: list[Row] = []
        while len(rows) < n:
            count = heavy_tailed_count(rng, median=6.0, sigma=0.6, low=2, high=24)
            letters = [string.ascii_lowercase[i] for i in rng.integers(26, size=count)]
            prompt = "".join(letters) + "="
            if belongs(prompt, split):
                rows.append({"prompt": prompt, "answer": "".join(sorted(letters)), "letters": count})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        letters = list(row["answer"])
        if rng.random() < SLIP:
            at = int(rng.integers(len(letters) - 1))
            letters[at : at + 2] = reversed(letters[at : at + 2])
        return "".join(letters)

    def verify(self, response: str, row: Row) -> float:
        """1.0 when the response is exactly the sorted letters."""
        return float(response == row["answer"])
