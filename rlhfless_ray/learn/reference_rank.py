"""One rank of the reference, which computes log-probabilities of samples under the initial policy. It is not trained."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import torch

from rlhfless_ray.learn.deterministic import use_deterministic_kernels
from rlhfless_ray.learn.image_inputs import PaddedWithImages
from rlhfless_ray.learn.micro_batch_tensors import passed
from rlhfless_ray.learn.micro_batches import PromptSharing
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_model
from rlhfless_ray.learn.process_group import join_process_group, leave_process_group
from rlhfless_ray.learn.rank_settings import ReferenceSettings
from rlhfless_ray.learn.shares import Cutter, Share
from rlhfless_ray.learn.tensor_parallel import divided
from rlhfless_ray.local.laptop.cpu_bfloat16 import use_float32_products
from rlhfless_ray.types import Span
from rlhfless_ray.weights.model_folder import as_folder
from rlhfless_ray.weights.tensor_file import Files
from rlhfless_ray.weights.tensor_slice import FormerRank


class ReferenceRank:
    """A rank as a plain class. Call `open`, then `logprobs`. The ranks share a batch. Only ranks of one copy of the model communicate."""

    def __init__(self, settings: ReferenceSettings) -> None:
        if settings.deterministic:
            use_deterministic_kernels()
        self.settings = settings
        self.device = torch.device("cuda" if settings.device == "gpu" else "cpu")
        use_float32_products(settings.dtype, self.device.type)
        self.model: TokenLogprobs | None = None
        self.sharing: PromptSharing | None = None

    def open(self, files: Files | Path, rendezvous: tuple[str, int], state: None = None) -> None:
        """Load a model folder or its files, as `LearnerRank.open` does. There is no other state."""
        with as_folder(files) as folder:
            self.tensors_of = PaddedWithImages(folder)
            model = load_model(folder, self.settings.dtype, self.settings.trust_remote_code, "the reference model")
        self.sharing = PromptSharing.of(model, self.settings.share_prompts)
        wrapped = TokenLogprobs(model).eval().requires_grad_(False)
        if self.settings.tensor_parallel > 1:
            join_process_group(rendezvous, self.settings.rank, self.settings.ranks, self.device.type)
            wrapped = divided(wrapped, self.settings.tensor_parallel)
        self.model = wrapped.to(self.device)

    def close(self) -> dict[str, FormerRank]:
        """Drop the model, and leave the process group."""
        self.model = None
        gc.collect()
        leave_process_group()
        return {}

    @property
    def cutter(self) -> Cutter:
        """The rules for dividing batches among the ranks."""
        return Cutter(self.settings.ranks // self.settings.tensor_parallel, self.settings.micro_batch_tokens, self.sharing)

    def logprobs(self, share: Share) -> np.ndarray:
        """Return log-probabilities of the share's tokens, (response tokens,) float32, with 0 for tokens that another rank computes."""
        assert self.model is not None
        model, temperature = self.model, self.settings.temperature
        cuts = [cut for cut in share.passes if cut]
        return passed(lambda tensors: model(temperature, **tensors)[0], share.batch, cuts, self.device, self.tensors_of).cpu().numpy()

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
