"""Send engines the KV pages of their prompts at the beginning of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.rollout.neighbours import PrefixPages
from rlhfless_ray.step.step_prefixes import StepPrefixes
from rlhfless_ray.types import Prompt


class SendPrefixes(Plugin):
    def __init__(self, pages: PrefixPages, step: StepPrefixes, prompts: Sequence[Prompt], shares: Sequence[np.ndarray]) -> None:
        """`shares`: positions of each engine's prompts, in the order of the pool's engines."""
        self.pages, self.step, self.prompts, self.shares = pages, step, prompts, shares

    def begin(self, rollout: LiveRollout) -> None:
        tokens = [prompt.token_ids for prompt in self.prompts]
        self.pages.send(self.step, tokens, rollout.pool.working, self.shares, rollout.weights.version)

    def metrics(self, before: Mapping[str, Any]) -> dict[str, Any]:
        return self.pages.finish(self.step)
