"""A user's loop: recipes/own_loop.py with its curriculum and rewards, own advantages, and what a wrong order of verbs says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray import Recipe, RunParts, Runtime, Step
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.step.step import StepProgress
from rlhfless_ray.types import Completion, Prompt, SampleId, Scored
from tests.conftest import samples, small_recipe
from tests.run_files import rows
from tests.test_stops import Ended

FILE = Path(__file__).parents[1] / "recipes" / "own_loop.py"


@pytest.fixture(scope="module")
def own_loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(row: int, reward: float | None, tokens: int = 3) -> Scored:
    done = Completion(0, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), "stop", 0)
    return Scored(Prompt(row, "p", (1,)), SampleId(row, 1, 0), done, reward=reward)


# ---- a run --------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.engine
def test_a_loop_of_ones_own_trains_on_picked_prompts_with_its_rewards_and_is_resumed(
    private_ray: None, tmp_path: Path, own_loop: ModuleType
) -> None:
    """The second step's advantages are its own too. The run is left after it, and resumed to its last step."""
    tree = small_recipe(tmp_path, run__steps=3, checkpoint__every_steps=1)
    picked: list[list[int]] = []

    class Curriculum(own_loop.Curriculum):  # type: ignore[name-defined,misc]
        def pick(self, count: int) -> list[int]:
            picked.append(super().pick(count))
            return picked[-1]

    with Runtime(Recipe.parse(tree)) as run:
        advantages = run.parts.updates.advantages
        trained: dict[int, Batch] = {}

        def own(step: Step) -> Batch:
            values = [float(n) for n in range(len(step.samples))] if step.number == 2 else None
            trained[step.number] = advantages(step, values)
            return trained[step.number]

        run.parts.updates.advantages = own  # type: ignore[method-assign,assignment]
        for step in own_loop.train(run.parts, Curriculum(len(run.inputs.prompts.train), 0)):
            assert sorted({s.prompt.index for s in step.samples}) == sorted(picked[step.number - 1])
            for one in step.samples:
                scored = -len(one.text) / 10
                assert one.reward == pytest.approx(scored and scored + 0.1 / (1 + len(one.completion.token_ids)))
            if step.number == 2:
                lengths = [len(s.completion.token_ids) for s in step.samples]
                assert trained[2].advantages.tolist() == np.repeat(np.arange(len(lengths), dtype=np.float32), lengths).tolist()
                break
    with Runtime(Recipe.parse(tree), resume=True) as run:
        steps = list(own_loop.train(run.parts, Curriculum(len(run.inputs.prompts.train), 1)))
    assert [step.number for step in steps] == [3]
    assert [row["step"] for row in rows(run.folder.path, 1)] == [1, 2, 3] and (run.folder.path / "model").is_dir()
    assert [one["advantage"] for one in samples(run.folder.path, 2)][:3] == [0.0, 1.0, 2.0]
    assert {row.step for row in read_ledger(run.folder.path / "ledger.csv") if row.what} >= {1, 2, 3}


# ---- what may be changed --------------------------------------------------------------------------------------------


def test_the_curriculum_of_the_recipe_prefers_prompts_that_are_half_right(own_loop: ModuleType) -> None:
    curriculum = own_loop.Curriculum(6, seed=0)
    curriculum.observe([sample(row, float(row < 3)) for row in range(6) for _ in range(8) if row not in (1, 4)])
    assert set(curriculum.pick(2)) == {1, 4}
    assert own_loop.with_bonus([sample(0, 0.0), sample(0, 1.0, tokens=4), sample(0, None)]) == [0.0, 1.02, None]


@pytest.mark.parametrize("returned", [[1], [1, 2, 99, 3], [-1, 0, 1, 2]])
def test_rows_that_do_not_exist_are_named(returned: list[int]) -> None:
    cursor, recipe = Cursor(8, 4, True, 0), Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    prompts = [Prompt(i, "p", (1,)) for i in range(8)]
    source = PromptSource(prompts, cursor, DynamicSampling(recipe, cursor), None, lambda count: [7 - n for n in range(count)])
    assert [prompt.index for prompt in source.draw(3, False)] == [7, 6, 5] and cursor.state()["taken"] == 3
    source.pick = lambda count: returned
    with pytest.raises(UserError, match=r"^session\.admit: pick\(4\) returned \[.*\]; expected 4 rows from 0 to 7$"):
        source.draw(4, False)


# ---- the order ------------------------------------------------------------------------------------------------------


def calls(run: RunParts, step: Step) -> Iterator[tuple[str, Callable[[], Any], set[str]]]:
    """Yield each verb with its call, and the names of what may be done with the step before."""
    pending: Any = SimpleNamespace(result=lambda: pytest.fail("it was waited for"))
    yield "session.admit", run.session.admit, {"updating", "updated", "published", "closed"}
    yield "updates.score", lambda: run.updates.score(step), {"taken"}
    yield "updates.phase", lambda: run.updates.phase(step).__enter__(), {"scored"}
    yield "updates.advantages", lambda: run.updates.advantages(step), {"learning"}
    yield "updates.start", lambda: run.updates.start(None), {"learning"}  # type: ignore[arg-type]
    yield "updates.publish", lambda: run.updates.publish(pending), {"updating", "updated"}
    yield "records.close", lambda: run.records.close(step), {"published"}


def test_each_verb_names_the_order_if_it_comes_at_another_time(tmp_path: Path) -> None:
    run = Ended(tmp_path).run.parts
    step = run.session.step
    refused = 0
    for progress in StepProgress:
        for verb, call, allowed in calls(run, step):
            step.progress = progress
            if progress.name.lower() not in allowed:
                with pytest.raises(UserError, match=rf"^{verb}: step 4 must be .*, and is {progress.name.lower()}; the order") as caught:
                    call()
                assert all(name in str(caught.value) for name in allowed)
                refused += 1
    assert refused == 7 * len(StepProgress) - 11


def test_a_step_that_is_not_the_admitted_one_is_not_taken(tmp_path: Path) -> None:
    session = Ended(tmp_path).run.parts.session
    session.step.progress, session.upcoming = StepProgress.CLOSED, Step(5)
    with pytest.raises(UserError, match=r"^session\.take: step 5 is not the step that session\.admit has returned last"):
        session.take(Step(5))
    with pytest.raises(UserError, match=r"^session\.admit: step 5 is admitted already; take it first"):
        session.admit()
    session.step.progress = StepProgress.PUBLISHED
    with pytest.raises(UserError, match=r"^session\.take: step 4 must be closed by then, and is published; the order of a step is"):
        session.take(session.upcoming)


def test_a_learn_phase_in_which_nothing_is_published_is_refused(tmp_path: Path) -> None:
    run = Ended(tmp_path).run.parts
    step = run.session.step
    step.progress = StepProgress.SCORED
    run.stages.learn.phase = lambda samples: nullcontext()  # type: ignore[method-assign,assignment]
    with (
        pytest.raises(UserError, match=r"^the end of updates\.phase: step 4 must be published by then, and is learning"),
        run.updates.phase(step),
    ):
        pass


# ---- values of one's own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "said"), [([1.0], "expected a value for each of 2 samples, got 1"), ([1.0, float("nan")], "row 8 is nan, and not a finite")]
)
def test_values_that_nothing_can_be_learned_from_are_named(tmp_path: Path, rewards: list[float], said: str) -> None:
    run = Ended(tmp_path).run.parts
    step = run.session.step
    step.progress, step.samples = StepProgress.TAKEN, [sample(7, 0.0), sample(8, 1.0)]
    run.stages.score.phase = nullcontext  # type: ignore[method-assign,assignment]
    run.stages.score.score = lambda samples, *_: list(samples)  # type: ignore[method-assign,assignment]
    with pytest.raises(UserError, match=rf"^updates\.score: .*{said}"):
        run.updates.score(step, lambda samples: rewards)
    assert [one.reward for one in step.scored] == [0.0, 1.0]
