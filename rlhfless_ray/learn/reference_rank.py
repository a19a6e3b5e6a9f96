"""One rank of the reference: log-probabilities of samples under the initial policy. It does not learn."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import torch

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.policy_model import INPUTS, TokenLogprobs, load_model, passed
from rlhfless_ray.learn.prompt_sharing import make_cutter
from rlhfless_ray.learn.rank_settings import ReferenceSettings
from rlhfless_ray.types import Span
from rlhfless_ray.weights.model_folder import as_folder
from rlhfless_ray.weights.tensor_file import Files


class ReferenceRank:
    """A plain class, like the learner: `open` → `logprobs`. Its ranks share a batch, and need nothing of one another."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self.settings = settings
        self.device = torch.device("cuda" if settings.device == "gpu" else "cpu")
        self.model: TokenLogprobs | None = None

    def open(self, files: Files | Path, rendezvous: tuple[str, int], threads: int, state: None = None) -> list[Span]:
        """Load a model folder or its files, as `Learner.open`; there is no other state."""
        start = time.time()
        torch.set_num_threads(threads)
        with as_folder(files) as folder:
            model = load_model(folder, self.settings.dtype, self.settings.trust_remote_code)
        own = self.settings
        self.cutter = make_cutter(model, own.share_prompts, own.micro_batch_tokens, own.ranks, own.rank)
        self.model = TokenLogprobs(model).eval().requires_grad_(False).to(self.device)
        return [Span("start", "open reference", start, time.time())]

    def logprobs(self, batch: Batch, threads: int) -> tuple[np.ndarray, list[Span]]:
        """Of the tokens of this rank's share, 0 elsewhere: (Σ response length,) float32."""
        assert self.model is not None
        start, model, temperature = time.time(), self.model, self.settings.temperature
        torch.set_num_threads(threads)
        share = [cut for cut in self.cutter.cut(batch, np.arange(len(batch))) if cut]
        found = passed(lambda tensors: model(*(tensors[name] for name in INPUTS), temperature)[0], batch, share, self.device)
        return found.cpu().numpy(), [Span("work", "log-probabilities", start, time.time())]

    def leave_device(self) -> list[Span]:
        return self._to("leave device", torch.device("cpu"))

    def return_to_device(self) -> list[Span]:
        return self._to("return to device", self.device)

    def _to(self, what: str, device: torch.device) -> list[Span]:
        start = time.time()
        if self.model is not None:
            self.model.to(device)
        gc.collect()
        if self.device.type == "cuda" and device.type == "cpu":
            torch.cuda.empty_cache()
        return [Span("transfer", what, start, time.time())]
