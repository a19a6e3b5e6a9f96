"""Of an agent's sample only the policy's tokens are learned from: laid out by hand, and the gradient against autograd over all logits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_reference import load
from tiny_policy import VOCABULARY, tiny_policy

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.compute_advantages import compute_advantages
from rlhfless_ray.learn.learn_stage import LearnStage
from rlhfless_ray.learn.learner_rank import LearnerRank
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.policy_model import TokenLogprobs
from rlhfless_ray.learn.shares import Cutter
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Completion, Prompt, SampleId, Scored
from tests.learn.conftest import learner_settings

MASKS = ["##..#", None, "#...##.#", "###"]  # the policy's tokens; None: all of four


def batch_of(masks: list[str | None]) -> Batch:
    """Tokens count up from 2, prompts have two; a token's log-probability is minus the token."""
    rows, flags, at = [], [], 2
    for k, one in enumerate(masks):
        length = 4 if one is None else len(one)
        ids = np.arange(at, at + 2 + length) % VOCABULARY
        at += 2 + length
        rows.append((tuple(ids[:2].tolist()), ids[2:].astype(np.int32), -ids[2:].astype(np.float32), k + 1.0, k // 2))
        flags.append(None if one is None else np.array([c == "#" for c in one]))
    return Batch.of(rows, flags)


def test_layout_by_hand() -> None:
    batch = batch_of(MASKS)
    assert batch.lengths.tolist() == [7, 6, 10, 5] and batch.response_lengths.tolist() == [3, 4, 4, 3]
    assert batch.logprobs.tolist() == [-4, -5, -8, -11, -12, -13, -14, -17, -21, -22, -24, -27, -28, -29]
    assert batch.advantages.tolist() == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    tensors = padded(batch, np.array([2, 0]), torch.device("cpu"))
    assert tensors["targets"].tolist() == [17, 21, 22, 24, 4, 5, 8]
    assert tensors["columns"].tolist() == [1, 5, 6, 8, 1, 2, 5], "each token is foreseen from the one before it, whoever wrote that"
    assert tensors["flat"].tolist() == [7, 8, 9, 10, 0, 1, 2] and tensors["sequence"].tolist() == [2, 2, 2, 2, 0, 0, 0]
    assert tensors["ids"][0].tolist() == list(range(15, 25)), "the agent's tokens are context"
    part = batch.take(np.array([2, 0]))
    assert part.response_lengths.tolist() == [4, 3] and part.logprobs.tolist() == [-17, -21, -22, -24, -4, -5, -8]
    assert part.mask is not None and "".join(".#"[int(x)] for x in part.mask) == MASKS[2] + MASKS[0]  # type: ignore[operator]


def test_without_a_mask_nothing_changes() -> None:
    assert batch_of([None, None]).mask is None and batch_of(["####", None]).response_lengths.tolist() == [4, 4]
    assert Batch.of([], []).mask is None


def loops(
    rewards: list[float], masks: list[str], kl: np.ndarray, beta: float, gamma: float, values: np.ndarray | None, lambd: float
) -> np.ndarray:
    """Over all tokens of each sample; the agent's have neither reward nor value, and time passes over them."""
    found, at = [], 0
    for reward, mask in zip(rewards, masks, strict=True):
        last = mask.rindex("#")
        r = [(-beta * kl[at + t] + (reward if t == last else 0.0)) if c == "#" else 0.0 for t, c in enumerate(mask)]
        v = [0.0 if values is None or c == "." else values[at + t] for t, c in enumerate(mask)] + [0.0]
        later, out = 0.0, [0.0] * len(mask)
        for t in reversed(range(len(mask))):
            later = r[t] + gamma * later if values is None else r[t] + gamma * v[t + 1] - v[t] + gamma * lambd * later
            out[t] = later
        found += [x if c == "#" else 0.0 for x, c in zip(out, mask, strict=True)]
        at += len(mask)
    return np.array(found)


@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_credit_against_loops(estimator: str) -> None:
    masks, rng = ["##..#", "####", "#...##.#", "###"], np.random.default_rng(3)
    total = sum(map(len, masks))
    mask = np.array([c == "#" for c in "".join(masks)])
    kl, rewards = np.where(mask, rng.random(total), 0.0), rng.normal(size=4)
    values = np.where(mask, rng.normal(size=total), 0.0) if estimator == "gae" else None
    recipe = Recipe.parse({
        "prompts": {"task": "chain"}, "reward": {"function": "task", "overlong_buffer_tokens": 4}, "rollout": {"samples_per_prompt": 2},
        "algorithm": {"advantage": {"estimator": estimator, "gamma": 0.9, **({"lambd": 0.8} if values is not None else {})}},
    })  # fmt: skip
    advantages, _, earned = compute_advantages(
        recipe.algorithm, recipe.reward, rewards.reshape(2, 2), np.array(list(map(len, masks))),
        np.zeros(4, bool), 6, kl=kl, kl_coefficient=0.3, values=values, mask=mask,
    )  # fmt: skip
    shaped = [r - max(0, m.count("#") - 2) / 4 for r, m in zip(rewards, masks, strict=True)]  # overlong: only what it wrote counts
    raw = loops(shaped, masks, kl, 0.3, 0.9, values, 0.8)
    wanted = np.where(mask, (raw - raw[mask].mean()) / raw[mask].std(), 0.0)
    np.testing.assert_allclose(advantages, wanted, rtol=1e-9, atol=1e-12)
    sums = [part.sum() for part in np.split(kl, np.cumsum(list(map(len, masks)))[:-1])]
    np.testing.assert_allclose(earned, [r - 0.3 * k for r, k in zip(shaped, sums, strict=True)], rtol=1e-9)


def test_the_stage_leaves_the_agents_tokens_out() -> None:
    masks: list[str | None] = ["##..#", None, "###", "#.#"]
    samples = []
    for i, one in enumerate(masks):
        length = 4 if one is None else len(one)
        done = Completion(i, np.arange(length, dtype=np.int32), np.arange(length, dtype=np.float32), "stop", 1)
        flags = None if one is None else np.array([c == "#" for c in one])
        samples.append(
            Scored(Prompt(i // 2, "p", (7, 8)), SampleId(i // 2, 1, i % 2), done, reward=[1.0, 3.0, None, 2.0][i], action_mask=flags)
        )
    failed = replace(samples[2].completion, token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0))
    samples[2] = replace(samples[2], completion=failed, action_mask=None)
    recipe = Recipe.parse({
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"samples_per_prompt": 2},
        "algorithm": {"advantage": {"estimator": "flash_reinforce"}},
    })  # fmt: skip
    batch, trained = LearnStage(SimpleNamespace(recipe=recipe), SimpleNamespace()).advantages(samples)  # type: ignore[arg-type]
    assert batch.response_lengths.tolist() == [3, 4, 2] and batch.lengths.tolist() == [7, 6, 5]
    assert batch.logprobs.tolist() == [0, 1, 4, 0, 1, 2, 3, 0, 2]
    assert batch.advantages.tolist() == [-1, -1, -1, 1, 1, 1, 1, 0, 0]
    assert [s.advantage for s in trained] == [s.earned for s in trained] == [-1, 1, None, 0]


def test_branches_are_learned_with_the_advantage_of_their_episode() -> None:
    """They come after the step's own samples, whose advantages they do not change."""
    samples = []
    for i in range(4):
        done = Completion(i, np.arange(3, dtype=np.int32), np.full(3, i, np.float32), "stop", 1)
        samples.append(Scored(Prompt(i // 2, "p", (7, 8)), SampleId(i // 2, 1, i % 2), done, reward=[1.0, 3.0, None, 2.0][i]))
    further = Completion(1, np.array([5, 6, 4], np.int32), np.array([-1, 0, -2], np.float32), "stop", 1)
    flags, name = np.array([True, False, True]), SampleId(0, 1, 1, branch=1)
    branch = Scored(Prompt(0, "p", (7, 9, 9)), name, further, reward=3.0, action_mask=flags)
    samples[1] = replace(samples[1], branches=(branch,))
    recipe = Recipe.parse({
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"samples_per_prompt": 2},
        "algorithm": {"advantage": {"estimator": "flash_reinforce"}},
    })  # fmt: skip
    stage = LearnStage(SimpleNamespace(recipe=recipe), SimpleNamespace())  # type: ignore[arg-type]
    plain, _ = stage.advantages([replace(one, branches=()) for one in samples])
    batch, trained = stage.advantages(samples)
    assert len(trained) == 4 and trained[1].branches == (branch,)
    assert batch.response_lengths.tolist() == [3, 3, 3, 2] and batch.lengths.tolist() == [5, 5, 5, 6]
    assert batch.advantages.tolist() == [*plain.advantages.tolist(), trained[1].advantage, trained[1].advantage]
    assert batch.logprobs.tolist()[-2:] == [-1, -2] and batch.groups.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_the_agents_tokens_have_no_gradient(mean: str) -> None:
    files, batch = tiny_policy(), batch_of(MASKS)
    settings = learner_settings(algorithm={"loss_mean": mean, "importance_cap": 0.0, "clip_low": 0.2, "clip_high": 0.2})
    learner = LearnerRank(settings)
    model = load(files)
    learner.trainer.engine, learner.trainer.backward = TokenLogprobs(model), lambda loss: loss.backward()  # type: ignore[method-assign]
    weights = learner._weights(torch.from_numpy(batch.response_lengths))
    (share,) = Cutter(1, settings.learner.max_micro_batch_tokens, learner.sharing, learner.algorithm).of_update(batch)
    found = learner._backward(share, share.steps[0], None, weights)
    assert found.tokens == 14

    plain, start, flat = load(files), 0, 0
    wrote = [np.ones(4, bool) if m is None else np.array([c == "#" for c in m]) for m in MASKS]
    for k, mask in enumerate(wrote):
        ids = torch.from_numpy(batch.tokens[start : start + 2 + len(mask)])
        logits = plain(ids[None]).logits[0, 1:-1]
        logits.retain_grad()
        logprob = torch.log_softmax(logits, -1)[torch.arange(len(mask)), ids[2:]]
        share = 1 / 14 if mean == "token" else 1 / (4 * mask.sum())
        # at the weights it was drawn with the ratio is 1 and its gradient that of the log-probability
        (-(torch.from_numpy(mask) * logprob).sum() * (k + 1.0) * share).backward()
        assert logits.grad is not None and (logits.grad[~mask] == 0).all() and (logits.grad[mask].abs().sum(1) > 0).all()
        start, flat = start + 2 + len(mask), flat + int(mask.sum())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
