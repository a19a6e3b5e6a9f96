"""Reward models: a Hugging Face folder with a scalar head, scored in processes of their own under leases of their own.

The reward of a response is the head's value at its last token: what transformers' sequence classification gives for one sequence
without padding, and what OpenRLHF's reward models give.
"""

from __future__ import annotations

import json
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlhfless_ray.errors import UserError
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.reward.values import finite
from rlhfless_ray.types import Sample
from rlhfless_ray.weights.folder import WEIGHTS, read_folder, write_folder

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

KEY = "reward.model_path"
Tokens = tuple[int, np.ndarray]  # key, prompt and response


@dataclass(frozen=True)
class Head:
    """Where the scalar head is among the weights, and what is done to its value."""

    name: str
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True)
class ModelSource(Source):
    pool_kind: ClassVar[str] = "reward"
    on_device: ClassVar[bool] = True

    files: dict[str, bytes] = field(repr=False)  # the folder's
    head: Head
    dtype: str
    micro_batch_tokens: int
    deadline_s: float
    trust_remote_code: bool = False

    @classmethod
    def load(cls, recipe: Recipe, tokenizer: Any) -> ModelSource:
        """Raises UserError for a folder that is no reward model, or whose tokens are not those of the policy's `tokenizer`."""
        reward = recipe.reward
        with told_as(KEY):
            files = read_folder(Path(reward.model_path))
        head = find_head(files, reward.value_head, reward.normalize)
        if tokenizer is not None:
            check_same_tokens(files, tokenizer, recipe.policy.trust_remote_code)
        return cls(files, head, recipe.policy.dtype, reward.micro_batch_tokens, reward.deadline_s, recipe.policy.trust_remote_code)

    def item(self, key: int, sample: Sample, decode: Decode) -> Tokens:
        return key, np.concatenate([np.asarray(sample.prompt.token_ids, np.int32), sample.completion.token_ids.astype(np.int32)])

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return ModelWorker(self, device)

    def call_s(self, timeout_s: float) -> float:
        """No function of a user's can hang here: a micro-batch may take long."""
        return self.deadline_s


class ModelWorker(Worker):
    """In host memory until it first scores; on its device from then on, until it is parked."""

    def __init__(self, source: ModelSource, device: str = "cpu") -> None:
        from rlhfless_ray.reward.model_torch import ScalarModel

        self.source = source
        self.device = "cuda" if device == "gpu" else device
        with tempfile.TemporaryDirectory(prefix="rlhfless-reward-") as name:
            folder = write_folder(Path(name), source.files)
            self.model = ScalarModel.load(folder, source.head.name, source.dtype, source.trust_remote_code)

    def open(self, threads: int) -> None:
        if self.device == "cpu":
            import torch

            torch.set_num_threads(threads)

    def park(self) -> None:
        self.model.move("cpu")

    def score(self, items: list[Tokens], budget_s: float = float("inf")) -> list[Score]:
        """In micro-batches of similar lengths, the longest first, at least one of them."""
        from rlhfless_ray.learn.packing import padded

        end = time.monotonic() + budget_s
        self.model.move(self.device)
        scores: list[Score] = []
        (batches,) = padded(np.array([len(ids) for _, ids in items]), self.source.micro_batch_tokens)
        for batch in sorted(batches, key=lambda part: -max(len(items[i][1]) for i in part)):
            chosen = [items[i] for i in batch]
            scores += self._scores(chosen)
            if time.monotonic() >= end:
                break
        return scores

    def _scores(self, items: list[Tokens]) -> list[Score]:
        most = self.model.context_tokens
        short = [(key, ids) for key, ids in items if most is None or len(ids) <= most]
        scores = [
            Score(key, None, f"{len(ids)} tokens are more than the reward model takes, {most}")
            for key, ids in items
            if most is not None and len(ids) > most
        ]
        values: Any = self.model.values([ids for _, ids in short]) if short else []
        head = self.source.head
        for (key, _), value in zip(short, values, strict=True):
            try:
                scores.append(Score(key, finite((float(value) - head.mean) / head.deviation)))
            except ValueError as error:
                scores.append(Score(key, None, f"the reward model gave {error}"))
        return scores


def find_head(files: dict[str, bytes], name: str, normalize: bool) -> Head:
    """The head `name`.weight of shape (1, width), or the one that config.json calls `value_head_prefix`, as OpenRLHF writes it;
    with `normalize`, the `mean` and `std` that config.json has of the rewards (without them values stay as they are).

    Raises UserError where there is no such head, naming what there is, and for a head of several scores.
    """
    try:
        config = json.loads(files["config.json"])
    except ValueError:
        raise UserError(f"{KEY}: its config.json is not valid JSON") from None
    name = config.get("value_head_prefix") or name
    shapes = {tensor: shape for file in files if file.endswith(WEIGHTS) for tensor, shape in _shapes(file, files[file]).items()}
    shape = shapes.get(f"{name}.weight")
    if shape is None:
        found = sorted(t.removesuffix(".weight") for t, s in shapes.items() if t.endswith(".weight") and len(s) == 2 and s[0] == 1)
        there = f"; it has {', '.join(f'`{f}`' for f in found)}: set reward.value_head" if found else ""
        raise UserError(f"{KEY}: the model has no scalar head `{name}`{there or ', so it is no reward model'}")
    if len(shape) != 2 or shape[0] != 1:
        raise UserError(f"{KEY}: its head `{name}` gives {shape[0]} values for a response, a reward model gives one")
    mean, deviation = (float(config.get(key, default)) for key, default in (("mean", 0.0), ("std", 1.0)))
    if not normalize:
        return Head(name)
    if not deviation > 0:
        raise UserError(f"{KEY}: reward.normalize divides by the std in its config.json, which is {deviation:g}")
    return Head(name, mean, deviation)


def _shapes(name: str, content: bytes) -> dict[str, list[int]]:
    """Tensor → shape, from a safetensors header."""
    try:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        return {tensor: entry["shape"] for tensor, entry in header.items() if tensor != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError):
        raise UserError(f"{KEY}: {name} is no safetensors file") from None


def check_same_tokens(files: dict[str, bytes], tokenizer: Any, trust_remote_code: bool) -> None:
    """The model reads the policy's tokens: raises UserError where the same number means another token."""
    from rlhfless_ray.policy_files import load_tokenizer

    with told_as(KEY):
        own = load_tokenizer(files, trust_remote_code)
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{KEY}: its tokenizer is not the policy's, whose tokens it would read; serve it with `python -m "
            "rlhfless_ray.cli.serve_rm` and give its address as reward.url: it then reads text"
        )


@contextmanager
def told_as(key: str) -> Iterator[None]:
    """Readers of model folders speak of the policy's, or of the recipe's."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("policy.path", key).replace(KEY, key)) from None
