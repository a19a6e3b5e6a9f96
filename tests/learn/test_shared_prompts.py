"""Responses that share a row with their prompt: the same log-probabilities, values and gradients as in rows of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.learn.micro_batches import SHARING_FAMILIES, PromptSharing, micro_batches
from rlhfless_ray.learn.packing import shared
from rlhfless_ray.learn.policy_model import TokenLogprobs, TokenValues, as_sampled

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from families import DENSE, ORDER, VOCABULARY, config

SHARING = [family for family in (*ORDER, *DENSE) if config(family).model_type in SHARING_FAMILIES]
SEE_IMAGES = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}  # tests/learn/test_image_inputs.py has them
CPU = torch.device("cpu")


def model_of(family: str, seed: int = 0) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return as_sampled(model)


def batch_of(prompts: list[int], responses: list[list[int]], seed: int = 0, masked: bool = False) -> Batch:
    """A batch with prompts and responses of these lengths, of random tokens."""
    rng = np.random.default_rng(seed)
    rows, masks = [], []
    for group, (prompt, lengths) in enumerate(zip(prompts, responses, strict=True)):
        ids = tuple(rng.integers(2, VOCABULARY, prompt).tolist())
        for length in lengths:
            rows.append((ids, rng.integers(2, VOCABULARY, length), np.zeros(length, np.float32), 1.0, group))
            masks.append(rng.random(length) < 0.6 if masked else None)
    return Batch.of(rows, masks)


def results(model: Any, batch: Batch, max_tokens: int, sharing: PromptSharing | None) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """Log-probabilities of the batch, the gradients of their weighted sum, and the tokens that were computed."""
    model.zero_grad()
    policy, computed = TokenLogprobs(model), 0
    found = torch.zeros(len(batch.logprobs))
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(batch.logprobs))).float()
    for cut in micro_batches(batch, np.arange(len(batch)), max_tokens, sharing):
        tensors = padded(batch, cut, CPU)
        logprobs, _ = policy(0.7, **tensors)
        (logprobs * weights[tensors["flat"]]).sum().backward()
        found[tensors["flat"]] = logprobs.detach()
        computed += tensors["ids"].numel()
    return found.numpy(), {name: x.grad.numpy().copy() for name, x in model.named_parameters() if x.grad is not None}, computed


@pytest.mark.parametrize("masked", [False, True], ids=["every token", "turns of an agent"])
@pytest.mark.parametrize("family", SHARING)
def test_every_family_computes_the_same_in_shared_rows(family: str, masked: bool) -> None:
    model = model_of(family)
    sharing = PromptSharing.of(model)
    assert sharing.obstacle == ""
    window = sharing.window or 100
    batch = batch_of([5, 9, 4, 6], [[3, 7, 1, 4], [2, 5], [6], [4, 4, 4]], masked=masked)
    assert batch.lengths.max() <= window
    alone, gradients_alone, tokens_alone = results(model, batch, 64, None)
    shared, gradients, tokens = results(model, batch, 64, sharing)
    assert tokens < 0.8 * tokens_alone
    np.testing.assert_allclose(shared, alone, atol=2e-5)
    assert gradients.keys() == gradients_alone.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, gradients_alone[name], atol=2e-5 * max(1.0, np.abs(gradients_alone[name]).max()), err_msg=name)


def test_the_families_that_share_are_the_ones_tested_here() -> None:
    assert {config(family).model_type for family in SHARING} == SHARING_FAMILIES - SEE_IMAGES


def test_responses_do_not_see_each_other() -> None:
    """A changed response changes no log-probability of the others in its row."""
    model = model_of("qwen2")
    batch = batch_of([6], [[5, 5, 5]])
    before, _, _ = results(model, batch, 64, PromptSharing.of(model))
    tokens = batch.tokens.copy()
    tokens[11 + 6 : 11 + 11] = 7  # the second sequence's response
    after, _, _ = results(model, Batch(**{**vars(batch), "tokens": tokens}), 64, PromptSharing.of(model))
    assert np.array_equal(before[[*range(5), *range(10, 15)]], after[[*range(5), *range(10, 15)]])
    assert not np.array_equal(before[5:10], after[5:10])


def test_values_of_a_critic_are_the_same() -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    shape = config("llama")
    shape.num_labels = 1
    model = as_sampled(AutoModelForSequenceClassification.from_config(shape))
    critic, batch = TokenValues(model), batch_of([5, 8], [[3, 6, 2], [4, 4]])
    found = []
    for sharing in (None, PromptSharing.of(model)):
        values = torch.zeros(len(batch.logprobs))
        for cut in micro_batches(batch, np.arange(5), 64, sharing):
            tensors = padded(batch, cut, CPU)
            values[tensors["flat"]] = critic(**tensors).detach()
        found.append(values.numpy())
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_sequences_beyond_the_window_have_rows_of_their_own() -> None:
    batch = batch_of([100], [[7, 3]])
    every = np.arange(2)
    assert [len(row) for cut in micro_batches(batch, every, 200, PromptSharing(64, window=107)) for row in cut] == [2]
    assert [len(row) for cut in micro_batches(batch, every, 200, PromptSharing(64, window=106)) for row in cut] == [1, 1]


def test_only_equal_prompts_share() -> None:
    """A group whose members differ in their prompts, as an agent may return, is not put into one row."""
    batch = batch_of([90, 90], [[3, 3], [3, 3]])
    one_group = Batch(**{**vars(batch), "groups": np.zeros(4, np.int64)})
    rows = [sorted(row.tolist()) for cut in micro_batches(one_group, np.arange(4), 100, PromptSharing(64)) for row in cut]
    assert sorted(rows) == [[0, 1], [2, 3]]


def test_off_and_dropout_and_other_families_keep_rows_of_their_own() -> None:
    model, batch = model_of("qwen2"), batch_of([20], [[3, 3, 3]])
    assert PromptSharing.of(model).obstacle == ""
    for sharing in (PromptSharing.of(model, "off"), PromptSharing.of(model, "auto", 0.1)):
        assert sharing.obstacle and [len(rows) for rows in micro_batches(batch, np.arange(3), 100, sharing)] == [3]
    model.config.model_type = "rwkv"
    assert PromptSharing.of(model).obstacle == "not tested with models of type rwkv"


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_are_a_partition_and_keep_the_budget(ranks: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        groups = np.repeat(np.arange(5), rng.integers(1, 20, 5))
        groups = groups[rng.permutation(len(groups))]
        prompts = rng.integers(1, 400, 5)[groups]
        lengths = prompts + rng.integers(1, 400, len(groups))
        budget, width = int(rng.integers(100, 4000)), int(rng.integers(32, 2000))
        dealt = shared(prompts, lengths, groups, budget, width, ranks)
        assert len(dealt) == ranks and len({len(mine) for mine in dealt}) == 1
        parts = [rows for mine in dealt for rows in mine if rows]
        assert sorted(np.concatenate([row for rows in parts for row in rows]).tolist()) == list(range(len(groups)))
        for rows in parts:
            assert all(len(set(groups[row].tolist())) == 1 and (np.diff(row) > 0).all() for row in rows)
            sizes = [prompts[row[0]] + (lengths[row] - prompts[row]).sum() for row in rows]
            assert len(rows) * max(sizes) <= budget or len(rows) == len(rows[0]) == 1


def test_groups_share_rows_where_that_pays() -> None:
    ones, four = np.ones(16, np.int64), np.repeat(np.arange(4), 4)

    def sizes(groups: np.ndarray, prompt: int, response: int, budget: int, ranks: int = 1) -> list[list[list[int]]]:
        dealt = shared(prompt * ones, (prompt + response) * ones, groups, budget, 896, ranks)
        return [[[len(row) for row in rows] for rows in mine] for mine in dealt]

    assert sizes(four, 200, 64, 1200) == [[[4, 4], [4, 4]]]
    assert sizes(four, 200, 64, 400) == [[[2]] * 8], "a whole group exceeds the budget"
    assert sizes(0 * four, 200, 64, 10_000, 4) == [[[4]]] * 4, "every rank has work"
    assert all(len(row) == 1 for rows in shared(ones, 65 * ones, four, 1200, 896)[0] for row in rows), "a tenth is not saved"


def test_long_responses_to_a_short_prompt_stay_apart() -> None:
    """Attention over one long row would cost more than the prompts save."""
    one = np.zeros(8, np.int64)
    rows = [len(row) for part in shared(np.full(8, 20), np.full(8, 4000), one, 100_000, 1024)[0] for row in part]
    assert rows == [1] * 8
    rows = [len(row) for part in shared(np.full(8, 3000), np.full(8, 4000), one, 100_000, 1024)[0] for row in part]
    assert 1 < max(rows) < 8


def test_ten_thousand_sequences_take_little_time() -> None:
    rng = np.random.default_rng(0)
    lengths = 100 + rng.integers(1, 800, 10_000)
    began_s = time.process_time()
    shared(np.full(10_000, 100), lengths, np.arange(10_000) // 8, 16_384, 896, 8)
    assert time.process_time() - began_s < 5
