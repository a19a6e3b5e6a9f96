"""The rollout of a step: staff the planned engines, generate every response, and hand leases to the next function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from placement.scaling.engine_assignment import assign_engines
from placement.scaling.resize_policy import Decision, assign_groups
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.fetch_weights import fetch_into, fetch_weights, wake
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import PREFERRED_S, Lease, Slot
from rlhfless_ray.functions.pool_client import PoolClient
from rlhfless_ray.functions.private_slots import PrivateSlots
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.joined_slots import JoinedSlots
from rlhfless_ray.rollout.kept_pages import KeptPages
from rlhfless_ray.rollout.listener import OnSamples, RolloutListener
from rlhfless_ray.rollout.live_rollout import DriverSettings, Ending, LiveRollout, Plugin, RequestSource, cut_without_pages
from rlhfless_ray.rollout.migration_policy import MigrationPolicy
from rlhfless_ray.rollout.request_source import WantedResponses
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.shared_drafts import SharedDrafts
from rlhfless_ray.rollout.shared_slots import SharedSlots
from rlhfless_ray.rollout.staff_pools import order_in_pools, planned_leases, staff_pools
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter
from rlhfless_ray.rollout.weight_traffic import WeightTraffic
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.step.requests import make_evaluation_requests
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Prompt, Sample, WeightVersion
from rlhfless_ray.weights.tensor_file import Files

GRANT_S = 0.2  # longest wait for free slots while an update goes on
BESIDE_S = 1.0  # interval at which a rollout without slots looks whether the update beside it has ended


class RolloutStage:
    def __init__(
        self,
        context: RunContext,
        pool: WorkerPool,
        publisher: ColocatedGroups,
        make_source: Callable[[WantedResponses], RequestSource],
        weight_bytes: int,
        *,
        carries: bool = False,
        drafter: TrainedDrafter | None = None,
        kept: KeptPages | None = None,
        on_end_near: Callable[[float, Slot], None] = lambda seconds, slot: None,
        on_no_pages: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create the stage.

        Args:
            publisher: the learner, which publishes the weights and needs the slots next.
            make_source: returns the source of a rollout's requests.
            carries: whether engines can copy KV pages.
            drafter: a draft model that is trained on the responses.
            kept: KV pages of responses that continue in the next step.
            on_end_near: called with the seconds until the rollout ends and a slot that will be free then.
            on_no_pages: called if an engine cannot keep KV pages, with the reason.
        """
        self.context, self.pool, self.publisher, self.on_end_near = context, pool, publisher, on_end_near
        self.on_no_pages = on_no_pages
        self.make_source, self.weight_bytes = make_source, weight_bytes
        self.began_s = 0.0
        self.restart_s: float | None = None  # time of the last rollout besides decoding and loading; None after a cold start
        self.idle_s: Callable[[float], float] | None = None  # beside an update, see `phase`
        self.drafter, self.kept = drafter, kept
        self.drafters = [drafter] if drafter is not None else []
        self.traffic = WeightTraffic()
        rollout = context.recipe.rollout
        self.drafts = SharedDrafts(drafter) if rollout.speculation != "off" else None
        rule = "off" if context.recipe.agent.is_used else rollout.migrate  # the remaining length of an episode cannot be forecast
        self.migration = MigrationPolicy(
            rule, rollout.migrate_tau, carries, context.autoscaler.safely, partial(context.autoscaler.steps.takes, "moves")
        )
        context.autoscaler.terms.include(self.migration.pauses)
        self.of_all: list[Plugin] = [self.drafts] if self.drafts is not None else []  # plugins of every rollout
        self.of_steps: list[Plugin] = [kept] if kept is not None else []
        self.cuts = kept.cuts if kept is not None else cut_without_pages

    def warm(self, width: int) -> int:
        """Return the number of engines of `width` slots that need no cold start. Other runs may keep the devices of parked ones."""
        working = sum(instance.memory_mb > 0 and instance.width == width for instance in self.pool.working)
        return working + self.pool.count_warm(width, self.context.leases.reachable())

    def assign_prompts(self, step: Step) -> list[np.ndarray]:
        """Return the positions of the prompts that the plan assigns to each engine."""
        return [share // step.batch.count for share in self._shares(step, step.plan.actors)]

    def begin(self, step: Step, weights: WeightVersion) -> None:
        """Start engines of a planned step before its phase: they take free leases and load the weights.

        Engines that have kept their devices since the part of the rollout beside the update load them too, and those that the plan does
        not need leave.
        """
        context, pool = self.context, self.pool
        width, kept = step.plan.width or pool.width, list(pool.working)
        leases = self._reclaim(kept if width != pool.width else kept[step.plan.actors :])
        self.load(weights)
        pool.set_width(width)
        with self._warm_start_timed():
            free = context.leases.without_lost([*leases, *context.broker.take()])
            used = planned_leases(pool, free, step.plan.pools) if step.plan.pools else free
            left = pool.begin(step.plan.actors, used, partial(fetch_into, weights=weights))
            context.broker.put([*(lease for lease in free if lease not in used), *left])
        context.broker.lend_idle(partial(self._reclaim, list(self.pool.working)))

    def count_missing(self, plan: RolloutPlan) -> int:
        """Return how many parked engines of a plan could wake on slots that this run does not hold."""
        pool = self.pool
        if pool.working or (plan.width or pool.width) != pool.width:
            return 0
        return min(pool.count_missing(plan.actors), sum(one.memory_mb > 0 and one.width == pool.width for one in pool.parked))

    def wake(self, plan: RolloutPlan) -> int:
        """Start engines of a planned step on free slots, without its weights. Returns how many there are.

        They wait for their phase, see `begin`. Whatever else needs their slots parks them.
        """
        self.pool.wake(plan.actors, GRANT_S, wake)
        self.context.broker.lend_idle(partial(self._reclaim, list(self.pool.working)))
        return len(self.pool.working)

    def load(self, weights: WeightVersion) -> None:
        """Let engines that hold leases load the weights, without waiting for it."""
        fetch_weights(self.pool, weights)

    def _reclaim(self, idle: list[Instance]) -> list[Lease]:
        """Park those of these engines that still wait for their phase, and return their leases."""
        waiting = [instance for instance in idle if instance in self.pool.working]
        return [lease for instance in waiting for lease in self._leave(instance)]

    @contextmanager
    def _warm_start_timed(self) -> Iterator[None]:
        began_s, cold, working = time.monotonic(), self.pool.cold_starts, len(self.pool.working)
        yield
        if cold == self.pool.cold_starts and len(self.pool.working) > working:
            self.context.autoscaler.terms.warm_start.observe(0.0, time.monotonic() - began_s)

    def _shares(self, step: Step, engines: int) -> list[np.ndarray]:
        """Return the unfinished requests of each engine, without engines that get none."""
        count = self.context.recipe.rollout.samples_per_prompt
        shares = step.plan.shares(engines, step.expected_work.mean(1), np.repeat(np.arange(len(step.prompts)), count))
        return [share for share in (share[step.batch.unfinished[share]] for share in shares) if len(share)]

    def _order_engines(self, step: Step, shares: list[np.ndarray], weights: WeightVersion) -> None:
        """Order the engines by these shares. The longest share goes to the learner's node if loading weights is faster there."""
        engines, homes, autoscaler = self.pool.working, self.publisher.learner_nodes, self.context.autoscaler
        prompts = np.repeat([len(p.token_ids) for p in step.prompts], self.context.recipe.rollout.samples_per_prompt)
        work_s = np.array([autoscaler.predictor.work_s(step.expected_work[share], prompts[share]) for share in shares])
        overhead_s = np.array(
            [
                autoscaler.predictor.overhead_s(
                    self.weight_bytes, e.slot.node not in homes, e.loading is not None or e.version != weights.version
                )
                for e in engines
            ]
        )
        order = order_in_pools(self.pool, step.plan.pools, work_s, overhead_s) or assign_engines(work_s, overhead_s)
        self.pool.working[:] = [*(engines[k] for k in order), *(e for k, e in enumerate(engines) if k not in order)]
        if shares and len({e.slot.node for e in engines}) > 1:
            longest = self.pool.working[int(np.argmax(work_s))]
            step.metrics["rollout/longest_at_home"] = float(longest.slot.node in homes)

    @contextmanager
    def phase(
        self,
        plan: RolloutPlan,
        weights: WeightVersion,
        name: str = "rollout",
        wait_s: float = 0.0,
        ends: Callable[[], bool] | None = None,
        idle_s: Callable[[float], float] | None = None,
        goes_on: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """Hold the plan's engines inside the block. They load the weights as soon as they have leases.

        Args:
            name: the phase's name.
            wait_s: longest wait for slots that another run gives back.
            ends: for work beside an update, whether it has ended. There may be no engine then, see `_staff`.
            idle_s: for the same, seconds until the slot of an idle engine is needed again, from the seconds until the rollout ends.
            goes_on: whether the rollout goes on at once under the update's weights. Then engines keep their devices and leases after the
                block, until they are needed for something else.
        """
        context, self.idle_s = self.context, idle_s
        with context.phases.phase(name):
            context.broker.keep_idle()
            self.pool.set_width(plan.width or self.pool.width)
            with self._warm_start_timed():
                begin = partial(fetch_into, weights=weights)
                if plan.pools:
                    context.broker.put(staff_pools(self.pool, context.broker.take(), plan.pools[: plan.actors], PREFERRED_S, begin))
                self._staff(plan.actors, begin, wait_s, ends)
            context.broker.release()
            context.autoscaler.actors = len(self.pool.working)
            yield
            if goes_on():
                context.broker.lend_idle(partial(self._reclaim, list(self.pool.working)))
            else:
                leases = self._park()
                if idle_s is not None and context.recipe.functions.elastic and self.decide_lease(0.0, True).action == "Release":
                    context.leases.release(leases)  # the update goes on for long
                else:
                    context.broker.put(leases)
            self.idle_s = None

    def decide_lease(self, tail_s: float, needed_next: bool) -> Decision:
        """Have the autoscaler decide about an idle engine's lease. Beside an update, `idle_s` says how long the slot would be idle."""
        autoscaler = self.context.autoscaler
        return autoscaler.steps.drained(tail_s, needed_next) if self.idle_s is None else autoscaler.steps.hold_idle(self.idle_s(tail_s))

    def _staff(self, actors: int, begin: Callable[[Instance], None], wait_s: float, ends: Callable[[], bool] | None) -> None:
        """Take slots for engines. `ends`: for work beside an update, whether it has ended.

        The learner holds its own slots then. If each of several runs waited until it has one more, none of them would ever get it. So a run
        has no engine if others hold the slots until its update ends, or if the nodes have no more of them.
        """
        context, need, wait_s = self.context, self._fewest(), max(0.2, wait_s)
        staff = partial(context.broker.resize, self.pool, actors, begin=begin)
        if ends is None:
            try:
                staff(need=need, wait_s=wait_s)
            except RunError:
                if (fewer := self._fewest()) >= need:  # otherwise only the run's own node is left meanwhile
                    raise
                staff(need=fewer, wait_s=wait_s)
            return
        staff(need=0, wait_s=wait_s)
        end_s = time.monotonic() + context.recipe.learner.deadline_s  # an update that hangs is found where its result is awaited
        while len(self.pool.working) < need:
            if ends() or time.monotonic() > end_s:
                context.broker.put(self.pool.park_all())
                return
            staff(need=0, wait_s=BESIDE_S)

    def _fewest(self) -> int:
        return self.context.limits().fewest(self.pool.width)

    def generate(
        self,
        step: Step,
        weights: WeightVersion,
        plugins: Sequence[Plugin] = (),
        until: Callable[[LiveRollout], bool] = lambda rollout: False,
        on_samples: OnSamples = lambda new: None,
    ) -> list[Sample]:
        """Generate until enough groups of the step's batch are complete. Returns all its samples, without reward.

        `plugins`: take part in this rollout. `until`: ends the rollout earlier. `on_samples`: called with samples as they finish.
        """
        recipe, batch = self.context.recipe, step.batch
        requests, lengths = batch.requests(recipe), step.expected_work + batch.made[:, None]
        self._begin_moves(lengths)
        shares = self._shares(step, len(self.pool.working))
        self._order_engines(step, shares, weights)
        wanted = WantedResponses(
            requests, step.prompts, lengths.mean(1), weights.version, batch.before(), batch.cuts, self.kept is not None
        )
        source, listener = self.make_source(wanted), RolloutListener(self._on_progress, on_samples)
        ending = Ending(lambda rollout: batch.is_enough(source.ended) or until(rollout), batch.until_enough, self.cuts)
        driver = self._driver(source, weights, [listener, *self.of_all, *self.of_steps, *self._moves(), *plugins], ending)
        result = self._run(driver, shares)
        step.metrics |= driver.rollout.metrics(step.metrics) | self.traffic.metrics(weights, self.publisher.complete_nodes)
        return batch.join(source.samples.all(), result.unfinished)

    def _begin_moves(self, lengths: np.ndarray) -> None:
        """Prepare the migration policy. `lengths`: (n, S) draws of the responses' lengths."""
        autoscaler, rollout, elastic = self.context.autoscaler, self.context.recipe.rollout, self.context.recipe.functions.elastic
        second = autoscaler.criteria.value_per_s if elastic else float("inf")  # inf: leases are never given back, so only time counts
        speed, prefill, start_s = autoscaler.engines.fit.speed, autoscaler.terms.prefill.per_unit_s, autoscaler.terms.cold_start.predict()
        self.migration.prepare(lengths, speed, second, prefill, rollout.max_tokens, start_s)
        self.migration.kind_on = lambda node: autoscaler.frontiers.engine_in(self.context.leases.pools.pool_of(node))

    def answer(self, prompts: list[Prompt], settings: list[tuple[float, int]], weights: WeightVersion) -> list[Sample]:
        """Generate the responses of an evaluation on as many engines as possible. `settings`: (temperature, responses per prompt)."""
        context = self.context
        context.broker.keep_idle()
        context.broker.resize(self.pool, context.most_engines(self.pool.width), wait_s=0.2)
        requests = make_evaluation_requests(context.recipe, prompts, settings)
        prompt_of = np.concatenate([np.repeat(np.arange(len(prompts)), count) for _, count in settings])
        expected = context.autoscaler.predictor.expected(prompts)[prompt_of]
        source = self.make_source(WantedResponses(requests, prompts, expected, weights.version))
        driver = self._driver(source, weights, [RolloutListener(self._on_progress), *self.of_all])
        self._run(driver, assign_groups(expected, prompt_of, len(self.pool.working)))
        context.broker.put(self._park())
        return source.samples.all()

    def _driver(self, source: RequestSource, weights: WeightVersion, plugins: list[Plugin], ending: Ending = Ending()) -> RolloutDriver:  # noqa: B008
        rollout = self.context.recipe.rollout
        settings = DriverSettings(
            rollout.stream_interval_s,
            rollout.silence_s,
            self.publisher.learner_slots,
            self.decide_lease,
            self.give_back,
            self._leave,
            waits=self.idle_s is None,
        )
        return RolloutDriver(self.pool, source, weights, settings, ending, plugins)

    def _run(self, driver: RolloutDriver, shares: list[np.ndarray]) -> RolloutResult:
        """Generate the responses, and measure what the planner needs to know."""
        autoscaler, version = self.context.autoscaler, driver.rollout.weights.version
        self.began_s = time.monotonic()
        all_warm = all(instance.memory_mb > 0 for instance in self.pool.working)
        self.traffic.loaded(version, (instance.slot.node for instance in self.pool.working))
        result = driver.run(shares, self.context.recipe.rollout.deadline_s)
        overhead_s = time.monotonic() - self.began_s - max(result.decode_s.values(), default=0.0)
        self.traffic.loaded(version, (node for node, _ in result.loads))
        for node, seconds in result.loads:
            autoscaler.predictor.observe_load(self.weight_bytes, seconds, away=node not in self.publisher.learner_nodes)
        self.restart_s = max(0.0, overhead_s - max((seconds for _, seconds in result.loads), default=0.0)) if all_warm else None
        autoscaler.predictor.observe_rollout(result.steps, overhead_s if all_warm else None)
        pools = self.context.leases.pools
        for pool, steps in (result.steps_by(lambda node: pools.pool_of(node).name) if len(pools.kinds) > 1 else {}).items():
            autoscaler.predictor.observe_pool(pool, steps)
        return result

    @property
    def grows(self) -> bool:
        """Whether a rollout takes slots from a shared pool, and gives slots to other runs, while it runs."""
        return self.migration.is_on

    def _moves(self) -> list[Plugin]:
        """Return what moves requests between engines, and exchanges slots with other runs of the cluster."""
        return [*self._shared_slots(), self.migration] if self.migration.is_on else []

    def _shared_slots(self) -> list[Plugin]:
        """Return what takes further slots, and on a shared pool gives slots to other runs."""
        context, autoscaler, source = self.context, self.context.autoscaler, self.context.leases.source
        width = self.pool.width
        if isinstance(source, PrivateSlots) and not source.is_alone and context.recipe.functions.elastic:

            def count(left: np.ndarray, tokens: np.ndarray) -> int:
                most = context.most_engines(width)
                return autoscaler.safely("growing", lambda: autoscaler.frontiers.best_engines(left, tokens, most), lambda: 0)

            return [JoinedSlots(count)]
        if autoscaler.criteria.bids is None or not isinstance(source, PoolClient):
            return []

        def renew(left: np.ndarray, tokens: np.ndarray, working: int, warm: int) -> int:
            return autoscaler.renew_rollout(left, tokens, working, warm, context.most_engines(width))  # nodes may join while it runs

        most = min(autoscaler.criteria.bids.most // width, context.most_engines(width))
        return [SharedSlots(context.leases, source, most, autoscaler.terms.warm_start.predict(), renew)]

    def give_back(self, instance: Instance, decision: Decision) -> None:
        """Release the lease of an idle engine if the decision says so. An engine that is still starting keeps it."""
        if decision.action == "Release" and self.context.recipe.functions.elastic and instance.started:
            self.context.leases.release(self._leave(instance))

    def state(self) -> JsonObject:
        """Return the fitted times of moves, for a checkpoint."""
        return self.migration.state()

    def files(self) -> Files:
        """Return the state that is too large for JSON, as files."""
        return self.drafter.files() if self.drafter is not None else {}

    def restore_files(self, files: Files) -> None:
        if self.drafter is not None:
            self.drafter.restore(files)

    def restore(self, state: JsonObject) -> None:
        self.migration.restore(state)

    def _leave(self, instance: Instance) -> list[Lease]:
        """Park an engine and return its leases."""
        return self.pool.park(instance) if self.context.record_start_or_replace(self.pool, instance, self._record_start) else []

    def _on_progress(self, done: int, total: int) -> None:
        """Do deferred work while engines decode, and tell the next phase when this one will end."""
        self.context.record.progress.phase(f"rollout: {done} of {total} responses")
        self.context.record.catch_up()
        if self.pool.working:
            self.on_end_near((time.monotonic() - self.began_s) * (total - done) / max(done, 1), self.pool.working[0].slot)

    def _record_start(self, instance: Instance) -> None:
        if spans := self.context.record_start(instance):
            terms, seconds = self.context.autoscaler.terms, sum(span.to_s - span.from_s for span in spans)
            terms.cold_start.observe(0.0, seconds)
            terms.pools.observe_start(self.context.leases.pools.pool_of(instance.slot.node).name, seconds)
            if instance.keeps_no_pages:
                self.on_no_pages(f"{instance.keeps_no_pages}; moved contexts are computed again")
                self.migration.pages = None
            if instance.drafter_failure:
                self.context.record.progress.message(f"{instance.id} drafts without the drafter, which failed: {instance.drafter_failure}")

    def _park(self) -> list[Lease]:
        """Park all engines and return their leases."""
        for instance in list(self.pool.working):
            self.context.record_start_or_replace(self.pool, instance, self._record_start)
        return self.pool.park_all()
