"""Reward models give what transformers gives for the same tokens, whatever the batch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.reward_model import ModelWorker, RewardModelSource
from rlhfless_ray.runtime.load_reward import load_reward
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId
from rlhfless_ray.weights.load_policy import load_tokenizer
from rlhfless_ray.weights.model_folder import write_folder
from tests.reward.reward_models import WORDS, reward_model, tokenizer_files


def loaded(folder: Path, files: dict[str, bytes], tokenizer: Any = None, **reward: Any) -> RewardModelSource:
    write_folder(folder, files)
    tree = {"prompts": {"task": "chain"}, "reward": {"model_path": str(folder), "micro_batch_tokens": 200, **reward}}
    source = load_reward(Recipe.parse(tree), tokenizer)
    assert isinstance(source, RewardModelSource)
    return source


def sequences(rng: np.random.Generator, count: int = 23, longest: int = 90) -> list[np.ndarray]:
    return [rng.integers(0, len(WORDS), rng.integers(1, longest)).astype(np.int32) for _ in range(count)]


def by_transformers(folder: Path, asked: list[np.ndarray]) -> np.ndarray:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return np.array([float(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 0]) for ids in asked])


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_it_gives_what_transformers_gives(tmp_path: Path, family: str) -> None:
    source = pickle.loads(pickle.dumps(loaded(tmp_path, reward_model(family=family), load_tokenizer(tokenizer_files(), False))))
    asked = sequences(np.random.default_rng(1))
    expected = by_transformers(tmp_path, asked)
    assert expected.std() > 0.1
    worker = source.worker(1.0)
    worker.open(1)
    scores = worker.score([(100 + i, ids) for i, ids in enumerate(asked)], float("inf"))
    assert sorted(score.key for score in scores) == list(range(100, 123)) and all(score.error is None for score in scores)
    found = np.array([score.reward for score in sorted(scores, key=lambda score: score.key)])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    alone = [worker.score([(0, ids)], 0.0)[0].reward for ids in asked[:5]]
    np.testing.assert_allclose(alone, found[:5], atol=2e-5)
    assert source.pool_kind == "reward" and source.on_device


def test_a_head_of_another_name_and_the_rewards_statistics(tmp_path: Path) -> None:
    plain = loaded(tmp_path / "plain", reward_model())
    asked = sequences(np.random.default_rng(2), 4)
    expected = by_transformers(tmp_path / "plain", asked)

    def of(files: dict[str, bytes], **reward: Any) -> np.ndarray:
        scores = loaded(tmp_path / "other", files, **reward).worker(1.0).score(list(enumerate(asked)), 9.0)
        return np.array([s.reward for s in sorted(scores, key=lambda s: s.key)])

    np.testing.assert_allclose(of(reward_model(head="v"), value_head="v"), expected, atol=2e-5)
    named = reward_model(head="v", config={"value_head_prefix": "v", "mean": 0.5, "std": 2.0})
    np.testing.assert_allclose(of(named), expected, atol=2e-5)
    np.testing.assert_allclose(of(named, normalize=True), (expected - 0.5) / 2.0, atol=2e-5)
    np.testing.assert_allclose(of(reward_model(), normalize=True), expected, atol=2e-5)
    assert plain.head.deviation == 1.0


def test_time_over_ends_after_a_micro_batch_and_none_exceeds_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded(tmp_path, reward_model()).worker(1.0)
    assert isinstance(worker, ModelWorker)
    sizes: list[tuple[int, int]] = []
    values = worker.model.values

    def watched(batch: list[np.ndarray]) -> np.ndarray:
        sizes.append((len(batch), max(map(len, batch))))
        return values(batch)

    monkeypatch.setattr(worker.model, "values", watched)
    items = list(enumerate(sequences(np.random.default_rng(3))))
    first = worker.score(items, 0.0)
    assert len(sizes) == 1 and len(first) == sizes[0][0]
    worker.score(items)
    assert all(rows * longest <= 200 for rows, longest in sizes) and len(sizes) > 3


def test_what_is_too_long_or_not_a_number_is_the_samples_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = loaded(tmp_path, reward_model(context=32)).worker(1.0)
    assert isinstance(worker, ModelWorker)
    scores = {s.key: s for s in worker.score([(0, np.ones(33, np.int32)), (1, np.ones(32, np.int32))])}
    assert scores[0].error == "33 tokens exceed the reward model's context of 32 tokens" and scores[1].reward is not None
    monkeypatch.setattr(worker.model, "values", lambda batch: np.array([np.nan], np.float32))
    assert worker.score([(0, np.ones(3, np.int32))])[0].error == "the reward model gave nan, not a finite number"


def test_the_tokens_are_prompt_and_response() -> None:
    completion = Completion(0, np.array([7, 1], np.int32), np.zeros(2, np.float32), "stop", 0)
    key, ids = RewardModelSource.item(None, 5, Sample(Prompt(0, "", (3, 4)), SampleId(0, 1, 0), completion), str)  # type: ignore[arg-type]
    assert key == 5 and ids.tolist() == [3, 4, 7, 1]


def test_folders_that_are_no_reward_model_are_refused(tmp_path: Path) -> None:
    def refused(files: dict[str, bytes], tokenizer: Any = None, **reward: Any) -> str:
        with pytest.raises(UserError) as caught:
            loaded(tmp_path / "model", files, tokenizer, **reward)
        assert str(caught.value).startswith("reward.model_path: ")
        return str(caught.value)

    assert "no scalar head `head`; it has `score`: set reward.value_head" in refused(reward_model(), value_head="head")
    assert "its head `score` gives 3 values per response" in refused(reward_model(labels=3))
    other = load_tokenizer(tokenizer_files(WORDS[::-1]), False)
    assert "its tokenizer differs from the policy's" in refused(reward_model(), other)
    assert "std in its config.json, which is 0" in refused(reward_model(config={"mean": 0, "std": 0}), normalize=True)
    assert "model.safetensors is not a complete safetensors file" in refused({**reward_model(), "model.safetensors": b"12345678{"})
    assert "config.json is not valid JSON" in refused({**reward_model(), "config.json": b"{"})
    assert "config.json is not a JSON object" in refused({**reward_model(), "config.json": b"[]"})
    with pytest.raises(UserError, match=r"^reward.model_path: .* is not a folder"):
        load_reward(Recipe.parse({"prompts": {"task": "chain"}, "reward": {"model_path": str(tmp_path / "none")}}))
    assert json.loads(reward_model()["config.json"])["model_type"] == "qwen2"
