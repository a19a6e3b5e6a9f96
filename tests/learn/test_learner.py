"""The learner gang against an independent reference, with every number of ranks and ZeRO stage.

All runs happen once, in the `cases` fixture; the tests here compare what came out.
"""

from __future__ import annotations

import copy
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_reference import Reference, load, logprobs, sequences
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from rlhfless_ray.learn.kl_estimators import token_kl
from rlhfless_ray.learn.micro_batches import PromptSharing, micro_batches
from rlhfless_ray.learn.rank_state import read_state
from rlhfless_ray.weights.shards import shard_name
from rlhfless_ray.weights.tensor_file import as_tensor
from tests.learn.conftest import STAGES, VARIANTS, Cases, marked

Weights = dict[str, np.ndarray]
FLOAT32 = (
    *("plain", "full", "shared", "shared gspo", "few", "tied", "chunked", "uncorrected", "gspo", "gspo sampler", "shuffled", "masked"),
    *("kl in reward", "own means", "carried"),
)
SAME_AS_PLAIN = ("wide", "narrow", "recompute", "hosted")


@pytest.fixture(scope="module")
def expected(cases: Any) -> Any:
    """name → (first weights, [weights after each update], [stats of each update], master weights) of the reference."""

    @lru_cache
    def of(name: str) -> tuple[Weights, list[Weights], list[list[dict[str, float]]], list[Weights]]:
        first = cases.first(1)
        case = first["plain/0" if name == "nan" else "bf16/2" if name == "bf16" else f"{name}/0"]
        batches = [case["batches"][0], case["batches"][2]] if name == "nan" else case["batches"]
        reference = Reference(case["files"], case["settings"])
        start, weights, masters, stats = reference.weights(), [], [], []
        for batch in batches:
            stats.append(reference.update(batch))
            weights.append(reference.weights())
            masters.append({n: p.detach().numpy().copy() for n, p in reference.master.items()})
        return start, weights, stats, masters

    return of


def distance(found: Weights, wanted: Weights, start: Weights) -> float:
    """How far apart, as a share of how far the run has moved from its start."""
    assert found.keys() == wanted.keys()
    apart = sum(float(np.square(found[k].astype(np.float64) - wanted[k]).sum()) for k in wanted)
    moved = sum(float(np.square(start[k].astype(np.float64) - wanted[k]).sum()) for k in wanted)
    return (apart / moved) ** 0.5


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[k], wanted[k]) for k in wanted)


def of_kinds(*kinds: str) -> list[Any]:
    """Parameters `name` and `ranks`: every case of these kinds."""
    return marked(*(f"{kind}/{stage}" for kind in kinds for stage in STAGES.get(kind, (0,))))


@pytest.mark.parametrize(("name", "ranks"), of_kinds(*FLOAT32, *SAME_AS_PLAIN))
def test_updates_equal_the_reference(cases: Any, expected: Any, name: str, ranks: int) -> None:
    """Whatever the ranks, the ZeRO stage and the micro-batches: weights after every update, loss, norm, clipping.

    Adam divides a gradient by its own size: where that is hardly more than rounding, so is the weight's change. Three instruction
    sets gave 4e-5 to 2e-4 for the distance; a wrong factor or a lost token gives 1e-2 and more."""
    kind = name.split("/")[0]
    start, weights, stats, _ = expected("plain" if kind in SAME_AS_PLAIN else kind)
    if kind in ("wide", "narrow", "recompute"):
        weights, stats = weights[:2], stats[:2]
    found = cases.result(name, ranks)
    for got, wanted in zip(found["weights"], weights, strict=True):
        assert distance(got, wanted, start) < 1e-3
        assert max(np.abs(got[k] - wanted[k]).max() for k in wanted) < 2e-4  # an Adam step is up to 1e-3
    for got, wanted in zip(found["stats"], stats, strict=True):
        assert got.loss == pytest.approx(np.mean([w["loss"] for w in wanted]), abs=1e-5)
        assert got.grad_norm == pytest.approx(np.mean([w["grad_norm"] for w in wanted]), rel=1e-5)
        assert got.learning_rate == pytest.approx(np.mean([w["learning_rate"] for w in wanted]), rel=1e-9)
        assert got.next_learning_rate == pytest.approx(wanted[-1]["next_rate"], rel=1e-9)
        assert got.last_grad_norm == pytest.approx(wanted[-1]["grad_norm"], rel=1e-5)
        assert got.clip_share == pytest.approx(np.mean([w["clip_share"] for w in wanted]), abs=0.01)
        assert got.importance_mean == pytest.approx(np.mean([w["importance"] for w in wanted]), rel=1e-4)
        assert got.mismatch_mean == pytest.approx(np.mean([w["mismatch"] for w in wanted]), rel=1e-4)
        assert got.mismatch_max == pytest.approx(max(w["mismatch_max"] for w in wanted), rel=1e-4)
        assert got.importance_capped_share == pytest.approx(np.mean([w["capped"] for w in wanted]), abs=0.01)
        for field in ("ppo_kl", "sampler_kl", "reference_gap"):
            assert getattr(got, field) == pytest.approx(np.mean([w[field] for w in wanted]), rel=1e-3, abs=2e-5), field
        assert got.trained_tokens == sum(w["tokens"] for w in wanted)
        assert (got.skipped, got.reason) == (0, "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shared_case_shares_rows(cases: Any, ranks: int) -> None:
    config = json.loads(cases.files["config.json"])
    for batch in cases.long:
        cuts = micro_batches(batch, np.arange(len(batch)), 200, PromptSharing(config["hidden_size"]), 0, ranks)
        assert len(cuts) > 1 and max(len(row) for rows in cuts for row in rows) > 1


def test_the_cases_have_teeth(cases: Any, expected: Any) -> None:
    """Ratios are clipped, gradients are clipped, importance weights are capped, and the KL term has a value."""
    stats = cases.result("full/0", 1)["stats"]
    assert min(s.clip_share for s in stats) > 0.05
    assert min(s.grad_norm for s in stats) > 10 * 0.1
    assert min(s.importance_capped_share for s in stats) > 0.05
    assert stats[-1].kl > 1e-4
    assert stats[-1].loss == pytest.approx(stats[-1].policy_loss + 0.3 * stats[-1].kl, abs=1e-6)
    start, weights, _, _ = expected("plain")
    assert distance(expected("full")[1][-1], weights[-1], start) > 0.1


def test_ranks_agree_on_what_happened(cases: Any) -> None:
    for name, found in cases.results[2][0].items():
        other = cases.result(name, 2, rank=1)
        assert repr(found["stats"]) == repr(other["stats"])
        for shards in zip(cases.result(name, 2)["shards"], other["shards"], strict=True):
            sizes = [sum(values.size for values in shard.values()) for shard in shards]
            assert sum(sizes) == sum(array.size for array in other["weights"][0].values()), "no element is published twice"
            assert min(sizes) > 0, "the ranks share the work"
            if all(piece.end - piece.start < math.prod(piece.shape) for piece in shards[0]):
                assert max(sizes) - min(sizes) <= len(shards[0]), "each has an even part of each tensor"


@pytest.mark.parametrize(("name", "ranks"), of_kinds("nan", "bf16 nan", "hosted nan"))
def test_a_non_finite_update_is_skipped_and_counted(cases: Any, expected: Any, name: str, ranks: int) -> None:
    found = cases.result(name, ranks)
    stats, weights = found["stats"], found["weights"]
    assert [s.skipped for s in stats] == [0, 1, 0]
    assert "not finite" in stats[1].reason and stats[1].trained_tokens == 0
    assert same(weights[1], weights[0])
    assert not same(weights[2], weights[1])
    if not name.startswith("bf16"):  # afterwards all goes on as if the batch had never been: moments, schedule, step count
        start, wanted, _, _ = expected("nan")
        assert distance(weights[2], wanted[1], start) < 1e-4


@pytest.mark.parametrize(("name", "ranks"), of_kinds("infinite", "infinite hosted"))
def test_an_infinite_loss_is_skipped_though_its_gradient_is_finite(cases: Any, name: str, ranks: int) -> None:
    found, wanted = cases.result(name, ranks), cases.result("infinite/0", 1)
    assert [(s.skipped, s.reason) for s in found["stats"]] == [(0, ""), (1, "the loss is not finite"), (0, "")]
    assert np.isfinite(wanted["stats"][1].grad_norm)
    assert same(found["weights"][1], found["weights"][0])
    assert distance(found["weights"][2], wanted["weights"][2], published_names(cases.files)) < 3e-4


@pytest.mark.parametrize(("name", "ranks"), marked("nan sampler/0"))
def test_spoilt_sampler_and_empty_batch_are_skipped_too(cases: Any, name: str, ranks: int) -> None:
    found = cases.result(name, ranks)
    assert [s.skipped for s in found["stats"]] == [1, 1]
    assert found["stats"][1].reason == "no sample of the step has a reward"
    assert same(found["weights"][0], {k: v.astype(np.float32) for k, v in published_names(cases.files).items()})


def published_names(files: dict[str, bytes]) -> Weights:
    return {name: tensor.float().numpy() for name, tensor in load_tensors(files["model.safetensors"]).items()}


@pytest.mark.parametrize(("name", "ranks"), marked("bf16/2", "bf16/3", "lora/2", "lora/3"))
def test_an_offloaded_update_is_the_same(cases: Any, name: str, ranks: int) -> None:
    """DeepSpeed is told, and makes the update that it makes on the device: see also the cases `hosted` of the other tests."""
    plain, hosted = (cases.result(name.replace("/", f"{way}/"), ranks) for way in ("", " hosted"))
    assert (plain["hosted"], hosted["hosted"]) == (False, True)
    start = published_names(cases.first(ranks)[name]["files"])
    for got, wanted in zip(hosted["weights"], plain["weights"], strict=True):
        assert distance(got, wanted, start) < (0.1 if name.startswith("bf16") else 3e-4)
    for got, wanted in zip(hosted["stats"], plain["stats"], strict=True):
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=0.01 if name.startswith("bf16") else 1e-4)


def variant(name: str, what: str) -> str:
    return name.replace("/", f" {what}/")


def with_base(cases: Any, name: str, ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was found in the case that a variant is compared with, and in the variant."""
    kind, _, stage = name.partition("/")
    return cases.result(f"{VARIANTS.sub('', kind)}/{stage}", ranks), cases.result(name, ranks)


def read_whole(state: Any, name: str, shape: torch.Size) -> np.ndarray:
    return state["moments"][name].reshape(shape)


def whole_weights(state: Any, files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    shapes = {name: tensor.shape for name, tensor in load_tensors(files["model.safetensors"]).items()}
    return {name: as_tensor(state["weights"][name]).view(shapes[name]) for name in state["weights"]}


@pytest.mark.parametrize(("name", "ranks"), of_kinds("bf16"))
def test_bfloat16_keeps_float32_weights_behind(cases: Any, expected: Any, name: str, ranks: int) -> None:
    """Updates far below bfloat16's step must add up: compared are the float32 weights of the snapshot, and what is
    published after each update, which is their rounding."""
    start, weights, _, masters = expected("bf16")
    found = cases.result(name, ranks)
    assert found["adds_in"] == torch.float32, "many small gradients would be lost in a sum of bfloat16"
    state = read_state(found["snapshots"][1])
    weights_behind = whole_weights(state, cases.first(ranks)[name]["files"])
    named = [key.removeprefix("master.") for key in state["moments"] if key.startswith("master.")]
    master = {name: read_whole(state, f"master.{name}", weights_behind[name].shape) for name in named}
    assert distance(master, masters[0], start) < 0.1
    assert same({k: v.float().numpy() for k, v in weights_behind.items()}, found["weights"][0])
    for tensor, value in master.items():
        np.testing.assert_array_equal(found["weights"][0][tensor], torch.tensor(value).bfloat16().float().numpy())
    assert distance(found["weights"][-1], weights[-1], start) < 0.15


@pytest.mark.parametrize(("name", "ranks"), of_kinds("kl in reward"))
def test_what_the_gang_sees_before_a_step(cases: Any, expected: Any, name: str, ranks: int) -> None:
    """Log-probabilities of every token under the weights of the moment and under those that the run began with, and their KL."""
    case = cases.first(1)["kl in reward/0"]
    reference = Reference(case["files"], case["settings"])
    for rank in range(ranks):
        found = cases.result(name, ranks, rank)
        moved = copy.deepcopy(reference.model)
        told = zip(found["logprobs"], found["reference"], strict=True)
        for batch, (of_learner, first), after in zip(case["batches"], told, expected("kl in reward")[1], strict=True):
            policy, kl = of_learner["old"], token_kl(of_learner["old"], first, "k2")
            with torch.no_grad():
                now, start = (torch.cat([logprobs(m, s, 1.0) for s in sequences(batch)]) for m in (moved, reference.start))
            np.testing.assert_allclose(policy, now, atol=2e-5)
            np.testing.assert_allclose(first, start, atol=2e-5)
            np.testing.assert_allclose(kl, (now - start) ** 2 / 2, atol=2e-5)
            moved.load_state_dict({k: torch.from_numpy(v) for k, v in after.items()})
        assert kl.max() > 1e-4


@pytest.mark.parametrize(("name", "ranks"), of_kinds("averaged"))
def test_the_average_of_the_weights_is_kept_and_goes_on(cases: Any, name: str, ranks: int) -> None:
    found, plain = (cases.result(one, ranks) for one in (name, name.replace("averaged", "plain")))
    assert all(same(a, b) for a, b in zip(found["weights"], plain["weights"], strict=True))
    average = published_names(cases.files)
    for done, weights in enumerate(found["weights"], 1):
        average = {name: 0.6 * mean + 0.4 * weights[name] for name, mean in average.items()}
        if done in found["snapshots"]:
            shards = {name: load_tensors(content) for name, content in found["snapshots"][done].items() if name.startswith("ema")}
            assert sorted(shards) == [shard_name("ema", rank, ranks) for rank in range(ranks)]
            kept = {name: tensor for of_rank in shards.values() for name, tensor in of_rank.items()}
            assert kept.keys() == average.keys() and len(kept) == sum(map(len, shards.values()))
            assert max(float(np.abs(kept[n].numpy() - average[n]).max()) for n in average) < 1e-6
    if name == "averaged/3":  # a run on one rank at ZeRO 0 that goes on from what two ranks left
        kept = load_tensors(cases.result("averaged/3 of 2 at 0 after 1", 1)["snapshots"][2]["ema.safetensors"])
        assert max(float(np.abs(kept[n].numpy() - average[n]).max()) for n in average) < 3e-5


@pytest.mark.parametrize(("name", "ranks"), marked(*(variant(name, "passed") for name in Cases.PASSED)))
def test_passes_that_came_ahead_in_parts_make_the_same_updates(cases: Any, expected: Any, name: str, ranks: int) -> None:
    """Log-probabilities of the old policy and of the reference, of parts of the samples: all later optimizer steps are the same, to
    rounding."""
    whole, parts = with_base(cases, name, ranks)
    start = published_names(cases.files)
    for got, wanted in zip(parts["weights"], whole["weights"], strict=True):
        assert distance(got, wanted, start) < 3e-4
    for got, wanted in zip(parts["stats"], whole["stats"], strict=True):
        for field in ("loss", "kl", "grad_norm", "clip_share", "importance_mean", "mismatch_mean"):
            assert getattr(got, field) == pytest.approx(getattr(wanted, field), rel=1e-4, abs=1e-5), field
    for got, steps in zip(parts["stats"], expected(name.split(" passed")[0])[2], strict=True):
        assert got.reference_gap == pytest.approx(np.mean([w["reference_gap"] for w in steps]), rel=1e-3, abs=2e-5)


@pytest.mark.parametrize(("name", "ranks"), marked(*(variant(name, "parked") for name in Cases.PARKED)))
def test_leaving_the_device_and_returning_changes_nothing(cases: Any, name: str, ranks: int) -> None:
    """Bit by bit; and the snapshot taken while away is the one before. Moving ZeRO's module would part it from its buffers."""
    stayed, parked = with_base(cases, name, ranks)
    assert repr(parked["stats"]) == repr(stayed["stats"])
    assert all(same(a, b) for a, b in zip(parked["weights"], stayed["weights"], strict=True))
    assert parked["snapshots"][1] == stayed["snapshots"][1] == parked["snapshots"]["1 away"]


@pytest.mark.parametrize(("name", "ranks"), marked(*(variant(name, "reads") for name in Cases.READS)))
def test_reading_the_published_weights_changes_nothing(cases: Any, name: str, ranks: int) -> None:
    """Bit by bit, also after a skipped update, which leaves the rank without weights of its own. So does a snapshot meanwhile."""
    own, read = with_base(cases, name, ranks)
    assert repr(read["stats"]) == repr(own["stats"])
    assert all(same(a, b) for a, b in zip(read["weights"], own["weights"], strict=True))
    for file, content in own["snapshots"].get(1, {}).items():
        assert read["snapshots"][1][file] == content, file


# ---- snapshot and continue --------------------------------------------------------------------------------------


def continued(cases: Any, ranks: int) -> list[tuple[str, Any, Any, int, int]]:
    rows = []
    for name, from_ranks, stage in cases.CONTINUED[ranks]:
        went_on = cases.result(f"{name} of {from_ranks} at {stage} after 1", ranks)
        rows.append((name, cases.result(name, from_ranks), went_on, from_ranks, stage))
    return rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_process_goes_on_from_the_snapshot(cases: Any, ranks: int) -> None:
    """With the same gang at ZeRO 0 bit by bit, with other ranks or another stage to rounding."""
    exact = 0
    for name, uncut, went_on, from_ranks, stage in continued(cases, ranks):
        start = uncut["weights"][0]
        assert len(went_on["weights"]) == len(uncut["weights"]) - 1 == 2
        for got, wanted in zip(went_on["weights"], uncut["weights"][1:], strict=True):
            if from_ranks == ranks and name.endswith("/0") and stage == 0:
                assert same(got, wanted)
                exact += 1
            else:
                assert distance(got, wanted, start) < (0.1 if name.startswith("bf16") else 1e-4)
        assert [s.learning_rate for s in went_on["stats"]] == [s.learning_rate for s in uncut["stats"][1:]]
        rng = read_state(uncut["snapshots"][1])["rng"].numpy()
        np.testing.assert_array_equal(went_on["rng"], rng)
    assert exact >= 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_snapshot_before_the_first_update_is_a_start_too(cases: Any, ranks: int) -> None:
    for name, from_ranks, stage in (("plain/2", 2, ranks), ("bf16/2", 1, 2)):
        uncut = cases.result(name, from_ranks)
        went_on = cases.result(f"{name} of {from_ranks} at {stage} after 0", ranks)
        for got, wanted in zip(went_on["weights"][1:], uncut["weights"][1:], strict=True):
            assert distance(got, wanted, uncut["weights"][0]) < (0.1 if name.startswith("bf16") else 1e-4)


def test_a_wrong_start_would_be_seen(cases: Any, expected: Any) -> None:
    """Teeth of the test before: going on without the moments or the step count ends up clearly elsewhere."""
    case = cases.first(1)["plain/0"]
    reference = Reference(case["files"], case["settings"])
    reference.update(case["batches"][0])
    reference.optimizer.state.clear()
    for batch in case["batches"][1:]:
        reference.update(batch)
    _, weights, _, _ = expected("plain")
    assert distance(reference.weights(), weights[-1], weights[0]) > 0.05


@pytest.mark.parametrize(("name", "ranks"), [("plain/0", 1), ("plain/3", 2), ("tied/0", 1), ("tied/3", 2), ("bf16/2", 1)])
def test_published_weights_are_a_model_that_transformers_loads(cases: Any, name: str, ranks: int) -> None:
    files = cases.first(ranks)[name]["files"]
    found = cases.result(name, ranks)
    state, published = found["snapshots"][1], found["weights"][0]
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    from_file = load({**files, "model.safetensors": save(whole_weights(read_state(state), files))}, dtype)
    by_hand = load(files, dtype)
    missing, unexpected = by_hand.load_state_dict({k: torch.from_numpy(v) for k, v in published.items()}, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if name.startswith("tied") else set())
    assert ("lm_head.weight" in published) == (not name.startswith("tied"))
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(from_file(ids).logits, by_hand(ids).logits, rtol=0, atol=0)
        assert not torch.equal(from_file(ids).logits, load(files, dtype)(ids).logits)
    if name.startswith("tied"):
        assert from_file.lm_head.weight.data_ptr() == from_file.model.embed_tokens.weight.data_ptr()


def test_snapshot_files_are_safetensors_and_json(cases: Any, tmp_path: Path) -> None:
    files = cases.result("plain/0", 1)["snapshots"][1]
    assert set(files) == {"model.safetensors", "optimizer.safetensors", "learner.json"}
    assert json.loads(files["learner.json"]).items() >= {"optimizer_steps": 1}.items()
    assert set(load_tensors(files["model.safetensors"])) == set(load_tensors(cases.files["model.safetensors"]))
    names = set(load_tensors(files["optimizer.safetensors"]))
    assert names == {f"{m}.{n}" for m in ("exp_avg", "exp_avg_sq") for n in published_names(cases.files)}
