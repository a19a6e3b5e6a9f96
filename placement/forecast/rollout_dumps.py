"""Read response lengths from verl's dumps of rollouts (`trainer.rollout_data_dir`).

The folder has a file `<step>.jsonl` for each step. Each line is a response: `input` and `output` are texts, without special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RolloutDump:
    """Response tokens of one step, a list for each prompt. All lists are equally long."""

    path: Path
    lengths: list[list[int]]


def is_dump(path: Path) -> bool:
    """Return whether a path is a folder, or a file whose first line has the texts of a response."""
    if path.is_dir():
        return True
    try:
        with path.open(encoding="utf-8-sig") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and {"input", "output"} <= row.keys()


def read_dump(path: Path, count_tokens: Callable[[list[str]], Sequence[int]]) -> RolloutDump:
    """Read a dump of one step, or the last one of a folder.

    A prompt that the step has several times counts as several prompts. `count_tokens`: returns the tokens of each text.
    Raises ValueError with one sentence for a file that is no dump.
    """
    if path.is_dir():
        steps = [file for file in path.glob("*.jsonl") if file.stem.isdigit()]
        if not steps:
            raise ValueError(f"{path}: a folder without dumps of rollouts, which verl calls <step>.jsonl")
        path = max(steps, key=lambda file: int(file.stem))
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # responses may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a dump of rollouts ({type(error).__name__})") from None
    outputs: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, response = row["input"], row["output"]
        except (ValueError, KeyError, TypeError):
            prompt, response = None, None
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise ValueError(f"{path}, line {number}: not a response with the texts `input` and `output`")
        outputs.setdefault(prompt, []).append(response)
    if not outputs:
        raise ValueError(f"{path}: no responses in it")
    size = min(map(len, outputs.values()))
    if uneven := next((len(group) for group in outputs.values() if len(group) % size), None):
        raise ValueError(f"{path}: one prompt has {uneven} responses and another {size}, so it is no whole step with equal groups")
    counts = count_tokens([text for group in outputs.values() for text in group])
    lengths = [max(1, count) for count in counts]  # an empty response had its end
    return RolloutDump(path, [lengths[first : first + size] for first in range(0, len(lengths), size)])
