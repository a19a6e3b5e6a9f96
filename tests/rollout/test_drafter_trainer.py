"""A drafter learns the policy's distribution from the tokens that the policy sampled, and from no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.task_tokenizer import TaskTokenizer
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout import drafter_trainer
from rlhfless_ray.rollout.drafter_trainer import DrafterSettings, DrafterTrainer, SampledSequence
from rlhfless_ray.rollout.speculation import read_drafter
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import small_recipe

WORDS = 8  # tokens that the synthetic policy samples
TEMPERATURE = 0.5


@pytest.fixture
def trainer(tmp_path: Path) -> DrafterTrainer:
    recipe = Recipe.parse(small_recipe(tmp_path, rollout__speculation="auto", rollout__drafter_train="on", rollout__drafter_hidden_size=32))
    files = read_drafter(recipe, TaskTokenizer(task("chain")), {"config.json": b'{"vocab_size": 40, "max_position_embeddings": 64}'})
    assert files is not None
    return DrafterTrainer(write_folder(tmp_path / "drafter", files), DrafterSettings(1e-2, TEMPERATURE))


def bigrams(count: int, seed: int) -> tuple[list[SampledSequence], np.ndarray]:
    """Sequences of a policy whose next token depends on the last one, behind prompts of token 30, which it never samples. Returns them
    and its raw logits."""
    rng = np.random.default_rng(seed)
    logits = np.random.default_rng(7).normal(size=(WORDS, WORDS))
    chances = np.exp(logits / TEMPERATURE) / np.exp(logits / TEMPERATURE).sum(1, keepdims=True)
    sequences = []
    for _ in range(count):
        tokens, logprobs = [30, 30, int(rng.integers(WORDS))], [np.nan, np.nan, np.nan]
        for _ in range(int(rng.integers(20, 40))):
            tokens.append(int(rng.choice(WORDS, p=chances[tokens[-1]])))
            logprobs.append(float(np.log(chances[tokens[-2], tokens[-1]])))
        sequences.append(SampledSequence(np.array(tokens, np.int32), np.array(logprobs, np.float32)))
    return sequences, logits


def test_the_drafter_learns_the_distribution_before_the_temperature(trainer: DrafterTrainer) -> None:
    sequences, logits = bigrams(300, seed=0)
    trainer.add(sequences)
    means, tokens, took_s = trainer.train(60_000, lambda seconds: True)
    assert tokens >= 60_000 and took_s > 0 and len(means) == trainer.updates
    assert means[0][1] > 1.0 and abs(np.mean([kl for _, kl in means[-20:]])) < 0.1, "log p of the policy minus that of the drafter"
    with torch.no_grad():
        found = torch.log_softmax(trainer.model(torch.arange(WORDS)[:, None]).logits[:, 0, :WORDS].double(), -1).numpy()
    # It has read single tokens at the first position only, so what they are followed by is the average over contexts.
    wanted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert np.abs(np.exp(found) - np.exp(wanted)).max() < 0.15
    with torch.no_grad():
        follows = torch.softmax(trainer.model(torch.tensor([[30, 30, 0, 1, 2]])).logits[0] / TEMPERATURE, -1)
    assert float(follows[:, 30].max()) < 0.01, "prompts are not learned"


def test_training_keeps_the_newest_sequences_and_stops_on_request(trainer: DrafterTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, _ = bigrams(60, seed=1)
    monkeypatch.setattr(drafter_trainer, "KEPT_TOKENS", 500)
    trainer.add(sequences)
    assert trainer.tokens == sum(len(one.tokens) for one in trainer.sequences) <= 500 and trainer.sequences[-1] is sequences[-1]
    calls: list[float] = []
    means, _, _ = trainer.train(10**9, lambda seconds: calls.append(seconds) or len(calls) < 4)  # type: ignore[func-returns-value]
    assert len(means) == 3 and calls[0] == 0 and min(calls[1:]) > 0
    monkeypatch.setattr(drafter_trainer, "BATCH_TOKENS", 100)
    monkeypatch.setattr(drafter_trainer, "WINDOW_TOKENS", 16)
    for _ in range(20):
        tokens, logprobs = trainer._batch()
        assert tokens.shape == logprobs.shape and tokens.shape[1] <= 16 and tokens.size <= 100


def test_every_update_reads_sampled_tokens_after_a_long_prompt(trainer: DrafterTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_trainer, "BATCH_TOKENS", 32)
    monkeypatch.setattr(drafter_trainer, "WINDOW_TOKENS", 16)
    for sequences in (bigrams(20, seed=4)[0], [SampledSequence(np.full(2, 30, np.int32), np.array([np.nan, -1.0], np.float32))]):
        prompt = SampledSequence(np.full(400, 30, np.int32), np.full(400, np.nan, np.float32))
        trainer.sequences.clear()
        trainer.add([SampledSequence(*map(np.concatenate, zip(vars(prompt).values(), vars(one).values()))) for one in sequences])  # noqa: B905
        for _ in range(50):
            tokens, logprobs = trainer._batch()
            assert tokens.shape[1] == 16 and not np.isnan(logprobs[:, 1:]).all(1).any()
        means, read, _ = trainer.train(40, lambda seconds: trainer.updates < 100)
        assert read >= 40 and np.isfinite(means).all()


def test_another_process_continues_from_the_weights(trainer: DrafterTrainer, tmp_path: Path) -> None:
    sequences, _ = bigrams(20, seed=2)
    trainer.add(sequences)
    other = DrafterTrainer(tmp_path / "drafter", trainer.settings)
    trainer.train(3000, lambda seconds: True)
    weights = trainer.weights()
    other.load(weights)
    assert other.weights().keys() == weights.keys() and all(np.array_equal(weights[name], array) for name, array in other.weights().items())
    other.load_moments(trainer.moments())
    for one in (trainer, other):  # the same data from here on
        one.sequences.clear()
        one.add(sequences)
        one.rng = np.random.default_rng(1)
        one.train(1000, lambda seconds: True)
    assert any(not np.array_equal(weights[name], array) for name, array in trainer.weights().items()), "what it returned is a copy"
    assert other.updates == trainer.updates
    for name, array in trainer.weights().items():
        np.testing.assert_array_equal(other.weights()[name], array, "with the moments it makes the same updates")
