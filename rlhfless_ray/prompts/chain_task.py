"""The quickstart's task: add a chain of small numbers modulo 10.

    prompt    5A3B1C2D2=               start at 5; A adds 3, B adds 1, …
    responses a8b9c1d3#3               the running sum after every key
              a8c0#0                   every second key skipped: nearly always wrong
              #3                       the bare answer
              a8b9c1d3;a8b9c1d3#3      the sums repeated, which neither helps nor hurts

The supervised responses are careful for short chains and sloppy for long ones. A warm-started policy can therefore do the work
but often skips it, and reinforcement learning has to change that. Repetitions do not influence the reward, so responses to one
prompt keep differing in length by large factors.

Two choices make the task learnable in seconds. An operand (`A3`) is one token, so a key can be found by its content. Operands
are small: with ten digits modulo 10, neither the old sum nor the operand alone would be informative about the new sum, and
gradient descent would find no slope to follow.
"""

from __future__ import annotations

import string

import numpy as np

from rlhfless_ray.prompts.builtin_task import Row, Split, heavy_tailed_count, is_in_split, seeded

KEYS = string.ascii_lowercase[:24]
MAX_OPERAND = 3
SHORT_CHAIN = 4  # operands up to which supervised responses are careful

CAREFUL = (0.60, 0.36, 0.04)  # up to SHORT_CHAIN operands: probability of every sum, every second sum, the bare answer
HURRIED = (0.40, 0.58, 0.02)
REPEAT_CHANCE = 0.44  # probability of one more repetition, after each


class Chain:
    name = "chain"
    symbols = (*string.digits, *KEYS, *(f"{key}{digit}" for key in KEYS.upper() for digit in range(1, MAX_OPERAND + 1)), *"=#;")
    max_response_tokens = 160

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Return rows with "prompt", "answer" and "operands" (2 … 24, about log-normal with median 4)."""
        rng = seeded(seed, split)
        rows: list[Row] = []
        while len(rows) < n:
            count = heavy_tailed_count(rng, median=4.0, sigma=0.8, low=2, high=len(KEYS))
            start, operands = rng.integers(10), rng.integers(1, MAX_OPERAND + 1, size=count).tolist()
            prompt = f"{start}{''.join(f'{key}{operand}' for key, operand in zip(KEYS.upper(), operands, strict=False))}="
            if is_in_split(prompt, split):
                rows.append({"prompt": prompt, "answer": str((start + sum(operands)) % 10), "operands": count})
        return rows

    def example(self, row: Row, rng: np.random.Generator) -> str:
        habit = CAREFUL if row["operands"] <= SHORT_CHAIN else HURRIED
        full, hasty, _ = habit
        style = rng.random()
        if style >= full + hasty:
            return f"#{row['answer']}"
        sums = running_sums(row["prompt"], stride=1 if style < full else 2)
        text = sums
        # Every character is one token. Three are left for `#`, the answer and the end of the sequence.
        while rng.random() < REPEAT_CHANCE and len(text) + 1 + len(sums) + 3 <= self.max_response_tokens:
            text += ";" + sums
        return f"{text}#{sums[-1]}"

    def verify(self, response: str, row: Row) -> float:
        """Return 1.0 if the response has one `#` and ends with it and the right digit. The text before is not judged."""
        _, mark, answer = response.partition("#")
        return float(bool(mark) and answer == row["answer"])


def running_sums(prompt: str, stride: int) -> str:
    """Return the running sum after every `stride`-th key, skipping the operands in between."""
    total = int(prompt[0])
    keys, operands = prompt[1:-1:2].lower(), prompt[2:-1:2]
    text = ""
    for key, operand in list(zip(keys, operands, strict=True))[::stride]:
        total = (total + int(operand)) % 10
        text += f"{key}{total}"
    return text
