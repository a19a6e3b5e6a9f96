"""The prefix KV of a step: whether it pays, prefill under leases before the engines have theirs, pages to who needs them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.exceptions import RayTaskError

from placement.prefix import PrefixChoice, PrefixDemand, PrefixSpeed, choose_prefix
from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.instance import GONE, Instance, lost_on_the_way, raised_at_start, reason_of
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.prefix.actor import Fetched
from rlhfless_ray.prefix.demand import prefix_demand
from rlhfless_ray.prefix.service import ANSWER_S, PrefixService, Prepared, Producer
from rlhfless_ray.rollout.stream import fetch_weights
from rlhfless_ray.site import Site
from rlhfless_ray.types import WeightVersion
from rlhfless_ray.waits import get

SHARE_OF_STORE = 0.5  # of the object store that pages may take; weights, snapshots and other returns need the rest
GIVE_UP, GIVE_UP_S = 3, 120.0  # steps in a row without a page, and seconds, after which it is off: a replica may have to come back
FETCH_S = 30.0  # a page that takes longer than this to come is computed


@dataclass
class StepPrefixes:
    """What a step's prompts get. of[prompt] as in `Prepared`; empty where the choice was off."""

    choice: PrefixChoice
    demand: PrefixDemand | None = None
    engine_s: float = 0.0  # of prefill instances and engines, for pages, as far as was measured
    prepared: Prepared = field(default_factory=Prepared)
    sent: list[tuple[Instance, Any]] = field(default_factory=list)  # engines that fetch, and what will say how it went
    metrics: dict[str, Any] = field(default_factory=dict)


class PrefixStage:
    def __init__(
        self, site: Site, pool: Pool, mode: str, *, run_id: str, block_size: int, page_bytes: int, store_bytes: int,
        blocked: str | None = None, max_instances: int = 1, private: bool = False,
    ) -> None:  # fmt: skip
        """`pool`: prefill instances (`PageActor`). `mode`: auto, on or off. `page_bytes`: as estimated from the policy; the
        engines tell. `store_bytes`: the object store's size. `blocked`: why this policy cannot be served. `private`: the
        cluster ends with the run, and the service with it."""
        self.site, self.pool, self.mode, self.blocked = site, pool, mode, blocked
        self.block_size, self.page_bytes, self.max_instances = block_size, page_bytes, max_instances
        self.cap_bytes = int(SHARE_OF_STORE * store_bytes)
        self.speed = PrefixSpeed.first_guess(site.autoscaler.terms.prefill.per_unit_s, max(page_bytes, 1))
        self.service = PrefixService(run_id, self.cap_bytes)
        self.private, self.told = private, ""
        self.failed_in_a_row, self.last_page_s = 0, time.monotonic()

    def choose(self, demand: PrefixDemand | None, steps_left: int) -> PrefixChoice:
        """Before anything is leased. A cold start of the prefill instance is spread over the steps that are left."""
        if demand is None:
            return PrefixChoice(False, 0, "prefix_kv: off" if self.mode == "off" else f"off: {self.blocked}")
        costs = self.speed.costs()
        if not any(instance.memory_mb > 0 for instance in self.pool.parked):
            start_s = self.site.autoscaler.terms.cold_start.predict() / max(1, steps_left)
            costs = costs.with_start(start_s)
        return choose_prefix(
            demand, costs, mode=self.mode, time_value=self.site.autoscaler.second, max_instances=self.max_instances,
            page_bytes=self.page_bytes, cap_bytes=self.cap_bytes,
        )  # fmt: skip

    def weigh(self, prompts: Sequence[Sequence[int]], shares: Sequence[np.ndarray], steps_left: int) -> StepPrefixes:
        """Whether the pages of `prompts` (token ids, one for each distinct prompt of the step) pay. `shares`: of each engine that
        will work, the prompts (positions) of its requests."""
        able = self.mode != "off" and not self.blocked  # else nothing is counted for it

        def weighed() -> StepPrefixes:
            demand = prefix_demand(prompts, shares, self.block_size) if able else None
            return StepPrefixes(self.choose(demand, steps_left), demand)

        step = self.site.autoscaler.safely(
            "weighing prefix KV", weighed, lambda: StepPrefixes(PrefixChoice(False, 0, "off: weighing it failed"), None)
        )
        choice, demand = step.choice, step.demand
        step.metrics = {
            "prefix/on": float(choice.on), "prefix/reason": choice.reason, "prefix/saved_engine_s": choice.saved_engine_s,
            "prefix/break_even_tokens": choice.break_even_tokens if np.isfinite(choice.break_even_tokens) else None,
        }
        if demand is not None:
            step.metrics |= {
                "prefix/asked_tokens": sum(len(prompts[p]) for share in shares for p in np.asarray(share, int).tolist()),
                "prefix/off_tokens": int(demand.off_tokens.sum()), "prefix/distinct_tokens": demand.distinct_tokens,
                "prefix/header_tokens": demand.trunk_tokens,
            }
        return step

    def prefill(self, step: StepPrefixes, prompts: Sequence[Sequence[int]], weights: WeightVersion) -> StepPrefixes:
        """The pages of the prompts, where they were found to pay. Instances take what leases are spare, or ask for some, and have
        given them all back when this returns."""
        choice = step.choice
        if not choice.on:
            if self.mode != "off" and (self.blocked or choice.no_room):
                self._say(choice.reason)
            return step
        site, start = self.site, time.monotonic()
        with site.phases.phase("prefill"):
            if self.service.handle is None:
                try:
                    self.service.start()
                except RunError as error:
                    self.block(str(error))
                    step.metrics["prefix/on"] = 0.0
                    return step
            site.spare = self.pool.resize(choice.instances, site.spare, need=0, wait_s=0.2)
            unready = self._made_ready(weights)
            producers = [Producer(instance.actor, len(instance.leases)) for instance in self.pool.working]
            within_s = site.recipe.functions.lease_deadline_s
            said = len(self.service.failures)
            self.service.keep_only(weights.version)
            step.prepared = self.service.prepare(weights.version, prompts, producers, within_s)
            self._account(step, time.monotonic() - start)
            if step.prepared.failed:
                self._end_failed()
            site.spare += self.pool.park_all()
        for failure in [*unready, *step.prepared.failed, *self.service.failures[said:]]:
            site.record.progress.message(f"prefix KV: {failure}; engines compute what is missing")
        self.failed_in_a_row = 0 if step.prepared.refs else self.failed_in_a_row + 1
        self.last_page_s = start if not self.failed_in_a_row else self.last_page_s
        if self.failed_in_a_row >= GIVE_UP and start - self.last_page_s >= GIVE_UP_S:
            self.blocked = f"it came to nothing in {GIVE_UP} steps in a row"
        return step

    def _say(self, reason: str) -> None:
        """Once."""
        if reason != self.told:
            self.told = reason
            self.site.record.progress.message(f"prefix KV is {reason}")

    def block(self, why: str) -> None:
        """Instances turn out not to serve it."""
        if not self.blocked:
            self.blocked = why
            self._say(f"off: {why}")

    def _made_ready(self, weights: WeightVersion) -> list[str]:
        """Instances that have started and loaded; of the others, which end here, why. They are waited for: the index's calls
        come from another process, and Ray keeps the order of calls of one caller only."""
        fetch_weights(self.pool, weights)
        failed = []
        for instance in list(self.pool.working):
            try:
                before = [ref for ref in (instance.opened, instance.loading) if ref is not None]
                get(before, self.site.recipe.functions.lease_deadline_s, f"{instance.id} to be ready")
                self.site.told_start(instance)
                why, raised = instance.keeps_no_pages, bool(instance.keeps_no_pages)
            except (*GONE, RayTaskError, RunError) as error:
                why = instance.failure() or f"{instance.id}: {reason_of(error)}"
                raised = isinstance(error, RayTaskError) or raised_at_start(error)
            if raised:  # no fault of a process: the next one would say the same, unless it was the weights that were lost
                if not lost_on_the_way(instance.loading):
                    self.block(why)
                leases = instance.leases
                self.pool.end(instance)
                self.site.leases.release(leases)
            elif why:
                failed.append(why)
                self.pool.lose(instance, why)
        return failed

    def _end_failed(self) -> None:
        """Instances that died, hang or could not start: the next step that needs one starts it anew."""
        asked = [(instance, instance.actor.kind.remote()) for instance in self.pool.working]
        for instance, told in asked:
            try:
                get(told, ANSWER_S, f"{instance.id} to answer")
            except RayTaskError:  # it answers
                continue
            except (*GONE, RunError) as error:
                self.pool.lose(instance, reason_of(error))

    def _account(self, step: StepPrefixes, wall_s: float) -> None:
        done = step.prepared.done
        for producer, one in done:
            instance = self.pool.working[producer]
            self.site.ledger.spans([lease.id for lease in instance.leases], one.spans)
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
        """Each engine is told to fetch what its prompts need; the call stands before its rollout in the actor's queue."""
        for instance, share in zip(engines, shares, strict=False):
            mine = sorted(set(np.asarray(share, int).tolist()))
            refs = step.prepared.needed_by(mine) if step.prepared.refs else []
            if refs:
                step.sent.append((instance, instance.actor.fetch_pages.remote(version, [prompts[i] for i in mine], refs, FETCH_S)))

    def over(self, step: StepPrefixes) -> dict[str, Any]:
        """After the rollout: let go of the pages, and say how it went. An engine that died has lost its own."""
        counts: Counter[str] = Counter()
        for instance, told in step.sent:
            dropped = instance.actor.drop_pages.remote()
            try:
                fetched: Fetched = get(told, FETCH_S, f"{instance.id} to have fetched its pages")
                loaded, tokens, load_s = get(dropped, FETCH_S, f"{instance.id} to drop its pages")
            except (*GONE, RayTaskError, RunError):
                counts["lost"] += 1
                continue
            self.site.ledger.spans([lease.id for lease in instance.leases], fetched.spans)
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
        """Processes end, leases go, the application is removed."""
        self.site.leases.release(self.pool.close())
        self.service.stop(remove=not self.private)
