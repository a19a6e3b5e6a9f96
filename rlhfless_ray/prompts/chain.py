"""The quickstart's task: add a chain of small numbers modulo 10.

    prompt    5Q3R1S2T2=               start at 5; Q adds 3, R adds 1, …
    responses q8r9s1t3#3               the running sum after every key
              s1t3#3                   only every third: three additions at once, which a small model mostly gets wrong
              #3                       the bare answer
              q8r9s1t3;q8r9s1t3#3      the sums again: a second look neither helps nor hurts

Whoever wrote the supervised responses was careful with short chains and hasty with long ones, so a warm-started policy can
do the work but often does not take the trouble. That is what reinforcement learning has to change. How often the sums are
looked over again has no influence on the reward, so responses to one prompt keep differing in length by large factors.

Two choices make the task learnable in seconds. An operand (`Q3`) is one token, so that a key is found by its content. And
operands are small: with all ten digits, modulo 10, neither the old sum nor the operand alone would say anything about the
new sum, and gradient descent would find no slope to follow until it has both.
"""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.tasks import Row, Split, belongs, heavy_tailed_count, seeded

KEYS = string.ascii_lowercase
LARGEST = 3  # operand
MOST = 24  # operands
import os; ROT=int(os.environ.get("ROT","1"))
SHORT = 4  # operands up to which the writer is careful

FULL, SKIM, DIRECT = 1, 3, 0  # operands added per written sum; 0: nothing is written
STYLES = (FULL, SKIM, DIRECT)
CAREFUL = (0.60, 0.20, 0.20)
HASTY = (0.35, 0.50, 0.15)
AGAIN = 0.35  # chance of one more look, after every look


class Chain:
    name = "chain"
    symbols = (
        *string.digits,
        *KEYS,
        *(f"{key}{digit}" for key in KEYS.upper() for digit in range(1, LARGEST + 1)),
        *"=#;",
    )
    max_response_tokens = 160

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Rows with "prompt", "answer" and "operands" (2 … 24, about log-normal with median 4)."""
        rng = seeded(seed, split)
        rows: list[Row] = []
        while len(rows) < n:
            count = heavy_tailed_count(rng, median=4.0, sigma=0.65, low=2, high=MOST)
            start, first_key = int(rng.integers(10)), int(rng.integers(ROT))
            operands = rng.integers(1, LARGEST + 1, size=count).tolist()
            keys = [KEYS[(first_key + i) % len(KEYS)].upper() for i in range(count)]
            prompt = f"{start}" + "".join(f"{key}{operand}" for key, operand in zip(keys, operands, strict=True)) + "="
            if belongs(prompt, split):
                rows.append({"prompt": prompt, "answer": str((start + sum(operands)) % 10), "operands": count})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        habit = CAREFUL if row["operands"] <= SHORT else HASTY
        style = STYLES[int(np.searchsorted(np.cumsum(habit)[:-1], rng.random(), side="right"))]
        answer = f"#{row['answer']}"
        if style == DIRECT:
            return answer
        look = written(row["prompt"], style)
        text = look
        # Every character of a response is one token; one is left for the end of the sequence.
        while rng.random() < AGAIN and len(text) + 1 + len(look) + len(answer) < self.max_response_tokens:
            text += ";" + look
        return text + answer

    def verify(self, response: str, row: Row) -> float:
        """1.0 when the response has one `#` and ends with it and the right digit; what comes before is not judged."""
        _, mark, answer = response.partition("#")
        return float(bool(mark) and answer == row["answer"])


def written(prompt: str, stride: int) -> str:
    """One look at the chain: the running sum after every `stride` operands and after the last one."""
    keys = [character.lower() for character in prompt if character.isupper()]
    sums = np.cumsum([int(character) for character in prompt if character.isdigit()]) % 10
    stops = [*range(stride, len(keys), stride), len(keys)]
    return "".join(f"{keys[stop - 1]}{sums[stop]}" for stop in stops)
