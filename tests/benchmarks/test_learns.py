"""What the runs that should learn are judged by, and what their reward model learns from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.learning.supervised_stages import STAGES, StageResult, recipe
from benchmarks.learning.train_reward_model import Response, RewardModelTraining, in_order, labelled, response
from benchmarks.learns import ESTIMATORS, LEAST, PPO, Curve, settings, targets
from rlhfless_ray.common.estimators import ESTIMATORS as THERE_ARE
from rlhfless_ray.prompts.builtin_tasks import Chain
from rlhfless_ray.prompts.task_tokenizer import build_tokenizer


def test_every_estimator_is_run() -> None:
    assert set(ESTIMATORS) == set(THERE_ARE) - {"online_dpo"}, "which has another loss"


def test_stages_have_a_target_each() -> None:
    told = StageResult("rm", 8, 0.7, 0.1, pairs_told=0.96)
    found = [StageResult("sft", 8, 2.0, 1.0, 0.5, 0.48), StageResult("dpo", 8, 0.7, 0.1, 0.5, 0.59), told]
    assert [one.target().met for one in found] == [True, False, True]
    assert {stage: recipe(stage, Path("start"), Path("root"), False).task for stage in STAGES} == {
        stage: stage.removeprefix("online_") for stage in STAGES
    }


def test_a_run_has_to_rise_and_a_reward_model_to_tell_right_from_wrong(tmp_path) -> None:
    before = {"sampled": 0.4, "greedy": 0.5}
    curves = [Curve(name, before, {"sampled": after, "greedy": 0.9}, [0.4]) for name, after in (("rloo", 0.49), (PPO, 0.6))]
    model = RewardModelTraining(tmp_path, 3, supervised=0.9, spoilt=0.5, own=0.5)
    found = targets(curves, model)
    assert [target.met for target in found] == [False, True, True] and found[0].value == pytest.approx(9) and found[0].least == LEAST
    assert "reward.function=" in settings(PPO, model) and f"reward.model_path={tmp_path}" in settings(PPO, model)


def test_pairs_in_order_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    values, right = rng.integers(5, size=40).astype(float), (rng.random(40) < 0.3).astype(float)
    pairs = [(a, b) for a, x in zip(values, right, strict=True) for b, y in zip(values, right, strict=True) if x and not y]
    assert in_order(values, right) == pytest.approx(np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]))


def test_every_sum_is_labelled_and_the_end_is_what_the_verifier_says() -> None:
    row = {"prompt": "5A3B1C2=", "answer": "1", "operands": 3}
    texts = ["a8b9c1#1", "a8b0c2#2", "a8c0#0", "#1", "a8b9c1;a8b9c1#1", "a8b"]
    tokenizer = build_tokenizer(Chain())
    found = labelled([row] * len(texts), [Response(list(text)) for text in texts], tokenizer)
    assert [one.right for one in found] == [[1, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0, 1, 0, 0], [1, 1], [1] * 8, [0, 1]]
    for one, text in zip(found, texts, strict=True):
        written = [tokenizer.convert_ids_to_tokens(one.tokens[place]) for place in one.places]
        assert written[0] == tokenizer.eos_token and one.places[0] == len(one.tokens) - 1
        assert written[1:] == [character for character in text if character.isdigit()]
    (cut,) = labelled([row], [Response([*"a8b9c1#1"], ended=False)], tokenizer)
    assert cut.right == [0, 1, 1, 1, 1] and tokenizer.convert_ids_to_tokens(cut.tokens[cut.places[0]]) == "1", "it went on"
    (odd,) = labelled([row], [Response(["a", "8", "A3", "#", "1"])], tokenizer)
    assert odd.right == [1, 1, 1] and len(odd.tokens) == 5 + 5 + 1


def test_mistakes_are_mistakes() -> None:
    rng = np.random.default_rng(3)
    rows = Chain().rows(300, 0, "train")
    made = [response(row, rng) for row in rows]
    right = np.array([Chain().verify(one.text, row) * one.ended for one, row in zip(made, rows, strict=True)])
    plain = np.array([Chain().verify(Chain().example(row, rng), row) for row in rows])
    assert 0.15 < right.mean() < plain.mean() - 0.1 and 0 < np.mean([not one.ended for one in made]) < 0.1
    assert len({one.text.partition("#")[0].count(";") for one in made}) > 2, "some look again"
