"""The driver's side of a rollout: assign requests, collect tokens, and tell plugins what happens.

A response depends on its request and the weights only, so any engine can continue it where another one was cut or died.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from placement.scaling.resize_policy import Release
from rlhfless_ray.common.deadlines import wait_any
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.engine.control_queue import EngineCommand
from rlhfless_ray.engine.token_deltas import TokenDeltas
from rlhfless_ray.functions.fetch_weights import fetch_into, fetch_weights
from rlhfless_ray.functions.instance import GONE, Instance, lost_on_the_way, reason_of
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.engine_calls import EngineCall, Ref
from rlhfless_ray.rollout.events import RolloutEnded, RolloutProgress, TokensArrived
from rlhfless_ray.rollout.live_rollout import DriverSettings, Ending, LiveRollout, Plugin, RequestSource
from rlhfless_ray.rollout.lost_engines import LOOK_S, LostEngines
from rlhfless_ray.rollout.rollout_result import RolloutResult
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Span, WeightVersion

Report = tuple[TokenDeltas, EngineSteps, list[Span]]


class RolloutDriver:
    """Generate the responses of a source on the pool's working instances."""

    def __init__(
        self,
        pool: WorkerPool,
        source: RequestSource,
        weights: WeightVersion,
        settings: DriverSettings,
        ending: Ending = Ending(),  # noqa: B008  # frozen
        plugins: Sequence[Plugin] = (),
    ) -> None:
        """`plugins`: they hear of events in this order, after the source and `LostEngines`."""
        self.rollout = LiveRollout(pool, source, weights, settings, ending)
        self.source, self.calls, self.token_log = source, self.rollout.calls, self.rollout.token_log
        self.lost = LostEngines(self.rollout)
        self.rollout.plugins = (source, self.lost, *plugins)
        self.reloaded: set[int] = set()  # engines that loaded the copy of the weights

    def run(self, shares: Sequence[np.ndarray], deadline_s: float) -> RolloutResult:
        """Generate all responses.

        `shares`: keys of the responses of each working instance, in the pool's order. Leases of instances without any are given
        back at once. Raises RunError past the deadline, or when the pool's failure budget is used up.
        """
        rollout, source, result = self.rollout, self.source, self.rollout.result
        shares = [share for share in shares if len(share)]
        instances = list(rollout.pool.working)
        missing = source.total - len(source.ended)
        if sum(map(len, shares)) != missing or len(shares) > len(instances):
            raise ValueError(
                f"{len(shares)} shares with {sum(map(len, shares))} requests for {len(instances)} engines and {missing} requests"
            )
        if rollout.ending.is_reached(rollout):
            result.unfinished = source.unfinished()
            return result
        rollout.shares = shares
        rollout.begin()
        try:
            self._begin(instances, shares)
            self._loop(deadline_s)
        finally:
            for plugin in rollout.plugins:
                plugin.close()
            # plugins of a run keep their last rollout, and a node that holds weights for it is not idle
            rollout.weights = WeightVersion(rollout.weights.version, ())
            rollout.held_at.clear()
        rollout.emit(RolloutEnded())
        if rollout.stopping:
            result.unfinished = source.unfinished()
        elif missing := self.token_log.missing:
            total = len(self.token_log.requests)
            raise RunError(f"{missing} of {total} responses are missing although every engine has reported its end")
        return result

    def _begin(self, instances: list[Instance], shares: Sequence[np.ndarray]) -> None:
        """Give each engine its share, and give back those without one."""
        rollout = self.rollout
        fetch_weights(rollout.pool, rollout.weights)
        for instance, share in zip(instances, shares, strict=False):
            self.source.assign(self.calls.number(instance), np.asarray(share))
        for instance in instances[len(shares) :]:
            self.calls.number(instance)
            rollout.settings.give_back(instance, Release(0, "the plan assigns no requests to it"))
        self.source.start()

    def _loop(self, deadline_s: float) -> None:
        rollout, end_s = self.rollout, time.monotonic() + deadline_s
        while self.source.has_work() or self.calls.running:
            of_plugins = {ref: plugin for plugin in rollout.plugins for ref in plugin.refs()}
            refs = [*self.calls.running, *of_plugins, *rollout.migrations.copying]
            ready = wait_any(refs, end_s - time.monotonic(), self.source.awaited(), within_s=LOOK_S, of_s=deadline_s)
            self.receive([ref for ref in ready if ref in self.calls.running])
            for ref in ready:
                if ref in of_plugins:
                    of_plugins[ref].receive(ref)
            rollout.migrations.poll()
            self._stop_if_enough()
            rollout.emit(RolloutProgress(len(self.source.ended), self.source.total))

    def _stop_if_enough(self) -> None:
        """Cut all requests once the rollout may end. Engines that are still starting are sent the command again with each report."""
        rollout = self.rollout
        if not rollout.stopping and rollout.ending.is_reached(rollout):
            rollout.stopping = True
            self.source.stop()
            rollout.migrations.leaving.clear()
            for call in self.calls.running.values():
                self._cut_owed(call)

    def _cut_owed(self, call: EngineCall) -> None:
        for ticket, keys in self.rollout.ending.cuts(call.number, self.token_log.owed(call.number)).items():
            if keys:
                self.calls.send_command(call, EngineCommand(cut=tuple(keys), what="go on in the next step", ticket=ticket))

    # ---- reports of engines ---------------------------------------------------------------------------------------

    def receive(self, generators: Sequence[Ref]) -> None:
        """Record reports of engines, and the ends of their calls. One call of Ray fetches all of them."""
        refs = {generator: next(generator, None) for generator in generators}
        arrived = {generator: ref for generator, ref in refs.items() if ref is not None}
        try:
            reports = dict(zip(arrived, ray.get(list(arrived.values())), strict=True))
        except RayError:  # of one of them: `_receive` finds whose it is
            reports = {}
        for generator, ref in refs.items():
            if generator in self.calls.running:
                self._receive(generator, ref, reports.get(generator))

    def _receive(self, generator: Ref, ref: Ref | None, report: Report | None) -> None:
        """Record a report. Without a `report`, it is fetched. Without a `ref`, the call has ended."""
        rollout, call = self.rollout, self.calls.running[generator]
        instance, result = call.instance, rollout.result
        if ref is None:
            del self.calls.running[generator]
            self._end_call(call)
            return
        try:
            deltas, steps, spans = ray.get(ref) if report is None else report
            loaded = _take_load_spans(instance)
        except (*GONE, RayTaskError) as error:
            del self.calls.running[generator]
            if self.load_copy(call):
                return
            if isinstance(error, GONE):
                self.lost.handle_death(call, error)
                return
            failure = instance.failure() or f"{instance.id} failed: {reason_of(error)}"
            raise RunError(f"rollout engine {failure}") from error
        call.heard_s = time.monotonic()
        result.loads += [(instance.slot.node, span.to_s - span.from_s) for span in loaded]
        result.steps.extend(steps)
        result.step_nodes.append((instance.slot.node, len(steps)))
        result.decode_s[instance.id] = result.decode_s.get(instance.id, 0.0) + float(steps.column("seconds").sum())
        rollout.pool.ledger.spans([lease.id for lease in instance.leases], [*loaded, *spans])
        ended, cut = self.token_log.accept(call.number, instance.id, deltas)
        call.assigned.difference_update(cut.tolist())
        rollout.emit(TokensArrived(call, deltas, cut, rollout.migrations.complete(call, deltas)))
        if rollout.stopping:
            self._cut_owed(call)
        else:
            rollout.migrations.forward(cut)
        if len(ended):
            self.source.complete(ended.tolist())
            rollout.cancel_moves(ended.tolist())

    def load_copy(self, call: EngineCall) -> bool:
        """Let an engine load the driver's copy of the weights and start over, if their node was lost before it had them.

        Returns False if its call failed for another reason. Requests that it may have begun with older weights are cut and ignored.
        """
        instance, weights = call.instance, self.rollout.weights
        copies = weights.copies or (weights.shards if call.number in self.rollout.late else ())
        if not copies or call.number in self.reloaded or not lost_on_the_way(instance.loading):
            return False
        self.reloaded.add(call.number)
        self.calls.send_command(call, EngineCommand(cut=tuple(call.assigned), what="start over with the step's weights"))
        instance.version = None
        fetch_into(instance, replace(weights, shards=copies, others={}))
        self._resend(call.number)
        return True

    def _end_call(self, call: EngineCall) -> None:
        """Handle the end of an engine's call: repeat commands that came too late, and drain an idle engine."""
        forgotten = call.assigned & set(self.token_log.owed(call.number).tolist())
        if forgotten:
            raise RunError(f"rollout engine {call.instance.id} ended without {len(forgotten)} of its responses")
        if not self.rollout.stopping:
            self._resend(call.number)
            self.rollout.drain_if_idle(call.number)

    def _resend(self, number: int) -> None:
        """Start a new call of an engine with its unfinished requests. Its moves are cancelled, because they were for the old call."""
        owed = self.token_log.owed(number)
        if len(owed):
            self.calls.send(number, owed)
        self.rollout.cancel_moves(owed.tolist())


def _take_load_spans(instance: Instance) -> list[Span]:
    """Return the spans of the instance's last weight load, once. Raises if the load failed, and keeps the error for `failure`."""
    spans = ray.get(instance.loading) if instance.loading is not None else []
    instance.loading = None
    return spans
