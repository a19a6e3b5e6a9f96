"""Create the stages of a run from its worker pools, and close them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import ray

from placement.memory import VALUE_BYTES
from rlhfless_ray.agent.agent_actor import AgentActor
from rlhfless_ray.agent.agent_processes import AgentProcesses, start_agent
from rlhfless_ray.agent.load_agent import AgentSource
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.prefix.prefix_stage import PrefixStage
from rlhfless_ray.prefix.supported_models import page_bytes
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.prescored_stage import PrescoredStage
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.kept_pages import KeptPages
from rlhfless_ray.rollout.multi_turn import EpisodeTurns
from rlhfless_ray.rollout.request_source import PlainRequests
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.runtime.run_inputs import RunInputs
from rlhfless_ray.runtime.worker_pools import WorkerPools
from rlhfless_ray.weights.model_folder import config_of, without_weights
from rlhfless_ray.weights.tensor_file import Files


@dataclass(frozen=True)
class Stages:
    faults: FailureBudget  # shared by all functions
    prefix: PrefixStage | None
    rollout: RolloutStage
    score: ScoreStage
    learn: LearnStage
    agents: AgentProcesses | None  # None: responses have one turn

    @classmethod
    def of(cls, context: RunContext, worker_pools: WorkerPools, inputs: RunInputs, *, private: bool) -> Stages:
        """Create the stages. `private`: whether this Ray serves no other run."""
        faults, files, reward, tokenizer = worker_pools.faults, inputs.files, inputs.reward_source, inputs.tokenizer
        score = (PrescoredStage if isinstance(reward, AgentSource) else ScoreStage)(context, worker_pools.reward, reward, tokenizer)
        learn = LearnStage(context, worker_pools.worker_group, worker_pools.critic, worker_pools.reference)
        agents = _agents(context, reward, files, inputs.lengths.longest_prompt, faults) if isinstance(reward, AgentSource) else None
        prefix = _prefix(context, worker_pools, files, private)
        weight_bytes = sum(len(content) for name, content in files.items() if name.endswith(".safetensors"))
        rollout = RolloutStage(
            context,
            worker_pools.rollout,
            learn.worker_groups,
            partial(PlainRequests, tokenizer) if agents is None else partial(EpisodeTurns, agents, context.recipe.answer_column),
            weight_bytes,
            carries=prefix is not None and not prefix.blocked,
            drafter=TrainedDrafter(context, worker_pools.drafter) if worker_pools.drafter is not None else None,
            kept=_kept_pages(context.recipe, files) if context.recipe.rollout.partial_kv == "keep" else None,
            on_end_near=score.prepare,
            on_no_pages=(lambda reason: None) if prefix is None else prefix.block,
        )
        return cls(faults, prefix, rollout, score, learn, agents)

    def pools(self) -> Iterator[WorkerPool]:
        yield from (self.rollout.pool, self.score.pool)
        yield from self.learn.worker_groups.pools()
        if self.prefix is not None:
            yield self.prefix.pool
        if self.rollout.drafter is not None:
            yield self.rollout.drafter.pool

    @property
    def replacements(self) -> int:
        """Number of processes that were replaced so far."""
        return self.rollout.pool.replacements + self.score.pool.replacements + (self.agents.replaced if self.agents else 0)

    def close(self) -> None:
        """End every process. Their leases stay."""
        for pool in (self.rollout.pool, self.score.pool, *self.learn.worker_groups.pools()):
            pool.close()
        if self.prefix is not None:
            self.prefix.close()
        if self.rollout.drafter is not None:
            self.rollout.drafter.pool.close()
        if self.agents is not None:
            self.agents.close()


def _agents(context: RunContext, source: AgentSource, files: Files, longest_prompt_tokens: int, faults: FailureBudget) -> AgentProcesses:
    """Start the agents' processes, while the learner starts."""
    recipe, resource = context.recipe, context.leases.resource
    agent, functions = recipe.agent, recipe.functions
    config, longest = ray.put(without_weights(files)), recipe.longest_tokens(longest_prompt_tokens)
    arguments = (source, config, recipe.policy.trust_remote_code, longest, agent.timeout_s, agent.turn_tokens)
    start_s = functions.lease_deadline_s + agent.timeout_s
    agents = AgentProcesses(
        lambda: start_agent(AgentActor, *arguments, resource=resource), agent.processes, agent.timeout_s, faults, start_s, context.ledger
    )
    agents.start()
    return agents


def _kept_pages(recipe: Recipe, files: Files) -> KeptPages:
    return KeptPages(recipe.rollout.samples_per_prompt, recipe.rollout.block_size, *_page_and_store_bytes(recipe, files))


def _page_and_store_bytes(recipe: Recipe, files: Files) -> tuple[int, int]:
    """Return the sizes of a KV page of the policy in `files`, and of the cluster's object store, in bytes."""
    page = page_bytes(config_of(files), VALUE_BYTES[recipe.policy.dtype], recipe.rollout.block_size)
    return page, int(ray.cluster_resources().get("object_store_memory", 0))


def _prefix(context: RunContext, worker_pools: WorkerPools, files: Files, private: bool) -> PrefixStage | None:
    if worker_pools.prefill is None:
        return None
    rollout = context.recipe.rollout
    page, store = _page_and_store_bytes(context.recipe, files)
    return PrefixStage(
        context,
        worker_pools.prefill,
        rollout.prefix_kv,
        run_id=context.leases.run_id,
        block_size=rollout.block_size,
        page_bytes=page,
        store_bytes=store,
        blocked=worker_pools.prefix_blocked,
        private=private,
    )
