"""The quickstart's task: add a chain of small numbers modulo 10.

    prompt    5A3B1C2D2=               start at 5; A adds 3, B adds 1, …
    responses a8b9c1d3#3               the running sum after every key
              a8c0#0                   every second key passed over: hasty, and nearly always wrong
              #3                       the bare answer
              a8b9c1d3;a8b9c1d3#3      the sums again: a second look neither helps nor hurts

Whoever wrote the supervised responses was careful with short chains and hasty with long ones, so a warm-started policy can
do the work but often does not take the trouble. That is what reinforcement learning has to change. How often the sums are
looked over again has no influence on the reward, so responses to one prompt keep differing in length by large factors.

Two choices make the task learnable in seconds. An operand (`A3`) is one token, so that a key is found by its content. And
operands are small: with all ten digits, modulo 10, neither the old sum nor the operand alone would say anything about the
new sum, and gradient descent would find no slope to follow until it has both.
"""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.task import Row, Split, belongs, heavy_tailed_count, seeded

KEYS = string.ascii_lowercase[:24]
LARGEST = 3  # operand
SHORT = 4  # operands up to which the writer is careful

CAREFUL = (0.60, 0.36, 0.04)  # up to SHORT operands: chance of every sum, of every second one, of the bare answer
HURRIED = (0.40, 0.58, 0.02)
AGAIN = 0.44  # chance of one more look, after every look


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
            count = heavy_tailed_count(rng, median=4.0, sigma=0.8, low=2, high=len(KEYS))
            start, operands = rng.integers(10), rng.integers(1, LARGEST + 1, size=count).tolist()
            prompt = f"{start}{''.join(f'{key}{operand}' for key, operand in zip(KEYS.upper(), operands, strict=False))}="
            if belongs(prompt, split):
                rows.append({"prompt": prompt, "answer": str((start + sum(operands)) % 10), "operands": count})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        habit = CAREFUL if row["operands"] <= SHORT else HURRIED
        full, hasty, _ = habit
        style = rng.random()
        if style >= full + hasty:
            return f"#{row['answer']}"
        look = written(row["prompt"], stride=1 if style < full else 2)
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
