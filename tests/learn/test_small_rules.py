"""KL controllers, dynamic filtering and DeepSpeed's configuration."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.learn.deepspeed_setup import deepspeed_config, import_muon, parameter_groups
from rlhfless_ray.learn.group_filter import kept_groups
from rlhfless_ray.learn.kl_controller import AdaptiveKL, FixedKL
from rlhfless_ray.recipe import LearnerConfig


@given(st.lists(st.floats(0, 20), max_size=6), st.integers(1, 1000))
def test_adaptive_controller_is_the_product_of_its_steps(kls: list[float], samples: int) -> None:
    controller, expected = AdaptiveKL(0.2, target=6.0, horizon=10_000), 0.2
    for kl in kls:
        controller = controller.after(kl, samples)
        expected *= 1 + float(np.clip(kl / 6 - 1, -0.2, 0.2)) * samples / 10_000
    assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_controllers_steer_and_can_be_saved() -> None:
    start = AdaptiveKL(0.1, target=1.0)
    assert start.after(5.0, 512).coefficient == pytest.approx(0.1 * (1 + 0.2 * 512 / 10_000))
    assert start.after(0.0, 512).coefficient < 0.1 == start.after(1.0, 512).coefficient
    later = start.after(1.1, 64)
    assert AdaptiveKL(**json.loads(json.dumps(asdict(later)))) == later
    assert start.after(math.nan, 512) == start.after(math.inf, 512) == start, "or the coefficient would be no number for ever"
    fixed = FixedKL(0.01)
    assert fixed.after(100.0, 512) == fixed


@given(
    st.lists(st.lists(st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from([(0.0, 1.0), (0.1, 0.5), (-1.0, 0.5)]),
)
@settings(max_examples=200, deadline=None)
def test_groups_strictly_inside_are_kept(scores: list[list[float]], bounds: tuple[float, float]) -> None:
    from fractions import Fraction

    found = kept_groups(np.array(scores), *bounds)
    for group, kept in zip(scores, found.tolist(), strict=True):
        known = [Fraction(s) for s in group if not math.isnan(s)]
        exact = sum(known) / len(known) if known else None
        assert kept == (exact is not None and Fraction(bounds[0]) < exact < Fraction(bounds[1]))


def test_equal_scores_at_a_bound_are_not_kept_whatever_the_rounding() -> None:
    for count in range(1, 40):
        scores = np.full((1, count), 0.1)
        assert not kept_groups(scores, 0.1, 1.0)[0] and not kept_groups(scores, 0.0, 0.1)[0]


def test_filter_edges() -> None:
    assert kept_groups(np.zeros((0, 4))).shape == (0,)
    assert not kept_groups(np.zeros((3, 0))).any()
    assert kept_groups(np.array([[True, False], [True, True]])).tolist() == [True, False]


def test_zero_1_of_bfloat16_is_zero_2() -> None:
    """DeepSpeed's ZeRO 1 would add up gradients in bfloat16. The cases of the learner therefore have no ZeRO 1 in bfloat16."""
    one, two = (LearnerConfig(zero_stage=stage) for stage in (1, 2))
    assert deepspeed_config(one, "bfloat16", "cpu") == deepspeed_config(two, "bfloat16", "cpu")
    assert deepspeed_config(one, "float32", "cpu") != deepspeed_config(two, "float32", "cpu")


def test_norms_are_not_decayed_whatever_their_name() -> None:
    from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

    falcon = FalconConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, new_decoder_architecture=True)
    for model in (GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=1, n_head=2)), FalconForCausalLM(falcon)):
        decayed, spared = parameter_groups(model, decay_all=False)
        assert all(p.ndim == 2 for p in decayed["params"]) and all(p.ndim == 1 for p in spared["params"])
        assert "weight_decay" not in decayed and spared["weight_decay"] == 0
        assert len(parameter_groups(model, decay_all=True)) == 1


def test_kernels_of_an_optimizer_that_is_never_used_are_not_compiled() -> None:
    import_muon()
    from deepspeed.runtime.zero.muon import original_muon

    assert not hasattr(original_muon.muon_update, "_torchdynamo_orig_callable"), "what torch.compile returns has its function there"
