"""Reward models: Hugging Face folders with a scalar head, scored in processes with leases of their own.

The reward of a response is the head's value at its last token, as in transformers' sequence classification of one unpadded
sequence and in OpenRLHF's reward models.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.model_checks import check_width
from rlhfless_ray.learn.output_scale import output_scale
from rlhfless_ray.learn.process_group import free_port
from rlhfless_ray.local.member_process import MemberProcess
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.reward.values import to_finite_float
from rlhfless_ray.types import Sample
from rlhfless_ray.weights.load_policy import check_family, check_files, load_tokenizer
from rlhfless_ray.weights.model_folder import WEIGHTS, config_of, read_folder, write_folder
from rlhfless_ray.weights.quantized_base import refuse_quantized
from rlhfless_ray.weights.tensor_file import Files, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.recipe import Recipe

KEY = "reward.model_path"
Tokens = tuple[int, np.ndarray]  # key, prompt and response


@dataclass(frozen=True)
class Head:
    """Name of the scalar head among the weights, and the mean and deviation that normalise its value."""

    name: str
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True)
class RewardModelSource(Source):
    pool_kind: ClassVar[str] = "reward"
    on_device: ClassVar[bool] = True

    files: Files = field(repr=False)  # file name → content
    head: Head
    dtype: str
    micro_batch_tokens: int
    deadline_s: float
    trust_remote_code: bool = False
    tensor_parallel: int = 1
    deterministic: bool = False  # see `run.deterministic`

    @classmethod
    def load(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> RewardModelSource:
        """Read the folder. Raises UserError if it is not a reward model or its tokens are not the policy `tokenizer`'s."""
        reward = recipe.reward
        files = read_folder(Path(reward.model_path), KEY)
        head = find_head(files, reward.value_head, reward.normalize)
        if tokenizer is not None:
            check_same_tokens(files, tokenizer, recipe.policy.trust_remote_code)
        check_width("reward", reward.tensor_parallel, config_of(files))
        return cls(
            files,
            head,
            recipe.policy.dtype,
            1 if recipe.run.exact else reward.micro_batch_tokens,  # alone: a score's bits may depend on the others in a micro-batch
            reward.deadline_s,
            recipe.policy.trust_remote_code,
            reward.tensor_parallel,
            recipe.run.deterministic,
        )

    def item(self, key: int, sample: Sample, decode: Decode) -> Tokens:
        return key, np.concatenate([np.asarray(sample.prompt.token_ids, np.int32), sample.completion.token_ids.astype(np.int32)])

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return ModelWorker(self, device)

    def call_s(self, timeout_s: float) -> float:
        """Return `deadline_s`: there is no user code that can hang, but a micro-batch may take long."""
        return self.deadline_s


class ModelWorker(Worker):
    """Hold the model in host memory, and on its device from the first scoring until it is parked.

    A divided model has further members, processes that take part in every pass. Under the first lease each keeps its slices.
    """

    def __init__(self, source: RewardModelSource, device: str = "cpu") -> None:
        from rlhfless_ray.reward.scalar_model import ScalarModel

        self.source = source
        self.device = "cuda" if device == "gpu" else device
        self.members = [
            MemberProcess("rlhfless_ray.reward.reward_model_member", environment=_device_of_member(member))
            for member in range(1, source.tensor_parallel)
        ]
        with tempfile.TemporaryDirectory(prefix="rlhfless-reward-") as name:
            self.model = ScalarModel.load(*self._load_arguments(Path(name)))

    def _load_arguments(self, folder: Path) -> tuple[Path, str, str, bool, bool]:
        source = self.source
        return write_folder(folder, source.files), source.head.name, source.dtype, source.trust_remote_code, source.deterministic

    def open(self, threads: int) -> None:
        if self.device == "cpu":
            import torch

            from rlhfless_ray.local.laptop.cpu_bfloat16 import note, use_float32_products

            torch.set_num_threads(threads - len(self.members))
            use_float32_products(self.source.dtype, self.device)
            self.note = note()
        if self.members:
            self._divide()

    def _divide(self) -> None:
        """Divide the model among its members, each of which loads all of it first."""
        rendezvous, count = ("127.0.0.1", free_port()), self.source.tensor_parallel
        with tempfile.TemporaryDirectory(prefix="rlhfless-reward-") as name:
            arguments = self._load_arguments(Path(name))
            for number, member in enumerate(self.members, 1):
                member.call("load", arguments, {"divide": (rendezvous, number, count, self.device)})
            self.model.divide(rendezvous, 0, count, self.device)
            self._wait()

    def park(self) -> None:
        self._move("cpu")

    def _move(self, device: str) -> None:
        for member in self.members:
            member.call("move", (device,))
        self.model.move(device)
        self._wait()

    def _values(self, sequences: list[np.ndarray]) -> np.ndarray:
        for member in self.members:
            member.call("values", (sequences,))
        values = self.model.values(sequences)
        self._wait()
        return values

    def _wait(self) -> None:
        for member in self.members:
            member.result()

    def score(self, items: list[Tokens], budget_s: float = float("inf")) -> list[Score]:
        """Score micro-batches of similar lengths, longest first, until `budget_s` is over; at least one."""
        from rlhfless_ray.learn.packing import padded

        end = time.monotonic() + budget_s
        self._move(self.device)
        scores: list[Score] = []
        (batches,) = padded(np.array([len(ids) for _, ids in items]), self.source.micro_batch_tokens)
        for batch in sorted(batches, key=lambda part: -max(len(items[i][1]) for i in part)):
            chosen = [items[i] for i in batch]
            scores += self._scores(chosen)
            if time.monotonic() >= end:
                break
        return scores

    def _scores(self, items: list[Tokens]) -> list[Score]:
        limit = self.model.context_tokens
        short = [(key, ids) for key, ids in items if limit is None or len(ids) <= limit]
        scores = [
            Score(key, None, f"{len(ids)} tokens exceed the reward model's context of {limit} tokens")
            for key, ids in items
            if limit is not None and len(ids) > limit
        ]
        values: Any = self._values([ids for _, ids in short]) if short else []
        head = self.source.head
        for (key, _), value in zip(short, values, strict=True):
            try:
                scores.append(Score(key, to_finite_float((float(value) - head.mean) / head.deviation)))
            except ValueError as error:
                scores.append(Score(key, None, f"the reward model gave {error}"))
        return scores


def _device_of_member(member: int) -> dict[str, str]:
    """Return the environment of a further member, which sees only its own of the devices that this process was given."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": devices[member]} if member < len(devices) else {}


def find_head(files: Files, name: str, normalize: bool, setting: str = KEY) -> Head:
    """Find the weight `name`.weight of shape (1, width), or the one that config.json names as `value_head_prefix`.

    OpenRLHF writes that key. With `normalize` the head takes `mean` and `std` of the rewards from config.json, if present.
    Raises UserError, which names `setting`, for incomplete files, quantised weights, a missing head, with the candidates, and a head with
    several scores.
    """
    config = config_of(files)
    name = config.get("value_head_prefix") or name
    check_files(files, setting)
    check_family(files, setting, is_causal=False)
    refuse_quantized(config, setting)
    # Of all files, also of a head beside the base that no index names: `ScalarModel.load` finds it.
    headers = [read_header(content) or {} for file, content in files.items() if file.endswith(WEIGHTS)]
    shapes = {tensor: entry["shape"] for header in headers for tensor, entry in header.items()}
    shape = shapes.get(f"{name}.weight")
    if shape is None:
        candidates = sorted(t.removesuffix(".weight") for t, s in shapes.items() if t.endswith(".weight") and len(s) == 2 and s[0] == 1)
        there = f"; it has {', '.join(f'`{f}`' for f in candidates)}: set reward.value_head" if candidates else ""
        raise UserError(f"{setting}: the model has no scalar head `{name}`{there or ', so it is not a reward model'}")
    if len(shape) != 2 or shape[0] != 1:
        raise UserError(f"{setting}: its head `{name}` gives {shape[0]} values per response, but a reward model gives one")
    return Head(name, *output_scale(config, setting, "reward.normalize")) if normalize else Head(name)


def check_same_tokens(files: Files, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> None:
    """Raise UserError unless both tokenizers have the same vocabulary: the model reads the policy's tokens."""
    if load_tokenizer(files, trust_remote_code, KEY).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{KEY}: its tokenizer differs from the policy's, whose tokens it would read; serve it with `python -m "
            "rlhfless_ray.cli.serve_rm` and set reward.url to its address: it then reads text"
        )
