"""Convert finished episodes to samples, and compute the step's agent metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhfless_ray.agent.messages import EpisodeEnd
from rlhfless_ray.agent.unfinished_episode import token_versions
from rlhfless_ray.types import Completion, Prompt, Request, Sample, Scored


class EpisodeSamples:
    """The samples of a rollout, by the keys of its requests."""

    def __init__(self, requests: Sequence[Request], prompts: Iterable[Prompt], version: int) -> None:
        """`prompts`: of all requests, in any order. `version`: weight version, the same for all turns that this rollout draws."""
        self.ids, self.version = [request.id for request in requests], version
        self.prompts = {prompt.index: prompt for prompt in prompts}
        self.made: dict[int, Sample] = {}
        self.agent_s: list[float] = []

    def add(self, played: Iterable[EpisodeEnd]) -> list[Sample]:
        """Return the new samples, with rewards. A failed episode has an error and no tokens."""
        added: list[Sample] = []
        for end in played:
            if end.key in self.made:
                continue
            name = self.ids[end.key]
            prompt = self.prompts[name.row]
            if isinstance(end.result, str):
                completion = Completion(end.key, np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", self.version)
                sample = Scored(prompt, name, completion, error=end.result)
            else:
                is_mixed = any(version != self.version for _, _, version in end.drawn)
                versions = token_versions(end.result, end.drawn) if is_mixed else ()
                sample = end.result.sample(prompt, name, end.key, self.version, versions, end.observation, end.texts)
            self.made[end.key] = sample
            self.agent_s.append(end.agent_s)
            added.append(sample)
        return added

    def all(self) -> list[Sample]:
        """Return all samples in the order of their requests."""
        return [self.made[key] for key in sorted(self.made)]

    def metrics(self) -> dict[str, Any]:
        samples = self.all()
        turns = [sum(who == "policy" for who, _ in s.turns) for s in samples if s.turns]
        return {
            "agent/turns_mean": float(np.mean(turns)) if turns else 0.0,
            "agent/turns_max": max(turns, default=0),
            "agent/feedback_tokens": int(sum(len(s.completion.token_ids) - s.written_tokens for s in samples)),
            "agent/mean_s": float(np.mean(self.agent_s)) if self.agent_s else 0.0,
        }
