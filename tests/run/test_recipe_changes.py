"""What a resume with another recipe says, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.changes import UNLEARNED, changes, is_learned, keys_of
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.report.read_run import RunRecord
from rlhfless_ray.report.summary import header
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.runtime.saved_state import SavedState

RL = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
STAGE = SupervisedRecipe.parse({"task": "sft", "data": {"task": "chain"}})


def tree_of(recipe: Recipe | SupervisedRecipe) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(recipe.to_yaml())
    return tree


def with_value(recipe: Recipe | SupervisedRecipe, key: str, value: Any) -> dict[str, Any]:
    tree = at = tree_of(recipe)
    *sections, name = key.split(".")
    for section in sections:
        at = at[section]
    at[name] = value
    return tree


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RL, STAGE])
def test_every_key_is_compared_and_classified(recipe: Recipe | SupervisedRecipe) -> None:
    assert not changes(tree_of(recipe), recipe)
    for key in keys_of(type(recipe)):
        (found,) = changes(with_value(recipe, key, "another"), recipe).found or (None,)
        if found is None:
            assert not is_learned(key) and tree_of(recipe)[key.split(".")[0]][key.split(".")[1]] == "auto", key
        else:
            assert (found.key, found.is_learned) == (key, is_learned(key))


def test_the_list_names_no_key_that_is_gone_and_new_keys_are_refused() -> None:
    known = {*keys_of(Recipe), *keys_of(SupervisedRecipe)}
    named = {f"{section}.{name}" for section, names in UNLEARNED.items() for name in names or ()}
    assert named <= known and {key.partition(".")[0] for key in known} >= UNLEARNED.keys()
    assert is_learned("rollout.new_key") and is_learned("new_section.key") and is_learned("algorithm.loss.new_key")


@pytest.mark.parametrize(
    "key",
    [
        *("reward.function", "algorithm.advantage.estimator", "learner.learning_rate", "prompts.batch_prompts", "rollout.temperature"),
        *("prompts.path", "run.seed", "policy.path", "rollout.top_p", "rollout.max_tokens", "algorithm.kl.coefficient", "lora.dropout"),
        *("data.batch_rows", "loss.beta", "teacher.path", "task", "ema.beta", "agent.path", "evaluate.prompts", "critic.learning_rate"),
    ],
)
def test_what_is_learned_or_counted_is_refused(key: str) -> None:
    assert is_learned(key)


@pytest.mark.parametrize(
    "key",
    [
        *("run.steps", "run.episodes", "run.epochs", "rollout.max_actors", "objective.prefer", "watch.wandb", "checkpoint.every_steps"),
        *("checkpoint.keep", "cluster.address", "functions.keep_alive_s", "price.cpu_slot_per_hour", "learner.ranks", "save.path"),
        *("evaluate.every_steps", "rollout.deadline_s", "reward.workers", "learner.micro_batch_tokens"),
    ],
)
def test_what_changes_nothing_that_is_learned_is_said(key: str) -> None:
    assert not is_learned(key)


def test_keys_of_an_older_recipe_had_their_defaults() -> None:
    tree = tree_of(RL)
    del tree["rollout"]["top_p"], tree["ema"], tree["algorithm"]["loss"]
    assert not changes(tree, RL)
    (found,) = changes(tree, RL.with_settings({"rollout.top_p": 0.9})).found
    assert str(found) == "rollout.top_p: `1.0` → `0.9`"
    assert not changes({**tree, "gone": {"key": 1}}, RL)


def test_a_file_counts_by_its_content() -> None:
    now = RL.with_settings({"reward.function": "new/r.py:score"})

    def found(was: str, then: str) -> list[tuple[str, bool]]:
        before = with_value(now, "reward.function", was)
        given = changes(before, now, {"reward.function": then}, {"reward.function": "digest"}).found
        return [(str(change), change.is_learned) for change in given]

    assert found("new/r.py:score", "digest") == []
    assert found("new/r.py:score", "other") == [("reward.function: `new/r.py:score` has other content now", True)]
    assert found("r.py:score", "digest") == [("reward.function: `r.py:score` → `new/r.py:score`", False)], "it has moved"
    assert found("r.py:score", "other") == [("reward.function: `r.py:score` → `new/r.py:score`", True)]
    assert found("r.py:old", "digest") == [("reward.function: `r.py:old` → `new/r.py:score`", True)]


def test_a_stretched_schedule_is_said() -> None:
    now = RL.with_settings({"learner.schedule": "linear", "run.steps": 8})
    (said,) = changes(with_value(now, "run.steps", 4), now).said(4)
    assert said == (
        "changed after step 4, with no effect on what is learned: run.steps: `4` → `8` (the learning rate's schedule `linear` now ends at "
        "the new last step)"
    )


# ---- a run ------------------------------------------------------------------------------------------------------


def resumed(recipe: Recipe, state: dict[str, Any], folder: Path, **settings: Any) -> Runtime:
    """Compare a recipe with a checkpoint's state as a resume does."""
    run = Runtime.__new__(Runtime)
    cursor = Cursor(11, 2, True, recipe.run.seed)
    run.recipe, run.inputs = recipe, SimpleNamespace(cursor=cursor, contents=settings.get("contents", {}))  # type: ignore[assignment]
    run.resume_changed = settings.get("accepted", False)
    run._check_state(state, RunFolder(folder))
    return run


def state_of(recipe: Recipe, **more: Any) -> dict[str, Any]:
    return {"step": 4, "recipe": recipe.model_dump(mode="json"), "cursor": Cursor(11, 2, True, recipe.run.seed).state(), **more}


def test_a_resume_is_refused_with_all_that_differs_and_goes_on_if_that_is_accepted(tmp_path: Path) -> None:
    now = RL.with_settings({"learner.learning_rate": 0.5, "rollout.temperature": 0.7, "rollout.max_actors": 3, "run.seed": 5})
    with pytest.raises(UserError) as caught:
        resumed(now, state_of(RL), tmp_path)
    assert str(caught.value) == (
        f"--resume: {tmp_path} was trained with other settings up to step 4, so one curve would show two experiments: run.seed: `0` → `5`; "
        "rollout.temperature: `1.0` → `0.7`; learner.learning_rate: `1e-06` → `0.5`; set them back, start a new run without --resume, or "
        "go on with --resume-changed"
    )
    first, second = resumed(now, state_of(RL), tmp_path, accepted=True).changes.said(4)
    assert first.startswith("changed after step 4, accepted with --resume-changed: run.seed: `0` → `5`; ")
    assert second == "changed after step 4, with no effect on what is learned: rollout.max_actors: `2` → `3`"


def test_the_same_recipe_goes_on_without_a_word(tmp_path: Path) -> None:
    """As a job that is retried. What a run decides itself may differ."""
    decided = state_of(RL.with_settings({"learner.micro_batch_tokens": 4096, "rollout.tensor_parallel": 1}))
    assert resumed(RL, decided, tmp_path).changes.said(4) == []


def test_without_a_recipe_in_the_checkpoint_that_of_the_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RL.to_yaml())
    state = state_of(RL)
    del state["recipe"]
    with pytest.raises(UserError, match=r"rollout.top_p: `1.0` → `0.9`; set them back"):
        resumed(RL.with_settings({"rollout.top_p": 0.9}), state, tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(b"\xff: [")
    assert resumed(RL, state, tmp_path).changes.said(4) == []


@pytest.mark.parametrize("cursor", [None, {}, {"taken": "x"}, []])
def test_an_unverified_state_without_a_place_in_the_prompts_is_one_sentence(tmp_path: Path, cursor: Any) -> None:
    with pytest.raises(UserError, match=r"names no place in the prompts; continue from the checkpoint before with --resume=previous"):
        resumed(RL, {**state_of(RL), "cursor": cursor}, tmp_path)


def test_other_prompts_need_the_flag_and_drop_begun_groups(tmp_path: Path) -> None:
    state = state_of(RL)
    state["cursor"] |= {"checksum": "other", "taken": 15}
    with pytest.raises(UserError, match="the checksum of the training prompts was other"):
        resumed(RL, state, tmp_path)
    run = resumed(RL, state, tmp_path, accepted=True)
    said: list[str] = []
    kept = SavedState.__new__(SavedState)
    kept.stages, kept.resume_changed = SimpleNamespace(context=SimpleNamespace(say=said.append)), True  # type: ignore[assignment]
    kept.session = SimpleNamespace(source=SimpleNamespace(cursor=run.inputs.cursor))  # type: ignore[assignment]
    state |= {"ahead": [1], "in_flight": [2]}
    kept.restore_rows(state)
    assert "ahead" not in state and "in_flight" not in state and run.inputs.cursor.state()["taken"] == 15
    assert said == ["responses to the earlier training prompts, which the checkpoint holds, are dropped"]


def test_both_recipes_stay_and_the_report_shows_the_change(tmp_path: Path) -> None:
    recipe = RL.with_settings({"run.root": str(tmp_path), "run.name": "a"})
    folder = RunFolder.create(recipe)
    folder.begin(recipe, "machine", 0)
    now = recipe.with_settings({"rollout.temperature": 0.7})
    folder.begin(now, "machine", 4, changes(tree_of(recipe), now), tree_of(recipe))
    assert Recipe.load(folder.path / "recipe.yaml") == now and Recipe.load(folder.path / "recipe_until_step_4.yaml") == recipe
    folder.begin(now, "machine", 6)
    details = dict(header(RunRecord.read(folder.path))["details"])
    assert details["recipe changed after step 4"] == "rollout.temperature: `1.0` → `0.7`", "a later resume keeps it"
    alone = RunFolder.create(now)  # only the checkpoints were left
    alone.begin(now, "machine", 4, changes(tree_of(recipe), now), tree_of(recipe))
    assert Recipe.load(alone.path / "recipe_until_step_4.yaml") == recipe
