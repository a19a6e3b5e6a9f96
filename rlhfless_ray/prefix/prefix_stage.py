"""The prefix KV of a step: decide whether it pays, prefill under leases, and send pages to engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ray.exceptions import RayTaskError

from placement.scaling.prefix_benefit import PrefixChoice, PrefixDemand, PrefixSpeed, choose_prefix
from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.fetch_weights import fetch_weights
from rlhfless_ray.functions.instance import GONE, Instance, is_loss, lost_on_the_way, raised_at_start, reason_of
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.prefix.page_service import ANSWER_S, PrefixService, Producer
from rlhfless_ray.prefix.prefix_stats import prefix_demand
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.step.step_prefixes import Prepared, StepPrefixes
from rlhfless_ray.types import Fetched, WeightVersion

STORE_SHARE = 0.5  # share of the object store for pages; weights, snapshots and other results need the rest
# prefix KV is switched off after this many steps and seconds without a page; a replica may need time to restart
MAX_FAILED_STEPS, MIN_OUTAGE_S = 3, 120.0
FETCH_S = 30.0  # a page that takes longer to arrive is computed


class PrefixStage:
    def __init__(
        self, context: RunContext, pool: WorkerPool, mode: str, *, run_id: str, block_size: int, page_bytes: int, store_bytes: int,
        blocked: str | None = None, private: bool = False,
    ) -> None:  # fmt: skip
        """Set up the service without starting it.

        Args:
            pool: prefill instances (`ExactEngineActor`).
            mode: auto, on or off.
            page_bytes: estimated from the policy; engines report the true size.
            store_bytes: size of the object store.
            blocked: why this policy cannot use prefix KV, or None.
            private: the cluster ends with the run, so the service need not be deleted.
        """
        self.context, self.pool, self.mode, self.blocked = context, pool, mode, blocked
        self.block_size, self.page_bytes = block_size, page_bytes
        self.cap_bytes = int(STORE_SHARE * store_bytes)
        self.speed = PrefixSpeed.first_guess(context.autoscaler.terms.prefill.per_unit_s, max(page_bytes, 1))
        self.service = PrefixService(run_id, self.cap_bytes)
        self.private, self.last_message = private, ""
        self.failed_in_a_row, self.last_page_s = 0, time.monotonic()

    def choose(self, demand: PrefixDemand | None, steps_left: int) -> PrefixChoice:
        """Choose before anything is leased. A cold start of the prefill instance is spread over the remaining steps."""
        if demand is None:
            return PrefixChoice(False, 0, "prefix_kv: off" if self.mode == "off" else f"off: {self.blocked}")
        costs = self.speed.costs()
        if not any(instance.memory_mb > 0 for instance in self.pool.parked):
            start_s = self.context.autoscaler.terms.cold_start.predict() / max(1, steps_left)
            costs = replace(costs, instance_s=costs.instance_s + start_s)
        most = self.context.most_engines(self.pool.width)
        return choose_prefix(
            demand, costs, mode=self.mode, time_value=self.context.autoscaler.criteria.value_per_s, max_instances=most,
            page_bytes=self.page_bytes, cap_bytes=self.cap_bytes,
        )  # fmt: skip

    def weigh(self, prompts: Sequence[Sequence[int]], shares: Sequence[np.ndarray], steps_left: int) -> StepPrefixes:
        """Decide whether pages of `prompts` (token ids, one entry per distinct prompt) pay.

        `shares`: for each engine, the positions of its requests' prompts.
        """
        is_on = self.mode != "off" and not self.blocked  # if not, the demand is not counted

        def weighed() -> StepPrefixes:
            demand = prefix_demand(prompts, shares, self.block_size) if is_on else None
            return StepPrefixes(self.choose(demand, steps_left), demand)

        step = self.context.autoscaler.safely(
            "weighing prefix KV", weighed, lambda: StepPrefixes(PrefixChoice(False, 0, "off: weighing it failed"), None)
        )
        choice, demand = step.choice, step.demand
        step.metrics = {
            "prefix/on": float(choice.on),
            "prefix/reason": choice.reason,
            "prefix/saved_engine_s": choice.saved_engine_s,
            "prefix/break_even_tokens": choice.break_even_tokens if np.isfinite(choice.break_even_tokens) else None,
        }
        if demand is not None:
            step.metrics |= {
                "prefix/asked_tokens": sum(len(prompts[p]) for share in shares for p in np.asarray(share, int).tolist()),
                "prefix/off_tokens": int(demand.off_tokens.sum()),
                "prefix/distinct_tokens": demand.distinct_tokens,
                "prefix/header_tokens": demand.trunk_tokens,
            }
        return step

    def prefill(self, step: StepPrefixes, prompts: Sequence[Sequence[int]], weights: WeightVersion, width: int = 1) -> StepPrefixes:
        """Compute the pages of the prompts, if that pays, with instances of `width` slots.

        Instances take spare leases or request some, and have returned all of them when this returns.
        """
        choice = step.choice
        if not choice.on:
            if self.mode != "off" and (self.blocked or choice.no_room):
                self._say_once(choice.reason)
            return step
        context, start = self.context, time.monotonic()
        with context.phases.phase("prefill"):
            if self.service.handle is None:
                try:
                    self.service.start()
                except RunError as error:
                    self.block(str(error))
                    step.metrics["prefix/on"] = 0.0
                    return step
            self.pool.set_width(width)
            context.broker.resize(self.pool, choice.instances, need=0, wait_s=0.2)
            not_ready = self._wait_until_ready(weights)
            producers = [Producer(instance.actor, len(instance.leases)) for instance in self.pool.working]
            within_s = context.recipe.functions.lease_deadline_s
            reported = len(self.service.failures)
            self.service.keep_only(weights.version)
            step.prepared = self.service.prepare(weights.version, prompts, producers, within_s)
            self._account(step, time.monotonic() - start)
            if step.prepared.failed:
                self._remove_failed()
            context.broker.put(self.pool.park_all())
        for failure in [*not_ready, *step.prepared.failed, *self.service.failures[reported:]]:
            context.record.progress.message(f"prefix KV: {failure}; engines compute what is missing")
        self.failed_in_a_row = 0 if step.prepared.refs else self.failed_in_a_row + 1
        self.last_page_s = start if not self.failed_in_a_row else self.last_page_s
        if self.failed_in_a_row >= MAX_FAILED_STEPS and start - self.last_page_s >= MIN_OUTAGE_S:
            self.blocked = f"no page could be prepared in {MAX_FAILED_STEPS} steps in a row"
        return step

    def _say_once(self, reason: str) -> None:
        """Log a message once."""
        if reason != self.last_message:
            self.last_message = reason
            self.context.record.progress.message(f"prefix KV is {reason}")

    def block(self, why: str) -> None:
        """Switch prefix KV off because instances do not support it."""
        if not self.blocked:
            self.blocked = why
            self._say_once(f"off: {why}")

    def _wait_until_ready(self, weights: WeightVersion) -> list[str]:
        """Wait until instances have started and loaded, and return why others were removed.

        This waits because the index's calls come from another process, and Ray keeps the order of one caller's calls only.
        """
        fetch_weights(self.pool, weights)
        failed = []
        for instance in list(self.pool.working):
            try:
                before = [ref for ref in (instance.opened, instance.loading) if ref is not None]
                get(before, self.context.recipe.functions.lease_deadline_s, f"{instance.id} to be ready")
                self.context.record_start(instance)
                why, raised = instance.keeps_no_pages, bool(instance.keeps_no_pages)
            except (*GONE, RayTaskError, RunError) as error:
                why = instance.failure() or f"{instance.id}: {reason_of(error)}"
                raised = isinstance(error, RayTaskError) or raised_at_start(error)
            if raised:  # not a process failure: the next one would fail too, unless the weights were lost
                if not lost_on_the_way(instance.loading):
                    self.block(why)
                leases = instance.leases
                self.pool.end(instance)
                self.context.leases.release(leases)
            elif why:
                failed.append(why)
                self.pool.end_lost(instance, why)
        return failed

    def _remove_failed(self) -> None:
        """Remove instances that died or hang. A later step starts new ones if needed."""
        replies = [(instance, instance.actor.kind.remote()) for instance in self.pool.working]
        for instance, reply in replies:
            try:
                get(reply, ANSWER_S, f"{instance.id} to answer")
            except RayTaskError:  # the instance is alive
                continue
            except (*GONE, RunError) as error:
                self.pool.end_lost(instance, reason_of(error))

    def _account(self, step: StepPrefixes, wall_s: float) -> None:
        done = step.prepared.done
        for producer, one in done:
            instance = self.pool.working[producer]
            self.context.ledger.spans([lease.id for lease in instance.leases], one.spans)
            self.speed.observe_job(one.tokens, one.pages, one.prefill_s, one.save_s)
            self.page_bytes = one.page_bytes
            step.engine_s += one.prefill_s + one.load_s + one.save_s + one.fetched.seconds
        busy_s = max((span.to_s - span.from_s for _, one in done for span in one.spans), default=0.0)
        self.speed.observe_step(max(1e-4, wall_s - busy_s))
        step.metrics |= {
            "prefix/computed_tokens": sum(one.tokens for _, one in done), "prefix/pages": sum(one.pages for _, one in done),
            "prefix/no_room": step.prepared.no_room, "prefix/failed": len(step.prepared.failed),
            "prefix/instances": len(self.pool.working),
        }  # fmt: skip

    def send(self, step: StepPrefixes, prompts: Sequence[Sequence[int]], engines: Sequence[Instance], shares: Sequence[np.ndarray],
             version: int) -> None:  # fmt: skip
        """Make each engine fetch its prompts' pages. The call precedes its rollout in the actor's queue."""
        for instance, share in zip(engines, shares, strict=False):
            mine = sorted(set(np.asarray(share, int).tolist()))
            refs = step.prepared.needed_by(mine) if step.prepared.refs else []
            if refs:
                step.sent.append((instance, instance.actor.fetch_pages.remote(version, [prompts[i] for i in mine], refs, FETCH_S)))

    def finish(self, step: StepPrefixes) -> JsonObject:
        """Release the pages after the rollout, and return metrics. The pages of an engine that died are counted as lost."""
        counts: Counter[str] = Counter()
        for instance, reply in step.sent:
            dropped = instance.actor.drop_pages.remote()
            try:
                fetched: Fetched = get(reply, FETCH_S, f"{instance.id} to have fetched its pages")
                loaded, tokens, load_s = get(dropped, FETCH_S, f"{instance.id} to drop its pages")
            except (*GONE, RayTaskError, RunError) as error:
                if not is_loss(error):  # a lost engine shows in its rollout
                    self.context.record.progress.message(f"prefix KV: {instance.id} could not use its pages: {reason_of(error)}")
                counts["lost"] += 1
                continue
            self.context.ledger.spans([lease.id for lease in instance.leases], fetched.spans)
            self.speed.observe_fetch(fetched.pages, fetched.seconds, loaded, load_s)
            step.engine_s += fetched.seconds + load_s
            counts.update(
                fetched=fetched.pages, loaded=loaded, loaded_tokens=tokens, lost=fetched.lost, foreign=fetched.foreign,
                damaged=fetched.damaged,
            )  # fmt: skip
        if step.sent and step.demand is not None:
            names = ("fetched", "loaded", "loaded_tokens", "lost", "foreign", "damaged")
            step.metrics |= {f"prefix/{name}": counts[name] for name in names}
            engine_s = step.engine_s + self.speed.costs().prefill_token_s * float(step.demand.on_tokens.sum())
            step.metrics["prefix/measured_saved_engine_s"] = step.choice.off_engine_s - engine_s
        step.sent, step.prepared = [], Prepared()
        return step.metrics

    def close(self) -> None:
        """End the processes, release their leases and delete the application."""
        self.context.leases.release(self.pool.close())
        self.service.stop(remove=not self.private)
