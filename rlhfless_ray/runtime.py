"""A run: its parts, their life, and the stages that `loop.py` calls.

    with Runtime(recipe) as run:
        for step in run:
            print(step.plan.reason, step.metrics["reward/mean"], step.ledger["full_slot_s"])
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy as np

from placement.lengths import Scenarios
from placement.policy import Decision, deal, failed, slots_to_yield
from placement.speed import Speed
from rlhfless_ray.autoscale import Autoscaler, RolloutPlan
from rlhfless_ray.crew import Actors, hire
from rlhfless_ray.errors import RunError, Stopped, UserError
from rlhfless_ray.functions.cluster import RayCluster
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.phases import Phases
from rlhfless_ray.policy_files import context_tokens, initial_policy, keep_policy, load_tokenizer
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.prompts.load import load_prompts
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.record import Record
from rlhfless_ray.reward.functions import load_reward
from rlhfless_ray.run_folder import RunFolder
from rlhfless_ray.types import Completion, Prompt, Request, Sample, Step, UpdateStats, WeightVersion
from rlhfless_ray.waits import STOP
from rlhfless_ray.weights.folder import read_folder, without_weights, write_folder

FIRST_SPEED = Speed(base_s=0.01, per_seq_s=0.0001)  # before the first step record; any order of magnitude will do
REWARD_START_S = 3.0  # a reward process: its imports, measured on two cores
UPDATE_GRACE_S = 1.5  # `ray job stop` kills 3 s after SIGTERM: an update may take this much of them to end,
SAVE_GRACE_S = 2.0  # and the learner's snapshot this much


class Runtime:
    """Context manager and iterator of Steps. Everything a run holds is released when the block ends, however it ends."""

    def __init__(self, recipe: Recipe, *, resume: bool = False) -> None:
        """Reads and checks everything that can be checked without Ray. Raises UserError for the user's mistakes."""
        self.recipe, self.resume = recipe, resume
        self.files, self.owes_warm_start = initial_policy(recipe)
        self.tokenizer = load_tokenizer(self.files, recipe.policy.trust_remote_code)
        self.prompts = load_prompts(recipe, self.tokenizer, context_tokens(self.files))
        self.reward_source = load_reward(recipe)
        self.cursor = Cursor(len(self.prompts.train), recipe.prompts.batch_prompts, recipe.prompts.shuffle, recipe.run.seed)
        self.autoscaler = Autoscaler(recipe, FIRST_SPEED)
        self.cluster = RayCluster(recipe)
        self.cursor_done = self.cursor.state()  # after the last finished step: a stop inside a step repeats it whole
        self.weight_bytes = sum(len(content) for name, content in self.files.items() if name.endswith(".safetensors"))
        self.steps_done = 0
        self.ahead: Step | None = None  # the next step's prompts, forecast and plan, made while the learner works
        self.weights: WeightVersion | None = None
        self.in_update = False
        self._stack = ExitStack()

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.push(self._tells_what_is_left)
            if self.resume:
                self.folder = RunFolder.resumed(self.recipe)
                stack.enter_context(self.folder.locked())
            stack.enter_context(STOP.listening())
            stack.callback(self.cluster.stop)
            try:
                self.cluster.start()
            except SystemExit:  # what Ray's own handler, in place while it starts, makes of SIGTERM
                raise Stopped(signal.SIGTERM) from None
            STOP.listen()
            STOP.check()
            resource = self.cluster.resource()
            self.slots = self.cluster.check_size(resource)
            if not self.resume:
                self.folder = RunFolder.create(self.recipe)
                stack.enter_context(self.folder.locked())
            checkpoint = self.folder.load_checkpoint() if self.resume else None
            self.steps_done = checkpoint[0] if checkpoint else 0
            self.folder.begin(self.recipe, f"{platform.machine()}, {self.slots} {resource} slots", self.steps_done)
            price = self.recipe.price.gpu_slot_per_hour if resource == "gpu" else self.recipe.price.cpu_slot_per_hour
            self.ledger = Ledger(resource, price)
            self.ledger.name_of = self.cluster.node_name
            self.ledger.resume_from(self.folder.path / "ledger.csv", self.steps_done)
            self.record = Record(self.recipe, self.folder, self.ledger, self.steps_done)
            stack.push(self._ended)
            self.phases = Phases(self.record.progress.phase)
            self.step = Step(self.steps_done)
            self._hire(resource)
            stack.push(self._released)
            self._begin(checkpoint)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def __iter__(self) -> Iterator[Step]:
        from rlhfless_ray.loop import steps

        return steps(self)

    def actor_classes(self) -> Actors:
        return Actors.real()

    def _hire(self, resource: str) -> None:
        longest = max(len(p.token_ids) for p in itertools.chain(self.prompts.train, self.prompts.heldout))
        crew = hire(
            self.recipe, resource, self.files, longest, self.reward_source, self.ledger, self.folder.path, self.actor_classes()
        )
        self.leases, self.rollout, self.reward, self.gang = crew.leases, crew.rollout, crew.reward, crew.gang
        self.spare: list[Any] = []  # leases between two functions
        self.max_actors = min(self.recipe.rollout.max_actors, self.slots)

    def _begin(self, checkpoint: tuple[int, dict[str, bytes], dict[str, Any]] | None) -> None:
        """Start the learner, and the engines' processes beside it; publish the first weights."""
        import ray

        from rlhfless_ray.functions.lease import node_slots, places

        with self.phases.phase("start", "starting the learner"):
            self.spare = self.gang.staff(self.spare)
            home = self.gang.by_rank[0].slot
            if self.leases.resource == "cpu":  # on GPU a guess: the device is known with the lease only
                for slot in places(node_slots("cpu"), home.node, self.max_actors):
                    self.rollout.prewarm(slot)
            self.reward.prewarm(home)
            if self.owes_warm_start and checkpoint is None:
                self.record.progress.phase("supervised warm start (cached afterwards)")
                self.files = self.gang.warm_start(ray.put(self.files), self.recipe)
                keep_policy(self.recipe, self.files)
            self.record.progress.phase("loading the policy")
            if self.recipe.algorithm.kl.coefficient > 0:  # the reference is what the run began with, also after a resume
                reference = self.folder.path / "reference"
                if checkpoint:
                    self.files = read_folder(reference)
                else:
                    write_folder(reference, self.files)
            state = checkpoint[1] if checkpoint else None
            self.gang.build(ray.put(self.files), self.cluster.private, ray.put(state) if state else None)
            if checkpoint:
                self._restore(checkpoint[2])
            self.weights = self.gang.publish(self.steps_done)
            self.spare += self.gang.park()
        if checkpoint is None:
            self._save()  # a stop at any later moment finds something to resume from

    # ---- the stages, in the order of the loop -----------------------------------------------------------------

    def begin_step(self, number: int) -> Step:
        STOP.check()
        self.ledger.cut(number)
        self.first_row = len(self.ledger.rows)
        self.leases.waited_s = 0.0
        self.step = Step(number)
        return self.step

    def next_prompts(self) -> list[Prompt]:
        return self.ahead.prompts if self.ahead else [self.prompts.train[i] for i in self.cursor.next()]

    def forecast(self, step: Step) -> Scenarios:
        return self.ahead.forecast if self.ahead else self.autoscaler.forecast(step.prompts, step.number)

    def plan(self, step: Step) -> RolloutPlan:
        if self.ahead:
            plan, self.ahead = self.ahead.plan, None
        else:
            warm = sum(instance.memory_mb > 0 for instance in (*self.rollout.parked, *self.rollout.working))
            plan = self.autoscaler.plan(step.forecast, step.prompts, self.max_actors, step=step.number, warm=warm)
        if failed(plan.decision):
            self.record.progress.message(f"step {step.number}: {plan.reason}")
        return plan

    @contextmanager
    def rollout_phase(self, plan: RolloutPlan) -> Iterator[None]:
        with self.phases.phase("rollout"):
            need = self.recipe.rollout.min_actors
            began_s, cold = time.monotonic(), self.rollout.cold_starts
            self._release(self.rollout.resize(plan.actors, self.spare, need=need, wait_s=0.2))
            if cold == self.rollout.cold_starts:
                self.autoscaler.terms.warm_start.observe(0.0, time.monotonic() - began_s)
            self.spare = []
            self.autoscaler.actors = len(self.rollout.working)
            yield
            self.spare = self._park_engines()

    def generate(self, step: Step) -> list[Sample]:
        """Every response to the step's prompts, as samples without reward."""
        count = self.recipe.rollout.samples_per_prompt
        requests = self._requests(step, count)
        expected = step.forecast.lengths.mean(1)
        groups = np.repeat(np.arange(len(step.prompts)), count)
        done = self._run(requests, step.plan.shares(len(self.rollout.working), expected, groups), expected)
        return self._samples([prompt for prompt in step.prompts for _ in range(count)], done, count)

    @contextmanager
    def score_phase(self, phase: str = "score") -> Iterator[None]:
        with self.phases.phase(phase):
            self.spare = self.reward.resize(min(self.recipe.reward.workers, max(1, len(self.spare))), self.spare)
            yield
            self._told_start(self.reward)
            self.spare += self.reward.park_all()

    def score(self, samples: list[Sample], name: str = "step") -> int:
        """Every sample's reward; returns how many have none. Raises RunError when too many: the samples are on disk then."""
        from rlhfless_ray.reward.score import check_failures, score_samples

        share = self.recipe.reward.max_failed_share
        try:
            failed = score_samples(
                self.reward, samples, self.recipe.reward.timeout_s, max_failed_share=share,
                max_replacements=self.recipe.functions.max_replacements, say=self.record.progress.phase,
            )
            check_failures(samples, failed, share)
        except RunError:
            self.record.samples(self.step.number, samples, name)
            raise
        if failed:
            first, where = next(s for s in samples if s.error is not None), "update" if name == "step" else name
            self.record.progress.message(
                f"{failed} of {len(samples)} samples could not be scored and are left out of the {where}; row "
                f"{first.prompt.index}: {first.error}"
            )
        return failed

    def advantages(self, samples: list[Sample]) -> Any:
        """The learner's batch; a sample without a reward is not in it."""
        from rlhfless_ray.learn.advantage import group_advantages
        from rlhfless_ray.learn.batch import Batch

        count = self.recipe.rollout.samples_per_prompt
        rewards = np.array([np.nan if s.reward is None else s.reward for s in samples]).reshape(-1, count)
        values = group_advantages(rewards, self.recipe.algorithm.normalize_std).reshape(-1)
        sequences = []
        for i, (sample, value) in enumerate(zip(samples, values, strict=True)):
            if np.isnan(value):
                continue
            sample.advantage = float(value)
            answer = sample.completion
            sequences.append((sample.prompt.token_ids, answer.token_ids, answer.logprobs, float(value), i // count))
        return Batch.of(sequences)

    @contextmanager
    def learn_phase(self) -> Iterator[None]:
        """Rollout engines hold no lease here."""
        with self.phases.phase("learn"):
            self._size_learner()
            self._release(self.gang.staff(self.spare))
            self.spare = []
            yield
            self.spare = self.gang.park()

    def _size_learner(self) -> None:
        """On CPU a slot more is a thread more; results do not depend on it. On GPU a rank has one device."""
        self.learner_plan = self.autoscaler.size_learner(self.step.samples)
        if self.leases.resource == "cpu":
            self.gang.slots = self.gang.ranks * self.learner_plan.actors

    def update(self, batch: Any) -> UpdateStats:
        """A stop signal waits for the update to end: an update that is half done cannot be saved."""
        self.in_update = True
        with STOP.deferred(UPDATE_GRACE_S, self.record.progress.message):
            began_s = time.monotonic()
            stats = self.gang.update(batch, meanwhile=self._look_ahead)
            slots = min(len(instance.leases) for instance in self.gang.by_rank)
            self.autoscaler.observe_update(slots, self.step.samples, time.monotonic() - began_s)
            self.quality |= {"pool/learn_slots": slots * self.gang.ranks, "pool/learn_reason": self.learner_plan.reason}
        self.in_update, self.unrecorded = False, True
        if stats.skipped:
            self.record.progress.message(f"optimizer step skipped: {stats.reason}")
        return stats

    def _look_ahead(self) -> None:
        """While the learner works: learn from this step's lengths, and plan the next one with what it taught."""
        step = self.step
        self.autoscaler.observe_samples(step.prompts, step.samples)
        self.quality = self.autoscaler.quality(step.forecast, step.samples, step.prompts, self.max_actors)
        self.quality["epoch"] = self.cursor.epoch
        while self.autoscaler.troubles:
            self.record.progress.message(f"step {step.number}: {self.autoscaler.troubles.pop(0)}; planning goes on without it")
        self.cursor_after = self.cursor.state()
        if step.number < self.recipe.run.steps:
            ahead = Step(step.number + 1)
            ahead.prompts = self.next_prompts()
            ahead.forecast = self.forecast(ahead)
            ahead.plan = self.plan(ahead)
            self.ahead = ahead

    def publish(self, version: int) -> WeightVersion:
        with self.phases.phase("publish"):
            return self.gang.publish(version)

    def evaluation_is_due(self, number: int) -> bool:
        every = self.recipe.evaluate.every_steps
        return number == self.recipe.run.steps or (every > 0 and number % every == 0)

    def evaluate(self) -> dict[str, float]:
        """Exact accuracy (mean reward) on the held-out prompts, one response each, sampled and greedy."""
        prompts = self.prompts.heldout
        if not prompts:
            return {}
        with self.phases.phase("eval", "evaluating"):
            self.spare = self.rollout.resize(self.max_actors, self.spare, wait_s=0.2)
            temperatures = {"sampled": self.recipe.rollout.temperature}
            if self.recipe.evaluate.greedy:
                temperatures["greedy"] = 0.0
            requests = [
                self._request(k * len(prompts) + i, prompt, temperature, -1, 0)
                for k, temperature in enumerate(temperatures.values())
                for i, prompt in enumerate(prompts)
            ]
            expected = np.tile(self.autoscaler.expected(prompts), len(temperatures))
            groups = np.tile(np.arange(len(prompts)), len(temperatures))
            done = self._run(requests, deal(expected, groups, len(self.rollout.working)), expected)
            self.spare += self._park_engines()
            samples = self._samples(prompts * len(temperatures), done, 1)
            with self.score_phase("eval_score"):  # its time is part of the evaluation's
                self.score(samples, "evaluation")
            found = {"eval/length_mean": float(np.mean([len(s.completion.token_ids) for s in samples]))}
            for k, name in enumerate(temperatures):
                part = samples[k * len(prompts) : (k + 1) * len(prompts)]
                if rewards := [s.reward for s in part if s.reward is not None]:
                    found[f"eval/accuracy_{name}"] = float(np.mean(rewards))
        return found

    def record_evaluation(self, found: dict[str, float]) -> None:
        self.phases.take()
        self.owes_evaluation = False
        self.record.evaluation(self.steps_done, found)

    def end_step(self, step: Step) -> None:
        """Write the step down, learn from it for the next plan, and make room for others on a shared cluster."""
        self._record(step)
        if step.number % self.recipe.checkpoint.every_steps == 0 or step.number == self.recipe.run.steps:
            self._save()
        for pool in (self.rollout, self.reward):
            pool.reap(self.autoscaler.keep_warm_s(pool.gaps_s))
        if not self.cluster.private:
            decision = slots_to_yield(len(self.spare), 1, self.leases.others_wait())
            if decision.action == "Release":
                self._release(self.spare[decision.actors :])
                self.spare = self.spare[: decision.actors]

    def _record(self, step: Step) -> None:
        """The step is done as soon as this is called: a stop from here on saves it."""
        self.steps_done, self.cursor_done, self.unrecorded = step.number, self.cursor_after, False
        seconds, wall_s = self.phases.take()
        self.autoscaler.observe_step(seconds, wall_s, len(step.samples))
        replaced = self.rollout.replaced + self.reward.replaced
        self.record.step(step, seconds, wall_s, self.first_row, self.quality, replaced, self.leases)

    def finish(self) -> None:
        """The final model, beside the tokenizer and config it needs."""
        files = {**without_weights(self.files), "model.safetensors": self.gang.snapshot()["model.safetensors"]}
        self.folder.write_model(files)
        self.finished = True

    # ---- what the stages share --------------------------------------------------------------------------------

    def _requests(self, step: Step, count: int) -> list[Request]:
        """A row that a batch holds twice, at the border of two epochs, is asked for twice as many samples, all different."""
        requests: list[Request] = []
        times: Counter[int] = Counter()
        for prompt in step.prompts:
            first = count * times[prompt.index]
            times[prompt.index] += 1
            for number in range(first, first + count):
                requests.append(self._request(len(requests), prompt, self.recipe.rollout.temperature, step.number, number))
        return requests

    def _request(self, key: int, prompt: Prompt, temperature: float, step: int, sample: int) -> Request:
        """The seed names the sample (run, step, prompt, number), never the engine it will run on."""
        name = struct.pack("<qqqq", self.recipe.run.seed, step, prompt.index, sample)
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        return Request(key, prompt.token_ids, seed, self.recipe.rollout.max_tokens, temperature)

    def _run(self, requests: list[Request], shares: list[np.ndarray], expected: np.ndarray) -> dict[int, Completion]:
        from rlhfless_ray.rollout.stream import run_rollout

        assert self.weights is not None
        self.rollout_began_s = time.monotonic()
        all_warm = all(instance.memory_mb > 0 for instance in self.rollout.working)
        stream = run_rollout(
            self.rollout, requests, shares, expected, self.weights,
            interval_s=self.recipe.rollout.stream_interval_s, deadline_s=self.recipe.rollout.deadline_s,
            max_replacements=self.recipe.functions.max_replacements, needed_next=self.gang.slots,
            drained=self.autoscaler.drained, give_back=self._drained, on_progress=self._prewarm_next,
        )
        around_s = time.monotonic() - self.rollout_began_s - max(stream.decode_s.values())
        for seconds in stream.load_s:
            self.autoscaler.observe_load(self.weight_bytes, seconds)
        self.autoscaler.observe_rollout(stream.steps, around_s if all_warm else None)
        return stream.completions

    def _drained(self, instance: Any, decision: Decision) -> None:
        if decision.action == "Release" and self.recipe.functions.elastic and instance.started:  # one that starts is at work
            self._told_start(self.rollout, instance)
            self._release(self.rollout.park(instance))

    def _prewarm_next(self, done: int, total: int) -> None:
        """The next phase's process starts while this one ends, if none is warm."""
        self.record.progress.phase(f"rollout: {done} of {total} responses")
        if self.reward.parked or self.reward.working:
            return
        left_s = (time.monotonic() - self.rollout_began_s) * (total - done) / max(done, 1)
        if self.autoscaler.prewarm_now(left_s, REWARD_START_S):
            self.reward.prewarm(self.rollout.working[0].slot)

    def _samples(self, prompts: list[Prompt], done: dict[int, Completion], count: int) -> list[Sample]:
        ordered = [done[i] for i in range(len(prompts))]
        texts = self.tokenizer.batch_decode([c.token_ids for c in ordered], skip_special_tokens=True)
        return [Sample(p, i % count, c, t) for i, (p, c, t) in enumerate(zip(prompts, ordered, texts, strict=True))]

    def _release(self, leases: list[Any]) -> None:
        self.leases.release(leases)

    def _told_start(self, pool: Any, only: Any = None) -> None:
        """Starts that ended are told to the ledger, while the instance (`only` this one) still has its leases."""
        for instance in [only] if only else pool.working:
            if instance.opened is not None and not instance.memory_mb:
                told = instance.told(self.recipe.functions.lease_deadline_s)
                instance.memory_mb = told["memory_mb"]
                if pool is self.rollout:
                    self.autoscaler.terms.cold_start.observe(0.0, sum(span.to_s - span.from_s for span in told["spans"]))
                self.ledger.spans([lease.id for lease in instance.leases], told["spans"])

    def _park_engines(self) -> list[Any]:
        """Engines leave their slots; returns the leases."""
        self._told_start(self.rollout)
        return self.rollout.park_all()

    # ---- state ------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.steps_done, "version": self.weights.version if self.weights else 0, "cursor": self.cursor_done,
            "autoscaler": self.autoscaler.state(),
            "skipped_in_a_row": self.gang.skipped_in_a_row, "owes_evaluation": self.owes_evaluation,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.cursor.restore(state["cursor"])
        self.cursor_done = self.cursor.state()
        try:
            self.autoscaler.restore(state["autoscaler"])
        except (KeyError, ValueError) as error:
            raise UserError(
                f"--resume: the checkpoint's planner is of another version of this program ({error}); start the run anew under "
                "another run.name"
            ) from None
        self.gang.skipped_in_a_row = state["skipped_in_a_row"]
        self.owes_evaluation = state.get("owes_evaluation", self.steps_done == 0)

    def _save(self, deadline_s: float | None = None) -> None:
        learner = self.gang.snapshot(deadline_s)
        self.folder.save_checkpoint(self.steps_done, learner, self._state(), self.recipe.checkpoint.keep)
        self.saved = self.steps_done
        self.record.checkpointed()

    # ---- the end ----------------------------------------------------------------------------------------------

    saved = -1  # the step of the newest checkpoint
    unrecorded = False  # the learner has made a step that is not written down yet
    owes_evaluation = True
    finished = False

    def _released(self, kind: Any, error: Any, trace: Any) -> None:
        """Save what can be saved, end every process, give back every lease."""
        try:
            if isinstance(error, Stopped) or (error is None and not self.finished):
                self._save_last_step(hurry=isinstance(error, Stopped) and error.signal_number == signal.SIGTERM)
        except Exception as failure:  # the checkpoint before stands; the leases must go all the same
            self.record.progress.message(f"no checkpoint at the stop: {' '.join(str(failure).split())[:300]}")
        finally:
            self.folder.end(*self._outcome(error))  # before any word to Ray: it may be gone, and an answer take a minute
            for pool in (self.rollout, self.reward, self.gang.pool):
                pool.close()
            self.leases.release_all()
            self.weights = None  # the last reference: its arrays lie on a node, which is not idle while they do
            self.gang.by_rank = []

    def _save_last_step(self, hurry: bool) -> None:
        """The last whole step, if it is not saved yet. `hurry`: whoever asked for the stop kills soon."""
        STOP.obeyed()
        if self.in_update:
            self.record.progress.message("stopped inside an update: the checkpoint before it stands")
            return
        if self.unrecorded:
            self.owes_evaluation = self.evaluation_is_due(self.step.number) and not self.step.evaluation
            self._record(self.step)
        if self.weights is not None and self.saved != self.steps_done:  # no weights yet: the learner was not built
            self._save(SAVE_GRACE_S if hurry else None)

    def _outcome(self, error: Any) -> tuple[str, str]:
        """Status and reason for status.json."""
        if error is None:
            left = f"the loop was left after step {self.steps_done} of {self.recipe.run.steps}"
            return ("done", "") if self.finished else ("stopped", left)
        return "stopped" if isinstance(error, (Stopped, KeyboardInterrupt, GeneratorExit)) else "failed", str(error)

    def _ended(self, kind: Any, error: Any, trace: Any) -> None:
        self.record.close(*self._outcome(error))

    def _tells_what_is_left(self, kind: Any, error: Any, trace: Any) -> None:
        folder = getattr(self, "folder", None)  # a stop may come before there is one
        if isinstance(error, Stopped) and folder is not None:
            error.resumable = bool(folder.checkpoints())
