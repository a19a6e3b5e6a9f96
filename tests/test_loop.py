"""The page: what it calls, in which order, on a pipeline that only writes down what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.common.pending import Pending
from rlhfless_ray.loop import steps
from rlhfless_ray.step.step import Step


class Pipeline:
    """Engines start early after the steps in `early`; the run ends after `last_step`."""

    def __init__(self, last_step: int, early: tuple[int, ...] = (), *, done: int = 0, owes: bool = False, ahead: bool = False) -> None:
        self.last_step, self.early, self.steps_done, self.owes_evaluation = last_step, early, done, owes
        self.weights: Any = f"weights {done}"
        self.log: list[str] = []
        self.at_work = False  # the learner
        self.overtaken = False  # whether updates end before the rollouts beside them
        self.rolls_out_ahead = ahead

    @property
    def session(self) -> Pipeline:
        return self

    def plan(self, number: int) -> Step | None:
        if number > self.last_step:
            return None
        self.note(f"plan {number}")
        return Step(number)

    def admit(self, number: int) -> Step | None:
        assert self.at_work
        step = self.plan(number)
        if step is not None and self.rolls_out_ahead:
            assert self.weights == f"weights {number - 2}"
            step.samples = self.note("generate a part", []) if self.overtaken else self.note("generate", ["sample"])
        return step

    def begin_step(self, step: Step) -> None:
        self.step = step
        self.note(f"begin {step.number}")

    def take(self, step: Step) -> None:
        assert self.weights == f"weights {step.number - 1}"
        step.samples = step.samples or self.note("generate", ["sample"])

    def switch(self, step: Step) -> None:
        assert not self.at_work and self.weights == f"weights {step.number - 1}"
        if not step.samples and self.overtaken:
            self.note(f"plan the rest of {step.number}")

    def score(self, step: Step) -> Any:
        step.samples = [*self.note("score", step.samples), "filled"]  # type: ignore[list-item]
        return step.samples

    @contextmanager
    def learn_phase(self) -> Iterator[None]:
        yield
        assert not self.at_work, "the learner is waited for inside its phase"

    def advantages(self, samples: list[str]) -> str:
        assert samples == ["sample", "filled"]
        return "batch"

    def start_update(self, batch: str) -> Pending[str]:
        self.at_work = True
        self.note("update starts")

        def result() -> str:
            self.at_work = False
            return self.note(f"stats {self.step.number}")

        return Pending(result)

    def observe_samples(self, step: Step) -> None:
        assert self.at_work
        self.note("observe")

    def publish(self, version: int) -> str:
        assert not self.at_work
        return self.note(f"weights {version}")

    def evaluation_is_due(self, number: int) -> bool:
        return number == self.last_step

    def evaluate(self) -> dict[str, float]:
        return self.note("evaluate", {"eval/accuracy": 1.0})

    def record_evaluation(self, found: dict[str, float]) -> None:
        self.note("evaluation recorded")

    def decide_end(self, step: Step, upcoming: Step | None) -> Any:
        return SimpleNamespace(starts_next=upcoming is not None and step.number in self.early)

    def close_step(self, step: Step, starts_next: bool) -> dict[str, float]:
        return self.note(f"close {step.number}", {"money": 1.0})

    def start_engines(self, upcoming: Step) -> None:
        assert self.weights == f"weights {upcoming.number - 1}"
        self.note(f"engines of {upcoming.number}")

    def record_step(self, step: Step, end: Any) -> None:
        assert step.stats == f"stats {step.number}" and step.ledger == {"money": 1.0}
        self.note(f"record {step.number}")

    def finish(self) -> None:
        self.note("finish")

    def note(self, what: str, value: Any = None) -> Any:
        self.log.append(what)
        return what if value is None else value


def test_with_a_lag_the_next_step_is_rolled_out_while_the_learner_works() -> None:
    run = Pipeline(2, ahead=True)
    done = list(steps(run))  # type: ignore[arg-type]
    assert run.log == [
        *("plan 1", "begin 1", "generate", "score", "update starts", "observe", "plan 2", "generate"),
        *("stats 1", "weights 1", "close 1", "record 1"),
        *("begin 2", "score", "update starts", "observe", "stats 2", "weights 2", "evaluate", "close 2", "record 2", "finish"),
    ]
    assert [step.number for step in done] == [1, 2]


def test_a_partial_rollout_that_the_update_has_overtaken_goes_on_under_its_weights() -> None:
    run = Pipeline(2, ahead=True)
    run.overtaken = True
    assert [step.samples for step in steps(run)] == [["sample", "filled"]] * 2  # type: ignore[arg-type]
    update = run.log.index("update starts")
    assert run.log[update + 2 : run.log.index("close 1")] == [*("plan 2", "generate a part", "stats 1", "weights 1", "plan the rest of 2")]
    assert run.log[run.log.index("begin 2") :][1:3] == ["generate", "score"]


def test_the_next_step_is_planned_while_the_learner_works_and_its_engines_start_before_the_step_is_written_down() -> None:
    run = Pipeline(2, early=(1,))
    done = list(steps(run))  # type: ignore[arg-type]
    work = ["generate", "score", "update starts", "observe"]
    assert run.log == [
        *("plan 1", "begin 1", *work, "plan 2", "stats 1", "weights 1", "close 1", "engines of 2", "record 1"),
        *("begin 2", *work, "stats 2", "weights 2", "evaluate", "close 2", "record 2", "finish"),
    ]
    assert [step.number for step in done] == [1, 2] and done[1].evaluation == {"eval/accuracy": 1.0} and not done[0].evaluation


def test_engines_that_others_may_need_slots_for_do_not_start_early() -> None:
    run = Pipeline(2)
    list(steps(run))  # type: ignore[arg-type]
    assert "engines of 2" not in run.log and run.log.index("begin 2") > run.log.index("record 1")


def test_a_resumed_run_goes_on_after_its_last_step_and_makes_up_for_an_evaluation() -> None:
    run = Pipeline(4, done=3, owes=True)
    assert [step.number for step in steps(run)] == [4]  # type: ignore[arg-type]
    assert run.log[:3] == ["evaluate", "evaluation recorded", "plan 4"]
    over = Pipeline(3, done=3)
    assert list(steps(over)) == [] and over.log == ["finish"]  # type: ignore[arg-type]


def test_prompts_that_end_early_end_the_run() -> None:
    """Filtered groups use up an episode: known when the step's samples were looked at."""

    class Short(Pipeline):
        def observe_samples(self, step: Step) -> None:
            super().observe_samples(step)
            self.last_step = step.number

    run = Short(9)
    assert [step.number for step in steps(run)] == [1] and run.log[-1] == "finish"  # type: ignore[arg-type]


def test_a_planner_that_fails_leaves_the_phase_with_its_error() -> None:
    class Failing(Pipeline):
        def plan(self, number: int) -> Step | None:
            if number == 2:
                raise ValueError("no forecast")
            return super().plan(number)

    run = Failing(3)
    with pytest.raises(ValueError, match="no forecast"):
        list(steps(run))  # type: ignore[arg-type]
    assert run.log[-1] == "observe"
