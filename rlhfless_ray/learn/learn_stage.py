"""The learn stage of a step: advantages, the update by the learner, and the published weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from placement.calls import TRAIN_CRITIC, TRAIN_POLICY, VALUES
from placement.scaling.resize_policy import Decision
from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.lease import Lease
from rlhfless_ray.learn.batch import Batch, batch_of, counts_of, lags_of, mask_of
from rlhfless_ray.learn.carry import FILE, as_bytes, carried, of_bytes
from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.learn.compute_advantages import compute_advantages, penalized
from rlhfless_ray.learn.gang_scheduling import homes_of
from rlhfless_ray.learn.kl_controller import AdaptiveKL, FixedKL
from rlhfless_ray.learn.kl_estimators import mean_kl, token_kl
from rlhfless_ray.learn.logprob_passes import StepPasses
from rlhfless_ray.learn.rank_settings import RankLayout, auto_ranks
from rlhfless_ray.learn.step_calls import Starts, StepCalls, passes_wanted
from rlhfless_ray.learn.worker_group import WorkerGroup
from rlhfless_ray.recipe.section import AutoCount
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample, Scored, Trained, UpdateStats, WeightVersion
from rlhfless_ray.weights.tensor_file import Files

FREE_S = 0.05  # longest wait for Ray to grant a free slot


class LearnStage:
    def __init__(
        self, context: RunContext, worker_group: WorkerGroup, critic: WorkerGroup | None = None, reference: WorkerGroup | None = None
    ) -> None:
        self.context, self.worker_group, self.critic = context, worker_group, critic
        self.worker_groups = ColocatedGroups(context, worker_group, critic, reference)
        self.number = 0  # number of the step that runs now
        self.passes_s = 0.0  # seconds of that phase before the policy's update
        self.plan: Decision | None = None
        self.chooses_ranks = False  # whether the number of ranks may change between steps
        self.resized: dict[str, Any] = {}  # metrics of the newest choice of ranks
        self.update: Pending[UpdateStats] = Pending(UpdateStats)  # of the learner, the newest one
        self._stop_waits = ExitStack()  # holds the deferral of stop signals while an update is under way
        section = context.recipe.algorithm.kl
        self.controller: FixedKL | AdaptiveKL = FixedKL(section.coefficient)
        if section.target is not None:
            self.controller = AdaptiveKL(section.coefficient, section.target, section.horizon)
        self.kl_in_reward = section.coefficient > 0 and section.place == "reward"
        self.carries = context.recipe.algorithm.remainder == "carry"
        self.leftover: Batch | None = None  # samples of finished steps that filled no optimizer step
        self.kl = 0.0  # mean over the step's samples, if the KL is part of the reward
        self.passes = StepPasses(context, worker_group, critic, reference)
        self.calls = StepCalls(context, self.worker_groups, self.passes, self.kl_in_reward)

    # ---- ahead, while engines work ----------------------------------------------------------------------------

    @property
    def _passes(self) -> list[str]:
        return passes_wanted(self.passes, self.kl_in_reward or self.carries)

    def lease_free_slots(self, worker_groups: list[WorkerGroup]) -> list[Lease]:
        """Lease a slot for each rank of the first of these worker groups that has free slots where its state is. Returns the leases.

        A pool that several runs share grants slots for bids, and this work makes none.
        """
        leases = self.context.leases
        for worker_group in worker_groups if self.context.autoscaler.criteria.bids is None else []:
            homes = homes_of(worker_group.by_rank)
            if homes and not worker_group.working and len(leases.with_room(homes)) == len(homes):
                return leases.collect(leases.ask(len(homes), homes), worker_group.pool.kind, FREE_S)
        return []

    def pass_beside(self, seconds: float) -> None:
        """Once the update under way has ended, compute log-probabilities of finished samples of the rollout that works beside it.

        They are those of the proximal policy, which is the version that the update has made. The learner still holds its slots, because
        the step waits for the rollout, which continues for `seconds`.

        Does nothing after a rank was lost. New ranks need leases, and engines may hold all of them, so `_updated` replaces the lost ones
        after the rollout.
        """
        passes = self.passes.logprobs
        if passes is None or not (passes.waiting or passes.refs) or not self.update.is_ready() or self.update.has_failed():
            return
        if not self.worker_group.have_failed(passes.refs):
            self.update.result()  # records it first: a learner that is lost in a pass repeats the update
            passes.collect(parks=False)
            passes.start_ahead([], seconds)

    def _end_passes_beside(self) -> None:
        """Wait for the last of these passes. Engines hold no lease."""
        passes = self.passes.logprobs
        if passes is not None and passes.refs:
            passes.collect(wait=True, parks=False)

    # ---- the phase --------------------------------------------------------------------------------------------

    def advantages(self, answers: Sequence[Scored]) -> tuple[Batch, list[Trained]]:
        """Return the learner's batch of whole groups, without samples that have no reward, and all samples.

        Call it inside the phase. Reference, learner and critic first compute what the update needs of the batch.
        """
        recipe = self.context.recipe
        rewards = np.array([np.nan if s.reward is None else s.reward for s in answers])
        known = np.isfinite(rewards)
        learned = [sample for sample, scored in zip(answers, known, strict=True) if scored]
        branches = [branch for sample in learned for branch in sample.branches]
        batch = batch_of([*learned, *branches], recipe.rollout.samples_per_prompt)
        if recipe.rollout.max_lag_steps:
            batch = replace(batch, lags=lags_of([*learned, *branches], self.number - 1))
        own = slice(int(batch.response_lengths[: len(learned)].sum()))  # tokens that advantages are computed for; branches take theirs
        lengths = np.array([len(s.completion.token_ids) for s in answers], np.int64)
        mask = mask_of([s.action_mask for s in answers], lengths.tolist())
        scored_tokens: np.ndarray | slice = slice(None)  # all, as nearly always
        if mask is not None or not known.all():
            scored_tokens = np.repeat(known, lengths) if mask is None else np.repeat(known, lengths) & mask
        extra: dict[str, Any] = {}
        tokens = int(lengths.sum())
        began_s = time.monotonic()
        passed = self.calls.run_passes([*learned, *branches], batch, self._passes if learned else [VALUES])
        self.passes_s += time.monotonic() - began_s
        if self.kl_in_reward and len(batch):
            kl = token_kl(passed["old"][own], passed["reference"][own], recipe.algorithm.kl.estimator, recipe.algorithm.kl.limit)
            self.kl = mean_kl(kl, batch.response_lengths[: len(learned)])
            extra |= {"kl": _spread(kl, scored_tokens, tokens), "kl_coefficient": self.controller.coefficient}
        batch = replace(batch, **passed)  # type: ignore[arg-type]
        if batch.values is not None:
            extra["values"] = _spread(batch.values[own], scored_tokens, tokens)
        truncated = np.array([s.completion.finish_reason == "length" for s in answers], bool)
        advantages, returns, earned = compute_advantages(
            recipe.algorithm,
            recipe.reward,
            rewards.reshape(-1, recipe.rollout.samples_per_prompt),
            lengths,
            truncated,
            recipe.rollout.max_tokens,
            mask=mask,
            **extra,
        )
        after = penalized(recipe.reward, rewards, lengths, truncated, recipe.rollout.max_tokens, mask)
        written = lengths if mask is None else counts_of(mask, lengths)
        sums = np.concatenate([[0.0], np.cumsum(_spread(advantages[scored_tokens], scored_tokens, tokens))])[np.cumsum(lengths)]
        means = np.diff(sums, prepend=0.0) / np.maximum(written, 1)
        trained = []
        for sample, scored, mean, sum_of, reward in zip(answers, known, means, earned, after, strict=True):
            of_update = {"advantage": float(mean), "earned": float(sum_of), "penalized": float(reward)} if scored else {}
            trained.append(Trained(**vars(sample) | of_update))
        by_token = {"advantages": advantages} | ({} if self.critic is None else {"returns": returns})
        of_tokens = {name: x[scored_tokens].astype(np.float32) for name, x in by_token.items()}
        if branches:
            of_branch = np.repeat(means[known], [len(sample.branches) for sample in learned])
            further = np.repeat(of_branch, batch.response_lengths[len(learned) :]).astype(np.float32)
            of_tokens["advantages"] = np.concatenate([of_tokens["advantages"], further])
            if batch.values is not None:
                of_tokens["returns"] = np.concatenate([of_tokens["returns"], batch.values[own.stop :] + further])
        batch = replace(batch, kl_coefficient=self.controller.coefficient, **of_tokens)  # type: ignore[arg-type]
        return batch, trained

    @contextmanager
    def phase(self, samples: Sequence[Sample]) -> Iterator[None]:
        """Run the learn phase of a step with these samples inside the block. Rollout engines hold no lease in it."""
        context, self.passes_s = self.context, 0.0
        with context.phases.phase("learn"):
            self.plan = context.autoscaler.size_learner(samples, self.worker_groups.shares_slots)
            context.broker.put(self.passes.collect(wait=True))
            if context.leases.resource == "cpu":  # every slot is a thread; on GPU a rank has one device
                for worker_group in self.worker_groups.all:
                    worker_group.slots = worker_group.ranks * self.plan.actors
                if (delay := context.autoscaler.learner_delay).seconds:
                    self.worker_group.scheduler.wait_s = delay.seconds
                    context.record.progress.message(f"step {self.number}: the update {delay.reason}")
            self.calls.begin(samples, self.plan, self._passes)
            if self.worker_groups.alone:
                self.worker_groups.turn(self.worker_group)
            with self._stop_waits:  # also ends the deferral if an update fails before its result is waited for
                yield
            self._resize()
            for worker_group in self.worker_groups.all:
                if worker_group.working:
                    context.broker.put(worker_group.park())

    def use_layouts(self, by_ranks: Mapping[int, RankLayout]) -> None:
        """Choose among these layouts of the learner from now on, by their numbers of ranks. It begins with the first, and others follow."""
        counts, self.by_ranks = list(by_ranks), by_ranks
        self.context.autoscaler.sizing.choose_ranks(counts)
        self.chooses_ranks = len(counts) > 1
        for group in self.worker_groups.all:
            group.set_layout(self._layouts(counts[0])[group.name])
        if isinstance(self.context.recipe.learner.ranks, AutoCount):
            self.worker_group.find_smaller = self._find_smaller

    def _layouts(self, ranks: int) -> dict[str, RankLayout]:
        """Return the layouts of all groups where the learner has `ranks`. A number that is `auto` and the critic's ZeRO stage follow it."""
        layout, numbers = self.by_ranks[ranks], auto_ranks(self.context.recipe, ranks)
        found = {group.name: replace(group.layout, ranks=numbers.get(group.name, group.layout.ranks)) for group in self.worker_groups.all}
        if self.critic is not None:
            found["critic"] = replace(found["critic"], zero_stage=layout.zero_stage)
        return found | {"learner": layout}

    def _find_smaller(self) -> RankLayout | None:
        """Return a layout of the learner for which there are slots, if there are none for its present ranks."""
        fewer = self.context.autoscaler.predictor.learners.fewer(self._room())
        return None if fewer is None else self._layouts(fewer)["learner"]

    def _room(self) -> int:
        return sum(self.context.leases.nodes.slots(self.worker_group.pool.labels).values())

    def _resize(self) -> None:
        """Choose the ranks of the next update, once the engines have this one's weights to load."""
        autoscaler, self.resized = self.context.autoscaler, {}
        if not self.chooses_ranks or not self.worker_group.working:
            return
        if calls_s := autoscaler.predictor.calls_took[0]:
            kinds = {group.pool.kind for group in self.worker_groups.all}
            autoscaler.predictor.beside_calls = self.context.ledger.beside(kinds, calls_s)
        decision = autoscaler.sizing.decide_ranks(self.number, self._room())
        if decision.actors != autoscaler.predictor.ranks:
            done = self.worker_groups.resize(self._layouts(decision.actors))
            autoscaler.sizing.use_ranks(self.worker_group.ranks)
            if done is not None:
                self.resized = done.metrics
                autoscaler.terms.reshard.observe(0.0, done.seconds)
        self.resized |= {"learn/ranks": self.worker_group.ranks, "learn/ranks_reason": decision.reason}

    def start_update(self, batch: Batch, samples: Sequence[Sample]) -> Pending[tuple[UpdateStats, dict[str, Any]]]:
        """Start the updates of policy and critic, as soon as both can have slots. The result: the policy's statistics, and metrics of both.

        Stop signals are deferred until the result is there, because a partial update cannot be saved.
        """
        progress = self.context.record.progress
        self._stop_waits.enter_context(STOP.deferred(self.context.recipe.run.sigterm_s / 2, progress.message))
        frozen = 1 <= self.number <= self.context.recipe.critic.freeze_policy_steps
        batch, left = self._cut(batch) if self.carries and not (frozen and self.critic is None) else (batch, None)
        began_s = time.monotonic()
        starts: Starts = {} if frozen else {TRAIN_POLICY: (self.worker_group, lambda: self._started(batch, samples))}
        if self.critic is not None:
            starts[TRAIN_CRITIC] = self.critic, partial(self.critic.start_update, replace(batch, experts=None))
        self.update = Pending(UpdateStats)
        self.calls.start(starts)
        self.calls.search({ranks: self._layouts(ranks) for ranks in self.by_ranks} if self.chooses_ranks else {})
        if self.critic is not None and (frozen or self.worker_groups.shares_slots):  # engines need its slots beside the policy's update
            self.calls.runner.end(TRAIN_CRITIC)
            self.context.broker.put(self.critic.park())
        if frozen and not self.worker_groups.alone:
            self.worker_groups.turn(self.worker_group)
        before_s = self.passes_s + time.monotonic() - began_s
        if self.passes.each and self.critic is None:
            self.context.autoscaler.predictor.observe_passes(samples, before_s)
        runner = self.calls.runner
        return Pending(lambda: self._updated(samples, left, before_s), runner.is_ready, runner.has_failed)

    def _started(self, batch: Batch, samples: Sequence[Sample]) -> Pending[UpdateStats]:
        """Start the learner's update. The autoscaler records its duration, unless ranks were lost in it."""
        began_s, restarts = time.monotonic(), self.worker_group.recovery.restarts
        if self.chooses_ranks and self.worker_group.ranks != self.context.autoscaler.predictor.ranks:  # there were no slots for so many
            self.context.autoscaler.sizing.use_ranks(self.worker_group.ranks)
        update = self.worker_group.start_update(batch, publishes=True)
        beside = self.context.recipe.rollout.rolls_out_ahead or not self.worker_groups.alone

        def result() -> UpdateStats:
            stats: UpdateStats = update.result()
            if restarts == self.worker_group.recovery.restarts:
                waited_s = time.monotonic() - began_s  # also for what else the driver waits for meanwhile
                took_s = self.worker_group.call_s if beside else waited_s
                self.context.autoscaler.predictor.observe_update(self._slots(), samples, took_s)
            return stats

        self.update = replace(update, result=result)
        return self.update

    def _updated(self, samples: Sequence[Sample], left: Batch | None, before_s: float) -> tuple[UpdateStats, dict[str, Any]]:
        assert self.plan is not None
        coefficient, progress = self.controller.coefficient, self.context.record.progress
        with self._stop_waits:
            results = self.calls.finish()
            stats = self.update.result()
            self._end_passes_beside()
            if not self.worker_group.working:  # it was lost in a pass, or a lost critic has its leases
                self.worker_groups.turn(self.worker_group)
            if self.kl_in_reward:
                stats = replace(stats, kl=self.kl)
            if stats.applied:
                self.controller = self.controller.after(stats.kl, len(samples))
            self.leftover = left
        if stats.skipped:
            progress.message(f"optimizer step skipped: {stats.reason}")
        plans = filter(None, (self.plan.reason, self.calls.plan.reason if self.calls.plan else ""))
        metrics: dict[str, Any] = {"pool/learn_slots": self._slots() * self.worker_group.ranks, "pool/learn_reason": "; ".join(plans)}
        metrics |= self.calls.metrics()
        self.calls.observe()
        if (of_critic := results.get(TRAIN_CRITIC)) is not None:
            if of_critic.skipped:
                progress.message(f"optimizer step of the critic skipped: {of_critic.reason}")
            metrics |= {f"critic/{name}": value for name, value in asdict(of_critic).items() if name not in ("reason", "skipped_last")}
            self.context.autoscaler.predictor.observe_passes(samples, before_s + self.calls.after_policy_s())
        if self.context.recipe.algorithm.keeps_reference:
            metrics["learn/kl_coefficient"] = coefficient
        return stats, metrics

    def _cut(self, batch: Batch) -> tuple[Batch, Batch | None]:
        """Return the step's batch joined with the samples left from earlier steps, and the samples that it leaves."""
        section = self.context.recipe.algorithm
        assert section.batch_samples is not None
        rng = np.random.default_rng([self.context.recipe.run.seed % 2**63, self.number])
        return carried(self.leftover, batch, section.batch_samples, section.epochs, rng)

    def _slots(self) -> int:
        """Return the slots of each rank of the learner."""
        return min(len(instance.leases) for instance in self.worker_group.by_rank)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON types."""
        return {"kl_coefficient": self.controller.coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore an adaptive KL coefficient; a fixed one keeps the recipe's value."""
        if isinstance(self.controller, AdaptiveKL) and "kl_coefficient" in state:
            self.controller = replace(self.controller, coefficient=state["kl_coefficient"])

    def files(self) -> Files:
        """Return the state that is too large for JSON, as files."""
        return {} if self.leftover is None else {FILE: as_bytes(self.leftover)}

    def restore_files(self, files: Files) -> None:
        if FILE not in files:
            return
        if self.carries:
            self.leftover = of_bytes(bytes(files[FILE]))
        else:
            self.context.record.progress.message(
                "samples that the checkpoint carries over are not trained on, because algorithm.remainder changed"
            )

    def publish(self, version: int) -> WeightVersion:
        with self.context.phases.phase("publish"):
            return self.worker_group.weights.publish(version)


def _spread(values: np.ndarray, chosen: np.ndarray | slice, tokens: int) -> np.ndarray:
    """Return an array for all tokens with these values at the chosen tokens, and 0 at the others."""
    if isinstance(chosen, slice):
        return values.astype(np.float64, copy=False)
    out = np.zeros(tokens)
    out[chosen] = values
    return out
