"""One call: what becomes a recipe, what is refused, and how functions of both signatures score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray import make_recipe
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.front.callbacks import Callbacks
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.given_functions import GivenSource, GivenWorker
from rlhfless_ray.reward.source import Score
from rlhfless_ray.step.step import Step
from rlhfless_ray.trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "3 + 3 =", "answer": "6"}]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    return [float(text == wanted) if wanted != "none" else None for text, wanted in zip(completions, answer, strict=True)]


async def brief(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def short(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(row["answer"] in response)


def worker(*functions: Callable[..., Any], weights: list[float] | None = None) -> GivenWorker:
    recipe = make_recipe("model", ROWS, list(functions), reward_weights=weights)
    path, _, name = recipe.reward.function.rpartition(":")
    return GivenWorker(GivenSource.load(path, name, 1, recipe.prompts.prompt_column), 5.0)


def items(*pairs: tuple[str, str], **more: object) -> list[Any]:
    return [(key, "prompt", text, [1, 2], {"prompt": "prompt", "answer": answer, **more}) for key, (text, answer) in enumerate(pairs)]


def test_rows_and_functions_are_kept_in_files_that_the_recipe_names() -> None:
    recipe = make_recipe("model", ROWS, right, rollout={"max_tokens": 32}, **{"run.steps": 3})  # type: ignore[arg-type]
    assert (recipe.rollout.max_tokens, recipe.run.steps) == (32, 3)
    assert (recipe.prompts.prompt_column, recipe.prompts.answer_column, recipe.prompts.template) == ("prompt", "answer", "none")
    assert Path(recipe.prompts.path).read_text().count("\n") == 1
    assert recipe.reward.function.endswith(":right")
    assert make_recipe("model", ROWS, right) == make_recipe("model", ROWS, right)


def test_turns_get_the_chat_template() -> None:
    recipe = make_recipe("model", [{"prompt": [{"role": "user", "content": "hi"}], "solution": "x"}], right)
    assert (recipe.prompts.template, recipe.prompts.answer_column) == ("chat", "solution")


@pytest.mark.slow
def test_data_sets_may_be_streamed() -> None:
    from datasets import Dataset

    data = Dataset.from_list(ROWS)
    assert make_recipe("model", data, right).prompts.path == make_recipe("model", ROWS, right).prompts.path
    with pytest.raises(UserError, match="max_rows"):
        make_recipe("model", data.to_iterable_dataset(), right)
    assert Path(make_recipe("model", data.to_iterable_dataset(), right, max_rows=1).prompts.path).read_text().count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": []}, "prompts: the data set is empty"),
        ({"prompts": {"train": ROWS}}, r"choose one, such as prompts=dataset\['train'\]"),
        ({"prompts": [{"prompt": {1}}]}, "prompts, row 1: column `prompt` has a set"),
        ({"prompts": 3}, "prompts: expected a path, a list of dicts or a datasets.Dataset, got int"),
        ({"reward": []}, "several rewards must be functions"),
        ({"reward": [right, "model"]}, "several rewards must be functions"),
        ({"reward": lambda x: x}, "neither signature"),
        ({"reward": [right, short], "reward_weights": [1.0]}, "a number for each of 2 functions, got 1"),
        ({"rollout": 3}, "`rollout` is a section"),
        ({"rolout": {}}, "did you mean `rollout`"),
    ],
)
def test_mistakes_are_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_recipe(**{"policy": "model", "prompts": ROWS, "reward": right, **arguments})


def test_functions_of_both_signatures_score_the_same() -> None:
    batch = items(("4", "4"), ("5", "4"))
    assert worker(right).score(batch) == worker(short).score(batch) == [Score(0, 1.0), Score(1, 0.0)]


def test_several_rewards_are_a_weighted_sum_and_logged_by_name() -> None:
    first, second = worker(right, brief, weights=[2.0, 0.5]).score(items(("4", "4"), ("none", "none")))
    assert (first.reward, first.extra_logs) == (2.0 - 0.5, {"rewards/right": 1.0, "rewards/brief": -1.0})
    assert second.reward == -2.0 and math.isnan(second.extra_logs["rewards/right"])  # None does not count


def test_a_sample_without_any_reward_has_an_error() -> None:
    (score,) = worker(right).score(items(("x", "none")))
    assert score.reward is None and score.error is not None and "every function gave None" in score.error


def test_a_failing_sample_harms_no_other() -> None:
    def picky(completions: list[str], **columns: Any) -> list[float]:
        return [1 / len(text) for text in completions]

    scores = worker(picky).score(items(("ab", "x"), ("", "x"), ("abcd", "x")))
    assert [score.reward for score in scores] == [0.5, None, 0.25]
    assert scores[1].error is not None and "division by zero" in scores[1].error


def test_a_wrong_number_of_rewards_is_named() -> None:
    def two(completions: list[str], **columns: Any) -> list[float]:
        return [1.0, 2.0]

    (score,) = worker(two).score(items(("ab", "x")))
    assert score.error is not None and "2 values in `rewards` for 1 query" in score.error


def test_turns_come_to_functions_as_turns() -> None:
    seen = []

    def talk(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.append((prompts, completions, completion_ids, sorted(columns)))
        return [0.0]

    found = worker(talk)
    found.functions = [talk]  # the unpickled one has a list of its own
    turns = [{"role": "user", "content": "hi"}]
    found.score([(0, "<user>hi", "hello", [7], {"prompt": turns, "level": 3})])
    assert seen == [([turns], [[{"role": "assistant", "content": "hello"}]], [[7]], ["level"])]


@dataclass
class Listener:
    heard: list[tuple[str, int]] = field(default_factory=list)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **more: Any) -> None:
        self.heard.append(("log", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append(("step", state.global_step))
        control.should_training_stop = state.global_step == 2


class Epochs:
    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None: ...


@pytest.mark.slow
def test_callbacks_hear_of_steps_and_may_stop_the_run() -> None:
    listener = Listener()
    callbacks = Callbacks([listener], Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}), Path())
    assert [callbacks.stops_after(Step(number)) for number in (1, 2)] == [False, True]
    assert listener.heard == [("log", 1), ("step", 1), ("log", 2), ("step", 2)]
    with pytest.raises(UserError, match="Epochs has none of the methods"):
        Callbacks([Epochs()], callbacks.recipe, Path())


@pytest.mark.slow
def test_settings_of_trl_become_keys() -> None:
    config = GRPOConfig(
        output_dir="out/mine", num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2, beta=0.04, max_steps=5,
        learning_rate=1e-5, loss_type="grpo", scale_rewards=False, logging_steps=1, report_to="none", warmup_steps=1,
    )  # fmt: skip
    recipe = GRPOTrainer("model", right, config, ROWS).recipe
    assert (recipe.run.name, recipe.run.root, recipe.run.steps, recipe.run.seed) == ("mine", "out", 5, 42)
    assert (recipe.prompts.batch_prompts, recipe.rollout.samples_per_prompt, recipe.rollout.max_tokens) == (4, 4, 256)
    assert (recipe.algorithm.kl.coefficient, recipe.algorithm.loss_mean, recipe.algorithm.advantage.estimator) == (
        0.04,
        "sequence",
        "dr_grpo",
    )
    assert (recipe.learner.schedule, recipe.learner.warmup_share, recipe.watch.wandb) == ("linear", 0.2, "off")


@pytest.mark.slow
def test_settings_of_trl_without_an_equivalent_are_refused() -> None:
    with pytest.raises(UserError, match="`repetition_penalty` has no equivalent"):
        GRPOConfig(repetition_penalty=1.1)
    with pytest.raises(UserError, match="loss_type = 'cispo' has no equivalent"):
        GRPOTrainer("model", right, GRPOConfig(loss_type="cispo"), ROWS)
    with pytest.raises(UserError, match="cannot be divided into groups of num_generations = 3"):
        GRPOTrainer("model", right, GRPOConfig(num_generations=3), ROWS)
    with pytest.raises(UserError, match="`reward_processing_classes` has no equivalent"):
        GRPOTrainer("model", right, None, ROWS, reward_processing_classes=object())
