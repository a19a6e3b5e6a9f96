"""What `run.exact` fixes, leaves out, keeps at a resume and refuses. Runs with it are in tests/test_exact_run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.scaling.learner_size import LearnerSize
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.overlap_rules import passes_obstacle
from rlhfless_ray.learn.rank_settings import critic_settings, learner_settings
from rlhfless_ray.local.slot_check import check_slots
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.changes import TO_ROUNDING, changes, is_learned, keys_of
from rlhfless_ray.reward.reward_model import RewardModelSource
from rlhfless_ray.runtime.load_reward import load_reward
from rlhfless_ray.weights.load_policy import warm_start_key
from rlhfless_ray.weights.model_folder import write_folder
from tests.reward.reward_models import reward_model


def recipe(**sections: Any) -> Recipe:
    tree: dict[str, Any] = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "run": {"exact": True}}
    return Recipe.parse(tree | sections)


def test_the_planner_has_one_number_of_slots_to_choose() -> None:
    size = LearnerSize(6, fixed=True)
    assert size.counts == [6] and LearnerSize(6).counts == [1, 2, 4, 6]
    for slots, seconds in ((6, 9.0), (1, 0.1), (2, 0.1), (6, 9.0), (6, 9.0)):  # fewer were free
        assert size.decide(1, 100.0, value_per_s=0.0).actors == 6
        size.observe(slots, 100.0, seconds)
    assert size.decide(6, 100.0, value_per_s=0.0).actors == 6


def test_nothing_is_computed_in_the_tail_and_the_reason_is_told() -> None:
    assert "run.exact" in (passes_obstacle(recipe()) or "")
    assert passes_obstacle(recipe(run={})) is None


def test_updates_do_not_use_the_engines_log_probabilities_and_the_run_says_so() -> None:
    with_critic = {"algorithm": {"advantage": {"estimator": "gae"}, "importance_cap": 3.0}}
    for settings in (learner_settings, critic_settings):
        assert settings(recipe(**with_critic)).algorithm.importance_cap == 0
        assert settings(recipe(run={}, **with_critic)).algorithm.importance_cap == 3
    assert "importance_cap counts as 0 instead of 3," in recipe(**with_critic).exact_note
    assert recipe(algorithm={"importance_cap": 0.0}).exact_note == "" == recipe(run={}).exact_note


@pytest.mark.parametrize("exact", [False, True])
def test_a_reward_model_scores_each_sample_alone(tmp_path: Path, exact: bool) -> None:
    write_folder(tmp_path, reward_model())
    source = load_reward(recipe(run={"exact": exact}, reward={"model_path": str(tmp_path), "micro_batch_tokens": 200}), None)
    assert isinstance(source, RewardModelSource)
    assert (source.micro_batch_tokens == 1) == exact


def test_the_warm_start_of_another_thread_count_is_another() -> None:
    keys = {warm_start_key(recipe(run={"exact": exact}, learner={"max_slots_per_rank": n})) for exact in (False, True) for n in (1, 2)}
    assert len(keys) == 3, "without exact both counts share one"


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("learner.max_slots_per_rank", 2, 1),
        ("learner.ranks", 1, 2),
        ("learner.micro_batch_tokens", 4096, "auto"),
        ("reference.ranks", 1, 3),
    ],
)
def test_a_resume_keeps_what_changes_rounding(key: str, before: Any, now: Any) -> None:
    for exact in (False, True):
        old = recipe(run={"exact": exact}).with_settings({key: before})
        found = changes(yaml.safe_load(old.to_yaml()), old.with_settings({key: now}))
        if exact:
            with pytest.raises(UserError, match=rf"{key}: `{before}` → `{now}`; set them back"):
                found.check(Path("folder"), 3, accepted=False)
        else:
            found.check(Path("folder"), 3, accepted=False)


def test_exact_itself_is_kept_and_the_list_names_no_key_that_is_gone() -> None:
    assert is_learned("run.exact") and set(keys_of(Recipe)) >= TO_ROUNDING


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"rollout": {"max_lag_steps": 1}}, "rollout.max_lag_steps=1"),
        ({"rollout": {"max_lag_steps": 2, "partial": "restart"}}, "rollout.partial=restart"),
        ({"rollout": {"top_k": 40}}, "rollout.top_k=40"),
        ({"rollout": {"top_p": 0.95}}, "rollout.top_p=0.95"),
        ({"rollout": {"tensor_parallel": "auto"}}, "rollout.tensor_parallel=auto"),
        ({"algorithm": {"importance_cap": 0, "loss": {"correction_level": "seq"}}}, "algorithm.loss.correction_level=seq"),
        (
            {"algorithm": {"importance_cap": 0, "loss_mean": "sequence", "loss": {"kind": "gspo", "ratio_to": "sampler"}}},
            "algorithm.loss.ratio_to=sampler",
        ),
    ],
)
def test_what_reads_bits_that_depend_on_times_is_refused(sections: dict[str, Any], setting: str) -> None:
    with pytest.raises(UserError, match=f"run.exact: with {setting} updates depend on"):
        recipe(**sections)
    recipe(**sections, run={"exact": False})


def test_gpus_are_refused() -> None:
    check_slots(recipe(), 4, "cpu")
    check_slots(recipe(run={}), 4, "gpu")
    with pytest.raises(UserError, match=r"run\.exact: true is kept on CPU cores only"):
        check_slots(recipe(), 4, "gpu")
