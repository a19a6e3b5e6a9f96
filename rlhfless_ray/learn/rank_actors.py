"""Ray actors for ranks of learner, critic and reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhfless_ray.learn.process_group import free_port
from rlhfless_ray.local.fast_imports import fast_imports
from rlhfless_ray.types import CriticStats, Span, UpdateStats
from rlhfless_ray.weights.model_folder import DividedFiles
from rlhfless_ray.weights.remote_folder import Delivery, FilesInStore, deliver, has_tensors_of_ranks, map_files, sees
from rlhfless_ray.weights.tensor_file import Files, RemoteFile, read_header_bytes
from rlhfless_ray.weights.tensor_slice import HeldSlices, Slices

if TYPE_CHECKING:
    from rlhfless_ray.learn.rank_settings import RankSettings, ReferenceSettings
    from rlhfless_ray.learn.shares import Share
    from rlhfless_ray.recipe import Recipe

T = TypeVar("T")
PassReply = tuple[dict[str, np.ndarray], np.ndarray, list[Span]]  # values by name, the share's `spans`, and the rank's activities
Source = tuple[str, dict[str, int], str] | list[FilesInStore]  # arguments of `map_files`, or the files of each rank


def timed(call: Callable[[], T], activity: str, what: str, threads: int | None = None) -> tuple[T, list[Span]]:
    """Return the result of a call, and the span that it took. `threads`: of torch, if it changes."""
    start = time.time()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    result = call()
    return result, [Span(activity, what, start, time.time())]


def read_source(source: Source) -> Files:
    """Return the files that every reader needs, on disk or in shared memory. The driver's call that needs them has the deadline."""
    import ray

    if isinstance(source, tuple):
        return map_files(*source)
    return {name: content for files in ray.get([one.files for one in source]) for name, content in files.items()}


def parts_in(source: Source) -> dict[str, RemoteFile]:
    """Return the files of which a reader fetches those that it uses."""
    import ray

    def of(name: str, header: bytes, ref: Any) -> RemoteFile:
        return RemoteFile(header, lambda: ray.get(ref)[name])

    found = {} if isinstance(source, tuple) else {name: part for one in source for name, part in one.parts.items()}
    return {name: of(name, *part) for name, part in found.items()}


class RankActor:
    """The base of all rank actors. `rank`: a LearnerRank, CriticRank or ReferenceRank."""

    name: str  # in spans
    imports = "import torch and deepspeed"

    def __init__(self) -> None:
        """Import the libraries. `build` loads the model later, under a lease."""
        start = time.time()
        with fast_imports():
            self.kind()
        self.rank: Any = None
        self.imported = Span("start", self.imports, start, time.time())

    def kind(self) -> Any:
        """The class of `rank`, imported here."""
        raise NotImplementedError

    def open(self, threads: int) -> dict[str, Any]:
        from rlhfless_ray.local.process_memory import own_memory_mb

        return {"memory_mb": own_memory_mb(), "spans": [self.imported]}

    def rendezvous(self, loopback: bool) -> tuple[str, int]:
        """Return an address and a free port for the process group on this node, which is rank 0's."""
        import ray

        address = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        return address, free_port(address)

    def build(
        self,
        files: Source | DividedFiles,
        rendezvous: tuple[str, int],
        threads: int,
        state: Source | None,
        settings: RankSettings | ReferenceSettings,
    ) -> dict[str, Any]:
        """Load the model, and the `state` of a stopped run. Each comes from a folder that `sees` confirmed, or as references to files.

        A process that is a rank already becomes one with these settings, and takes its own part of the state first. `fetched` in the reply:
        bytes of weights and optimizer state that it fetched of others, and the least that it had to fetch.
        """
        from rlhfless_ray.learn.rank_state import fetched_by, read_state
        from rlhfless_ray.local.laptop.cpu_bfloat16 import note
        from rlhfless_ray.local.process_memory import own_memory_mb

        def become() -> tuple[int, int]:
            former = {} if self.rank is None else self.rank.close()
            self.rank = self.kind()(settings)
            saved = None if state is None else read_state(read_source(state), parts_in(state), former)
            self.rank.open(model, rendezvous, saved)
            return fetched_by(saved or {})

        if isinstance(files, DividedFiles):
            model: Any = replace(files, rank=settings.rank)
        else:
            model = Path(files[0]) if isinstance(files, tuple) else read_source(files)
        fetched, spans = timed(become, "start", f"open {self.name}", threads)
        reply = {"memory_mb": own_memory_mb(), "spans": spans, "cutter": self.rank.cutter, "note": note(), "fetched": fetched}
        return reply | self.publishes()

    def publishes(self) -> dict[str, bool]:
        """Return how the rank's weights are published, for the reply of `build`. Only a learner's are."""
        return {}

    def update(self, share: Share, threads: int) -> tuple[UpdateStats | CriticStats, list[Span]]:
        return timed(lambda: self.rank.update(share), "work", "update", threads)

    def sees(self, folder: str, sizes: dict[str, int]) -> bool:
        return sees(folder, sizes)

    def save(self, folder: str, prefix: str) -> Delivery:
        """Write this rank's files of a checkpoint into a folder of the driver's, or return them."""
        return deliver({prefix + name: content for name, content in self.rank.trainer.state_files().items()}, folder)

    def save_model(self, folder: str, trained: bool) -> tuple[Delivery, list[Span]]:
        """Write or return the weights of a model folder in the same way, see `TrainerRank.model_files`."""
        return timed(lambda: deliver(self.rank.trainer.model_files(trained=trained), folder), "transfer", "write the model")

    def model(self) -> tuple[Files, list[Span]]:
        """Return this rank's files of the model's weights, adapters merged, and its activities: two return values of the Ray call."""
        return timed(self.rank.trainer.model_files, "transfer", "write the model")

    def keep(self) -> tuple[Files, Files, tuple[float, int, dict[str, bytes]]]:
        """Return this rank's files of a checkpoint: those that every rank reads, and those that `has_tensors_of_ranks` names.

        Also return CPU seconds, bytes, and the headers of the divided files. These are three return values of the Ray call. The
        files stay in this node's object store until they are needed.
        """
        start = time.thread_time()
        files = self.rank.trainer.state_files()
        parts = {name: content for name, content in files.items() if has_tensors_of_ranks(name)}
        headers = {name: read_header_bytes(content) for name, content in parts.items()}
        whole = {name: content for name, content in files.items() if name not in parts}
        return whole, parts, (time.thread_time() - start, sum(map(len, files.values())), headers)

    def park(self) -> dict[str, Any]:
        """Leave the device. Memory that stays there, such as libraries' buffers, counts as memory kept warm."""
        from rlhfless_ray.local.process_memory import report_parked_memory

        return report_parked_memory(self.rank.leave_device() if self.rank.device.type == "cuda" else [])

    def unpark(self) -> list[Span]:
        return self.rank.return_to_device() if self.rank.device.type == "cuda" else []


class LearnerActor(RankActor):
    name = "learner"

    def kind(self) -> Any:
        from rlhfless_ray.learn.learner_rank import LearnerRank

        return LearnerRank

    def publishes(self) -> dict[str, bool]:
        held = self.rank.trainer.held
        return {"reads_published": held.reads_published, "holds_all": held.holds_all}

    def warm_start(self, files: Files, recipe: Recipe, threads: int) -> tuple[Files, list[Span]]:
        from rlhfless_ray.learn.warm_start import warm_start

        return timed(lambda: warm_start(files, recipe, threads), "work", "warm start")

    def logprobs(self, share: Share, threads: int, names: tuple[str, ...]) -> PassReply:
        by_name, spans = timed(lambda: self.rank.logprobs(share, names), "work", "log-probabilities", threads)
        return by_name, share.spans, spans

    def agreement(self, share: Share, threads: int, temperature: float, top_p: float, top_k: int = 0, noisy: bool = False) -> PassReply:
        logprobs, spans = timed(lambda: self.rank.agreement(share, temperature, top_p, top_k, noisy), "work", "check agreement", threads)
        return {"agreement": logprobs}, share.spans, spans

    def weights(self, *share: int) -> tuple[Slices, tuple[dict[str, int], list[Span]]]:
        """Return this rank's slices of the weights, and a digest of each with the spans. `share`: see `RankWeights.published`.

        These are two return values of the Ray call. The slices stay in this node's object store until engines pull it.
        """
        from rlhfless_ray.weights.checksum import digests

        weights, spans = timed(lambda: self.rank.trainer.weights(*share), "transfer", "publish weights")
        return weights, (digests(weights), spans)

    def read_published(self, *parts: Slices) -> None:
        """Call `RankWeights.read_published`. `parts`: each rank's slices of the last version on this node, as views of the object store."""
        self.rank.trainer.held.read_published(HeldSlices.of(*parts))


class CriticActor(RankActor):
    name = "critic"

    def kind(self) -> Any:
        from rlhfless_ray.learn.critic_rank import CriticRank

        return CriticRank

    def values(self, share: Share, threads: int) -> PassReply:
        values, spans = timed(lambda: self.rank.values(share), "work", "values", threads)
        return {"values": values}, share.spans, spans

    def config(self) -> bytes:
        return self.rank.config()


class ReferenceActor(RankActor):
    name = "reference"
    imports = "import torch"

    def kind(self) -> Any:
        from rlhfless_ray.learn.reference_rank import ReferenceRank

        return ReferenceRank

    def reference(self, share: Share, threads: int) -> PassReply:
        logprobs, spans = timed(lambda: self.rank.logprobs(share), "work", "log-probabilities", threads)
        return {"reference": logprobs}, share.spans, spans
