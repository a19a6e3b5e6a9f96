"""Record which experts the routers of a mixture choose inside vLLM, so that the learner can choose the same ones.

vLLM (0.32) returns them with its second model runner only. Its routers call a function with their choices under either runner.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter


class RouterChoices:
    """The choices for every token whose KV the engine holds, by the token's place in the KV cache.

    A prompt that is not computed, because its KV is cached, has the choices of the request that computed it.
    """

    def __init__(self, runner: Any) -> None:
        """Watch the routers of the runner's model. `runner`: vLLM's model runner. Raises ValueError if a router cannot be watched."""
        self.runner = runner
        mixtures = sorted(
            (module for module in runner.get_model().modules() if isinstance(module, MoERunner)), key=lambda one: one.layer_id
        )
        if not mixtures or any(one._quant_method.is_monolithic or not isinstance(one.router, BaseRouter) for one in mixtures):
            raise ValueError("vLLM's kernels for these experts do not tell which ones a token goes to")
        self.shape = (len(mixtures), runner.model_config.get_num_experts_per_tok())
        self.step = torch.zeros(runner.max_num_tokens, *self.shape, dtype=torch.uint8, device=runner.device)  # of the tokens of a pass
        self.held: torch.Tensor | None = None  # (tokens of the KV cache, routers, experts per token)
        for number, mixture in enumerate(mixtures):
            mixture.router.set_capture_fn(partial(self._note, number))
        forward = runner._model_forward

        def watched(**inputs: object) -> Any:
            output = forward(**inputs)
            self._hold()
            return output

        runner._model_forward = watched

    def _note(self, number: int, experts: torch.Tensor) -> None:
        """Take one router's choices (tokens, experts per token) for the tokens of the running pass."""
        self.step[: len(experts), number] = experts

    def _hold(self) -> None:
        """Move the choices of a pass to the places of its tokens."""
        runner = self.runner
        if self.held is None:
            places = runner.kv_cache_config.num_blocks * self._block_tokens
            self.held = torch.zeros(places, *self.shape, dtype=torch.uint8, device=self.step.device)
        count = int(runner.query_start_loc.np[runner.input_batch.num_reqs])
        self.held[runner.input_batch.block_table[0].slot_mapping.gpu[:count]] = self.step[:count]

    @property
    def _block_tokens(self) -> int:
        return int(self.runner.cache_config.block_size)

    def of(self, name: str, tokens: int) -> np.ndarray:
        """Return the choices for the first `tokens` tokens of a request, (tokens, routers, experts per token) uint8.

        `name`: vLLM's own. Call it before the next engine step, in which the blocks of an ended request may get another owner.
        """
        assert self.held is not None
        position = torch.arange(tokens)
        blocks = torch.tensor(self.runner.requests[name].block_ids[0])
        places = blocks[position // self._block_tokens] * self._block_tokens + position % self._block_tokens
        return self.held[places.to(self.held.device)].cpu().numpy()
