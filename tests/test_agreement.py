"""What is compared between engines and learner, and when: on samples without engines."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.report.progress_panel import line
from rlhfless_ray.report.summary import warnings
from rlhfless_ray.runtime.agreement import SAMPLES, TOKENS, Agreement, compare_mismatch, compute_distances, select_batch
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId, UpdateStats, WeightVersion
from rlhfless_ray.weights.checksum import checksum, combined, damaged, digests, listed
from rlhfless_ray.weights.compare import differing
from rlhfless_ray.weights.tensor_slice import whole_slices


def sample(key: int, length: int, version: int = 0, mask: np.ndarray | None = None) -> Sample:
    tokens = np.arange(length, dtype=np.int32) + 100 * key
    completion = Completion(key, tokens, np.full(length, -1.0 - key, np.float32), "stop", version)
    return Sample(Prompt(key, "", (5, 6, 7)), SampleId(key, 1, 0), completion, action_mask=mask)


def recipe(**sections: Any) -> Recipe:
    return Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, **sections})


class Learner:
    """Of it only what the check asks; it finds every token `apart` nats less likely than the engines, and noise moves it by `moved`."""

    def __init__(self, apart: float, moved: float = 1e-6) -> None:
        self.apart, self.moved, self.asked, self.working, self.ranks, self.slots = apart, moved, [], True, 1, 1
        self.storage = SimpleNamespace(model=self.model)

    def compute(self, what: str, batch: Any, temperature: float, top_p: float, top_k: int, noisy: bool = False) -> dict[str, np.ndarray]:
        if not noisy:
            self.asked.append((batch, temperature, top_p, top_k))
        return {what: batch.logprobs - np.float32(self.apart) + np.float32(noisy * self.moved)}

    def park(self) -> list[str]:
        return ["lease"]

    def model(self) -> bytes:
        raise RunError("no model here")


def agreement(fake: Learner, **sections: Any) -> tuple[Agreement, list[str]]:
    said: list[str] = []
    progress = SimpleNamespace(message=said.append)
    context = SimpleNamespace(recipe=recipe(**sections), broker=SlotBroker(SimpleNamespace()), record=SimpleNamespace(progress=progress))
    return Agreement(context, SimpleNamespace(learner=fake), SimpleNamespace(working=[], parked=[], width=1)), said


def test_a_few_short_beginnings_stand_for_all_samples() -> None:
    batch = select_batch([sample(k, 5 * k) for k in range(40)])
    assert batch is not None and len(batch) == SAMPLES and batch.response_lengths.max() == TOKENS
    keys = batch.tokens[np.cumsum(batch.lengths) - 1] // 100
    assert keys[0] == 1 and keys[-1] == 39 and (np.diff(keys) > 3).all(), "spread over all that wrote something"
    assert select_batch([sample(3, 0)]) is None and select_batch([]) is None


def test_of_an_agents_sample_the_policys_tokens_count() -> None:
    mask = np.zeros(120, bool)
    mask[1::2] = True
    batch = select_batch([sample(1, 120, mask=mask), sample(2, 4)])
    assert batch is not None
    assert batch.response_lengths.tolist() == [TOKENS, 4] and batch.lengths.tolist() == [3 + 2 * TOKENS, 7]
    assert batch.mask is not None and batch.mask[: 2 * TOKENS].sum() == TOKENS


def test_tokens_that_were_drawn_without_ends_are_not_compared() -> None:
    """Before `rollout.min_tokens` no token can end a response, or an agent's turn, so the others are likelier than to the learner."""
    mask = np.array([True] * 5 + [False] * 2 + [True] * 4 + [False])
    batch = select_batch([sample(1, 9), sample(2, 3), sample(3, 12, mask=mask)], min_tokens=3)
    assert batch is not None and batch.mask is not None and len(batch) == 2
    assert batch.mask.tolist() == [False] * 3 + [True] * 6 + [False] * 3 + [True] * 2 + [False] * 5 + [True]
    assert len(batch.logprobs) == 9
    assert select_batch([sample(2, 3)], min_tokens=3) is None
    assert compare_mismatch(UpdateStats(trained_tokens=9, mismatch_mean=1.0), 1e-3, 1.0, min_tokens=3) == {}


def test_the_first_samples_and_those_after_the_first_update_are_checked() -> None:
    learner = Learner(0.0)
    checks, _ = agreement(learner)
    samples = {version: [sample(k, 6, version) for k in range(3)] for version in range(4)}
    versions = [WeightVersion(version, ()) for version in range(4)]
    checks.check(samples[0], versions[0], 0.7, parks=False)
    checks.check(samples[0], versions[0], 0.7, parks=True)
    assert len(learner.asked) == 1 and checks.context.broker.free == ()
    checks.updated(UpdateStats(skipped=1, trained_tokens=9))
    checks.check(samples[1], versions[1], 0.7, parks=False)
    assert len(learner.asked) == 1, "no update was made yet"
    checks.updated(UpdateStats(applied=1, trained_tokens=9))
    checks.check(samples[1], versions[2], 0.7, parks=True)
    assert len(learner.asked) == 1, "these are of older weights than the learner holds"
    checks.check(samples[2], versions[2], 0.0, parks=True)
    assert [asked[1:] for asked in learner.asked] == [(0.7, 1.0, 0), (1.0, 1.0, 0)], "greedy ones have log-probabilities at temperature 1"
    assert checks.context.broker.free == ("lease",)
    checks.updated(UpdateStats(applied=1, trained_tokens=9))
    checks.check(samples[3], versions[3], 0.7, parks=False)
    assert len(learner.asked) == 2


def test_the_first_samples_of_engines_of_another_width_are_checked() -> None:
    learner = Learner(0.0)
    checks, _ = agreement(learner)
    checked = []
    for version, width in enumerate((1, 1, 1, 2, 2, 1)):
        checks.engines.width = width
        checks.check([sample(0, 6, version)], WeightVersion(version, ()), 1.0, parks=False)
        checks.updated(UpdateStats(applied=1, trained_tokens=9))
        checked.append(len(learner.asked))
    assert checked == [1, 2, 2, 3, 3, 4]


def test_samples_that_no_update_compares_are_checked() -> None:
    """While the policy is frozen: a mismatch of 0 of no tokens would look like agreement."""
    learner = Learner(0.0)
    checks, _ = agreement(learner)
    for version in range(3):
        checks.check([sample(0, 6, version)], WeightVersion(version, ()), 1.0, parks=False)
        assert compare_mismatch(UpdateStats(), 1e-3, 1.0) == {}
        checks.updated(UpdateStats())
    assert len(learner.asked) == 3


@pytest.mark.parametrize(("algorithm", "warned"), [({}, [1, None, 1, 1]), ({"remainder": "carry", "batch_samples": 9}, [1, None, None, 1])])
def test_tokens_of_older_weights_are_no_disagreement(algorithm: dict[str, Any], warned: list[int | None]) -> None:
    """Filtered groups that are left over are trained a step later, and then some of them may be carried over to the next step."""
    checks, _ = agreement(Learner(0.0), algorithm=algorithm)
    stats = UpdateStats(trained_tokens=9, mismatch_mean=1.0)
    assert [checks.compare(stats, old).get("learn/mismatch_warning") for old in (False, True, False, False)] == warned


@pytest.mark.parametrize("apart", [0.002, float("nan"), float("inf")])
def test_too_large_a_difference_ends_the_run_or_is_told(apart: float) -> None:
    checks, said = agreement(Learner(apart))
    with pytest.raises(RunError, match=r"do not agree under weight version 0.*tolerance"):
        checks.check([sample(0, 9)], WeightVersion(0, ()), 1.0, parks=False)
    assert said == []
    checks, said = agreement(Learner(apart), rollout={"agreement": "warn"})
    checks.check([sample(0, 9)], WeightVersion(0, ()), 1.0, parks=True)
    assert len(said) == 1 and "do not agree" in said[0] and checks.context.broker.free == ("lease",)


def test_why_no_tensor_is_named_is_told() -> None:
    checks, _ = agreement(Learner(1.0))
    with pytest.raises(RunError, match=r"finding the tensors that differ failed .*no model here"):
        checks.check([sample(0, 9)], WeightVersion(0, ()), 1.0, parks=False)


def test_bfloat16_top_p_and_top_k_have_their_own_tolerance() -> None:
    learner = Learner(0.02)
    checks, _ = agreement(learner, policy={"dtype": "bfloat16"}, learner={"zero_stage": 1}, rollout={"top_p": 0.9, "top_k": 7})
    checks.check([sample(0, 9)], WeightVersion(0, ()), 0.6, parks=False)
    assert learner.asked[0][1:] == (0.6, 0.9, 7), "the learner computes what was sampled from, so no tolerance is needed for what is cut"
    stats = UpdateStats(skipped=1, trained_tokens=9)
    assert compare_mismatch(stats, 0.01, 0.9)["learn/mismatch_tolerance"] == pytest.approx(0.01 - math.log(0.9))
    assert compare_mismatch(UpdateStats(trained_tokens=9, mismatch_mean=1.0), 0.01, 1.0, top_k=7) == {}, "top-k has no such bound"


def test_what_rounding_explains_is_no_disagreement() -> None:
    checks, _ = agreement(Learner(0.01, moved=0.004))
    checks.check([sample(0, 9)], WeightVersion(0, ()), 1.0, parks=False)
    assert checks.tolerance == pytest.approx(0.032, rel=1e-3)
    checks, _ = agreement(Learner(0.01, moved=0.001))
    with pytest.raises(RunError, match=r"differ by 0.01 nats .*float32: 0.008\)"):
        checks.check([sample(0, 9)], WeightVersion(0, ()), 1.0, parks=False)
    edge = np.array([-1.0, -np.inf, -np.inf, -2.0], np.float32)
    assert compute_distances(edge, np.array([-1.5, -3.0, -np.inf, np.nan]), True)[:3].tolist() == [0.5, 1.0, 0.0]
    assert np.isnan(compute_distances(edge, np.array([-1.5, -3.0, -np.inf, np.nan]), True)[3])


def row_of(mismatch: float) -> dict[str, Any]:
    stats = UpdateStats(skipped=1, mismatch_mean=mismatch, trained_tokens=9)
    return {"step": 4, "learn/mismatch_mean": mismatch, **compare_mismatch(stats, 1e-3, 1.0)}


@pytest.mark.parametrize(("mismatch", "warns"), [(0.1, 1), (float("nan"), 1), (1e-5, 0), (0.0, 0)])
def test_every_step_warns_above_the_tolerance(mismatch: float, warns: int) -> None:
    row = row_of(mismatch)
    assert row["learn/mismatch_warning"] == warns
    assert ("mismatch of engine and learner" in line(row, 9)) == bool(warns)
    record: Any = SimpleNamespace(steps=[row_of(1e-6), row], metrics=[], ledger=[], status={})
    assert ("Engines and learner disagree" in [w["title"] for w in warnings(record)]) == bool(warns)


# ---- names of tensors ---------------------------------------------------------------------------------------------


def test_damage_is_told_by_name() -> None:
    weights = {"b": np.arange(4, dtype=np.float32), "a": np.ones((2, 3)), "c": np.zeros((), np.float32)}
    published = digests(whole_slices(weights))
    assert damaged(published, published) == [] and combined(published) == checksum(weights)
    changed = {**weights, "a": weights["a"].reshape(3, 2), "d": weights["c"]}
    del changed["b"]
    assert damaged(digests(whole_slices(changed)), published) == ["a", "b", "d"]
    assert listed([str(i) for i in range(11)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_rows_of_an_engines_parameters_are_traced_to_tensors() -> None:
    layer = "model.layers.0"
    parts = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    shapes = {f"{layer}.self_attn.{name}.weight": (rows, 8) for name, rows in parts.items()}
    shapes |= {f"{layer}.mlp.experts.{e}.{name}.weight": (3, 3) for e in range(12) for name in ("gate_proj", "up_proj", "down_proj")}
    shapes |= {f"{layer}.norm.weight": (8,)}
    fused = {"qkv_proj": list(parts)}
    rng = np.random.default_rng(0)
    wanted = {
        f"{layer}.self_attn.qkv_proj.weight": rng.normal(size=(8, 2)).astype(np.float32),
        f"{layer}.mlp.experts.routed_experts.w13_weight": rng.integers(0, 2**60, 12).astype(np.uint64),
        f"{layer}.mlp.experts.routed_experts.w2_weight": rng.integers(0, 2**60, 12).astype(np.uint64),
        f"{layer}.norm.weight": np.array([5], np.uint64),
        "other.weight": np.array([5, 6], np.uint64),
    }

    def named(name: str, row: int, change: float = 1) -> list[str]:
        found = {key: value.copy() for key, value in wanted.items()}
        found[name][row] += np.array(change).astype(found[name].dtype)
        return differing(found, wanted, shapes, fused)

    qkv, w13 = f"{layer}.self_attn.qkv_proj.weight", f"{layer}.mlp.experts.routed_experts.w13_weight"
    assert named(qkv, 3) == [f"{layer}.self_attn.q_proj.weight"] and named(qkv, 5) == [f"{layer}.self_attn.k_proj.weight"]
    assert named(qkv, 3, 1e-8) == [], "rounding is no difference"
    assert named(w13, 1) == [f"{layer}.mlp.experts.1.{name}.weight" for name in ("gate_proj", "up_proj")]
    assert named(w13.replace("w13", "w2"), 11) == [f"{layer}.mlp.experts.11.down_proj.weight"]
    assert named(f"{layer}.norm.weight", 0) == [f"{layer}.norm.weight"] and named("other.weight", 1) == ["other.weight"]
    assert differing({}, {"gone.weight": np.array([1], np.uint64)}, shapes, fused) == ["gone.weight"]
