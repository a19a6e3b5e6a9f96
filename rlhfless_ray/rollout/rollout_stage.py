"""The rollout of a step: engines as the plan says, every response to its prompts, and leases on to the next function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from placement.scaling.engine_assignment import assign_engines
from placement.scaling.resize_policy import Decision, assign_groups
from rlhfless_ray.agent.agent_processes import AgentProcesses
from rlhfless_ray.agent.episode_samples import EpisodeSamples
from rlhfless_ray.autoscaler.rollout_plan import RolloutPlan
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.rollout.driver import run_rollout
from rlhfless_ray.rollout.listener import RolloutListener
from rlhfless_ray.rollout.migration_policy import MigrationPolicy
from rlhfless_ray.rollout.multi_turn import MultiTurnRollout
from rlhfless_ray.rollout.neighbours import PrefixPages, WeightPublisher
from rlhfless_ray.rollout.overlap import OverlapScheduler
from rlhfless_ray.rollout.requests import evaluation_requests, step_requests
from rlhfless_ray.rollout.rollout_result import RolloutResult, fetch_into
from rlhfless_ray.rollout.samples import ResponseSamples
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Prompt, Request, Sample, Step, WeightVersion


class RolloutStage:
    def __init__(
        self,
        context: RunContext,
        pool: WorkerPool,
        publisher: WeightPublisher,
        tokenizer: Any,
        weight_bytes: int,
        *,
        prefix: PrefixPages | None = None,
        agents: AgentProcesses | None = None,
        on_end_near: Callable[[float, Slot], None] = lambda seconds, slot: None,
    ) -> None:
        """`publisher`: where weights come from, and whose slots are needed next. `prefix`: what gives the engines KV that others
        have computed. `agents`: who answers the policy, where samples have several turns. `on_end_near(seconds, slot)` is told
        for how long the rollout will go on, and a slot that will be free then."""
        self.context, self.pool, self.publisher, self.on_end_near = context, pool, publisher, on_end_near
        self.tokenizer, self.weight_bytes = tokenizer, weight_bytes
        self.began_s = 0.0
        self.prefix, self.agents = prefix, agents
        rollout = context.recipe.rollout
        moves = rollout.migrate != "off" and agents is None  # what an agent will say, and so what is left, nobody foresees
        carries = prefix is not None and not prefix.blocked
        self.migration = None if not moves else MigrationPolicy(rollout.migrate, rollout.migrate_tau, carries)

    @property
    def warm(self) -> int:
        """Engines that need no cold start."""
        return sum(instance.memory_mb > 0 for instance in (*self.pool.parked, *self.pool.working))

    def prompt_shares(self, step: Step) -> list[np.ndarray]:
        """The prompts (positions) whose requests the plan gives to each engine."""
        return self._prompts(self._shares(step, step.plan.actors))

    def begin(self, step: Step, weights: WeightVersion) -> None:
        """Before the phase of a step that is planned: engines take what leases are spare, and load the weights."""
        context = self.context
        with self._warm_start_timed():
            free = context.leases.living(context.broker.take())
            context.broker.put(self.pool.begin(step.plan.actors, free, partial(fetch_into, weights=weights)))
        context.broker.lend_idle(partial(self._reclaim, list(self.pool.working)))

    def _reclaim(self, idle: list[Instance]) -> list[Lease]:
        """Park engines that wait for their phase or their weights; returns their leases."""
        return [lease for instance in idle for lease in self._leave(instance)]

    @contextmanager
    def _warm_start_timed(self) -> Iterator[None]:
        began_s, cold, working = time.monotonic(), self.pool.cold_starts, len(self.pool.working)
        yield
        if cold == self.pool.cold_starts and len(self.pool.working) > working:
            self.context.autoscaler.terms.warm_start.observe(0.0, time.monotonic() - began_s)

    def _shares(self, step: Step, engines: int) -> list[np.ndarray]:
        """The requests of each engine; engines that get none are left out, as in the rollout."""
        count = self.context.recipe.rollout.samples_per_prompt
        shares = step.plan.shares(engines, step.forecast.lengths.mean(1), np.repeat(np.arange(len(step.prompts)), count))
        return [share for share in shares if len(share)]

    def _seat(self, step: Step, shares: list[np.ndarray], weights: WeightVersion) -> None:
        """Put the engines into the order of these shares: the longest goes to the learner's node, where weights come soonest and a
        slot is handed on, as far as that is worth anything."""
        engines, homes, autoscaler = self.pool.working, self.publisher.learner_nodes, self.context.autoscaler
        prompts = np.repeat([len(p.token_ids) for p in step.prompts], self.context.recipe.rollout.samples_per_prompt)
        work_s = np.array([autoscaler.work_s(step.forecast.lengths[share], prompts[share]) for share in shares])
        overhead_s = np.array(
            [
                autoscaler.overhead_s(self.weight_bytes, e.slot.node not in homes, e.loading is not None or e.version != weights.version)
                for e in engines
            ]
        )
        order = assign_engines(work_s, overhead_s)
        self.pool.working[:] = [*(engines[k] for k in order), *(e for k, e in enumerate(engines) if k not in order)]
        if len({e.slot.node for e in engines}) > 1:
            longest = self.pool.working[int(np.argmax(work_s))]
            step.metrics["rollout/longest_at_home"] = float(longest.slot.node in homes)

    def _prompts(self, shares: list[np.ndarray]) -> list[np.ndarray]:
        """The prompts of these requests, engine by engine."""
        return [share // self.context.recipe.rollout.samples_per_prompt for share in shares]

    @contextmanager
    def phase(self, plan: RolloutPlan, weights: WeightVersion) -> Iterator[None]:
        """Engines load the weights from the moment they have their leases, while their requests are still being made."""
        context = self.context
        with context.phases.phase("rollout"):
            context.broker.keep_idle()
            need, begin = context.recipe.rollout.min_actors, partial(fetch_into, weights=weights)
            with self._warm_start_timed():
                context.broker.resize(self.pool, plan.actors, need=need, wait_s=0.2, begin=begin)
            context.broker.release()
            context.autoscaler.actors = len(self.pool.working)
            yield
            context.broker.put(self._park())

    def generate(self, step: Step, weights: WeightVersion, tail: OverlapScheduler) -> list[Sample]:
        """Every response to the step's prompts, as samples without reward. `tail`: works on slots that engines have left."""
        count = self.context.recipe.rollout.samples_per_prompt
        requests = step_requests(self.context.recipe, step.number, step.prompts, step.before)
        expected = step.forecast.lengths.mean(1)
        if self.migration is not None:
            autoscaler, elastic = self.context.autoscaler, self.context.recipe.functions.elastic
            second = autoscaler.value_per_s if elastic else float("inf")  # what is never given back cannot be saved
            prefill, limit = autoscaler.terms.prefill.per_unit_s, self.context.recipe.rollout.max_tokens
            self.migration.begin(step.forecast.lengths, autoscaler.speed.speed, second, prefill, count, limit)
        shares = self._shares(step, len(self.pool.working))
        self._seat(step, shares, weights)
        if self.prefix is not None and step.prefixes is not None:
            tokens = [p.token_ids for p in step.prompts]
            self.prefix.send(step.prefixes, tokens, self.pool.working, self._prompts(shares), weights.version)
        samples = self._samples(step.prompts, count, weights)
        listener = self._beside(samples, tail if self.context.recipe.functions.elastic else None)
        stream = self._run(requests, shares, expected, weights, self.migration, listener)
        step.metrics |= {**stream.metrics(), **tail.metrics()}
        if isinstance(samples, EpisodeSamples):
            step.metrics |= samples.metrics()
        if self.prefix is not None and step.prefixes is not None:
            step.metrics |= self.prefix.finish(step.prefixes)
        return samples.all()

    def answer(self, prompts: list[Prompt], asked: list[tuple[float, int]], weights: WeightVersion) -> list[Sample]:
        """So many responses to each prompt at each temperature, by as many engines as there can be; for evaluations."""
        context = self.context
        context.broker.resize(self.pool, context.max_actors, wait_s=0.2)
        requests = evaluation_requests(context.recipe, prompts, asked)
        of = np.concatenate([np.repeat(np.arange(len(prompts)), count) for _, count in asked])
        expected = context.autoscaler.expected(prompts)[of]
        samples = self._samples([prompts[k] for k in of], 1, weights)
        listener = self._beside(samples, None)
        self._run(requests, assign_groups(expected, of, len(self.pool.working)), expected, weights, None, listener)
        context.broker.put(self._park())
        return samples.all()

    def _samples(self, prompts: list[Prompt], count: int, weights: WeightVersion) -> ResponseSamples | EpisodeSamples:
        if self.agents is not None:
            return EpisodeSamples(prompts, count, weights.version)
        return ResponseSamples(prompts, count, self.tokenizer)

    def _agents(self, samples: ResponseSamples | EpisodeSamples, requests: list[Request]) -> Any:
        """What makes the rollout of these requests, where agents play them."""
        if self.agents is None:
            return None
        column = self.context.recipe.answer_column
        asked = [samples.prompts[one.key // samples.count] for one in requests]
        labels = [(prompt.text, prompt.row.get(column, "") if column else "") for prompt in asked]
        return partial(MultiTurnRollout, self.agents, labels)

    def _beside(self, samples: ResponseSamples | EpisodeSamples, tail: OverlapScheduler | None) -> RolloutListener:
        handing_over_s = 2 * self.context.autoscaler.terms.warm_start.predict()
        return RolloutListener(samples, tail, self._leave, handing_over_s)

    def _run(
        self,
        requests: list[Request],
        shares: list[np.ndarray],
        expected: np.ndarray,
        weights: WeightVersion,
        migration: MigrationPolicy | None,
        listener: RolloutListener,
    ) -> RolloutResult:
        recipe, autoscaler = self.context.recipe, self.context.autoscaler
        self.began_s = time.monotonic()
        all_warm = all(instance.memory_mb > 0 for instance in self.pool.working)
        stream = run_rollout(
            self.pool,
            requests,
            shares,
            expected,
            weights,
            interval_s=recipe.rollout.stream_interval_s,
            deadline_s=recipe.rollout.deadline_s,
            silence_s=recipe.rollout.silence_s,
            needed_next=self.publisher.learner_slots,
            drained=autoscaler.drained,
            give_back=self.drained,
            on_progress=self._meanwhile,
            listener=listener,
            migration=migration,
            start_s=autoscaler.terms.cold_start.predict(),
            agents=self._agents(listener.samples, requests),  # type: ignore[arg-type]
            renew=self._renew,
        )
        overhead_s = time.monotonic() - self.began_s - max(stream.decode_s.values(), default=0.0)
        for node, seconds in stream.loads:
            autoscaler.observe_load(self.weight_bytes, seconds, away=node not in self.publisher.learner_nodes)
        autoscaler.observe_rollout(stream.steps, overhead_s if all_warm else None)
        if migration is not None and migration.trouble:
            autoscaler.troubles.append(migration.trouble)
        return stream

    def _renew(self, weights: WeightVersion, engines: list[Instance]) -> WeightVersion | None:
        """The step's weights were lost, and so was their copy: the learner publishes them once more. It may lack leases for that: these
        engines, which wait for them, lend theirs and take them again. None where it cannot, as it is at work already."""
        if self.publisher.learner_works:
            return None
        with self.context.broker.lending(partial(self._reclaim, engines)):
            fresh = self.publisher.safe(weights)
        lost = self.pool.leases.gone([engine.slot.node for engine in engines])
        for engine in engines:
            if engine in self.pool.parked and engine.slot.node not in lost:  # else it is seen to be gone when it is called
                self.context.broker.put(self.pool.resume(engine, self.context.broker.take()))
        return fresh if fresh.ref != weights.ref else None

    def drained(self, instance: Instance, decision: Decision) -> None:
        """An engine has nothing left to do: its lease goes where the decision says so. One that still starts is at work."""
        if decision.action == "Release" and self.context.recipe.functions.elastic and instance.started:
            self.context.leases.release(self._leave(instance))

    def state(self) -> dict[str, Any]:
        """What moves took, for a checkpoint."""
        return self.migration.state() if self.migration is not None else {}

    def restore(self, state: dict[str, Any]) -> None:
        if self.migration is not None:
            self.migration.restore(state)

    def _leave(self, instance: Instance) -> list[Lease]:
        """One engine leaves its slot; returns its leases."""
        return self.pool.park(instance) if self.context.record_start_or_replace(self.pool, instance, self._told_start) else []

    def _meanwhile(self, done: int, total: int) -> None:
        """Do what was put off while engines work, and tell the next phase when this one will end."""
        self.context.record.progress.phase(f"rollout: {done} of {total} responses")
        self.context.record.catch_up()
        if self.pool.working:
            self.on_end_near((time.monotonic() - self.began_s) * (total - done) / max(done, 1), self.pool.working[0].slot)

    def _told_start(self, instance: Instance) -> None:
        if spans := self.context.record_start(instance):
            self.context.autoscaler.terms.cold_start.observe(0.0, sum(span.to_s - span.from_s for span in spans))
            if instance.keeps_no_pages and self.prefix is not None:
                self.prefix.block(f"{instance.keeps_no_pages}; what moves between engines is computed again")
                if self.migration is not None:
                    self.migration.pages = None

    def _park(self) -> list[Lease]:
        """Engines leave their slots; returns the leases."""
        for instance in list(self.pool.working):
            self.context.record_start_or_replace(self.pool, instance, self._told_start)
        return self.pool.park_all()
