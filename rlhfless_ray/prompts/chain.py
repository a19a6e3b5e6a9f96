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

STYLES = ("full", "hasty", "bare")
CAREFUL = (0.60, 0.30, 0.10)  # chances of the styles, up to SHORT operands
HURRIED = (0.35, 0.60, 0.05)
AGAIN = 0.4  # chance of one more look, after every look


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
        """Rows with "prompt", "answer" and "operands" (2 … 24, about log-normal with median 4 to 5)."""
        rng = seeded(seed, split)
        rows: list[Row] = []
        while len(rows) < n:
            count = heavy_tailed_count(rng, median=4.3, sigma=0.7, low=2, high=MOST)
            start, first_key = int(rng.integers(10)), int(rng.integers(ROT))
            operands = rng.integers(1, LARGEST + 1, size=count).tolist()
            keys = [KEYS[(first_key + i) % len(KEYS)].upper() for i in range(count)]
            prompt = f"{start}" + "".join(f"{key}{operand}" for key, operand in zip(keys, operands, strict=True)) + "="
            if belongs(prompt, split):
                rows.append({"prompt": prompt, "answer": str((start + sum(operands)) % 10), "operands": count})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        habit = CAREFUL if row["operands"] <= SHORT else HURRIED
        style = STYLES[int(np.searchsorted(np.cumsum(habit)[:-1], rng.random(), side="right"))]
        if style == "bare":
            return f"#{row['answer']}"
        look = written(row["prompt"], stride=1 if style == "full" else 2)
        text = look
        # Every character of a response is one token; three are left for `#`, the answer and the end of the sequence.
        while rng.random() < AGAIN and len(text) + 1 + len(look) + 3 <= self.max_response_tokens:
            text += ";" + look
        return f"{text}#{look[-1]}"

    def verify(self, response: str, row: Row) -> float:
        """1.0 when the response has one `#` and ends with it and the right digit; what comes before is not judged."""
        _, mark, answer = response.partition("#")
        return float(bool(mark) and answer == row["answer"])


def written(prompt: str, stride: int) -> str:
    """One look at the chain: the running sum after every `stride`-th key, the others being passed over."""
    total = int(prompt[0])
    keys, operands = prompt[1:-1:2].lower(), prompt[2:-1:2]
    text = ""
    for key, operand in list(zip(keys, operands, strict=True))[::stride]:
        total = (total + int(operand)) % 10
        text += f"{key}{total}"
    return text
