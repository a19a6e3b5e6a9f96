"""A base model with a scalar head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.learn.deterministic import use_deterministic_kernels
from rlhfless_ray.local.laptop.cpu_bfloat16 import use_float32_products


class LastHiddenStates(nn.Module):
    def __init__(self, base: object) -> None:
        super().__init__()
        self.model: Any = base

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden states (sequences, length, width) of `ids` and their attention `mask`, both (sequences, length)."""
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


class ScalarModel:
    def __init__(self, base: Any, weight: Tensor, bias: Tensor | None) -> None:
        self.hidden: Any = LastHiddenStates(base).eval().requires_grad_(False)
        self.weight, self.bias = weight, bias
        self.device = torch.device("cpu")
        limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        self.context_tokens: int | None = limit if isinstance(limit, int) and limit > 0 else None

    @classmethod
    def load(cls, folder: Path, head: str, dtype: str, trust_remote_code: bool = False, deterministic: bool = False) -> ScalarModel:
        """Load the base with transformers and the head by name, so the model's class need not be known to transformers.

        `deterministic`: this process then only uses deterministic kernels. Raises RunError if the folder lacks weights of the base model.
        """
        from safetensors import safe_open
        from transformers import AutoModel
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()  # it would warn that the head is unused
        transformers_logging.disable_progress_bar()
        if deterministic:
            use_deterministic_kernels()
        kind = getattr(torch, dtype)
        base, loading = AutoModel.from_pretrained(
            folder, dtype=kind, trust_remote_code=trust_remote_code, local_files_only=True, output_loading_info=True
        )
        if missing := sorted(loading["missing_keys"]):
            raise RunError(f"reward.model_path: the folder lacks weights of its {type(base).__name__}, such as {missing[0]}")
        head_weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                names = set(tensors.keys())
                head_weights |= {part: tensors.get_tensor(f"{head}.{part}") for part in ("weight", "bias") if f"{head}.{part}" in names}
        bias = head_weights.get("bias")
        return cls(base, head_weights["weight"].to(kind), None if bias is None else bias.to(kind))

    def divide(self, rendezvous: tuple[str, int], member: int, members: int, device: str) -> None:
        """Keep this member's slice of each large matrix, and move it to the device. All members call this at the same time."""
        from rlhfless_ray.learn.process_group import join_process_group
        from rlhfless_ray.learn.tensor_parallel import divided

        join_process_group(rendezvous, member, members, device)
        self.hidden = divided(self.hidden, members)
        self.move(device)

    def move(self, device: str) -> None:
        target = torch.device(device)
        if self.device.type == target.type:
            return
        self.hidden.to(target)
        self.weight = self.weight.to(target)
        self.bias = None if self.bias is None else self.bias.to(target)
        self.device = target
        if target.type == "cpu":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def values(self, sequences: list[np.ndarray]) -> np.ndarray:
        """Return the head's value at the last token of each sequence of token ids, float32 (sequences,).

        All sequences form one batch, padded on the right. The mask matters for models that are not causal only.
        """
        use_float32_products(str(self.weight.dtype).removeprefix("torch."), self.device.type)
        lengths = torch.tensor([len(ids) for ids in sequences], device=self.device)
        ids = torch.zeros((len(sequences), int(lengths.max())), dtype=torch.int64)
        for row, tokens in enumerate(sequences):
            ids[row, : len(tokens)] = torch.from_numpy(np.asarray(tokens, np.int64))
        ids = ids.to(self.device)
        mask = torch.arange(ids.shape[1], device=self.device)[None, :] < lengths[:, None]
        hidden = self.hidden(ids, mask.long())
        last = hidden[torch.arange(len(sequences), device=self.device), lengths - 1]
        return torch.nn.functional.linear(last, self.weight, self.bias).squeeze(1).float().cpu().numpy()
