"""The rollout of a step: engines as the plan says, every response to its prompts, and leases on to the next function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from placement.policy import Decision, deal
from rlhfless_ray.autoscale import RolloutPlan
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.learn.gang import Gang
from rlhfless_ray.rollout.migrate import Migration
from rlhfless_ray.rollout.requests import evaluation_requests, step_requests
from rlhfless_ray.rollout.stream import Stream, run_rollout
from rlhfless_ray.site import Site
from rlhfless_ray.types import Completion, Prompt, Request, Sample, Step, WeightVersion

REWARD_START_S = 3.0  # a reward process: its imports, measured on two cores


class RolloutStage:
    def __init__(self, site: Site, pool: Pool, reward: Pool, gang: Gang, tokenizer: Any, weight_bytes: int) -> None:
        """`reward`, `gang`: the functions that come next, whose processes and slots it minds."""
        self.site, self.pool, self.reward, self.gang = site, pool, reward, gang
        self.tokenizer, self.weight_bytes = tokenizer, weight_bytes
        self.began_s = 0.0
        rollout = site.recipe.rollout
        self.migration = None if rollout.migrate == "off" else Migration(rollout.migrate, rollout.migrate_tau)

    @property
    def warm(self) -> int:
        """Engines that need no cold start."""
        return sum(instance.memory_mb > 0 for instance in (*self.pool.parked, *self.pool.working))

    @contextmanager
    def phase(self, plan: RolloutPlan) -> Iterator[None]:
        site = self.site
        with site.phases.phase("rollout"):
            began_s, cold = time.monotonic(), self.pool.cold_starts
            need = site.recipe.rollout.min_actors
            site.leases.release(self.pool.resize(plan.actors, site.handed(), need=need, wait_s=0.2))
            if cold == self.pool.cold_starts:
                site.autoscaler.terms.warm_start.observe(0.0, time.monotonic() - began_s)
            site.autoscaler.actors = len(self.pool.working)
            yield
            site.spare = self._park()

    def generate(self, step: Step, weights: WeightVersion) -> list[Sample]:
        """Every response to the step's prompts, as samples without reward."""
        count = self.site.recipe.rollout.samples_per_prompt
        requests = step_requests(self.site.recipe, step.number, step.prompts)
        expected = step.forecast.lengths.mean(1)
        groups = np.repeat(np.arange(len(step.prompts)), count)
        if self.migration is not None:
            autoscaler, elastic = self.site.autoscaler, self.site.recipe.functions.elastic
            self.migration.begin(step.forecast.lengths, autoscaler.speed.speed, autoscaler.second if elastic else float("inf"))
        shares = step.plan.shares(len(self.pool.working), expected, groups)
        stream = self._run(requests, shares, expected, weights, self.migration)
        step.metrics |= stream.metrics()
        return self._samples([prompt for prompt in step.prompts for _ in range(count)], stream.completions, count)

    def answer(self, prompts: list[Prompt], temperatures: list[float], weights: WeightVersion) -> list[Sample]:
        """One response to each prompt at each temperature, by as many engines as there can be; for evaluations."""
        site = self.site
        site.spare = self.pool.resize(site.max_actors, site.spare, wait_s=0.2)
        expected = np.tile(site.autoscaler.expected(prompts), len(temperatures))
        groups = np.tile(np.arange(len(prompts)), len(temperatures))
        requests = evaluation_requests(site.recipe, prompts, temperatures)
        done = self._run(requests, deal(expected, groups, len(self.pool.working)), expected, weights, None)
        site.spare += self._park()
        return self._samples(prompts * len(temperatures), done.completions, 1)

    def _run(
        self, requests: list[Request], shares: list[np.ndarray], expected: np.ndarray, weights: WeightVersion,
        migration: Migration | None,
    ) -> Stream:
        recipe, autoscaler = self.site.recipe, self.site.autoscaler
        self.began_s = time.monotonic()
        all_warm = all(instance.memory_mb > 0 for instance in self.pool.working)
        stream = run_rollout(
            self.pool, requests, shares, expected, weights,
            interval_s=recipe.rollout.stream_interval_s, deadline_s=recipe.rollout.deadline_s,
            max_replacements=recipe.functions.max_replacements, needed_next=self.gang.slots,
            drained=autoscaler.drained, give_back=self.drained, on_progress=self._prewarm_next,
            migration=migration, start_s=autoscaler.terms.cold_start.predict(),
        )
        around_s = time.monotonic() - self.began_s - max(stream.decode_s.values())
        for seconds in stream.load_s:
            autoscaler.observe_load(self.weight_bytes, seconds)
        autoscaler.observe_rollout(stream.steps, around_s if all_warm else None)
        return stream

    def drained(self, instance: Instance, decision: Decision) -> None:
        """An engine has nothing left to do: its lease goes where the decision says so. One that still starts is at work."""
        if decision.action == "Release" and self.site.recipe.functions.elastic and instance.started:
            self._told_start(instance)
            self.site.leases.release(self.pool.park(instance))

    def _prewarm_next(self, done: int, total: int) -> None:
        """The next phase's process starts while this one ends, if none is warm."""
        self.site.record.progress.phase(f"rollout: {done} of {total} responses")
        if self.reward.parked or self.reward.working:
            return
        left_s = (time.monotonic() - self.began_s) * (total - done) / max(done, 1)
        if self.site.autoscaler.prewarm_now(left_s, REWARD_START_S):
            self.reward.prewarm(self.pool.working[0].slot)

    def _told_start(self, instance: Instance) -> None:
        if spans := self.site.told_start(instance):
            self.site.autoscaler.terms.cold_start.observe(0.0, sum(span.to_s - span.from_s for span in spans))

    def _park(self) -> list[Lease]:
        """Engines leave their slots; returns the leases."""
        for instance in self.pool.working:
            self._told_start(instance)
        return self.pool.park_all()

    def _samples(self, prompts: list[Prompt], done: dict[int, Completion], count: int) -> list[Sample]:
        ordered = [done[i] for i in range(len(prompts))]
        texts = self.tokenizer.batch_decode([c.token_ids for c in ordered], skip_special_tokens=True)
        return [Sample(p, i % count, c, t) for i, (p, c, t) in enumerate(zip(prompts, ordered, texts, strict=True))]
