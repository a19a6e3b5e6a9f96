"""Engines of a rollout that die or hang, or whose node is lost or drained: their requests continue on other engines."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import ray

from placement.migration.evacuation import Evacuation, plan_evacuation
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.fetch_weights import fetch_weights
from rlhfless_ray.functions.instance import Instance, raised_at_start, reason_of
from rlhfless_ray.functions.worker_pool import GRANT_S, NoRoom
from rlhfless_ray.rollout.engine_calls import EngineCall
from rlhfless_ray.rollout.events import Event, RolloutProgress, RoomNeeded
from rlhfless_ray.rollout.inflight_migrations import COPY_S, ChooseMethods, MigrationRequest
from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.rollout.token_log import TokenLog

LOOK_S = 1.0  # longest time between two looks for silent engines
PAUSE_S = 0.1  # shortest time: a look visits every engine, but most reports come from one of them
SILENT_S = 3.0  # silence after which an engine's node is probed


class LostEngines(Plugin):
    """The driver's own plugin, which every rollout has."""

    def __init__(self, rollout: LiveRollout) -> None:
        self.rollout, self.pool, self.calls, self.token_log = rollout, rollout.pool, rollout.calls, rollout.token_log
        self.looked_s, self.probed_s, self.asked_s = time.monotonic(), time.monotonic(), -float("inf")

    def on_event(self, event: Event) -> None:
        if isinstance(event, RolloutProgress):
            if time.monotonic() - self.looked_s >= PAUSE_S:
                self.remove_silent()
            if not self.rollout.stopping:
                self.evacuate()

    def take(self, number: int, instance: Instance) -> bool:
        if instance.slot.node not in self.calls.draining:
            return False
        self.pool.leave(instance)
        return True

    # ---- drained nodes --------------------------------------------------------------------------------------------

    def evacuate(self) -> None:
        """Move requests off engines whose nodes are drained, as late as their notice allows. An engine leaves once it has no request left.

        If all engines are on such nodes, a new engine is started while they still work.
        """
        self.calls.draining = self.pool.leases.nodes.draining()
        if not self.calls.draining:
            return
        leaving = [instance for instance in self.pool.working if instance.slot.node in self.calls.draining]
        if leaving and len(leaving) == len(self.pool.working) and time.monotonic() - self.asked_s > LOOK_S:
            took = self.pool.lease_one(need=False, wait_s=GRANT_S)
            self.asked_s = time.monotonic()
            if took := self.pool.leases.without_lost(took):
                self.rollout.join(took)
        if stay := self.calls.staying():
            for node in {instance.slot.node: None for instance in leaving}:
                self._leave([instance for instance in leaving if instance.slot.node == node], stay, self.pool.leases.nodes.notice_s(node))

    def _leave(self, leaving: list[Instance], stay: list[int], notice_s: float | None) -> None:
        """Move the requests of a node's engines by a plan for all of them together."""
        log = self.token_log
        keys = np.concatenate([log.owed(self.calls.number(instance)) for instance in leaving])
        keys = keys[[key not in self.rollout.migrations.leaving for key in keys.tolist()]]
        plan = plan_evacuation((log.prompt + log.length)[keys], notice_s, self.rollout.move_times())
        if len(keys) and plan.wait_s == 0:
            self.rollout.result.decisions.append(f"{len(keys)} moved: {plan.reason}")
        self.rollout.evacuate(leaving, stay, plan.reason, methods_of(plan, keys[plan.pages & (log.length[keys] > 0)], notice_s))

    # ---- silent engines -------------------------------------------------------------------------------------------

    def remove_silent(self) -> None:
        """Replace engines that do not report although Ray considers their processes alive.

        Time in which the driver itself was held up does not count as silence: reports may be waiting to be read.
        """
        now, lost = time.monotonic(), self._find_lost_nodes()
        held_up_s, self.looked_s = max(0.0, now - self.looked_s - LOOK_S), now
        silence_s, start_s = self.rollout.settings.silence_s, self.pool.leases.deadline_s
        for generator, call in list(self.calls.running.items()):
            call.heard_s = min(now, call.heard_s + held_up_s)
            if not call.started and call.instance.started:
                call.started, call.heard_s = True, now
            is_lost = call.instance.slot.node in lost
            late = is_lost or now - call.heard_s > (silence_s if call.started else start_s)
            if late and not ray.wait([generator], timeout=0, fetch_local=False)[0]:
                del self.calls.running[generator]
                silent = f"it reported nothing for rollout.silence_s = {silence_s:g} s"
                never = f"it did not start within functions.lease_deadline_s = {start_s:g} s"
                self.handle_loss(call, FailureCause.NODE_LOST if is_lost else FailureCause.HUNG, silent if call.started else never)

    def _find_lost_nodes(self) -> set[str]:
        """Probe the nodes of silent engines, and return those that do not respond. Ray may notice their loss half a minute later."""
        now = time.monotonic()
        if now - self.probed_s <= SILENT_S:
            return set()
        self.probed_s = now
        silent = {call.instance.slot.node for call in self.calls.running.values() if now - call.heard_s > SILENT_S}
        return {node for node in silent if self.pool.leases.nodes.confirm_lost(node)}

    # ---- lost engines ---------------------------------------------------------------------------------------------

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
        rollout, instance = self.rollout, call.instance
        orphans = self.token_log.owed(call.number)
        rollout.result.replaced += 1
        rollout.result.orphans += len(orphans)
        rollout.result.silent_s += time.monotonic() - call.heard_s
        if cause.is_preemption:
            slot, silent_s = instance.slot, time.monotonic() - call.heard_s
            self.pool.ledger.preempted(self.pool.kind, instance.id, slot.node, str(slot.device), silent_s)
        if rollout.stopping:  # unreported tokens are generated in the next step
            self.pool.end_lost(instance, why, cause)
            return
        others = self.calls.available_or_starting(but=call.number)  # waiting for another slot might never end
        if not others:
            rollout.migrations.cancel(orphans.tolist())
            rollout.emit(RoomNeeded(0.0))  # the run itself may hold the only slot that is left, so no other would be granted
            make_room = partial(rollout.emit, RoomNeeded(self.pool.leases.deadline_s))
            try:
                successor = self.calls.number(self.pool.replace(instance, why, cause, make_room, waits=rollout.settings.waits))
            except NoRoom:
                rollout.source.stop()
                raise
            fetch_weights(self.pool, rollout.weights)
            if len(orphans):
                self.calls.send(successor, orphans)
            return
        self.calls.spread(orphans, others)
        rollout.cancel_moves(orphans.tolist())
        node = instance.slot.node  # leases of a drained node are released, without waiting for slots that other engines may hold
        is_usable = not self.pool.leases.nodes.find_lost([node]) and node not in self.pool.leases.nodes.draining()
        if is_usable and rollout.tail_s() > rollout.start_s:
            self.pool.replace(instance, why, cause)  # moves send it requests as soon as it can work
            fetch_weights(self.pool, rollout.weights)
        else:
            self.pool.end_lost(instance, why, cause)
            if is_usable:
                self.pool.prewarm(instance.slot)  # for the next rollout


def methods_of(plan: Evacuation, pages: np.ndarray, notice_s: float | None) -> ChooseMethods:
    """Return the moves of a plan. `pages`: keys of those of its requests whose KV pages are copied."""

    def choose(requests: np.ndarray, token_log: TokenLog, source: int, target: int, reason: str) -> list[MigrationRequest]:
        if plan.wait_s > 0:
            return []
        paged, within_s = np.isin(requests, pages), 2 * COPY_S if notice_s is None else min(2 * COPY_S, notice_s / 2)
        parts = (requests[paged], "pages"), (requests[~paged], "prefill")
        return [MigrationRequest(part, source, target, reason, how, within_s) for part, how in parts if len(part)]

    return choose
