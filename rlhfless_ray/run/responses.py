"""Generated responses on disk: a record that grows during generation, and the final file that is made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.common.disk_space import append, replace_by_parts, writing
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.types import Completion, Prompt, Sample

RECORD, RESPONSES = "responses.part.jsonl", "responses.jsonl"
SCORED_BY = "scored_by"  # setting: digest of what scores depend on besides the responses; scores of another one are made again
Key = tuple[int, int]  # prompt, number of the response


class ResponseRecord:
    """`responses.part.jsonl`: a line of settings, then one line for each response and each score, in order of arrival.

    Args:
        folder: The run folder.
        settings: The settings that determine tokens and rewards. A record with other values of them cannot be continued.
        answer_column: Column of the rows that goes into the lines.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], answer_column: str = "") -> None:
        """Open the record, or begin one. Raises UserError if it has other settings."""
        self.path, self.answer_column = folder / RECORD, answer_column
        self.places: dict[Key, tuple[int, int]] = {}  # offset and length of each response's line
        self.scores: dict[Key, dict[str, Any]] = {}
        if not self.path.is_file() or (before := self._read(settings)) != settings:
            if self.path.is_file():
                self._drop_scores(before, settings)
            append(self.path, _line({"settings": settings}))

    def _drop_scores(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """Drop the scores so far if these settings score responses in another way. Without a reward they stay."""
        if now.get(SCORED_BY, before.get(SCORED_BY)) != before.get(SCORED_BY):
            self.scores.clear()

    def _read(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Read the complete lines, and cut off the rest. Returns the newest settings, if the process did not end before it wrote them."""
        end, newest = 0, dict[str, Any]()
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # cut off by a crash
                row = json.loads(line)
                if "settings" in row:
                    self._drop_scores(newest, row["settings"])
                    newest = row["settings"]
                    _check_same(self.path, newest, settings)
                elif "response" in row:
                    self.places[_key(row)] = end, len(line)
                else:
                    self.scores[_key(row)] = row
                end += len(line)
        with self.path.open("r+b") as file:
            file.truncate(end)
        return newest

    def add(self, samples: Iterable[Sample]) -> None:
        """Append finished responses. Raises DiskFull and leaves the record as it was."""
        end, lines = self.path.stat().st_size, []
        places = {}
        for s in samples:
            row = {
                "prompt_index": s.prompt.index,
                "sample": s.sample,
                "prompt": s.prompt.text,
                "response": s.text,
                "finish": s.completion.finish_reason,
                **({"answer": s.prompt.row.get(self.answer_column)} if self.answer_column else {}),
                "token_ids": s.completion.token_ids.tolist(),
                "logprobs": [float(str(value)) for value in s.completion.logprobs],  # the shortest decimals of float32
            }
            lines.append(_line(row))
            places[_key(row)] = end, len(lines[-1])
            end += len(lines[-1])
        append(self.path, b"".join(lines))
        self.places |= places

    def add_scores(self, samples: Iterable[Sample]) -> None:
        rows = [
            {"prompt_index": s.prompt.index, "sample": s.sample, "reward": s.reward, "error": s.error}
            for s in samples
            if (s.prompt.index, s.sample) not in self.scores
        ]
        append(self.path, b"".join(map(_line, rows)))
        self.scores |= {_key(row): row for row in rows}

    def missing(self, prompts: Sequence[Prompt], count: int, *, scored: bool) -> list[Prompt]:
        """Return the prompts that lack one of `count` responses, or with `scored` one of their scores."""
        there = self.scores if scored else self.places
        return [prompt for prompt in prompts if any((prompt.index, n) not in there for n in range(count))]

    def samples(self, prompt: Prompt, count: int) -> dict[int, Sample]:
        """Return the existing responses to a prompt, by number."""
        samples = {}
        with self.path.open("rb") as file:
            for n in range(count):
                if (prompt.index, n) in self.places:
                    row = self._row(file, (prompt.index, n))
                    tokens, logprobs = np.array(row["token_ids"], np.int32), np.array(row["logprobs"], np.float32)
                    samples[n] = Sample(prompt, n, Completion(n, tokens, logprobs, row["finish"], 0), row["response"])
        return samples

    def _row(self, file: Any, key: Key) -> dict[str, Any]:
        start, length = self.places[key]
        file.seek(start)
        row: dict[str, Any] = json.loads(file.read(length))
        return row

    def write(self, path: Path, prompts: Sequence[Prompt], count: int) -> None:
        """Write all responses in the order of their prompts, each with its score, by one rename."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_by_parts(path, self._scored_lines(prompts, count))

    def _scored_lines(self, prompts: Sequence[Prompt], count: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for prompt, n in ((prompt, n) for prompt in prompts for n in range(count)):
                row, score = self._row(file, (prompt.index, n)), self.scores.get((prompt.index, n), {})
                if self.answer_column:
                    row["answer"] = prompt.row.get(self.answer_column)
                scored: dict[str, Any] = {name: score[name] for name in ("reward", "error") if name in score}
                tokens, logprobs = row.pop("token_ids"), row.pop("logprobs")
                yield _line({**row, **scored, "token_ids": tokens, "logprobs": logprobs})


def read_groups(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the responses to each prompt from a file that `generate` wrote."""
    with Path(path).open() as file:
        for _, rows in groupby(map(json.loads, file), key=lambda row: row["prompt_index"]):
            yield list(rows)


def best_responses(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the response with the highest reward to each prompt (best of n): the first one of several.

    Prompts without a scored response are left out. Raises UserError if no response has a reward.
    """
    yield from (max(scored, key=itemgetter("reward")) for scored in _scored_groups(path))


def preference_pairs(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the best and the worst response to each prompt as a pair, with the columns that `task: dpo` and `rm` read.

    Empty responses are left out, and prompts whose responses all have the same reward or the same text. Raises UserError if no response
    has a reward.
    """
    for group in _scored_groups(path):
        scored = [row for row in group if row["response"]]
        if not scored:
            continue
        chosen, rejected = max(scored, key=itemgetter("reward")), min(scored, key=itemgetter("reward"))
        if chosen["reward"] > rejected["reward"] and chosen["response"] != rejected["response"]:
            yield {
                "prompt": chosen["prompt"],
                "chosen": chosen["response"],
                "rejected": rejected["response"],
                "chosen_reward": chosen["reward"],
                "rejected_reward": rejected["reward"],
            }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSONL by one rename, and return their number."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for row in rows:
            count += 1
            yield _line(row)

    replace_by_parts(path, lines())
    return count


def _scored_groups(path: Path) -> Iterator[list[dict[str, Any]]]:
    for group in read_groups(path):
        if "reward" not in group[0]:
            raise UserError(f"{path}: its responses have no reward; generate them with a reward in the recipe")
        if scored := [row for row in group if row["reward"] is not None]:
            yield scored


def _check_same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if name != SCORED_BY and before.get(name, value) != value:  # a reward may be added later
            changed = "" if name in ("model", "prompts") else f" ({before.get(name)} before, {value} now)"
            raise UserError(
                f"--resume: {path} was generated with another {name}{changed}; set it back, or start another run without --resume"
            )


def _key(row: dict[str, Any]) -> Key:
    return row["prompt_index"], row["sample"]


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str, separators=(",", ":")).encode() + b"\n"
