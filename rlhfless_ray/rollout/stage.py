"""The rollout of a step: engines as the plan says, every response to its prompts, and leases on to the next function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from placement.policy import Decision, deal
from placement.seats import seats
from rlhfless_ray.agent.processes import Processes
from rlhfless_ray.agent.samples import EpisodeSamples
from rlhfless_ray.autoscale import RolloutPlan
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.functions.parked import FIRST_MB
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.learn.stage import LearnStage
from rlhfless_ray.prefix.stage import PrefixStage, StepPrefixes
from rlhfless_ray.reward.stage import ScoreStage
from rlhfless_ray.rollout.beside import Beside
from rlhfless_ray.rollout.episodes import Episodes
from rlhfless_ray.rollout.migrate import Migration
from rlhfless_ray.rollout.requests import evaluation_requests, step_requests
from rlhfless_ray.rollout.rollout import run_rollout
from rlhfless_ray.rollout.samples import Samples
from rlhfless_ray.rollout.stream import Stream, fetch_into
from rlhfless_ray.site import Site
from rlhfless_ray.tail import Tail
from rlhfless_ray.types import Prompt, Request, Sample, Step, WeightVersion

REWARD_START_S = 3.0  # a reward process: its imports, measured on two cores


class RolloutStage:
    def __init__(
        self, site: Site, pool: Pool, scoring: ScoreStage, learning: LearnStage, tokenizer: Any, weight_bytes: int,
        prefix: PrefixStage | None = None, agents: Processes | None = None,
    ) -> None:
        """`scoring`, `learning`: the stages that come next, which begin while the last engines work. `prefix`: what gives the
        engines KV that others have computed. `agents`: who answers the policy, where samples have several turns."""
        self.site, self.pool, self.scoring, self.learning = site, pool, scoring, learning
        self.tokenizer, self.weight_bytes = tokenizer, weight_bytes
        self.began_s = 0.0
        self.waiting: list[Instance] = []  # engines that hold leases and have nothing to do just now
        self.prefix, self.agents = prefix, agents
        rollout = site.recipe.rollout
        moves = rollout.migrate != "off" and agents is None  # what an agent will say, and so what is left, nobody foresees
        carries = prefix is not None and not prefix.blocked
        self.migration = None if not moves else Migration(rollout.migrate, rollout.migrate_tau, carries)

    @property
    def warm(self) -> int:
        """Engines that need no cold start."""
        return sum(instance.memory_mb > 0 for instance in (*self.pool.parked, *self.pool.working))

    def weigh(self, step: Step) -> StepPrefixes | None:
        """Whether the KV of what the prompts begin with pays for the plan's shares."""
        if self.prefix is None:
            return None
        shares = self._prompts(self._shares(step, step.plan.actors))
        steps_left = self.site.recipe.run.steps - step.number + 1
        return self.prefix.weigh([p.token_ids for p in step.prompts], shares, steps_left)

    def prefill(self, step: Step, weights: WeightVersion) -> StepPrefixes | None:
        """That KV, before the engines have their leases."""
        weighed = step.prefixes or self.weigh(step)
        if self.prefix is None or weighed is None:
            return None
        return self.prefix.prefill(weighed, [p.token_ids for p in step.prompts], weights)

    def begin(self, step: Step, weights: WeightVersion) -> None:
        """Before the phase of a step that is planned: engines take what leases are spare, and load the weights."""
        site = self.site
        with self._warm_start_timed():
            site.spare = self.pool.begin(step.plan.actors, site.leases.living(site.handed()), partial(fetch_into, weights=weights))
        self.waiting = list(self.pool.working)

    def lend(self) -> list[Lease]:
        """The leases that nobody works under just now, those of engines that wait for their phase or their weights too."""
        waiting, self.waiting = self.waiting, []
        return [*self.site.handed(), *(lease for instance in waiting for lease in self._leave(instance))]

    @contextmanager
    def _warm_start_timed(self) -> Iterator[None]:
        began_s, cold, working = time.monotonic(), self.pool.cold_starts, len(self.pool.working)
        yield
        if cold == self.pool.cold_starts and len(self.pool.working) > working:
            self.site.autoscaler.terms.warm_start.observe(0.0, time.monotonic() - began_s)

    def _shares(self, step: Step, engines: int) -> list[np.ndarray]:
        """The requests of each engine; engines that get none are left out, as in the rollout."""
        count = self.site.recipe.rollout.samples_per_prompt
        shares = step.plan.shares(engines, step.forecast.lengths.mean(1), np.repeat(np.arange(len(step.prompts)), count))
        return [share for share in shares if len(share)]

    def _homes(self) -> set[str]:
        """The nodes of the learner, where its weights come from and its slots are."""
        return {instance.slot.node for instance in self.learning.gang.by_rank}

    def _seat(self, step: Step, shares: list[np.ndarray], weights: WeightVersion) -> None:
        """Put the engines into the order of these shares: the longest goes to the learner's node, where weights come soonest and a
        slot is handed on, as far as that is worth anything."""
        engines, homes, autoscaler = self.pool.working, self._homes(), self.site.autoscaler
        prompts = np.repeat([len(p.token_ids) for p in step.prompts], self.site.recipe.rollout.samples_per_prompt)
        work_s = np.array([autoscaler.work_s(step.forecast.lengths[share], prompts[share]) for share in shares])
        around_s = np.array([
            autoscaler.around_s(self.weight_bytes, e.slot.node not in homes, e.loading is not None or e.version != weights.version)
            for e in engines
        ])
        order = seats(work_s, around_s)
        self.pool.working[:] = [*(engines[k] for k in order), *(e for k, e in enumerate(engines) if k not in order)]
        if len({e.slot.node for e in engines}) > 1:
            longest = self.pool.working[int(np.argmax(work_s))]
            step.metrics["rollout/longest_at_home"] = float(longest.slot.node in homes)

    def _prompts(self, shares: list[np.ndarray]) -> list[np.ndarray]:
        """The prompts of these requests, engine by engine."""
        return [share // self.site.recipe.rollout.samples_per_prompt for share in shares]

    @contextmanager
    def phase(self, plan: RolloutPlan, weights: WeightVersion) -> Iterator[None]:
        """Engines load the weights from the moment they have their leases, while their requests are still being made."""
        site = self.site
        with site.phases.phase("rollout"):
            need, self.waiting = site.recipe.rollout.min_actors, []
            begin = partial(fetch_into, weights=weights)
            with self._warm_start_timed():
                spare = self.pool.resize(plan.actors, site.handed(), need=need, wait_s=0.2, begin=begin)
            site.leases.release(spare)
            site.autoscaler.actors = len(self.pool.working)
            yield
            site.spare += self._park()

    def generate(self, step: Step, weights: WeightVersion) -> list[Sample]:
        """Every response to the step's prompts, as samples without reward."""
        count = self.site.recipe.rollout.samples_per_prompt
        requests = step_requests(self.site.recipe, step.number, step.prompts, step.before)
        expected = step.forecast.lengths.mean(1)
        if self.migration is not None:
            autoscaler, elastic = self.site.autoscaler, self.site.recipe.functions.elastic
            second = autoscaler.second if elastic else float("inf")  # what is never given back cannot be saved
            prefill, limit = autoscaler.terms.prefill.per_unit_s, self.site.recipe.rollout.max_tokens
            self.migration.begin(step.forecast.lengths, autoscaler.speed.speed, second, prefill, count, limit)
        shares = self._shares(step, len(self.pool.working))
        self._seat(step, shares, weights)
        if self.prefix is not None and step.prefixes is not None:
            tokens = [p.token_ids for p in step.prompts]
            self.prefix.send(step.prefixes, tokens, self.pool.working, self._prompts(shares), weights.version)
        tail = Tail(self.scoring, self.learning, len(step.prompts), count)
        samples = self._samples(step.prompts, count, weights)
        beside = self._beside(samples, tail if self.site.recipe.functions.elastic else None)
        stream = self._run(requests, shares, expected, weights, self.migration, beside)
        self.site.spare += tail.over()
        step.metrics |= {**stream.metrics(), **tail.metrics()}
        if isinstance(samples, EpisodeSamples):
            step.metrics |= samples.metrics()
        if self.prefix is not None and step.prefixes is not None:
            step.metrics |= self.prefix.over(step.prefixes)
        return samples.all()

    def answer(self, prompts: list[Prompt], asked: list[tuple[float, int]], weights: WeightVersion) -> list[Sample]:
        """So many responses to each prompt at each temperature, by as many engines as there can be; for evaluations."""
        site = self.site
        site.spare = self.pool.resize(site.max_actors, site.spare, wait_s=0.2)
        requests = evaluation_requests(site.recipe, prompts, asked)
        of = np.concatenate([np.repeat(np.arange(len(prompts)), count) for _, count in asked])
        expected = site.autoscaler.expected(prompts)[of]
        samples = self._samples([prompts[k] for k in of], 1, weights)
        beside = self._beside(samples, None)
        self._run(requests, deal(expected, of, len(self.pool.working)), expected, weights, None, beside)
        site.spare += self._park()
        return samples.all()

    def _samples(self, prompts: list[Prompt], count: int, weights: WeightVersion) -> Samples | EpisodeSamples:
        if self.agents is not None:
            return EpisodeSamples(prompts, count, weights.version)
        return Samples(prompts, count, self.tokenizer)

    def _agents(self, samples: Samples | EpisodeSamples, requests: list[Request]) -> Any:
        """What makes the rollout of these requests, where agents play them."""
        if self.agents is None:
            return None
        column = self.site.recipe.answer_column
        asked = [samples.prompts[one.key // samples.count] for one in requests]
        labels = [(prompt.text, prompt.row.get(column, "") if column else "") for prompt in asked]
        return partial(Episodes, self.agents, labels)

    def _beside(self, samples: Samples | EpisodeSamples, tail: Tail | None) -> Beside:
        handing_over_s = 2 * self.site.autoscaler.terms.warm_start.predict()
        return Beside(samples, tail, self._leave, self.site.leases.release, handing_over_s)

    def _run(
        self, requests: list[Request], shares: list[np.ndarray], expected: np.ndarray, weights: WeightVersion,
        migration: Migration | None, beside: Beside,
    ) -> Stream:
        recipe, autoscaler = self.site.recipe, self.site.autoscaler
        self.began_s = time.monotonic()
        all_warm = all(instance.memory_mb > 0 for instance in self.pool.working)
        stream = run_rollout(
            self.pool, requests, shares, expected, weights,
            interval_s=recipe.rollout.stream_interval_s, deadline_s=recipe.rollout.deadline_s,
            silence_s=recipe.rollout.silence_s, needed_next=self.learning.gang.slots,
            drained=autoscaler.drained, give_back=self.drained, on_progress=self._meanwhile,
            beside=beside, migration=migration, start_s=autoscaler.terms.cold_start.predict(),
            agents=self._agents(beside.samples, requests),  # type: ignore[arg-type]
            renew=self._renew,
        )
        around_s = time.monotonic() - self.began_s - max(stream.decode_s.values(), default=0.0)
        for node, seconds in stream.loads:
            autoscaler.observe_load(self.weight_bytes, seconds, away=node not in self._homes())
        autoscaler.observe_rollout(stream.steps, around_s if all_warm else None)
        if migration is not None and migration.trouble:
            autoscaler.troubles.append(migration.trouble)
        return stream

    def _renew(self, weights: WeightVersion, engines: list[Instance]) -> WeightVersion | None:
        """The step's weights were lost, and so was their copy: the learner publishes them once more. It may lack leases for that: these
        engines, which wait for them, lend theirs and take them again. None where it cannot, as it is at work already."""
        if self.learning.gang.working:
            return None
        self.waiting = list(engines)
        fresh = self.learning.gangs.safe(weights)
        self.waiting = []
        lost = self.pool.leases.gone([engine.slot.node for engine in engines])
        for engine in engines:
            if engine in self.pool.parked and engine.slot.node not in lost:  # else it is seen to be gone when it is called
                self.site.spare = self.pool.resume(engine, self.site.handed())
        return fresh if fresh.ref != weights.ref else None

    def drained(self, instance: Instance, decision: Decision) -> None:
        """An engine has nothing left to do: its lease goes where the decision says so. One that still starts is at work."""
        if decision.action == "Release" and self.site.recipe.functions.elastic and instance.started:
            self.site.leases.release(self._leave(instance))

    def state(self) -> dict[str, Any]:
        """What moves took, for a checkpoint."""
        return self.migration.state() if self.migration is not None else {}

    def restore(self, state: dict[str, Any]) -> None:
        if self.migration is not None:
            self.migration.restore(state)

    def _leave(self, instance: Instance) -> list[Lease]:
        """One engine leaves its slot; returns its leases."""
        return self.pool.park(instance) if self.site.survived_start(self.pool, instance, self._told_start) else []

    def _meanwhile(self, done: int, total: int) -> None:
        """What was put off is done while engines work; the next phase's process starts while this one ends, if none is warm."""
        self.site.record.progress.phase(f"rollout: {done} of {total} responses")
        self.site.record.catch_up()
        reward = self.scoring.pool
        if self.agents is not None or reward.parked or reward.working:
            return
        left_s = (time.monotonic() - self.began_s) * (total - done) / max(done, 1)
        slot = self.pool.working[0].slot
        if self.site.autoscaler.prewarm_now(left_s, REWARD_START_S, self.site.ledger.parked_price(slot.node, FIRST_MB)):
            reward.prewarm(slot)

    def _told_start(self, instance: Instance) -> None:
        if spans := self.site.told_start(instance):
            self.site.autoscaler.terms.cold_start.observe(0.0, sum(span.to_s - span.from_s for span in spans))
            if instance.keeps_no_pages and self.prefix is not None:
                self.prefix.block(f"{instance.keeps_no_pages}; what moves between engines is computed again")
                if self.migration is not None:
                    self.migration.pages = None

    def _park(self) -> list[Lease]:
        """Engines leave their slots; returns the leases."""
        for instance in list(self.pool.working):
            self.site.survived_start(self.pool, instance, self._told_start)
        return self.pool.park_all()
