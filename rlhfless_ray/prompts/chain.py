"""The quickstart's task: add a chain of digits modulo 10.

    prompt    5a3b8c1d6=
    responses a8b6c7d3#3                 every running sum, written after its key
              c7d3#3                     only every third: three additions at once, which a small model mostly gets wrong
              #3                         the bare answer
              a8b6c7d3;a8b6c7d3#3        the sums again: a second look neither helps nor hurts

Whoever wrote the supervised responses was careful with short chains and hasty with long ones, so a warm-started policy can
do the work but often does not take the trouble. That is what reinforcement learning has to change. How often the sums are
looked over again has no influence on the reward, so responses to one prompt keep differing in length by large factors.
"""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.tasks import Row, Split, belongs, heavy_tailed_count, seeded

KEYS = string.ascii_lowercase[:24]
SHORT_OPERANDS = 4  # up to here the writer is careful

FULL, SKIM, DIRECT = 1, 3, 0  # operands added per written sum; 0: nothing is written
STYLES = (FULL, SKIM, DIRECT)
CAREFUL = (0.60, 0.20, 0.20)
HASTY = (0.35, 0.50, 0.15)
AGAIN = 0.35  # chance of one more look, after every look


class Chain:
    name = "chain"
    symbols = string.digits + KEYS + "=#;"
    max_response_tokens = 160

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Rows with "prompt", "answer" and "operands" (2 … 24, about log-normal with median 4)."""
        rng = seeded(seed, split)
        rows: list[Row] = []
        while len(rows) < n:
            operands = heavy_tailed_count(rng, median=4.0, sigma=0.65, low=2, high=len(KEYS))
            digits = rng.integers(10, size=operands + 1)
            prompt = f"{digits[0]}" + "".join(f"{key}{digit}" for key, digit in zip(KEYS, digits[1:], strict=False)) + "="
            if belongs(prompt, split):
                rows.append({"prompt": prompt, "answer": str(int(digits.sum()) % 10), "operands": operands})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        operands = row["operands"]
        habit = CAREFUL if operands <= SHORT_OPERANDS else HASTY
        style = STYLES[int(np.searchsorted(np.cumsum(habit), rng.random(), side="right"))]
        answer = f"#{row['answer']}"
        if style == DIRECT:
            return answer
        look = self.written(row, style)
        text = look
        while rng.random() < AGAIN and len(text) + 1 + len(look) + len(answer) < self.max_response_tokens:
            text += ";" + look
        return text + answer

    def written(self, row: Row, stride: int) -> str:
        """One look at the chain: the running sum after every `stride` operands and after the last one."""
        digits = [int(character) for character in row["prompt"] if character.isdigit()]
        sums = np.cumsum(digits) % 10
        stops = [*range(stride, row["operands"], stride), row["operands"]]
        return "".join(f"{KEYS[stop - 1]}{sums[stop]}" for stop in stops)

    def verify(self, response: str, row: Row) -> float:
        """1.0 when the response has one `#` and ends with it and the right digit; what comes before is not judged."""
        _, mark, answer = response.partition("#")
        return float(bool(mark) and answer == row["answer"])
