"""A rollout while it runs, and the interface of its plugins.

A plugin works beside the driver: it moves requests, keeps pages, exchanges slots, or works on slots that engines have left. A rollout has
only those plugins that its recipe asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import ray

from placement.migration.evacuation import MoveTimes
from placement.scaling.resize_policy import Decision
from rlhfless_ray.agent.episode_samples import EpisodeSamples
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.fetch_weights import fetch_into
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.replicate import copy_to
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.engine_calls import Attached, EngineCalls, Ref, has_loaded
from rlhfless_ray.rollout.events import Event
from rlhfless_ray.rollout.inflight_migrations import ChooseMethods, InflightMigrations
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.samples import ResponseSamples
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Completion, Request, WeightVersion

PREFILL_TIMES = 0.05, 2e-5  # seconds of a move by prefill before any is measured: fixed, and for each token of the context


@dataclass(frozen=True)
class DriverSettings:
    """Times of a driver, and what becomes of engines without work.

    Attributes:
        interval_s: interval at which engines stream new tokens.
        silence_s: a started engine without a report for this long is considered hung.
        needed_next: number of slots that the next phase needs.
        decide: decides about the lease of an idle engine, from the seconds until the rollout ends and whether the next phase needs it.
        give_back: carries out that decision.
        park: parks an engine and returns its leases.
        waits: whether it waits for a slot if all engines are lost. Beside an update the learner may hold the last one: it raises NoRoom.
    """

    interval_s: float
    silence_s: float
    needed_next: int
    decide: Callable[[float, bool], Decision]
    give_back: Callable[[Instance, Decision], None]
    park: Callable[[Instance], list[Lease]] = lambda instance: []
    waits: bool = True


def cut_without_pages(engine: int, keys: np.ndarray) -> dict[int, list[int]]:
    return {0: keys.tolist()}


@dataclass(frozen=True)
class Ending:
    """When a rollout ends. By default this is with its last response, as in an evaluation.

    Attributes:
        is_reached: whether the rollout ends now. Unfinished requests are cut then.
        tokens_left: tokens of a live response until then, from the tokens (n,) that each response is expected to still get.
        cuts: {ticket: keys} of an engine's requests that are cut. Pages of their contexts are kept under a ticket that is not 0.
    """

    is_reached: Callable[[LiveRollout], bool] = lambda rollout: False
    tokens_left: Callable[[np.ndarray], float] = lambda left: float(left.max(initial=0.0))
    cuts: Callable[[int, np.ndarray], Mapping[int, list[int]]] = cut_without_pages


class Plugin:
    """Work beside a rollout. Each method does nothing unless a plugin overrides it."""

    rollout: LiveRollout

    def begin(self, rollout: LiveRollout) -> None:
        """Take part in a rollout, before its engines get requests."""
        self.rollout = rollout

    def refs(self) -> list[Ref]:
        """Return references for whose arrival the driver is to wake up."""
        return []

    def receive(self, ref: Ref) -> None:
        """Handle one of these references that is ready."""

    def on_event(self, event: Event) -> None:
        """Handle an event."""

    def attach(self, number: int, requests: list[Request]) -> Attached:
        """Return what an engine gets together with these requests."""
        return {}

    def take(self, number: int, instance: Instance) -> bool:
        """Take over an engine without work, and return whether it did. Otherwise `DriverSettings.decide` is asked."""
        return False

    def metrics(self, before: Mapping[str, object]) -> JsonObject:
        """Return metrics for the step's row. `before`: those of the step's earlier rollouts, to which counts are added."""
        return {}

    def close(self) -> None:
        """Give up what it holds, at the end of a rollout or after an error."""


class RequestSource(Plugin):
    """Where a rollout's requests come from.

    Attributes:
        token_log: the record of the requests.
        total: number of all responses.
        ended: keys of the finished responses, in the order of completion.
        samples: what the responses become once they end.
    """

    token_log: TokenLog
    samples: ResponseSamples | EpisodeSamples
    total: int
    ended: Collection[int]

    def has_work(self) -> bool:
        """Return whether engines have work now or will get more."""
        raise NotImplementedError

    def awaited(self) -> str:
        """Describe what the driver waits for, for messages."""
        raise NotImplementedError

    def assign(self, number: int, share: np.ndarray) -> None:
        """Give an engine its share of the responses (keys)."""
        raise NotImplementedError

    def start(self) -> None:
        """Start further requests. Called once all engines have their shares."""

    def stop(self) -> None:
        """Stop further requests. Called when the rollout ends early."""

    def complete(self, keys: list[int]) -> None:
        """Handle the end of these requests."""
        raise NotImplementedError

    def needs(self, number: int) -> bool:
        """Return whether an idle engine will get further requests."""
        return False

    def left(self) -> np.ndarray:
        """Return (n,) the tokens that each response is expected to still get."""
        raise NotImplementedError

    def unfinished(self) -> list[Completion]:
        """Return the unfinished responses with their tokens so far."""
        raise NotImplementedError


class LiveRollout:
    """The requests, engines and moves of a rollout, which its driver and its plugins share."""

    def __init__(self, pool: WorkerPool, source: RequestSource, weights: WeightVersion, settings: DriverSettings, ending: Ending) -> None:
        self.pool, self.source, self.weights, self.settings, self.ending = pool, source, weights, settings, ending
        self.plugins: tuple[Plugin, ...] = (source,)
        self.token_log = source.token_log
        self.calls = EngineCalls(pool, self.token_log, settings.interval_s, self._attach)
        self.migrations = InflightMigrations(self.calls, self.token_log)
        self.result = RolloutResult(self.token_log.completions, moved=self.migrations.moved)
        self.held_at: dict[str, tuple[Ref, ...]] = {}  # by node: copies of the weights for late engines
        self.late: set[int] = set()  # engines that load such copies
        self.stopping = False
        self.start_s = math.inf  # start time of a new engine; infinite without moves, because it would get no request
        self.move_times = lambda: MoveTimes(PREFILL_TIMES)  # seconds of a move; the migration policy measures them
        self.shares: Sequence[np.ndarray] = ()  # keys of each engine's responses, as planned

    def begin(self) -> None:
        for plugin in self.plugins:
            plugin.begin(self)

    def emit(self, event: Event) -> None:
        """Tell all plugins about an event, in the order in which they are registered."""
        for plugin in self.plugins:
            plugin.on_event(event)

    def _attach(self, number: int, requests: list[Request]) -> Attached:
        attached: Attached = {}
        for plugin in self.plugins:
            attached |= plugin.attach(number, requests)
        return attached

    def metrics(self, before: Mapping[str, object]) -> JsonObject:
        """Return metrics of the rollout and of its plugins, see `Plugin.metrics`."""
        metrics = self.result.metrics(before)
        for plugin in self.plugins:
            metrics |= plugin.metrics(before)
        return metrics

    # ---- forecasts ------------------------------------------------------------------------------------------------

    def tail_s(self) -> float:
        """Return the seconds until the rollout ends, by the forecasts of its live responses."""
        return self.horizon() * median_step_s(self.result.steps)

    def horizon(self) -> float:
        """Return the tokens that a live response gets until the rollout ends, by the forecasts."""
        return self.ending.tokens_left(self.source.left())

    def remaining(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that each unfinished request is expected to still get, and those of its context."""
        log = self.token_log
        return log.left()[~log.finished], (log.prompt + log.length)[~log.finished]

    # ---- engines --------------------------------------------------------------------------------------------------

    def join(self, leases: list[Lease]) -> None:
        """Start an engine under these leases. Moves send requests to it. It pulls the weights from another engine's node if it can."""
        instance = self.pool.assign_leases(leases)
        fetch_into(instance, self._weights_for(instance))

    def _weights_for(self, late: Instance) -> WeightVersion:
        """Return the version for a late engine: copies on a node that has loaded it, so that the learner's node sends nothing."""
        weights = self.weights
        others = [one for one in self.pool.working if one is not late and one.slot.node not in self.calls.draining]
        loaded = {one.slot.node: None for one in others if one.version == weights.version and has_loaded(one)}
        if not loaded or late.slot.node in loaded:
            return weights
        here = ray.get_runtime_context().get_node_id()
        origins = {node or here for node in weights.nodes or ("",)} | set(weights.others)
        if late.slot.node in origins or not (holders := [node for node in loaded if node not in origins]):
            return weights
        holder = next((node for node in self.held_at if node in holders), holders[0])
        if holder not in self.held_at:
            self.held_at[holder] = tuple(copy_to(shard, holder)[0] for shard in weights.shards)
        self.late.add(self.calls.number(late))
        return replace(weights, shards=self.held_at[holder], others={})

    def decide_lease(self, others: int = 0) -> Decision:
        """Decide about a lease without work. `others`: number of leases that no engine holds."""
        held = self.pool.width * len(self.pool.working) + others
        return self.settings.decide(self.tail_s(), held <= self.settings.needed_next)

    def drain_if_idle(self, number: int) -> None:
        """Give an engine back if it has no work and no request is moving to it, while others work."""
        instance, busy = self.calls.engines[number], self.calls.find(number) is not None
        if busy or self.source.needs(number) or not self.source.has_work():
            return
        if instance not in self.pool.working or self.migrations.is_target(number):
            return
        if not any(plugin.take(number, instance) for plugin in self.plugins):
            self.settings.give_back(instance, self.decide_lease())

    def cancel_moves(self, keys: list[int]) -> None:
        """Cancel the moves of these requests, and drain target engines that are idle now."""
        for number in self.migrations.cancel(keys):
            self.drain_if_idle(number)

    def evacuate(self, leaving: list[Instance], stay: list[int], reason: str, choose: ChooseMethods | None = None) -> None:
        """Move the requests of engines to the engines with the numbers `stay`. An engine without requests is drained.

        `choose`: which of them move now, and how; default: all, each by the faster method.
        """
        for instance in leaving if stay else ():
            number = self.calls.number(instance)
            if self.calls.find(number) is None:
                self.drain_if_idle(number)
                continue
            owed = [i for i in self.token_log.owed(number).tolist() if i not in self.migrations.leaving]
            for k, target in enumerate(stay):
                if part := owed[k :: len(stay)]:
                    self.migrations.move(np.array(part), number, target, reason, choose)


def median_step_s(steps: EngineSteps) -> float:
    """Return the median time of a token in the newest decode steps, in seconds."""
    return float(np.median([step.token_s for step in steps.newest(64)])) if len(steps) else 0.0
