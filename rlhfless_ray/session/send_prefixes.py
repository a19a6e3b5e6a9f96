"""Send engines the KV pages of their prompts at the beginning of a rollout."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prefix.prefix_stage import PrefixStage
from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.step.step import Step
from rlhfless_ray.step.step_prefixes import StepPrefixes


class SendPrefixes(Plugin):
    def __init__(self, stage: PrefixStage, prefixes: StepPrefixes, step: Step) -> None:
        self.stage, self.prefixes, self.step = stage, prefixes, step

    def begin(self, rollout: LiveRollout) -> None:
        tokens = [prompt.token_ids for prompt in self.step.prompts]
        prompts = [share // self.step.batch.count for share in rollout.shares]
        self.stage.send(self.prefixes, tokens, rollout.pool.working, prompts, rollout.weights.version)

    def metrics(self, before: Mapping[str, object]) -> JsonObject:
        return self.stage.finish(self.prefixes)
