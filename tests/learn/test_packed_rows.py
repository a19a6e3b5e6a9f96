"""Sequences that lie end to end in one row: the same log-probabilities and gradients as in rows of their own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn import packed_attention
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batch_tensors import packed, padded
from rlhfless_ray.learn.micro_batches import SHARING_FAMILIES, PromptSharing
from rlhfless_ray.learn.packing import Units, end_to_end
from rlhfless_ray.learn.packing import padded as pad_rows
from rlhfless_ray.learn.policy_model import TokenDistillation, TokenLogprobs
from rlhfless_ray.supervise.examples import cut_rows

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
sys.path.append(str(Path(__file__).parent))
from families import DENSE, ORDER, config
from test_shared_prompts import batch_of, model_of

PACKING = [family for family in (*ORDER, *DENSE) if config(family).model_type in SHARING_FAMILIES]
SEE_IMAGES = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}  # tests/learn/test_image_inputs.py has them
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 60), max_size=40).map(lambda x: np.array(x, np.int64))


def results(model: Any, batch: Batch, *, packs: bool, checkpoints: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the batch, and the gradients of their weighted sum."""
    model.zero_grad()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    every = np.arange(len(batch))
    tensors = packed(batch, every, CPU) if packs else padded(batch, every, CPU)
    assert tensors["ids"].numel() == (batch.lengths.sum() if packs else len(batch) * batch.lengths.max())
    logprobs, _ = TokenLogprobs(model)(0.7, **tensors)
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(batch.logprobs))).to(logprobs.dtype)
    (logprobs * weights[tensors["flat"]]).sum().backward()
    found = torch.zeros_like(weights)
    found[tensors["flat"]] = logprobs.detach()
    return found, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("masked", [False, True], ids=["every token", "some tokens"])
@pytest.mark.parametrize("family", PACKING)
def test_every_family_computes_the_same_in_a_packed_row(family: str, masked: bool) -> None:
    """Also layers with a window, of which some sequences are longer."""
    shape = config(family)
    batch = batch_of([5, 9, 4, 1, 30], [[3, 7], [2], [6], [1], [14]], masked=masked)
    if (getattr(shape, "sliding_window", None) or 100) < 100:
        batch = batch_of([5, 9, 4, shape.sliding_window], [[3, 7], [2], [6], [14]], masked=masked)
    model = model_of(family).double()  # so that 1e-6 shows more than rounding
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # others have no float64
    alone, gradients_alone = results(model, batch, packs=False)
    packed_attention.install(model)
    found, gradients = results(model, batch, packs=True)
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == gradients_alone.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradients_alone[name].abs().max()))
        torch.testing.assert_close(gradient / scale, gradients_alone[name] / scale, rtol=0, atol=1e-6, msg=name)


def test_the_families_that_pack_are_the_ones_tested_here() -> None:
    assert {config(family).model_type for family in PACKING} == SHARING_FAMILIES - SEE_IMAGES


def test_sequences_do_not_see_each_other() -> None:
    """A changed sequence changes no log-probability of the others in its row."""
    model = model_of("qwen2")
    packed_attention.install(model)
    batch = batch_of([6, 5, 7], [[5], [4], [6]])
    before, _ = results(model, batch, packs=True)
    tokens = batch.tokens.copy()
    tokens[11:20] = 7  # the second sequence
    after, _ = results(model, Batch(**{**vars(batch), "tokens": tokens}), packs=True)
    kept = [*range(5), *range(9, 15)]
    assert torch.equal(before[kept], after[kept]) and not torch.equal(before[5:9], after[5:9])


def test_padded_rows_and_recomputed_activations_are_the_same_with_this_attention() -> None:
    batch = batch_of([5, 9, 4, 20], [[3], [2], [6], [14]])
    model = model_of("gemma3")
    alone, gradients_alone = results(model, batch, packs=False)
    packed_attention.install(model)
    for packs, checkpoints in ((False, False), (True, True)):
        found, gradients = results(model, batch, packs=packs, checkpoints=checkpoints)
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, gradients_alone[name], rtol=1e-4, atol=1e-4)


def test_a_packed_row_has_the_experts_of_its_tokens() -> None:
    batch = batch_of([5, 9, 4], [[3], [2], [6]])
    experts = np.arange(2 * len(batch.tokens), dtype=np.uint8).reshape(-1, 1, 2)
    assert np.array_equal(packed(replace(batch, experts=experts), np.arange(3), CPU)["experts"][0], experts)


def test_a_teacher_sees_packed_rows_as_the_policy_does() -> None:
    batch, every = batch_of([5, 9, 4], [[3], [2], [6]]), np.arange(3)
    module = TokenDistillation(model_of("llama"), model_of("qwen2", seed=1))
    apart = module(**(tensors := padded(batch, every, CPU)))
    for model in (module.model, *module.teachers):
        packed_attention.install(model)
    together = module(**(joined := packed(batch, every, CPU)))
    assert torch.equal(tensors["flat"], joined["flat"])
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@given(LENGTHS, st.integers(1, 200), st.sampled_from([16, 128, 1024]), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_micro_batches_are_a_partition_and_keep_the_budget(lengths: np.ndarray, budget: int, width: int, ranks: int) -> None:
    dealt = end_to_end(Units(lengths), budget, width, ranks)
    if dealt is None:
        return
    assert len(dealt) == ranks and len({len(mine) for mine in dealt}) == 1
    parts = [part for mine in dealt for part in mine if len(part)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts or [np.empty(0, np.int64)])), np.arange(len(lengths)))
    assert all(lengths[part].sum() <= budget or len(part) == 1 for part in parts)


def test_rows_are_packed_where_that_saves_more_than_calls_of_attention_cost() -> None:
    rng = np.random.default_rng(0)
    spread = np.clip(rng.lognormal(4.0, 0.8, 32), 8, 200).astype(np.int64)
    (parts,) = end_to_end(Units(spread), 1024, 896) or [[]]
    assert len(parts) == -(-int(spread.sum()) // 1024)
    loads = [int(spread[part].sum()) for part in parts]
    assert max(loads) <= 1.1 * min(loads)
    assert end_to_end(Units(np.full(32, 32)), 1024, 64) is None, "nothing to save"
    assert end_to_end(Units(spread), 1024, 16) is None, "a narrow model computes padding quickly"
    assert len(pad_rows(spread, 1024)[0]) > len(parts)


def test_rows_that_are_not_packed_keep_their_larger_micro_batches() -> None:
    batch = batch_of([50] * 32, [[14]] * 32)
    every = np.arange(32)[:, None]
    assert [len(rows) for rows in cut_rows(batch, every, 8192, PromptSharing(64), packed_tokens=512).micro_batches] == [32]
    assert [len(rows) for rows in cut_rows(batch, every, 512, PromptSharing(64), packed_tokens=512).micro_batches] == [8] * 4
