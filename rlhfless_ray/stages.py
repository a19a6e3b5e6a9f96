"""The stages of a run, made of its hired functions, and what they have in common to the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhfless_ray.agent.actor import AgentActor
from rlhfless_ray.agent.load import AgentSource
from rlhfless_ray.agent.processes import Processes, start_agent
from rlhfless_ray.agent.stage import PlayedStage
from rlhfless_ray.functions.faults import Faults
from rlhfless_ray.functions.parked import ParkedMemory
from rlhfless_ray.learn.stage import LearnStage
from rlhfless_ray.prefix.stage import PrefixStage
from rlhfless_ray.reward.source import Source
from rlhfless_ray.reward.stage import ScoreStage
from rlhfless_ray.rollout.stage import RolloutStage
from rlhfless_ray.site import Site
from rlhfless_ray.weights.folder import without_weights

if TYPE_CHECKING:
    from rlhfless_ray.crew import Crew
    from rlhfless_ray.functions.pool import Pool


@dataclass(frozen=True)
class Stages:
    faults: Faults  # one budget for all
    prefix: PrefixStage | None
    rollout: RolloutStage
    score: ScoreStage
    learn: LearnStage
    agents: Processes | None  # None: responses are of one turn

    @classmethod
    def of(
        cls, site: Site, crew: Crew, files: dict[str, bytes], longest_prompt_tokens: int, reward: Source,
        tokenizer: object, *, private: bool,
    ) -> Stages:
        """`files`: the first policy's folder; `private`: nobody else is on this Ray."""
        recipe, say = site.recipe, site.record.progress.message
        faults = Faults(recipe.functions.max_replacements)
        score = PlayedStage(site, crew.reward) if isinstance(reward, AgentSource) else ScoreStage(site, crew.reward, reward, tokenizer)
        learn = LearnStage(site, crew.gang, crew.critic, crew.reference)
        learn.gangs.recovers(recipe.checkpoint.memory_every_steps, say)
        agents = _agents(site, reward, files, longest_prompt_tokens, faults) if isinstance(reward, AgentSource) else None
        prefix = _prefix(site, crew, files, private)
        weight_bytes = sum(len(content) for name, content in files.items() if name.endswith(".safetensors"))
        rollout = RolloutStage(site, crew.rollout, score, learn, tokenizer, weight_bytes, prefix, agents)
        for gang in learn.gangs.all:
            gang.leases.lend = rollout.lend
        stages = cls(faults, prefix, rollout, score, learn, agents)
        for pool in stages.pools():
            pool.faults = faults
        parked = ParkedMemory(recipe.functions.parked_mb, site.leases.memory_mb, say)
        of_reference = [crew.reference.pool] if crew.reference else []  # a learner's memory is its state, and stays
        for pool in (crew.rollout, crew.reward, *of_reference, *([prefix.pool] if prefix else [])):
            parked.watch(pool)
        return stages

    def pools(self) -> Iterator[Pool]:
        yield from (self.rollout.pool, self.score.pool)
        yield from self.learn.gangs.pools()
        if self.prefix is not None:
            yield self.prefix.pool

    @property
    def replacements(self) -> int:
        """Processes that took the place of others so far."""
        return self.rollout.pool.replacements + self.score.pool.replacements + (self.agents.replaced if self.agents else 0)

    def close(self) -> None:
        """End every process; their leases stay."""
        for pool in (self.rollout.pool, self.score.pool, *self.learn.gangs.pools()):
            pool.close()
        if self.prefix is not None:
            self.prefix.close()
        if self.agents is not None:
            self.agents.close()


def _agents(site: Site, source: AgentSource, files: dict[str, bytes], longest_prompt_tokens: int, faults: Faults) -> Processes:
    """Started ahead, beside the learner."""
    import ray

    recipe, resource = site.recipe, site.leases.resource
    agent, functions = recipe.agent, recipe.functions
    config, longest = ray.put(without_weights(files)), recipe.longest_tokens(longest_prompt_tokens)
    own = (source, config, recipe.policy.trust_remote_code, longest, agent.timeout_s, agent.turn_tokens)
    start_s = functions.lease_deadline_s + agent.timeout_s
    agents = Processes(
        lambda: start_agent(AgentActor, *own, resource=resource), agent.processes, agent.timeout_s, faults, start_s, site.ledger
    )
    agents.start()
    return agents


def _prefix(site: Site, crew: Crew, files: dict[str, bytes], private: bool) -> PrefixStage | None:
    import ray

    from rlhfless_ray.prefix.support import page_bytes

    if crew.prefill is None:
        return None
    rollout, size = site.recipe.rollout, 4 if site.recipe.policy.dtype == "float32" else 2
    return PrefixStage(
        site, crew.prefill, rollout.prefix_kv, run_id=site.leases.run_id, block_size=rollout.block_size,
        page_bytes=page_bytes(json.loads(files["config.json"]), size, rollout.block_size),
        store_bytes=int(ray.cluster_resources().get("object_store_memory", 0)), blocked=crew.prefix_blocked,
        max_instances=site.max_actors, private=private,
    )
