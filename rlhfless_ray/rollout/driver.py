"""The driver's side of a rollout: assign requests, collect tokens, move requests, and replace engines that die.

A response depends on its request and the weights only, so any engine can continue it where another one was cut or died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

from placement.scaling.resize_policy import Decision, Release
from rlhfless_ray.common.deadlines import wait_any
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.engine.control_queue import EngineCommand
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.fetch_weights import fetch_into, fetch_weights
from rlhfless_ray.functions.instance import GONE, Instance, lost_on_the_way, raised_at_start, reason_of
from rlhfless_ray.functions.worker_pool import GRANT_S, NoRoom, WorkerPool
from rlhfless_ray.rollout.engine_calls import EngineCall, EngineCalls
from rlhfless_ray.rollout.inflight_migrations import InflightMigrations
from rlhfless_ray.rollout.kept_pages import KeptPages
from rlhfless_ray.rollout.listener import RolloutListener
from rlhfless_ray.rollout.migration_policy import MigrationPolicy, MigrationRequest
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.rollout.shared_drafts import SharedDrafts
from rlhfless_ray.rollout.shared_slots import GIVEN, SharedSlots
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.types import Completion, EngineStep, Request, Span, WeightVersion

DECIDING_SHARE = 0.02  # largest share of the driver's time for decisions about moves
LOOK_S = 1.0  # interval at which the driver looks for silent engines
SILENT_S = 3.0  # silence after which an engine's node is probed
OUTLIVES = 1.1  # a response longer than its forecast is expected to reach this multiple of its present length


@dataclass(frozen=True)
class IdleEngines:
    """Decide about engines without work. `needed_next`: number of slots that the next phase needs.

    `decide`: decides about the lease of such an engine, from the seconds until the rollout ends and whether the next phase needs it.
    `give_back`: carries out that decision, unless the listener has work for the slot.
    """

    needed_next: int
    decide: Callable[[float, bool], Decision]
    give_back: Callable[[Instance, Decision], None]


@dataclass(frozen=True)
class PartialRun:
    """Earlier responses of a partial batch, and the end of its rollout. Unfinished requests are cut then.

    `until`: whether the rollout ends now although its groups are not complete, given its driver. `kept`: KV pages of responses that earlier
    rollouts began. None: their contexts are computed again.
    """

    batch: RolloutBatch
    until: Callable[[RolloutDriver], bool] = lambda driver: False
    kept: KeptPages | None = None


class RolloutDriver:
    """Generate the response to every request on the pool's working instances.

    Args:
        expected: (n,) forecast tokens of each request.
        interval_s: Interval at which engines stream new tokens.
        silence_s: A started engine without a report for this long is considered hung.
        idle: Decides about engines without work.
        on_progress: Called with the number of finished and of all responses.
        migration: Decides moves of requests between engines. None: requests stay as long as their engine lives.
        start_s: Expected start time of a new engine.
        partial_run: Earlier responses and the end of a partial batch. None: the rollout ends with the last response.
        drafts: Data for drafts that engines share.
        shared: Takes slots from other runs of the cluster, and gives slots to them. None: there are no others.
        waits: Whether it waits for a slot if all engines are lost. Beside an update the learner may hold the last one: it raises NoRoom.
    """

    def __init__(
        self,
        pool: WorkerPool,
        requests: list[Request],
        expected: np.ndarray,
        weights: WeightVersion,
        *,
        interval_s: float,
        silence_s: float,
        idle: IdleEngines,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        listener: RolloutListener | None = None,
        migration: MigrationPolicy | None = None,
        start_s: float = 15.0,
        partial_run: PartialRun | None = None,
        drafts: SharedDrafts | None = None,
        shared: SharedSlots | None = None,
        waits: bool = True,
    ) -> None:
        self.pool, self.expected, self.weights, self.interval_s = pool, expected, weights, interval_s
        self.silence_s, self.start_s, self.idle, self.on_progress = silence_s, start_s, idle, on_progress
        self.listener, self.migration, self.shared, self.waits = listener, migration, shared, waits
        self.partial_run, self.kept = partial_run, partial_run.kept if partial_run is not None else None
        self.stopping = False
        self.token_log = TokenLog(requests, self.logged_before(), self.kept is not None)
        if self.kept is not None:
            self.kept.begin(self.token_log)
        self.calls = EngineCalls(pool, self.token_log, interval_s, drafts, self.kept)
        if drafts is not None:
            drafts.begin(self.token_log)
        self.migrations = InflightMigrations(self.calls, self.token_log, expected)
        self.result = RolloutResult(self.token_log.completions, moved=self.migrations.moved)
        self.decide_at_s, self.looked_s, self.probed_s = 0.0, time.monotonic(), time.monotonic()
        self.draining: set[str] = set()  # ids of nodes that are drained
        self.reloaded: set[int] = set()  # engines that loaded the copy of the weights

    def logged_before(self) -> Mapping[int, Completion]:
        """Return the responses of earlier rollouts with which the token log begins, by the keys of their requests."""
        return self.partial_run.batch.before() if self.partial_run is not None else {}

    def run(self, shares: Sequence[np.ndarray], deadline_s: float) -> RolloutResult:
        """Generate all responses.

        `shares`: keys of the requests of each working instance, in the pool's order. Leases of instances without requests are given
        back at once. Raises RunError past the deadline, or when the pool's failure budget is used up.
        """
        start = time.monotonic()
        shares = [share for share in shares if len(share)]
        instances = list(self.pool.working)
        missing = self.total - self.done
        if sum(map(len, shares)) != missing or len(shares) > len(instances):
            raise ValueError(
                f"{len(shares)} shares with {sum(map(len, shares))} requests for {len(instances)} engines and {missing} requests"
            )
        if self.may_end():
            self.result.unfinished = self.unfinished()
            return self.result
        fetch_weights(self.pool, self.weights)
        for instance, share in zip(instances, shares, strict=False):
            self.assign(self.calls.number(instance), np.asarray(share))
        for instance in instances[len(shares) :]:
            self.calls.number(instance)
            self.idle.give_back(instance, Release(0, "the plan assigns no requests to it"))
        self.start_sources()
        while self.has_work or self.calls.running:
            left = deadline_s - (time.monotonic() - start)
            others = [ref for source in (self.listener, self.shared) if source is not None for ref in source.refs()]
            sources = self.sources()
            refs = [*self.calls.running, *sources, *others, *self.migrations.copying]
            for ready in wait_any(refs, left, self.awaited, within_s=LOOK_S, of_s=deadline_s):
                if ready in self.calls.running:
                    self.receive(ready)
                elif ready in sources:
                    self.receive_source(ready)
            self.migrations.poll()
            self.remove_silent()
            self.on_progress(self.done, self.total)
            self.stop_if_enough()
            self.evacuate_draining()
            if self.shared is not None:
                self.shared.poll(self)
            self.decide_moves()
            if self.listener is not None and self.has_work:
                self.listener.poll(self.tail_s(), self.decide_lease)
        if self.kept is not None:
            self.kept.end()
        if self.stopping:
            self.result.unfinished = self.unfinished()
        elif missing := self.token_log.missing:
            total = len(self.token_log.requests)
            raise RunError(f"{missing} of {total} responses are missing although every engine has reported its end")
        return self.result

    def may_end(self) -> bool:
        """Return whether the rollout may end. Unfinished requests are cut then."""
        end = self.partial_run
        return end is not None and (end.batch.is_enough(self.ended) or end.until(self))

    def stop_if_enough(self) -> None:
        """Cut all requests once the rollout may end. Engines that are still starting are sent the command again with each report."""
        if not self.stopping and self.may_end():
            self.stopping = True
            self.stop_sources()
            self.migrations.leaving.clear()
            for call in self.calls.running.values():
                self.cut_owed(call)

    def cut_owed(self, call: EngineCall) -> None:
        owed = self.token_log.owed(call.number)
        cuts = self.kept.cuts(call.number, owed, self.token_log) if self.kept is not None else {0: owed.tolist()}
        for ticket, keys in cuts.items():
            if keys:
                self.calls.send_command(call, EngineCommand(cut=tuple(keys), what="go on in the next step", ticket=ticket))

    # ---- sources of requests; a multi-turn rollout overrides these ------------------------------------------------

    def assign(self, number: int, share: np.ndarray) -> None:
        """Send an engine its share of the requests."""
        self.calls.send(number, share)

    def start_sources(self) -> None:
        """Start the sources of further requests. Called once all engines have their shares."""

    def stop_sources(self) -> None:
        """Stop the sources of further requests. Called when the rollout ends early."""

    def unfinished(self) -> list[Completion]:
        """Return the unfinished responses with their tokens so far."""
        return self.token_log.unfinished(self.weights.version)

    @property
    def ended(self) -> Collection[int]:
        """Return the keys of the finished responses, in the order of completion."""
        return self.result.completions

    @property
    def has_work(self) -> bool:
        """Return whether engines have work now or will get more."""
        return bool(self.calls.running)

    def sources(self) -> list[Any]:
        """Return references, besides those of engines and the listener, that bring requests when they are ready."""
        return []

    def receive_source(self, ready: Any) -> None:
        """Handle a reference of `sources` that is ready."""

    @property
    def awaited(self) -> str:
        """Describe what the driver waits for, for messages."""
        return f"{self.token_log.missing} of {self.total} responses from {len(self.calls.running)} engines"

    @property
    def done(self) -> int:
        """Number of finished responses."""
        return len(self.result.completions)

    @property
    def total(self) -> int:
        """Number of all responses."""
        return len(self.expected)

    # ---- reports of engines ---------------------------------------------------------------------------------------

    def receive(self, generator: Any) -> None:
        """Record an engine's report, or the end of its call."""
        call = self.calls.running[generator]
        instance = call.instance
        try:
            deltas, steps, spans = ray.get(next(generator))
            loaded = _take_load_spans(instance)
        except StopIteration:
            del self.calls.running[generator]
            self.end_call(call)
            return
        except (*GONE, RayTaskError) as error:
            del self.calls.running[generator]
            if self.load_copy(call):
                return
            if isinstance(error, GONE):
                self.handle_death(call, error)
                return
            failure = instance.failure() or f"{instance.id} failed: {reason_of(error)}"
            raise RunError(f"rollout engine {failure}") from error
        call.heard_s = time.monotonic()
        self.result.loads += [(instance.slot.node, span.to_s - span.from_s) for span in loaded]
        self.result.steps += steps
        self.result.decode_s[instance.id] = self.result.decode_s.get(instance.id, 0.0) + sum(step.seconds for step in steps)
        self.pool.ledger.spans([lease.id for lease in instance.leases], [*loaded, *spans])
        ended, cut = self.token_log.accept(call.number, instance.id, deltas)
        self.calls.share_drafts(call, deltas.keys, deltas.observed)
        for moved in self.migrations.complete(call, deltas):
            if self.migration is not None:
                self.migration.observe(moved.context_tokens, moved.pause_s, moved.how)
        call.assigned.difference_update(cut.tolist())
        if self.kept is not None:
            self.kept.observe(deltas.computed)
        if self.stopping:
            if self.kept is not None:
                self.kept.receive(call.number, call.instance.actor, cut, self.token_log)
            self.cut_owed(call)
        else:
            self.migrations.forward(cut)
        self.complete(ended.tolist())
        self.cancel_moves(ended.tolist())

    def complete(self, keys: list[int]) -> None:
        """Pass the completions of these requests to the listener."""
        if self.listener is not None:
            self.listener.add(self.token_log.completions[key] for key in keys)

    def load_copy(self, call: EngineCall) -> bool:
        """Let an engine load the driver's copy of the weights and start over, if their node was lost before it had them.

        Returns False if its call failed for another reason. Requests that it may have begun with older weights are cut and ignored.
        """
        instance, copies = call.instance, self.weights.copies
        if not copies or call.number in self.reloaded or not lost_on_the_way(instance.loading):
            return False
        self.reloaded.add(call.number)
        self.calls.send_command(call, EngineCommand(cut=tuple(call.assigned), what="start over with the step's weights"))
        instance.version = None
        fetch_into(instance, replace(self.weights, shards=copies, others={}))
        self.resend(call.number)
        return True

    def end_call(self, call: EngineCall) -> None:
        """Handle the end of an engine's call: repeat commands that came too late, and drain an idle engine."""
        forgotten = call.assigned & set(self.token_log.owed(call.number).tolist())
        if forgotten:
            raise RunError(f"rollout engine {call.instance.id} ended without {len(forgotten)} of its responses")
        if not self.stopping:
            self.resend(call.number)
            self.drain_if_idle(call.number)

    def resend(self, number: int) -> None:
        """Start a new call of an engine with its unfinished requests. Its moves are cancelled, because they were for the old call."""
        owed = self.token_log.owed(number)
        if len(owed):
            self.calls.send(number, owed)
        self.cancel_moves(owed.tolist())

    # ---- leases of idle engines -----------------------------------------------------------------------------------

    def drain_if_idle(self, number: int) -> None:
        """Give an engine back if it has no work and no request is moving to it, while others work."""
        instance, busy = self.calls.engines[number], self.calls.find(number) is not None
        if busy or not self.has_work or instance not in self.pool.working or self.migrations.is_target(number):
            return
        if instance.slot.node in self.draining:
            self.pool.leave(instance)
            return
        if self.shared is not None and number in self.shared.leaving:
            self.idle.give_back(instance, GIVEN)
            return
        if self.listener is None or not self.listener.take(instance, self.tail_s()):
            self.idle.give_back(instance, self.decide_lease())

    def decide_lease(self, others: int = 0) -> Decision:
        """Decide about a lease without work. `others`: number of leases that no engine holds."""
        return self.idle.decide(self.tail_s(), self.pool.width * len(self.pool.working) + others <= self.idle.needed_next)

    def tail_s(self) -> float:
        """Return the seconds until the rollout ends, by the forecasts of its live responses."""
        return self.horizon() * median_step_s(self.result.steps)

    def horizon(self) -> float:
        """Return the tokens that a live response gets until the rollout ends, by the forecasts."""
        left = np.zeros(len(self.token_log.finished))
        left[~self.token_log.finished] = self.remaining()[0]
        return float(left.max(initial=0.0)) if self.partial_run is None else self.partial_run.batch.until_enough(left)

    def remaining(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that each unfinished response is expected to still get, and those of its context."""
        log = self.token_log
        left = np.maximum(self.expected, OUTLIVES * log.length) - log.length
        return left[~log.finished], (log.prompt + log.length)[~log.finished]

    # ---- moves ----------------------------------------------------------------------------------------------------

    def decide_moves(self) -> None:
        """Ask the planner for moves, one decision at a time: never while a request is between two engines."""
        began_s = time.monotonic()
        if self.stopping or self.migration is None or self.migrations.leaving or not self.calls.running or began_s < self.decide_at_s:
            return
        stay = [number for number in self.calls.available() if self.calls.engines[number].slot.node not in self.draining]
        decided = self.migration.decide(self.token_log, stay, self.result.steps)
        now = time.monotonic()
        self.decide_at_s = now + max(self.interval_s, (now - began_s) / DECIDING_SHARE)
        if not decided.moves:
            return
        if decided.time_saved_s <= 0 and self.decide_lease().action != "Release":
            return  # the move only saves leases, and these would be held for the next phase
        self.result.decisions.append(f"{sum(len(move.requests) for move in decided.moves)} moved: {decided.reason}")
        for move in decided.moves:
            self.migrations.start(move)

    def cancel_moves(self, keys: list[int]) -> None:
        """Cancel the moves of these requests, and drain target engines that are idle now."""
        for number in self.migrations.cancel(keys):
            self.drain_if_idle(number)

    def evacuate_draining(self) -> None:
        """Move requests off engines whose nodes are drained.

        If all engines are on such nodes, a new engine is started while they still work. An engine leaves once it has no request left.
        """
        if self.stopping:
            return
        self.draining = self.pool.leases.nodes.draining()
        leaving = [i for i in self.pool.working if i.slot.node in self.draining]
        if not leaving:
            return
        if len(leaving) == len(self.pool.working):
            took = self.pool.lease_one(need=False, wait_s=GRANT_S)
            if took := self.pool.leases.without_lost(took):
                self.pool.assign_leases(took)
                fetch_weights(self.pool, self.weights)
        stay = [number for number in self.calls.available() if self.calls.engines[number] not in leaving]
        self.evacuate(leaving, stay, "the node is drained")

    def evacuate(self, leaving: list[Instance], stay: list[int], reason: str) -> None:
        """Move the requests of engines to the engines with the numbers `stay`. An engine without requests is drained."""
        for instance in leaving if stay else ():
            number = self.calls.number(instance)
            if self.calls.find(number) is None:
                self.drain_if_idle(number)
                continue
            owed = [i for i in self.token_log.owed(number).tolist() if i not in self.migrations.leaving]
            for k, target in enumerate(stay):
                if part := owed[k :: len(stay)]:
                    for move in self._moves(np.array(part), number, target, reason):
                        self.migrations.start(move)

    def _moves(self, requests: np.ndarray, source: int, target: int, reason: str) -> list[MigrationRequest]:
        """Request moves, each by the faster transfer method if both are known."""
        if self.migration is None:
            return [MigrationRequest(requests, source, target, reason)]
        return self.migration.choose_methods(requests, self.token_log, source, target, reason)

    # ---- lost engines ---------------------------------------------------------------------------------------------

    def remove_silent(self) -> None:
        """Replace engines that do not report although Ray considers their processes alive.

        Time in which the driver itself was held up does not count as silence: reports may be waiting to be read.
        """
        now, lost = time.monotonic(), self.find_lost_nodes()
        held_up_s, self.looked_s = max(0.0, now - self.looked_s - LOOK_S), now
        for generator, call in list(self.calls.running.items()):
            call.heard_s = min(now, call.heard_s + held_up_s)
            if not call.started and call.instance.started:
                call.started, call.heard_s = True, now
            start_s = self.pool.leases.deadline_s
            is_lost = call.instance.slot.node in lost
            late = is_lost or now - call.heard_s > (self.silence_s if call.started else start_s)
            if late and not ray.wait([generator], timeout=0, fetch_local=False)[0]:
                del self.calls.running[generator]
                silent = f"it reported nothing for rollout.silence_s = {self.silence_s:g} s"
                never = f"it did not start within functions.lease_deadline_s = {start_s:g} s"
                self.handle_loss(call, FailureCause.NODE_LOST if is_lost else FailureCause.HUNG, silent if call.started else never)

    def find_lost_nodes(self) -> set[str]:
        """Probe the nodes of silent engines, and return those that do not respond. Ray may notice their loss half a minute later."""
        now = time.monotonic()
        if now - self.probed_s <= SILENT_S:
            return set()
        self.probed_s = now
        silent = {call.instance.slot.node for call in self.calls.running.values() if now - call.heard_s > SILENT_S}
        return {node for node in silent if self.pool.leases.nodes.confirm_lost(node)}

    def handle_death(self, call: EngineCall, error: Exception) -> None:
        """Handle the death of an engine's process. Raises RunError if its constructor raised: the next process would raise too."""
        instance = call.instance
        cause = self.pool.cause(instance)
        if raised_at_start(error) and not cause.is_preemption:
            raise RunError(f"rollout engine {instance.id} could not start: {reason_of(error)}") from error
        self.handle_loss(call, cause, instance.failure() or reason_of(error))

    def handle_loss(self, call: EngineCall, cause: FailureCause, why: str) -> None:
        """Continue the requests of a lost engine from their last received token.

        Other engines take them over at once. Without others, the engine's successor gets them.
        """
        instance = call.instance
        orphans = self.token_log.owed(call.number)
        self.result.replaced += 1
        self.result.orphans += len(orphans)
        self.result.silent_s += time.monotonic() - call.heard_s
        if self.stopping:  # unreported tokens are generated in the next step
            self.pool.end_lost(instance, why, cause)
            return
        others = self.calls.available_or_starting(but=call.number)  # waiting for another slot might never end
        if not others:
            self.migrations.cancel(orphans.tolist())
            make_room = None
            if self.listener is not None:  # the run itself may hold the only slot that is left, so no other would be granted
                self.listener.release()
                make_room = partial(self.listener.finish, self.pool.leases.deadline_s)
            try:
                successor = self.calls.number(self.pool.replace(instance, why, cause, make_room, waits=self.waits))
            except NoRoom:
                self.stop_sources()
                raise
            fetch_weights(self.pool, self.weights)
            if len(orphans):
                self.calls.send(successor, orphans)
            return
        self.calls.spread(orphans, others, self.expected)
        self.cancel_moves(orphans.tolist())
        node = instance.slot.node  # leases of a drained node are released, without waiting for slots that other engines may hold
        is_usable = not self.pool.leases.nodes.find_lost([node]) and node not in self.pool.leases.nodes.draining()
        if is_usable and self.migration is not None and self.tail_s() > self.start_s:
            self.pool.replace(instance, why, cause)  # moves send it requests as soon as it can work
            fetch_weights(self.pool, self.weights)
        else:
            self.pool.end_lost(instance, why, cause)
            if is_usable:
                self.pool.prewarm(instance.slot)  # for the next rollout


def _take_load_spans(instance: Instance) -> list[Span]:
    """Return the spans of the instance's last weight load, once. Raises if the load failed, and keeps the error for `failure`."""
    spans = ray.get(instance.loading) if instance.loading is not None else []
    instance.loading = None
    return spans


def median_step_s(steps: list[EngineStep]) -> float:
    """Return the median time of a token in the newest decode steps, in seconds."""
    return float(np.median([s.token_s for s in steps[-64:]])) if steps else 0.0
