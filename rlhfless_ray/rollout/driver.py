"""The driver's side of a rollout: share requests out, write down what engines say, move requests, go on without engines that die.

A response depends on its request and the weights only, so any engine can go on where another one was cut or died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

from placement.scaling.resize_policy import Decision, Release
from rlhfless_ray.common.deadlines import wait_any
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import GONE, Instance, lost_on_the_way, raised_at_start, reason_of
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.control_queue import EngineCommand
from rlhfless_ray.rollout.engine_calls import EngineCall, EngineCalls
from rlhfless_ray.rollout.inflight_migrations import InflightMigrations
from rlhfless_ray.rollout.listener import RolloutListener
from rlhfless_ray.rollout.migration_policy import MigrationPolicy, MigrationRequest
from rlhfless_ray.rollout.rollout_result import RolloutResult, fetch_into, fetch_weights
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import EngineStep, Request, Span, WeightVersion

DECIDING_SHARE = 0.02  # of the driver's time, at most, goes into deciding on moves
LOOK_S = 1.0  # for engines that say nothing any more
SILENT_S = 3.0  # after which the node of one that says nothing is asked whether it is there
ALL_LOST_S = 5.0  # when one engine could not load for a lost node, until the others are heard of
GRANT_S = 0.05  # for a slot that may be free: Ray takes milliseconds to grant one
OUTLIVES = 1.1  # a response that outlives its forecast is taken to become this many times as long as it is


def run_rollout(
    pool: WorkerPool,
    requests: list[Request],
    shares: Sequence[np.ndarray],
    expected: np.ndarray,
    weights: WeightVersion,
    *,
    interval_s: float,
    deadline_s: float,
    silence_s: float,
    needed_next: int,
    drained: Callable[[float, bool], Decision],
    give_back: Callable[[Instance, Decision], None],
    on_progress: Callable[[int, int], None],
    listener: RolloutListener | None = None,
    migration: MigrationPolicy | None = None,
    start_s: float = 15.0,
    agents: Callable[..., RolloutDriver] | None = None,
    renew: Callable[[WeightVersion, list[Instance]], WeightVersion | None] = lambda weights, engines: None,
) -> RolloutResult:
    """Answer every request on the pool's working instances.

    shares: indices of the requests of each working instance, in the pool's order; instances beyond them get nothing to
    do and are given back at once. expected (n,): forecast tokens. `needed_next`: slots the next phase will want.
    When an instance has nothing left to do, `drained` (seconds of tail left, whether the next phase needs the slot) decides
    what becomes of its lease, and `give_back` carries it out, unless `beside` has work for its slot. `migration`: moves
    requests while they are answered (None: they stay where they are as long as their engine lives). `start_s`: what a new
    engine takes to start. `silence_s`: an engine that has started and says nothing for so long hangs. `agents`: makes the
    rollout of agents (`rollout/multi_turn.py`), whose episodes the requests are. `renew` has the weights, which were lost, published
    once more, while engines wait for them that may lend their leases (None: it cannot). Raises RunError past the deadline or when the
    pool's budget for faults is used up.
    """
    shares = [share for share in shares if len(share)]
    if sum(map(len, shares)) != len(requests) or len(shares) > len(pool.working):
        raise ValueError(
            f"{len(shares)} shares with {sum(map(len, shares))} requests for {len(pool.working)} engines and {len(requests)} requests"
        )
    kind = RolloutDriver if agents is None else agents
    rollout = kind(
        pool=pool,
        requests=requests,
        expected=expected,
        weights=weights,
        interval_s=interval_s,
        silence_s=silence_s,
        needed_next=needed_next,
        drained=drained,
        give_back=give_back,
        on_progress=on_progress,
        listener=listener,
        migration=migration,
        start_s=start_s,
        renew=renew,
    )
    return rollout.run(shares, deadline_s)


class RolloutDriver:
    def __init__(
        self,
        pool: WorkerPool,
        requests: list[Request],
        expected: np.ndarray,
        weights: WeightVersion,
        interval_s: float,
        silence_s: float,
        needed_next: int,
        drained: Callable[[float, bool], Decision],
        give_back: Callable[[Instance, Decision], None],
        on_progress: Callable[[int, int], None],
        listener: RolloutListener | None,
        migration: MigrationPolicy | None,
        start_s: float,
        renew: Callable[[WeightVersion, list[Instance]], WeightVersion | None],
    ) -> None:
        self.pool, self.expected, self.weights, self.interval_s = pool, expected, weights, interval_s
        self.silence_s, self.needed_next, self.start_s = silence_s, needed_next, start_s
        self.drained, self.give_back, self.on_progress, self.migration = drained, give_back, on_progress, migration
        self.listener, self.renew = listener, renew
        self.token_log = TokenLog(requests)
        self.launches = EngineCalls(pool, self.token_log, interval_s)
        self.moving = InflightMigrations(self.launches, self.token_log, expected)
        self.stream = RolloutResult(self.token_log.completions, moved=self.moving.moved)
        self.decide_at_s, self.listened_s = 0.0, time.monotonic()
        self.going: set[str] = set()  # ids of nodes that are drained
        self.looked_s = time.monotonic()  # for nodes that are gone
        self.renewed = False
        self.tried: dict[int, set[str]] = {}  # by engine: references to the weights, in words, that were lost on their way

    def run(self, shares: Sequence[np.ndarray], deadline_s: float) -> RolloutResult:
        start = time.monotonic()
        fetch_weights(self.pool, self.weights)
        instances = list(self.pool.working)
        for instance, share in zip(instances, shares, strict=False):
            self.begin(self.launches.number(instance), np.asarray(share))
        for instance in instances[len(shares) :]:
            self.launches.number(instance)
            self.give_back(instance, Release(0, "the plan has nothing for it to do"))
        self.open()
        while self.goes_on or self.launches.running:
            left = deadline_s - (time.monotonic() - start)
            others = self.listener.refs() if self.listener is not None else []
            sources = self.sources()
            refs = [*self.launches.running, *sources, *others]
            for ready in wait_any(refs, left, self.awaited, within_s=LOOK_S, of_s=deadline_s):
                if ready in self.launches.running:
                    self.hear(ready)
                elif ready in sources:
                    self.hear_source(ready)
            self.listen()
            self.on_progress(*self.progress)
            self.evacuate()
            self.steer()
            if self.listener is not None and self.goes_on:
                self.listener.poll(self.tail_s(), self.fate)
        if missing := self.token_log.missing:
            total = len(self.token_log.requests)
            raise RunError(f"{missing} of {total} responses are missing although every engine reported to be done")
        return self.stream

    # ---- where the work comes from; another kind of rollout has another one -----------------------------------------

    def begin(self, number: int, share: np.ndarray) -> None:
        """An engine gets its share."""
        self.launches.send(number, share)

    def open(self) -> None:
        """Engines have their shares."""

    @property
    def goes_on(self) -> bool:
        """Whether there is, or will be, work for engines."""
        return bool(self.launches.running)

    def sources(self) -> list[Any]:
        """References, besides those of engines and what works beside them, whose answers bring work."""
        return []

    def hear_source(self, ready: Any) -> None:
        """One of them has its answer."""

    @property
    def awaited(self) -> str:
        """What is waited for, in words."""
        return f"{self.token_log.missing} of {len(self.expected)} responses from {len(self.launches.running)} engines"

    @property
    def progress(self) -> tuple[int, int]:
        """Done, of how many."""
        return len(self.stream.completions), len(self.expected)

    # ---- engines ----------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """For engines that do not answer any more although their processes live, as far as Ray knows. While the driver itself was held
        up, none was silent: what they said or would have said waits to be heard."""
        now, lost = time.monotonic(), self.lost_nodes()
        held_up_s, self.listened_s = max(0.0, now - self.listened_s - LOOK_S), now
        for generator, launch in list(self.launches.running.items()):
            launch.heard_s = min(now, launch.heard_s + held_up_s)
            if not launch.started and launch.instance.started:
                launch.started, launch.heard_s = True, now
            start_s = self.pool.leases.deadline_s
            gone = launch.instance.slot.node in lost
            late = gone or now - launch.heard_s > (self.silence_s if launch.started else start_s)
            if late and not ray.wait([generator], timeout=0, fetch_local=False)[0]:
                del self.launches.running[generator]
                silent = f"it said nothing for rollout.silence_s = {self.silence_s:g} s"
                never = f"it did not start within functions.lease_deadline_s = {start_s:g} s"
                self.gone(launch, FailureCause.NODE_LOST if gone else FailureCause.HUNG, silent if launch.started else never)

    def lost_nodes(self) -> set[str]:
        """Those that do not answer of the nodes whose engines say nothing: Ray may take half a minute more to see it."""
        now = time.monotonic()
        if now - self.looked_s <= SILENT_S:
            return set()
        self.looked_s = now
        silent = {one.instance.slot.node for one in self.launches.running.values() if now - one.heard_s > SILENT_S}
        return {node for node in silent if self.pool.leases.lose(node)}

    def hear(self, generator: Any) -> None:
        launch = self.launches.running[generator]
        instance = launch.instance
        try:
            progress, steps, spans = ray.get(next(generator))
            loaded = _loaded(instance)
        except StopIteration:
            del self.launches.running[generator]
            self.ended(launch)
            return
        except (*GONE, RayTaskError) as error:
            del self.launches.running[generator]
            if self.weights_lost(launch):
                return
            if isinstance(error, GONE):
                self.died(launch, error)
                return
            failure = instance.failure() or f"{instance.id} failed: {reason_of(error)}"
            raise RunError(f"rollout engine {failure}") from error
        launch.heard_s = time.monotonic()
        self.stream.loads += [(instance.slot.node, span.to_s - span.from_s) for span in loaded]
        self.stream.steps += steps
        self.stream.decode_s[instance.id] = self.stream.decode_s.get(instance.id, 0.0) + sum(step.seconds for step in steps)
        self.pool.ledger.spans([lease.id for lease in instance.leases], [*loaded, *spans])
        ended, cut = self.token_log.accept(launch.number, instance.id, progress)
        for moved in self.moving.landed(launch, progress):
            if self.migration is not None:
                self.migration.observe(moved.context_tokens, moved.seconds, moved.how)
        launch.asked.difference_update(cut.tolist())
        self.moving.go_on(cut)
        self.done(ended.tolist())
        self.unreserve(ended.tolist())

    def done(self, indices: list[int]) -> None:
        """These requests have their completions."""
        if self.listener is not None:
            self.listener.heard(self.token_log.completion(i) for i in indices)

    def weights_lost(self, launch: EngineCall) -> bool:
        """Whether the engine could not load as its weights' node was lost: it takes the copy of them, or where that was lost too those
        that the learner publishes once more, and begins again. What it may have begun with the weights of before is cut and not heard."""
        instance = launch.instance
        if not lost_on_the_way(instance.loading):
            return False
        tried = self.tried.setdefault(launch.number, set())
        tried.add(instance.fetched)
        left = [ref for ref in (self.weights.copy, self.weights.ref) if ref is not None and str(ref) not in tried]
        if left:
            self.stop(launch)
        elif not self.renewed:
            others = [other for other in self.launches.running.values() if other.instance.loading is not None]
            ray.wait([instance.loading, *(other.instance.loading for other in others)], num_returns=1 + len(others), timeout=ALL_LOST_S)
            waiting = [launch, *(other for other in others if lost_on_the_way(other.instance.loading))]
            for one in waiting:
                self.stop(one)
            self.renewed, fresh = True, self.renew(self.weights, [one.instance for one in waiting])
            if fresh is not None:
                self.weights, left = fresh, [fresh.ref]
        if not left:
            return False
        instance.version = None
        fetch_into(instance, replace(self.weights, ref=left[0]))
        if len(owed := self.token_log.owed(launch.number)):
            self.launches.send(launch.number, owed)
        self.unreserve(owed.tolist())  # an order to cut was for the call that is over
        return True

    def stop(self, launch: EngineCall) -> None:
        """Its engine is to leave all it was asked for: it begins again."""
        keys = tuple(self.token_log.requests[i].key for i in launch.asked)
        self.launches.tell(launch, EngineCommand(cut=keys, what="begin again with the step's weights"))

    def ended(self, launch: EngineCall) -> None:
        """An engine's call is over. What it was sent too late goes on in another one; with nothing left it is drained."""
        owed = self.token_log.owed(launch.number)
        forgotten = launch.asked & set(owed.tolist())
        if forgotten:
            raise RunError(f"rollout engine {launch.instance.id} ended without {len(forgotten)} of its responses")
        if len(owed):
            self.launches.send(launch.number, owed)
        self.unreserve(owed.tolist())
        self.idle(launch.number)

    def idle(self, number: int) -> None:
        """Give an engine back, if it has nothing to do and nothing is on its way to it while others work."""
        instance, busy = self.launches.engines[number], self.launches.of(number) is not None
        if busy or not self.goes_on or instance not in self.pool.working or self.moving.awaited_by(number):
            return
        if instance.slot.node in self.going:
            self.pool.leave(instance)
            return
        if self.listener is None or not self.listener.take(instance, self.tail_s()):
            self.give_back(instance, self.fate())

    def unreserve(self, indices: list[int]) -> None:
        """These requests go nowhere any more: who waited for them may be without work."""
        for number in self.moving.stay(indices):
            self.idle(number)

    def fate(self, others: int = 0) -> Decision:
        """What becomes of a lease without work; `others`: leases that are not with engines."""
        return self.drained(self.tail_s(), len(self.pool.working) + others <= self.needed_next)

    def tail_s(self) -> float:
        """For how long the longest live response goes on, as forecast."""
        left = np.maximum(self.expected, OUTLIVES * self.token_log.length) - self.token_log.length
        return float(left[~self.token_log.finished].max(initial=0.0)) * step_s(self.stream.steps)

    def steer(self) -> None:
        """Ask the planner for moves, one decision at a time: not while a request is between two engines."""
        began_s = time.monotonic()
        if self.migration is None or self.moving.leaving or not self.launches.running or began_s < self.decide_at_s:
            return
        stay = [number for number in self.launches.living() if self.launches.engines[number].slot.node not in self.going]
        wishes = self.migration.decide(self.token_log, stay, self.stream.steps)
        now = time.monotonic()
        self.decide_at_s = now + max(self.interval_s, (now - began_s) / DECIDING_SHARE)
        if not wishes.moves:
            return
        if wishes.time_saved_s <= 0 and self.fate().action != "Release":
            return  # it saves leases only, and these would be held for the next phase
        self.stream.decisions.append(f"{sum(len(wish.requests) for wish in wishes.moves)} moved: {wishes.reason}")
        for wish in wishes.moves:
            self.moving.cut(wish)

    def evacuate(self) -> None:
        """Engines on nodes that will soon be gone: what they have goes to others, or where there are none to a new one, which
        starts while they still work. They leave when they have nothing more to tell."""
        self.going = self.pool.leases.draining()
        leaving = [i for i in self.pool.working if i.slot.node in self.going]
        if not leaving:
            return
        if len(leaving) == len(self.pool.working):
            took = self.pool.leases.take(1, self.pool.kind, need=0, wait_s=GRANT_S, labels=self.pool.labels)
            for lease in self.pool.leases.living(took):
                self.pool.assign_leases([lease])
                fetch_weights(self.pool, self.weights)
        stay = [number for number in self.launches.living() if self.launches.engines[number] not in leaving]
        for instance in leaving if stay else ():
            number = self.launches.number(instance)
            if self.launches.of(number) is None:
                self.idle(number)
                continue
            owed = [i for i in self.token_log.owed(number).tolist() if i not in self.moving.leaving]
            for k, target in enumerate(stay):
                if part := owed[k :: len(stay)]:
                    for wish in self.wishes(np.array(part), number, target, "the node is drained"):
                        self.moving.cut(wish)

    def wishes(self, requests: np.ndarray, source: int, target: int, reason: str) -> list[MigrationRequest]:
        """Each by the way that suits it, where that is known."""
        if self.migration is None:
            return [MigrationRequest(requests, source, target, reason)]
        return self.migration.by_way(requests, self.token_log, source, target, reason)

    def died(self, launch: EngineCall, error: Exception) -> None:
        instance = launch.instance
        cause = self.pool.cause(instance)
        if raised_at_start(error) and not cause.is_preemption:  # an exception, not a death: the next process would raise it again
            raise RunError(f"rollout engine {instance.id} could not start: {reason_of(error)}") from error
        self.gone(launch, cause, instance.failure() or reason_of(error))

    def gone(self, launch: EngineCall, cause: FailureCause, why: str) -> None:
        """Its requests go on from what was heard: on the living engines at once, or where there are none on its successor."""
        instance = launch.instance
        orphans = self.token_log.owed(launch.number)
        self.stream.replaced += 1
        self.stream.orphans += len(orphans)
        self.stream.silent_s += time.monotonic() - launch.heard_s
        others = [number for number in self.launches.living() if number != launch.number]
        if not others:
            self.moving.stay(orphans.tolist())
            successor = self.launches.number(self.pool.replace(instance, why, cause))
            fetch_weights(self.pool, self.weights)
            if len(orphans):
                self.launches.send(successor, orphans)
            return
        self.launches.spread(orphans, others, self.expected)
        self.unreserve(orphans.tolist())
        node = instance.slot.node  # of a drained one its leases go back: to wait for others, that engines may hold, is not worth it
        here = not self.pool.leases.gone([node]) and node not in self.pool.leases.draining()
        if here and self.migration is not None and self.tail_s() > self.start_s:
            self.pool.replace(instance, why, cause)  # it gets its part by a move, as soon as it can work
            fetch_weights(self.pool, self.weights)
        else:
            self.pool.lose(instance, why, cause)
            if here:
                self.pool.prewarm(instance.slot)  # for the next rollout


def _loaded(instance: Instance) -> list[Span]:
    """What the instance said of its last weight loading, once: it is done when the rollout after it has answers. What it raised
    stays there to be looked at."""
    spans = ray.get(instance.loading) if instance.loading is not None else []
    instance.loading = None
    return spans


def step_s(steps: list[EngineStep]) -> float:
    """Seconds of a decode step of late."""
    return float(np.median([s.seconds for s in steps[-64:]])) if steps else 0.0
