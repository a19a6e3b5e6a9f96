"""A second built-in task: sort the letters. `qkab=` is answered by `abkq`; lengths follow from the prompt."""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.tasks import Row, Split, belongs, heavy_tailed_count, seeded


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
        return row["answer"]

    def verify(self, response: str, row: Row) -> float:
        """1.0 when the response is exactly the sorted letters."""
        return float(response == row["answer"])
