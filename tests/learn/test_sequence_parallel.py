"""Ranks that share each sequence: the same updates as one rank, alone and beside data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn.batch import UNKNOWN_EXPERT
from rlhfless_ray.learn.model_checks import SLICED, slicing_refusal
from rlhfless_ray.learn.sequence_parallel import SequenceParallel
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from tests.conftest import made_once
from tests.learn.conftest import Cases, joined, learner_settings, run_gangs
from tests.rollout import families

# GRPO; with several optimizer steps and a reference; shared prompts; losses of sequences; ranks without response tokens or with different
# numbers of chunks; adapters; critics
CASES = (
    *("plain/0", "plain/2", "full/3", "shared/0", "gspo/0", "few/0", "chunked/3", "recompute/0", "tied/2", "kl in reward/0", "lora/3"),
    *("critic/1", "critic lora/0", "bf16/2"),
)
MORE = ("plain/1", "shared/3", "lora/0", "lora/2", "critic/0", "critic/3")  # other ZeRO stages
TWO_GROUPS = ("full/3", "few/0", "critic/1", "plain/0", "shared/0")
FAMILIES = ("gemma3_text", "llama", "mixtral", "qwen2_moe")  # one KV head for two ranks, a window shorter than a row, experts
LONG = (*MORE, *(family for family in SLICED if family not in FAMILIES))
LONG_OF_FOUR = ("plain/0", "shared/0")


def sliced(case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The case on groups of two ranks that share sequences."""
    section = case["settings"].learner.model_copy(update={"ranks": ranks, "sequence_parallel": 2})
    return {**case, "settings": replace(case["settings"], learner=section)}


Gangs = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, warm_processes: None) -> Callable[..., Gangs]:
    """What gangs answered to a case. Those that only `make test-long` runs have gangs of their own."""
    cases = Cases(Path())  # their settings and batches, not their results

    def case(name: str) -> dict[str, Any]:
        if name in SLICED:
            files = families.policy(name.removesuffix("_text"), kv_heads=1 + SLICED.index(name) % 2)
            return {"settings": learner_settings(stage=1), "files": files, "batches": cases.long[:1]}
        found = cases.first(1)[name]
        return {**found, "batches": found["batches"][:2], "snapshots": ()}

    @cache
    def made(folder: str, names: tuple[str, ...], of_four: tuple[str, ...]) -> Gangs:
        one = {name: case(name) for name in dict.fromkeys((*names, *of_four))}
        two, four = {name: sliced(one[name], 2) for name in names}, {name: sliced(one[name], 4) for name in of_four}

        def make(folder: Path) -> Gangs:
            return run_gangs(folder / "gangs", {1: one, 2: two, 4: four})

        return make(made_once(tmp_path_factory, folder, make))

    def of(name: str, ranks: int = 2) -> Gangs:
        if name in (LONG_OF_FOUR if ranks == 4 else LONG):
            return made("sequence-parallel-long", LONG, LONG_OF_FOUR)
        return made("sequence-parallel", (*CASES, *FAMILIES), tuple(name for name in TWO_GROUPS if name not in LONG_OF_FOUR))

    return of


def marked(names: Iterable[str], long: tuple[str, ...] = LONG) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in long)) for name in names]


def close(found: dict[str, Any], wanted: dict[str, Any], apart: float) -> None:
    for got, expected in zip(found["stats"], wanted["stats"], strict=True):
        assert got.loss == pytest.approx(expected.loss, rel=apart, abs=apart)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=10 * apart)
        assert (got.trained_tokens, got.skipped) == (expected.trained_tokens, 0)
    for name in ("values", "logprobs"):
        for got, expected in zip(found.get(name, []), wanted.get(name, []), strict=True):
            for key in expected if isinstance(expected, dict) else [...]:
                np.testing.assert_allclose(got[key], expected[key], rtol=5 * apart, atol=5 * apart)
    for got, expected in zip(found["weights"], wanted["weights"], strict=True):
        assert got.keys() == expected.keys()
        assert max(float(np.abs(got[name] - expected[name]).max()) for name in expected) < 200 * apart  # an Adam step is up to 1e-3


@pytest.mark.learner
@pytest.mark.parametrize("name", marked([*CASES, *MORE, *SLICED]))
def test_two_ranks_learn_what_one_does(answers: Callable[..., Gangs], name: str) -> None:
    gangs = answers(name)
    for rank in range(2):
        assert gangs[2][rank][name]["stats"] == gangs[2][0][name]["stats"]
    close(joined(gangs[2], name), joined(gangs[1], name), 1e-3 if name.startswith("bf16") else 1e-6)


@pytest.mark.learner
@pytest.mark.parametrize("name", marked(TWO_GROUPS, LONG_OF_FOUR))
def test_two_groups_divide_the_batch(answers: Callable[..., Gangs], name: str) -> None:
    gangs = answers(name, 4)
    close(joined(gangs[4], name), joined(gangs[1], name), 1e-6)


def of_rank(size: int, rank: int) -> SequenceParallel:
    """A rank's place, without process groups."""
    place = SequenceParallel.__new__(SequenceParallel)
    place.size, place.rank = size, rank
    return place


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.integers(0, 2**32))
def test_slices_have_every_token_once(size: int, rows: int, longest: int, shares: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spots = np.argwhere(rng.random((rows, longest)) < 0.5)
    tensors = {
        "ids": torch.from_numpy(rng.integers(2, 50, (rows, longest))),
        "seen": torch.ones(rows, longest, dtype=torch.bool),
        "experts": torch.from_numpy(rng.integers(0, 4, (rows, longest, 2, 2)).astype(np.uint8)),
        "rows": torch.from_numpy(spots[:, 0]),
        "columns": torch.from_numpy(spots[:, 1]),
        **{name: torch.arange(len(spots)) for name in ("targets", "flat", "sequence")},
    }
    if shares:
        tensors |= {name: torch.from_numpy(rng.integers(0, 5, (rows, longest))) for name in ("positions", "segments")}
    parts = [of_rank(size, rank).sliced(tensors) for rank in range(size)]
    for name in ("ids", "seen", "experts", *(("positions",) if shares else ())):
        whole = torch.cat([part[name] for part in parts], dim=1)
        assert torch.equal(whole[:, :longest], tensors[name])
    assert all(bool((part["ids"] == 0).any()) for part in parts[-1:]) or longest % size == 0
    assert bool((torch.cat([part["experts"] for part in parts], dim=1)[:, longest:] == UNKNOWN_EXPERT).all())
    if not shares:
        assert torch.equal(torch.cat([part["positions"] for part in parts], dim=1)[0], torch.arange(size * parts[0]["ids"].shape[1]))
    assert sorted(torch.cat([part["own"] for part in parts]).tolist()) == list(range(len(spots)))
    for part in parts:
        expected = tensors["ids"][tensors["rows"][part["own"]], tensors["columns"][part["own"]]]
        assert torch.equal(part["ids"][part["rows"], part["columns"]], expected) and torch.equal(part["targets"], part["own"])


def test_models_that_cannot_be_sliced_are_refused_in_one_sentence() -> None:
    llama = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2}
    assert slicing_refusal(llama, 3) is None and slicing_refusal({"text_config": llama}, 2) is None
    assert slicing_refusal(llama, 4) == "4 does not divide the model's 6 attention heads"
    assert "models of type gemma2 are not tested" in str(slicing_refusal({**llama, "model_type": "gemma2"}, 2))
    long = {"rope_type": "longrope", "long_factor": [1.0]}
    for changes in ({"rope_scaling": long}, {"rope_parameters": {"full_attention": long}}, {"rope_scaling": {"type": "dynamic"}}):
        assert "depends on the length of the whole sequence" in str(slicing_refusal({**llama, **changes}, 2))
    phi = {**llama, "model_type": "phi3"}
    rotary = {kind: slicing_refusal({**phi, "rope_scaling": {"type": kind}}, 2) for kind in ("su", "yarn", "linear")}
    assert [why is None for why in rotary.values()] == [False, False, True]
    assert "attention scores" in str(slicing_refusal({**llama, "attn_logit_softcapping": 50.0}, 2))


TREE = {"prompts": {"task": "chain"}, "reward": {"function": "task"}}
SFT = {"task": "sft", "data": {"task": "chain", "rows": 8}}
DROPS: dict[str, Any] = {"lora": {"rank": 2, "dropout": 0.1}}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Recipe, {**TREE, "learner": {"ranks": 3}}, "learner.sequence_parallel: 2 does not divide learner.ranks"),
    (Recipe, {**TREE, "learner": {"tensor_parallel": 2}}, "learner.sequence_parallel: not available with learner.tensor_parallel"),
    (Recipe, {**TREE, **DROPS}, "learner.sequence_parallel: not available with lora.dropout"),
    (
        Recipe,
        {**TREE, "algorithm": {"loss": {"router_aux": 0.1}}},
        "algorithm.loss.router_aux: not available with learner.sequence_parallel",
    ),
    (SupervisedRecipe, {**SFT, **DROPS}, "learner.sequence_parallel: not available with lora.dropout"),
]


@pytest.mark.parametrize(("kind", "tree", "sentence"), REFUSED)
def test_settings_that_exclude_each_other(kind: Any, tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        kind.parse({**tree, "learner": {"ranks": 2, "sequence_parallel": 2, **tree.get("learner", {})}})


@pytest.mark.parametrize("what", ["sequence_parallel", "tensor_parallel"])
def test_a_stage_on_fewer_ranks_shares_among_a_divisor(what: str) -> None:
    learner = SupervisedRecipe.parse({**SFT, "learner": {"ranks": 4, what: 4}, "run": {"min_ranks": 1}}).learner
    assert [getattr(learner.on_ranks(ranks), what) for ranks in (4, 3, 2, 1)] == [4, 1, 2, 1]
