"""Convert finished episodes to samples, and compute the step's agent metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rlhfless_ray.agent.messages import EpisodeEnd
from rlhfless_ray.agent.unfinished_episode import token_versions
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.types import Completion, Prompt, Request, Sample, SampleId, Scored


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
        new = [end for end in played if end.key not in self.made]
        for end in new:
            name = self.ids[end.key]
            self.made[end.key] = sample_of(end, self.prompts[name.row], name, self.version)
            self.agent_s.append(end.agent_s)
        return [self.made[end.key] for end in new]

    def all(self) -> list[Sample]:
        """Return all samples in the order of their requests."""
        return [self.made[key] for key in sorted(self.made)]

    def metrics(self) -> JsonObject:
        samples = self.all()
        turns = [sum(who == "policy" for who, _ in s.turns) for s in samples if s.turns]
        return {
            "agent/turns_mean": float(np.mean(turns)) if turns else 0.0,
            "agent/turns_max": max(turns, default=0),
            "agent/branches": sum(len(s.branches) for s in samples if isinstance(s, Scored)),
            "agent/feedback_tokens": int(sum(len(s.completion.token_ids) - s.written_tokens for s in samples)),
            "agent/mean_s": float(np.mean(self.agent_s)) if self.agent_s else 0.0,
        }


def sample_of(end: EpisodeEnd, prompt: Prompt, name: SampleId, version: int) -> Scored:
    """Return an episode as a sample. The agent's first observation replaces the prompt. `version`: the newest of its tokens."""
    episode = end.result
    if isinstance(episode, str):
        none = Completion(end.key, np.zeros(0, np.int32), np.zeros(0, np.float32), "stop", version)
        return Scored(prompt, name, none, error=episode)
    seen = tuple(episode.token_ids[: episode.prompt_tokens].tolist())
    if seen != prompt.token_ids:
        prompt = replace(prompt, token_ids=seen, text=end.observation)
    rest = episode.token_ids[episode.prompt_tokens :]
    logprobs = np.full(len(rest), np.nan, np.float32) if episode.logprobs is None else episode.logprobs
    versions = token_versions(episode, end.drawn) if any(drawn != version for _, _, drawn in end.drawn) else ()
    completion = Completion(end.key, rest, logprobs, "length" if episode.truncated else "stop", version, versions)
    mask, text = None if episode.action.all() else episode.action, "".join(text for _, text in end.texts)
    further = [replace(end, result=branch, observation="", texts=()) for branch in episode.branches]
    branches = tuple(sample_of(one, prompt, name._replace(branch=number), version) for number, one in enumerate(further, 1))
    return Scored(prompt, name, completion, text, mask, end.texts, episode.reward, None, episode.score, episode.extra_logs, branches)
