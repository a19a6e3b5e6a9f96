"""The session as a state machine: modes, cuts, lost engines, kills and resumes at random, against a small model of it.

The session is the product's, with its groups in flight, its prompt source, its filter and its checkpoint format. Only its stage is fake:
it draws which response gets tokens next, and when the update beside a rollout ends. A response's length and tokens follow from its
name, so the model knows them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from placement.forecast.forecaster import Scenarios
from placement.scaling.partial_rollout import find_late
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.worker_pool import NoRoom
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.step import Step, StepProgress
from rlhfless_ray.types import UNFINISHED, Completion, Group, Prompt, Sample, SampleId, Scored, WeightVersion
from tests.run_files import with_reward

STEPS = 6
BATCH = 3  # groups of a step

Mode = tuple[str, bool, int, float]  # partial, ahead, max_lag_steps, oversample
MODES: list[Mode] = [
    ("off", False, 0, 1.0),
    ("off", False, 1, 1.0),
    ("continue", False, 1, 1.5),
    ("continue", False, 2, 3.0),
    ("restart", False, 1, 2.0),
    ("restart", False, 3, 2.0),
    ("continue", True, 1, 1.0),
    ("continue", True, 2, 2.0),
]
SEEDS = st.integers(0, 9999)


def tokens_of(name: SampleId) -> np.ndarray:
    """The whole response of this name, which neither engines nor cuts change."""
    rng = np.random.default_rng([name.row, name.begun_step + 9, name.number])
    return rng.integers(0, 1000, rng.integers(1, 9)).astype(np.int32)


def passes(row: int) -> bool:
    """Whether the filter keeps the groups of this row."""
    return row % 3 != 0


class FakeStage:
    """Engines that draw which response gets tokens next, and whether they are lost."""

    kept = restart_s = drafter = None

    def __init__(self, session: SmallSession) -> None:
        self.session, self.pool = session, SimpleNamespace(working=["engine"])
        self.random = Random()

    def load(self, weights: WeightVersion) -> None: ...

    def generate(self, step: Step, weights: WeightVersion, *more: Any) -> list[Sample]:
        batch, random, beside = step.batch, self.random, self.session.update is not None
        if beside and random.random() < 0.15:
            raise NoRoom
        requests, before = batch.requests(self.session.context.recipe), batch.before()
        made = {one.key: int(batch.made[one.key]) for one in requests}
        finished = [key for key in before if not batch.unfinished[key]]
        working = [key for key in made if key not in finished]
        for key, completion in before.items():
            assert np.array_equal(completion.token_ids, tokens_of(batch.ids[key])[: made[key]]), "a response took another's name"
        while not batch.is_enough(finished) and not (beside and batch.cuts and random.random() < 0.2):
            key = random.choice(working)
            if random.random() < 0.1:  # its engine is lost, with the tokens that it has not reported
                made[key] = int(batch.made[key])
                continue
            made[key] = min(made[key] + random.randint(1, 4), len(tokens_of(batch.ids[key])))
            if made[key] == len(tokens_of(batch.ids[key])):
                working.remove(key)
                finished.append(key)
        if batch.cuts and batch.chosen is not None:
            self._check_choice(batch, finished)
        new = [self._completion(step, key, made[key], key in finished, weights.version) for key in made if batch.unfinished[key]]
        ended = [one for one in new if one.finish_reason != UNFINISHED]
        samples = [Sample(batch.groups[batch.group_of[one.key]].prompt, batch.ids[one.key], one, "text") for one in ended]
        return batch.join(samples, [one for one in new if one.finish_reason == UNFINISHED])

    def _check_choice(self, batch: RolloutBatch, finished: list[int]) -> None:
        """A step trains the first complete groups, unless others would then be too old in a later step."""
        place = {key: place for place, key in enumerate(finished)}
        ends = [place.get(key, len(batch.ids)) for key in range(len(batch.ids))]
        complete = np.argsort(np.reshape(ends, (-1, batch.count)).max(1), kind="stable")
        first = sorted(complete[: batch.quota].tolist())
        others = [last for group, last in enumerate(batch.last_steps) if group not in first]
        assert batch.chosen == first or find_late(others, batch.step + 1, batch.per_step)

    def _completion(self, step: Step, key: int, made: int, is_finished: bool, version: int) -> Completion:
        earlier, had = step.batch.before().get(key), int(step.batch.made[key])
        versions = (*(earlier.versions if earlier is not None and had else ()), *([(version, made - had)] if made > had else []))
        tokens = tokens_of(step.batch.ids[key])[:made]
        reason = "stop" if is_finished else UNFINISHED
        return Completion(key, tokens, -tokens / np.float32(3), reason, versions[-1][0] if versions else version, versions)


class SmallSession(RolloutSession):
    """Plans and leases nothing."""

    on_batch: Callable[[RolloutBatch], None]

    def next_batch(self, step: Step, *, refills: bool = False) -> RolloutBatch:
        batch = super().next_batch(step, refills=refills)
        self.on_batch(batch)
        return batch

    def _forecast(self, step: Step) -> None:
        step.prompts = [group.prompt for group in step.batch.groups]
        step.forecast = Scenarios.from_matrix(np.ones((len(step.batch.ids), 1)))

    def _plan(self, step: Step) -> Any:
        return None

    def _weigh_prefixes(self, step: Step) -> None:
        return None

    def _early_work(self, step: Step) -> list[Any]:
        return []

    @contextmanager
    def _phase(self, plan: Any) -> Iterator[None]:
        yield


@dataclass
class Model:
    """What a session must have done by the end of a step."""

    steps: list[list[Scored]] = field(default_factory=list)  # the samples of each trained step
    dropped: list[int] = field(default_factory=list)  # rows of groups without a learning signal
    admitted: list[SampleId] = field(default_factory=list)  # names of all groups, in the order in which they were admitted
    answered: set[SampleId] = field(default_factory=set)  # names of those that are trained, dropped or left over

    def copy(self) -> Model:
        return Model([*self.steps], [*self.dropped], [*self.admitted], {*self.answered})

    def admit(self, batch: RolloutBatch) -> None:
        """Check the groups that a rollout begins or goes on with: all that are in flight, in their order, then new ones."""
        names = [group.ids(1)[0] for group in batch.groups]
        in_flight = [name for name in self.admitted if name not in self.answered]
        if batch.cuts:
            assert names[: len(in_flight)] == in_flight, "a group in flight lost its name or its place"
        new = [name for name in names if name not in in_flight]
        assert len({*self.admitted, *new}) == len(self.admitted) + len(new), "a name is given twice"
        self.admitted += new


class SessionStates(RuleBasedStateMachine):
    @initialize(mode=st.sampled_from(MODES), filters=st.booleans(), seed=SEEDS)
    def begin(self, mode: Mode, filters: bool, seed: int) -> None:
        """Begin a run."""
        (partial, ahead, self.max_lag, share), random = mode, Random(seed)
        self.seed, count, rows = seed, random.randint(2, 3), random.choice([5, 16, 40])
        rollout = {"samples_per_prompt": count, "partial": partial, "ahead": ahead, "max_lag_steps": self.max_lag, "oversample": share}
        if partial == "off":
            del rollout["oversample"]
        tree: dict[str, Any] = {"prompts": {"task": "chain", "batch_prompts": BATCH}, "reward": {"function": "task"}, "rollout": rollout}
        if filters:
            tree["algorithm"] = {"filter_range": [0.0, 1.0], "filter_draw": 1.9, "filter_patience": 99}
        self.recipe, self.filters = Recipe.parse({**tree, "run": {"steps": STEPS}}), filters
        self.prompts = [Prompt(i, f"p{i}", (1, i)) for i in range(rows)]
        self.closed, self.model, self.state, self.patience = Model(), Model(), {}, random.randint(1, 4 * STEPS)
        self.start(0)

    def start(self, steps_done: int) -> None:
        """Start a session after these steps from the saved state."""
        self.done, self.actions, state = steps_done, 0, json.loads(json.dumps(self.state))
        self.cursor = Cursor(len(self.prompts), BATCH, True, self.seed)
        dynamic_sampling = DynamicSampling(self.recipe, self.cursor)
        self.groups = GroupsInFlight(self.recipe)
        if state:
            self.cursor.restore(state["cursor"])
            dynamic_sampling.restore(state["refill"], self.prompts)
            self.groups.restore(state["in_flight"], self.prompts)
        self.source = PromptSource(self.prompts, self.cursor, dynamic_sampling, None)
        context: Any = SimpleNamespace(
            recipe=self.recipe,
            record=SimpleNamespace(completion_order=lambda *_: None, progress=SimpleNamespace(message=lambda _: None)),
            autoscaler=SimpleNamespace(
                terms=SimpleNamespace(prefill=SimpleNamespace(per_unit_s=0.0)),
                engines=SimpleNamespace(width=1),
                predictor=SimpleNamespace(expected_update_s=1.0, learn=lambda: None, observe_samples=lambda *_: None),
                safely=lambda what, work, instead: work(),
            ),
            most_engines=lambda width: 1,
            broker=None,
            leases=SimpleNamespace(waited_s=0.0),
            ledger=SimpleNamespace(step=0, begin_step=lambda step: None),
        )
        learn: Any = SimpleNamespace(
            begin=lambda samples=0: None,
            worker_group=SimpleNamespace(by_rank=[]),
            worker_groups=SimpleNamespace(wait_for_copy=lambda weights: weights),
        )
        accounted = lambda name, phase: phase  # noqa: E731
        self.session = SmallSession(context, self.source, self.groups, None, learn, None, None, accounted, steps_done)  # type: ignore[arg-type]
        self.session.on_batch = lambda batch: self.model.admit(batch)
        self.session.stage = self.stage = FakeStage(self.session)  # type: ignore[assignment]
        self.session.weights = WeightVersion(steps_done, ())
        self.step = self.session.admit()
        self.phase = "planned"

    # ---- one step, in the order of `loop.py` ------------------------------------------------------------------------

    @rule(seed=SEEDS, kills=st.booleans())
    def act(self, seed: int, kills: bool) -> None:
        """Do what comes next. `kills`: or kill and resume the run, once it has done enough."""
        random = self.stage.random = Random(seed)
        if kills and self.actions >= self.patience:
            self.patience = random.randint(1, 4 * STEPS)
            self.kill_and_resume()
        elif self.step is None:
            self.begin(random.choice(MODES), random.random() < 0.5, seed)
        else:
            phases = {"planned": self.take, "taken": self.score, "scored": self.update, "updated": self.close}
            phases[self.phase]()
            self.actions += 1

    def take(self) -> None:
        assert self.step is not None
        self.session.take(self.step)
        self.phase = "taken"

    def score(self) -> None:
        assert self.step is not None

        def score(samples: Any) -> list[Scored]:
            assert not any(isinstance(sample, Scored) for sample in samples), "a reward outlived its step"
            scored = [with_reward(sample, 0.5 if passes(sample.id.row) else 0.0) for sample in samples]
            for sample in scored[:: self.count]:
                self.model.answered.add(sample.id)
                self.model.dropped += [sample.id.row] if self.filters and not passes(sample.id.row) else []
            return scored

        self.step.samples = samples = self.session.refill(self.step, score(self.step.samples), score)
        self.model.steps.append(samples)
        self.phase = "scored"

    def update(self) -> None:
        """Update the learner, and admit the next step beside it."""
        number = self.done + 1
        assert self.step is not None
        self.session.update_begins()
        self.session.update_is(Pending(lambda: None))  # type: ignore[arg-type, return-value]
        self.step.progress = StepProgress.UPDATING
        cursor = self.cursor.state()
        self.upcoming = self.session.admit()
        self.session.update = None
        self.session.weights = WeightVersion(number, ())
        self.session.switch()
        begun = self.session.begun
        in_flight = self.groups.in_flight if begun is None else begun
        self.next_state = {
            "cursor": cursor if begun is None else self.cursor.state(),
            "refill": self.source.dynamic_sampling.state(),
            "in_flight": self.groups.state(in_flight),
        }
        self.check_rows(self.next_state, in_flight)
        self.phase = "updated"

    def close(self) -> None:
        assert self.step is not None
        self.step.progress = StepProgress.CLOSED
        self.done, self.state, self.closed = self.done + 1, self.next_state, self.model.copy()
        self.step = self.upcoming
        self.phase = "planned"

    def kill_and_resume(self) -> None:
        """What happened since the last step ended is repeated, maybe in another order."""
        self.model = self.closed.copy()
        self.start(len(self.closed.steps))

    # ---- the model ------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        return self.recipe.rollout.samples_per_prompt

    def stream(self, length: int) -> list[int]:
        return Cursor(len(self.prompts), BATCH, True, self.seed).next(length)

    def check_rows(self, state: dict[str, Any], in_flight: list[Group]) -> None:
        """Each row that the cursor has passed is trained, dropped, in flight or left over, as often as it was drawn."""
        trained = [sample.id.row for samples in self.model.steps for sample in samples[:: self.count]]
        left_over = [group[0].id.row for group in self.source.dynamic_sampling.ready]
        found = [*trained, *self.model.dropped, *(group.prompt.index for group in in_flight), *left_over]
        assert Counter(found) == Counter(self.stream(state["cursor"]["taken"]))
        if not self.recipe.rollout.mode.boundary.cuts:
            kept = [row for row in self.stream(state["cursor"]["taken"]) if not self.filters or passes(row)]
            assert kept[: len(trained)] == trained, "steps train the rows in their order"

    @invariant()
    def every_step_has_exactly_its_samples(self) -> None:
        for number, samples in enumerate(self.model.steps, 1):
            assert len(samples) == BATCH * self.count
            for start in range(0, len(samples), self.count):
                first = samples[start].id
                wanted = [first._replace(number=first.number + n) for n in range(self.count)]
                assert [sample.id for sample in samples[start : start + self.count]] == wanted and first.number % self.count == 0
            for sample in samples:
                assert sample.completion.finish_reason == "stop" and np.array_equal(sample.completion.token_ids, tokens_of(sample.id))
                assert sum(tokens for _, tokens in sample.completion.versions) == len(sample.completion.token_ids)
                oldest = number - 1 - max(self.max_lag, int(self.filters))
                assert all(oldest <= version < number for version, _ in sample.completion.versions), "older than the bound"

    @invariant()
    def no_sample_is_trained_twice(self) -> None:
        names = [sample.id for samples in self.model.steps for sample in samples]
        assert len(set(names)) == len(names)

    @invariant()
    def nothing_is_left_in_flight_after_the_last_step(self) -> None:
        if self.done == STEPS and self.phase == "planned":
            assert self.step is None and not self.groups.in_flight


TestSessionStates = SessionStates.TestCase
TestSessionStates.settings = settings(stateful_step_count=8 * STEPS)
