"""The built-in tasks: rows from a seed, supervised responses for a warm start, and an exact verifier."""

from __future__ import annotations

import io
import math
import string
import zlib
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.row_images import MARK, PLACE

Split = Literal["train", "heldout"]
Row = JsonObject

KEYS = string.ascii_lowercase[:24]
MAX_OPERAND = 3
SHORT_CHAIN = 4  # operands up to which supervised responses are careful

CAREFUL = (0.60, 0.36, 0.04)  # up to SHORT_CHAIN operands: probability of every sum, every second sum, the bare answer
HURRIED = (0.40, 0.58, 0.02)
REPEAT_CHANCE = 0.44  # probability of one more repetition, after each
SWAP_CHANCE = 0.6  # probability that two neighbours of a supervised response of `sort` are swapped


CELLS = 2  # cells in a row and in a column, of one token each
PATCH, MERGE = 8, 2  # pixels of a patch, and patches of a token, in both directions
CELL = PATCH * MERGE
SQUARE = 10  # pixels
IMAGE_TOKENS = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}


class Task(ABC):
    """A built-in task. Instances hold no state: everything follows from the arguments."""

    name: str
    symbols: tuple[str, ...]  # vocabulary of prompts and responses, one token each
    max_response_tokens: int  # limit of a supervised response, end-of-sequence token included
    sees_images = False  # whether rows have "images"

    def rows(self, n: int, seed: int, split: Split) -> list[Row]:
        """Return `n` rows with the keys "prompt" and "answer".

        The first rows do not depend on `n`. A quarter of all prompts, chosen by checksum, is held out, whatever the seeds.
        """
        rng = np.random.default_rng([seed % 2**63, 0 if split == "train" else 1])
        rows: list[Row] = []
        while len(rows) < n:
            row = self._draw(rng)
            if (zlib.crc32(self._content(row)) % 4 == 0) == (split == "heldout"):
                rows.append(row)
        return rows

    def _content(self, row: Row) -> bytes:
        """Return what makes a row's prompt differ from others."""
        return str(row["prompt"]).encode()

    @abstractmethod
    def _draw(self, rng: np.random.Generator) -> Row: ...

    @abstractmethod
    def example(self, row: Row, rng: np.random.Generator) -> str:
        """Return a supervised response to the row, without the end-of-sequence token."""

    @abstractmethod
    def verify(self, response: str, row: Row) -> float:
        """Return 1.0 for an exactly correct response (without special tokens), else 0.0."""


def heavy_tailed_count(rng: np.random.Generator, median: float, sigma: float, low: int, high: int) -> int:
    """Draw a log-normal count until it lies in [low, high]."""
    while True:
        count = round(rng.lognormal(math.log(median), sigma))
        if low <= count <= high:
            return count


class Chain(Task):
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

    name = "chain"
    symbols = (*string.digits, *KEYS, *(f"{key}{digit}" for key in KEYS.upper() for digit in range(1, MAX_OPERAND + 1)), *"=#;")
    max_response_tokens = 160

    def _draw(self, rng: np.random.Generator) -> Row:
        """Return a row with 2 … 24 "operands", about log-normal with median 4."""
        count = heavy_tailed_count(rng, median=4.0, sigma=0.8, low=2, high=len(KEYS))
        start, operands = rng.integers(10), rng.integers(1, MAX_OPERAND + 1, size=count).tolist()
        prompt = f"{start}{''.join(f'{key}{operand}' for key, operand in zip(KEYS.upper(), operands, strict=False))}="
        return {"prompt": prompt, "answer": str((start + sum(operands)) % 10), "operands": count}

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


class Sort(Task):
    """A second built-in task: sort the letters. `qkab=` is answered by `abkq`, so the prompt determines the length.

    In many supervised responses two neighbours are swapped. A warm-started policy makes the same mistake as often, and
    reinforcement learning has to remove it.
    """

    name = "sort"
    symbols = (*string.ascii_lowercase, "=")
    max_response_tokens = 25

    def _draw(self, rng: np.random.Generator) -> Row:
        """Return a row with 2 … 24 "letters", about log-normal with median 6."""
        count = heavy_tailed_count(rng, median=6.0, sigma=0.6, low=2, high=24)
        letters = [string.ascii_lowercase[i] for i in rng.integers(26, size=count)]
        return {"prompt": "".join(letters) + "=", "answer": "".join(sorted(letters)), "letters": count}

    def example(self, row: Row, rng: np.random.Generator) -> str:
        letters = list(row["answer"])
        if rng.random() < SWAP_CHANCE:
            at = int(rng.integers(len(letters) - 1))
            letters[at : at + 2] = reversed(letters[at : at + 2])
        return "".join(letters)

    def verify(self, response: str, row: Row) -> float:
        """Return 1.0 if the response is exactly the sorted letters, else 0.0."""
        return float(response == row["answer"])


class Pictures(Task):
    """Count the squares in an image. Each of its four cells is dark noise and may have a bright square of any colour.

    The prompt is the same text for every row, so who does not see the image is right in a quarter of all cases.
    """

    name = "pictures"
    symbols = ("1", "2", "3", "4", "=", *PLACE.replace("><", "> <").split())
    max_response_tokens = 2
    sees_images = True

    def _draw(self, rng: np.random.Generator) -> Row:
        count = int(rng.integers(1, CELLS**2 + 1))
        image = rng.integers(0, 60, (CELLS * CELL, CELLS * CELL, 3), np.uint8)
        for cell in rng.permutation(CELLS**2)[:count]:
            top, left = np.array(divmod(int(cell), CELLS)) * CELL + rng.integers(0, CELL - SQUARE + 1, 2)
            image[top : top + SQUARE, left : left + SQUARE] = rng.integers(150, 256, 3)
        return {"prompt": f"{MARK}=", "answer": str(count), "images": _png(image)}

    def _content(self, row: Row) -> bytes:
        return bytes(row["images"])

    def example(self, row: Row, rng: np.random.Generator) -> str:
        return str(row["answer"])

    def verify(self, response: str, row: Row) -> float:
        """Return 1.0 for the right number, else 0.0."""
        return float(response == row["answer"])


class NoisePictures(Pictures):
    """`Pictures` with noise in place of each image: a policy that learns more than the most common answer has not read the image."""

    name = "noise_pictures"

    def _draw(self, rng: np.random.Generator) -> Row:
        noise = rng.integers(0, 256, (CELLS * CELL, CELLS * CELL, 3), np.uint8)
        return {**super()._draw(rng), "images": _png(noise)}


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


TASKS: dict[str, type[Task]] = {kind.name: kind for kind in (Chain, NoisePictures, Pictures, Sort)}


def task(name: str) -> Task:
    """Return the built-in task called `name`. Raises UserError, naming the known ones."""
    if name not in TASKS:
        raise UserError(f"prompts.task: no built-in task is called `{name}`; the known ones are {', '.join(TASKS)}")
    return TASKS[name]()
