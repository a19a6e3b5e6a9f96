"""Create the stages of a run with their worker pools, and close them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import ray

from placement.memory import VALUE_BYTES
from rlhfless_ray.agent.agent_actor import AgentActor
from rlhfless_ray.agent.agent_processes import AgentProcesses, start_agent
from rlhfless_ray.agent.episode_source import EpisodeSource
from rlhfless_ray.engine.engine_settings import engine_settings
from rlhfless_ray.functions.demand import make_demand
from rlhfless_ray.functions.engine_pools import EnginePools
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings, reference_settings
from rlhfless_ray.prefix.prefix_stage import PrefixStage
from rlhfless_ray.prefix.supported_models import page_bytes, unsupported
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.prescored_stage import PrescoredStage
from rlhfless_ray.reward.score_stage import ScoreStage
from rlhfless_ray.rollout.kept_pages import KeptPages
from rlhfless_ray.rollout.live_rollout import RequestSource
from rlhfless_ray.rollout.multi_turn import EpisodeTurns
from rlhfless_ray.rollout.request_source import PlainRequests, WantedResponses
from rlhfless_ray.rollout.rollout_stage import RolloutStage
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.runtime.agreement import Agreement
from rlhfless_ray.runtime.run_inputs import RunInputs
from rlhfless_ray.runtime.worker_pools import ActorClasses, PoolMaker, check_kv, with_publish
from rlhfless_ray.weights.model_folder import config_of, without_weights
from rlhfless_ray.weights.tensor_file import Files


@dataclass(frozen=True)
class Stages:
    context: RunContext
    faults: FailureBudget  # shared by all functions
    prefix: PrefixStage | None
    rollout: RolloutStage
    score: ScoreStage
    learn: LearnStage
    agents: AgentProcesses | None  # None: responses have one turn
    agreement: Agreement | None  # None: engines and learner compute no policy

    @classmethod
    def create(
        cls, context: RunContext, inputs: RunInputs, actors: ActorClasses, pools: EnginePools, at_once: bool, private: bool
    ) -> Stages:
        """Create the stages with their pools, all empty. Instances get all they need as bytes, because nodes lack the driver's files.

        Args:
            pools: where engines may work.
            at_once: whether parked engines release their memory at once, see `memory_fit.Fit`.
            private: whether this Ray serves no other run.
        """
        resource, files, reward, longest = context.leases.resource, inputs.files, inputs.reward_source, inputs.lengths.longest_prompt
        if resource == "cpu":
            check_kv(context.recipe, files, longest)
        context.demand = make_demand(context.recipe, resource, pools.pools.kinds)
        recipe = with_publish(context.recipe, files, resource)
        make = PoolMaker(recipe, context.broker, files, context.record.progress.message, give_back_at_once=at_once)
        critic = reference = prefix = drafter = None
        learner = make.worker_group("learn", actors.learner, learner_settings, "learner")
        if recipe.algorithm.has_critic:
            critic = make.worker_group("critic", actors.critic, critic_settings)
        if recipe.has_reference:
            reference = make.worker_group("reference", actors.reference, reference_settings)
        learn = LearnStage(context, learner, critic, reference)
        score = (PrescoredStage if isinstance(reward, EpisodeSource) else ScoreStage)(
            context, make.reward(actors.reward, reward), reward, inputs.tokenizer
        )
        shares_kv = actors.prefill is not None and recipe.rollout.prefix_kv != "off"
        unshared = unsupported(config_of(files), recipe.rollout.least_width) if shares_kv else None
        keeps_pages = (shares_kv and unshared is None) or recipe.rollout.partial_kv == "keep"
        engine = engine_settings(recipe, longest, resource, keeps_pages, inputs.tokenizer.eos_token_id)
        config, of_drafter = ray.put(without_weights(files)), [ray.put(inputs.drafter_files)] if inputs.drafter_files else []
        if actors.prefill is not None and shares_kv:
            blocked = f"KV cannot be shared, and contexts of moved responses are computed again: {unshared}" if unshared else None
            pool = make.engines("prefill", actors.prefill, replace(engine, speculation="off"), config)
            page, store = _page_and_store_bytes(recipe, files)
            mode, kv = recipe.rollout.prefix_kv, {"block_size": recipe.rollout.block_size, "page_bytes": page, "store_bytes": store}
            prefix = PrefixStage(context, pool, mode, run_id=context.leases.run_id, **kv, blocked=blocked, private=private)
        if of_drafter and recipe.rollout.drafter_train == "on" and actors.drafter:
            drafter = TrainedDrafter(context, make.drafter(actors.drafter, *of_drafter))
        requests: Callable[[WantedResponses], RequestSource] = partial(PlainRequests, inputs.tokenizer)
        agents = None
        if isinstance(reward, EpisodeSource):
            agents = _agents(context, reward, files, longest, make.faults)
            requests = partial(EpisodeTurns, agents, partial(reward.label, answer_column=recipe.answer_column))
        rollout = RolloutStage(
            context,
            make.engines("rollout", actors.rollout, engine, config, *of_drafter, labels=pools.labels),
            learn.worker_groups,
            requests,
            sum(len(content) for name, content in files.items() if name.endswith(".safetensors")),
            carries=prefix is not None and not prefix.blocked,
            drafter=drafter,
            kept=_kept_pages(recipe, files) if recipe.rollout.partial_kv == "keep" else None,
            on_end_near=score.prepare,
            on_no_pages=(lambda reason: None) if prefix is None else prefix.block,
        )
        pools.working = lambda: [instance.slot.node for instance in rollout.pool.working]
        agreement = Agreement(context, learn.worker_groups, rollout.pool) if actors.computes else None
        return cls(context, make.faults, prefix, rollout, score, learn, agents, agreement)

    @contextmanager
    def accounted(self, where: str, phase: AbstractContextManager[None]) -> Iterator[None]:
        """Run a phase, and check at its end that it lost no lease."""
        with phase:
            yield
        self.context.broker.check(where, self.pools())

    def generating(self) -> Iterator[WorkerPool]:
        """Yield the pools whose processes may be kept between steps."""
        yield from (self.rollout.pool, self.score.pool)
        if self.prefix is not None:
            yield self.prefix.pool

    def pools(self) -> Iterator[WorkerPool]:
        yield from self.generating()
        yield from self.learn.worker_groups.pools()
        if self.rollout.drafter is not None:
            yield self.rollout.drafter.pool

    @property
    def replacements(self) -> int:
        """Number of processes that were replaced so far."""
        return self.rollout.pool.replacements + self.score.pool.replacements + (self.agents.replaced if self.agents else 0)

    def close(self) -> None:
        """End every process, and ask for no further nodes. Leases stay."""
        for pool in self.pools():
            if self.prefix is None or pool is not self.prefix.pool:
                pool.close()
        if self.prefix is not None:
            self.prefix.close()
        if self.agents is not None:
            self.agents.close()
        self.context.demand.close()


def _agents(context: RunContext, source: EpisodeSource, files: Files, longest_prompt_tokens: int, faults: FailureBudget) -> AgentProcesses:
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
    return page, int(ray.cluster_resources().get("object_store_memory", 0))  # type: ignore[no-untyped-call]
