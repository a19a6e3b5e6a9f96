"""Make the leases of a run, and worker pools that share them, its ledger and its budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from placement.pools import OWN
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.engine_settings import EngineSettings, check_kernels
from rlhfless_ray.engine.exact_actor import ExactEngineActor
from rlhfless_ray.engine.stock_actor import StockEngineActor
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.instance import start_actor
from rlhfless_ray.functions.lease import Labels, LeaseManager, Slot
from rlhfless_ray.functions.ledger import Ledger, Prices
from rlhfless_ray.functions.node_pools import NodePools
from rlhfless_ray.functions.notices import NoticePolls
from rlhfless_ray.functions.private_slots import PrivateSlots, name_of_run
from rlhfless_ray.functions.slot_source import SlotSource
from rlhfless_ray.functions.warm_memory_budget import WarmMemoryBudget
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.rank_actors import CriticActor, LearnerActor, ReferenceActor
from rlhfless_ray.learn.recovery import Recovery
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.local.laptop.processor import has_int4
from rlhfless_ray.local.machine_memory import snapshot_every_steps
from rlhfless_ray.local.process_memory import large_page_environment
from rlhfless_ray.preflight.check_policy import why_not_served
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.engine_pools import engine_pools
from rlhfless_ray.reward.reward_actor import RewardActor
from rlhfless_ray.reward.source import Source
from rlhfless_ray.rollout.drafter_trainer import DrafterActor, DrafterSettings
from rlhfless_ray.weights.adapter import choose_publish
from rlhfless_ray.weights.load_policy import check_kv_cache
from rlhfless_ray.weights.model_folder import config_of, parameter_count
from rlhfless_ray.weights.quantized_base import has_4_bits
from rlhfless_ray.weights.tensor_file import Files

# Releasing 256 MB of KV cache and touching it again takes 20-40 ms of CPU time, 1-2 % of that. A larger cache takes longer only by the
# tokens that a rollout has put there, microseconds each.
GIVE_BACK_AFTER_S = 2.0


@dataclass(frozen=True)
class ActorClasses:
    """The actor classes of the functions. Benchmarks of control overhead replace them by replayed ones."""

    rollout: type
    reward: type
    learner: type
    prefill: type | None = None  # None: the engines keep no pages
    critic: type | None = None
    reference: type | None = None
    drafter: type | None = None  # None: no drafter is trained
    computes: bool = True  # whether engines and learner compute a policy, so that log-probabilities can be compared

    @classmethod
    def real(cls, engine: str = "exact") -> ActorClasses:
        """Return the classes of a run. `engine`: as in the recipe. Stock engines keep no pages and draft nothing."""
        actors = cls(ExactEngineActor, RewardActor, LearnerActor, ExactEngineActor, CriticActor, ReferenceActor, DrafterActor)
        return replace(actors, rollout=StockEngineActor, prefill=None) if engine == "stock" else actors


def make_leases(
    recipe: Recipe,
    resource: str,
    folder: Path,
    name_of: Callable[[str], str],
    source: SlotSource | None,
    say: Callable[[str], None],
    *,
    private: bool,
) -> LeaseManager:
    """Make the run's leases and their ledger, both empty.

    Args:
        folder: the run folder. Its path and the time name the run's leases on a shared cluster.
        name_of: node id → readable name.
        source: the pool of slots that the runs of the cluster share; None: a pool of this run alone.
        say: tells the user of notices that cannot be read.
        private: whether the cluster serves this run alone.
    """
    nodes = ClusterNodes(resource)
    if recipe.functions.notice and (recipe.cluster.local_nodes or not private):
        nodes.notices = NoticePolls(recipe.functions.notice, nodes.listed, say)
    pools = NodePools(nodes, engine_pools(recipe.rollout, recipe.price, resource))
    run_id = name_of_run(folder)
    ledger = Ledger(resource, prices(recipe, pools), name_of=name_of)
    source = source or PrivateSlots(resource, run_id, is_alone=private)
    return LeaseManager(resource, ledger, recipe.functions.lease_deadline_s, run_id, source, nodes, pools)


def prices(recipe: Recipe, pools: NodePools) -> Prices:
    price = recipe.price
    return Prices(
        slot_per_hour=lambda node: pools.pool_of(node).price_per_hour,
        core_per_hour=price.cpu_slot_per_hour,
        parked_share=price.parked_share,
        slot_mb=pools.nodes.slot_mb,
        pool=lambda node: pools.pool_of(node).name,
    )


class PoolMaker:
    """Makes the pools of one run, which share its leases, its ledger and its budgets."""

    def __init__(
        self, recipe: Recipe, broker: SlotBroker, files: Files, say: Callable[[str], None], *, give_back_at_once: bool = False
    ) -> None:
        """Create a maker. `give_back_at_once`: parked engines release their memory at once, see `memory_fit.Fit`."""
        self.recipe, self.broker, self.leases, self.say = recipe, broker, broker.leases, say
        self.resource = self.leases.resource
        self.give_back_after_s = 0.0 if give_back_at_once else GIVE_BACK_AFTER_S
        self.faults = FailureBudget(recipe.functions.max_replacements)
        self.parked = WarmMemoryBudget(recipe.functions.parked_mb, self.leases.nodes.memory_mb, say, self.leases.source)
        parameters = parameter_count(files)
        self.pages = large_page_environment(parameters) if self.resource == "cpu" else {}  # of processes with weights of the learner's size
        self.snapshot_steps = snapshot_every_steps(recipe, parameters)
        if self.snapshot_steps == 0 and recipe.checkpoint.memory_every_steps is None:
            then = "continues from the newest checkpoint" if recipe.checkpoint.resumable else "ends the run"
            part = recipe.cluster.memory_share_note
            limit = f"a quarter of the run's part of the memory{part}" if part else "a quarter of the memory"
            say(
                f"the learner's state is not copied in memory, because two copies would take more than {limit} of this machine; "
                f"a lost learner {then} (checkpoint.memory_every_steps)"
            )

    def engines(self, kind: str, cls: type, engine: EngineSettings, config: object, *drafter: object, **options: Any) -> WorkerPool:
        """Make a pool of engines.

        `config`: reference to the policy's files without weights. `drafter`: to those of the drafter, if there is one. `options`: keyword
        arguments of `WorkerPool`.
        """

        def start(slot: Slot) -> Any:
            return start_actor(cls, slot, self.resource, {}, config, replace(engine, tensor_parallel=pool.width), *drafter)

        options |= {"give_back_after_s": self.give_back_after_s, "waits_to_leave": False}
        pool = self._pool(kind, start, width=engine.tensor_parallel, **options)
        return pool

    def reward(self, cls: type, source: Source) -> WorkerPool:
        arguments = ray.put(source), self.recipe.reward.timeout_s, self.resource  # the source may contain a reward model's weights
        start = lambda slot: start_actor(cls, slot, self.resource, {}, *arguments)  # noqa: E731
        labels = dict(self.recipe.reward.nodes)
        width = self.recipe.reward.tensor_parallel
        return self._pool(source.pool_kind, start, on_device=source.on_device, width=width, labels=lambda: labels)

    def drafter(self, cls: type, *drafter: object) -> WorkerPool:
        """Make the pool of the process that trains the drafter."""
        rollout, device = self.recipe.rollout, "cuda" if self.resource == "gpu" else "cpu"
        settings = DrafterSettings(rollout.drafter_learning_rate, rollout.temperature, device, self.recipe.run.deterministic)
        return self._pool("drafter", lambda slot: start_actor(cls, slot, self.resource, {}, *drafter, settings))

    def worker_group(
        self, kind: str, cls: type | None, settings: Callable[..., Any], name: str = "", group: type[WorkerGroup] = WorkerGroup
    ) -> Any:
        """Make the worker group of learner, critic or reference. `name`: in messages; default: the kind. `group`: its class."""
        assert cls is not None
        recipe, resource = self.recipe, self.resource
        pool = WorkerPool(
            kind,
            lambda slot: start_actor(cls, slot, resource, self.pages),
            self.leases,
            float("inf"),
            on_device=True,
            leave_s=recipe.learner.deadline_s,
            faults=self.faults,
            labels=self._home_labels(dict(getattr(recipe, "learner" if kind == "learn" else kind).nodes)),
            parked_memory=self.parked if kind == "reference" else None,  # a learner's memory is its state, which must stay
        )
        shares_base = kind == "learn" and recipe.lora.publish == "adapter"
        recovery = Recovery(self.snapshot_steps, self.say, on_disk=recipe.checkpoint.resumable)
        of_ranks = settings(recipe, device=resource)
        return group(pool, of_ranks, recipe.learner, self.broker, name or kind, recovery, shares_base, recipe.run.exact)

    def _home_labels(self, named: dict[str, str]) -> Labels:
        """Return what finds the labels of a worker group's slots: those that the recipe names, or nodes of no pool while there are any."""
        pools = self.leases.pools
        if named or not self.recipe.rollout.pools:
            return lambda: named
        return lambda: pools.labels_of(OWN) if pools.slots()[OWN] else {}

    def _pool(self, kind: str, start: Callable[[Slot], Any], *, on_device: bool = True, **options: Any) -> WorkerPool:
        options |= {"faults": self.faults, "parked_memory": self.parked}
        return WorkerPool(kind, start, self.leases, self.recipe.functions.keep_alive_s, on_device=on_device, **options)


def with_publish(recipe: Recipe, files: Files, resource: str) -> Recipe:
    """Return the recipe with `lora.publish` resolved to `merged` or `adapter`, if it has adapters. Checks it on this resource."""
    lora = recipe.lora
    if not lora.rank:
        return recipe
    publish = "adapter"
    if not has_4_bits(config_of(files)):
        served = why_not_served(recipe, config_of(files)) is None and recipe.rollout.partial_kv != "keep"
        publish = choose_publish(lora.publish, served, resource, parameter_count(files), recipe.rollout.max_tokens)
    recipe = recipe.with_settings({"lora.publish": publish})
    check_kernels(recipe, resource)  # again: a base in 4 bits decides `lora.publish`
    if resource == "cpu" and has_4_bits(config_of(files)) and not has_int4():
        raise UserError("policy.path: its weights have 4 bits, for which vLLM needs AVX-512 on CPU; set it to the unquantised model")
    return recipe


def check_kv(recipe: Recipe, files: Files, longest_prompt_tokens: int) -> None:
    """Raise UserError for a KV cache that engines on CPU cannot have."""
    if recipe.rollout.block_size % 32:
        raise UserError(f"rollout.block_size: vLLM on CPU needs a multiple of 32 (got {recipe.rollout.block_size})")
    check_kv_cache(recipe, files, longest_prompt_tokens)
