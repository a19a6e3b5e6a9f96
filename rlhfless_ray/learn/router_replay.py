"""Let the learner's routers choose the experts that an engine's routers chose (R3, arXiv 2510.11370).

Engine and learner round differently. For a token between two experts this may decide otherwise, and then its log-probabilities differ
by much more than rounding.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from rlhfless_ray.learn.batch import UNKNOWN_EXPERT


class RouterReplay:
    """The routers of one model, in `model_checks.WITH_ROUTERS`. Experts are the engine's, and their weights the learner's own.

    Gradients therefore reach the routers as without replay. The backward pass must follow the forward pass before the next one, because
    activations may be computed again in it.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register with the model's routers. Raises ValueError if it has none."""
        self.experts: Tensor | None = None  # (rows, length, routers, experts per token) uint8, of the running pass. None: free choices
        self.routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if not self.routers:
            raise ValueError(f"{type(model).__name__} has no routers whose choices could be replayed")
        for number, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._choose, number))

    def begin_pass(self, experts: Tensor | None) -> None:
        """Set the experts of the next passes, see `experts`. Raises ValueError if they are of another number of routers."""
        if experts is not None and experts.shape[2] != len(self.routers):
            raise ValueError(f"the engine recorded {experts.shape[2]} routers, and the learner's model has {len(self.routers)}")
        self.experts = experts

    def _choose(self, number: int, router: object, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a router's (logits, weights, experts), each (tokens, …), with the engine's experts where they are known."""
        if self.experts is None:
            return output
        logits, weights, own = output
        replayed = self.experts[:, :, number].flatten(0, 1).to(own.device, own.dtype)
        experts = torch.where(replayed == UNKNOWN_EXPERT, own, replayed)
        chosen = logits.float().softmax(-1).gather(1, experts)
        if getattr(router, "norm_topk_prob", True):  # Mixtral's always do
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(weights.dtype), experts
