"""The page: what it calls, in which order, on a pipeline that only writes down what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhfless_ray.loop import steps
from rlhfless_ray.step.step import Step


class Pipeline:
    """All parts of a run. The run ends after `last_step`."""

    def __init__(self, last_step: int, *, done: int = 0, owes: bool = False) -> None:
        self.last_step, self.owes = last_step, owes
        self.step, self.at_work = Step(done), False  # at_work: the learner
        self.log: list[str] = []
        self.session = self.updates = self.evaluations = self.records = self

    def make_up(self) -> None:
        if self.owes:
            self.note("evaluate")

    def admit(self) -> Step | None:
        number = self.step.number + 1
        if number > self.last_step:
            return None
        return self.note(f"admit {number}", Step(number))

    def take(self, step: Step) -> None:
        self.step = step
        step.samples = self.note(f"take {step.number}", ["sample"])

    def score(self, step: Step) -> Any:
        step.samples = [*self.note("score", step.samples), "filled"]  # type: ignore[list-item]
        return step.samples

    @contextmanager
    def phase(self, step: Step) -> Iterator[None]:
        yield
        assert not self.at_work, "the learner is waited for inside its phase"
        self.note("phase ends")

    def advantages(self, step: Step) -> str:
        assert step.samples == ["sample", "filled"]  # type: ignore[comparison-overlap]
        return "batch"

    def start(self, batch: str) -> str:
        self.at_work = True
        return self.note("update starts", batch)

    def publish(self, update: str) -> None:
        assert update == "batch"
        self.at_work = False
        self.note("publish")

    def run(self, step: Step) -> None:
        if step.number == self.last_step:
            self.note("evaluate")

    def close(self, step: Step) -> None:
        self.note(f"close {step.number}")

    def finish(self) -> None:
        self.note("finish")

    def note(self, what: str, value: Any = None) -> Any:
        self.log.append(what)
        return value


def test_the_next_step_is_admitted_while_the_learner_works() -> None:
    run = Pipeline(2)
    done = list(steps(run))  # type: ignore[arg-type]
    assert run.log == [
        *("admit 1", "take 1", "score", "update starts", "admit 2", "publish", "phase ends", "close 1"),
        *("take 2", "score", "update starts", "publish", "phase ends", "evaluate", "close 2", "finish"),
    ]
    assert [step.number for step in done] == [1, 2]


def test_a_resumed_run_goes_on_after_its_last_step_and_makes_up_for_an_evaluation() -> None:
    run = Pipeline(4, done=3, owes=True)
    assert [step.number for step in steps(run)] == [4]  # type: ignore[arg-type]
    assert run.log[:3] == ["evaluate", "admit 4", "take 4"]
    over = Pipeline(3, done=3)
    assert list(steps(over)) == [] and over.log == ["finish"]  # type: ignore[arg-type]


def test_a_planner_that_fails_leaves_the_phase_with_its_error() -> None:
    class Failing(Pipeline):
        def admit(self) -> Step | None:
            if self.step.number == 1:
                raise ValueError("no forecast")
            return super().admit()

    run = Failing(3)
    with pytest.raises(ValueError, match="no forecast"):
        list(steps(run))  # type: ignore[arg-type]
    assert run.log[-1] == "update starts"
