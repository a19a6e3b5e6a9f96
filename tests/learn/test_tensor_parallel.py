"""Two ranks that share one copy of the policy: the same updates as one rank, and checkpoints that any width reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.learn.model_checks import DIVIDED, refusal
from tests.conftest import made_once
from tests.learn.conftest import Cases, joined, learner_settings, run_gangs
from tests.rollout import families

KINDS = ("plain/0", "plain/2", "full/1", "critic/1", "lora/2", "critic lora/0", "bf16/2", "averaged/1", "dropped/0")
MORE = ("plain/1", "critic/0", "lora/0")  # other ZeRO stages
CHECKPOINTS = ("plain/0", "plain/1", "plain/2", "full/1", "critic/0", "critic/1", "lora/0", "lora/2", "critic lora/0", "bf16/2")
FAMILIES = ("gemma3_text", "qwen3")  # with windows of attention, with norms of heads; the policy of the other cases is a Qwen 2
LONG = (*MORE, *(family for family in DIVIDED if family not in FAMILIES))


def wide(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The case on two ranks that share one copy."""
    section = case["settings"].learner.model_copy(update={"ranks": 2, "tensor_parallel": 2})
    return {**case, "settings": replace(case["settings"], learner=section), **changes}


def apart(name: str) -> float:
    return 1e-3 if name.startswith("bf16") else 1e-6


class Wide:
    """What two ranks of one copy answered, and one rank that goes on from their checkpoint."""

    def __init__(self, folder: Path, cases: Cases, names: tuple[str, ...]) -> None:
        one = {name: self.case(cases, name) for name in names}
        self.results = run_gangs(folder / "first", {1: one, 2: {name: wide(case) for name, case in one.items()}})
        later: dict[int, dict[str, Any]] = {1: {}, 2: {}}
        for name in CHECKPOINTS:
            if name in one:
                rest = {**one[name], "batches": one[name]["batches"][1:], "snapshots": ()}
                later[1][name] = {**rest, "state": self.snapshot(name, 2)}
                later[2][name] = wide(rest, state=self.snapshot(name, 1))
        self.continued = run_gangs(folder / "second", later)

    @staticmethod
    def case(cases: Cases, name: str) -> dict[str, Any]:
        from tiny_policy import tiny_policy

        if name in DIVIDED:
            files = families.policy(name.removesuffix("_text"), kv_heads=2)
            return {"settings": learner_settings(stage=1), "files": files, "batches": cases.batches[:2]}
        files = tiny_policy(kv_heads=2, dtype="bfloat16" if name.startswith("bf16") else "float32", layers=1)
        first = cases.first(1)["averaged/0" if name == "averaged/1" else name]
        return {**first, "files": files, "batches": first["batches"][:2], "snapshots": (1,)}

    def snapshot(self, name: str, ranks: int) -> dict[str, bytes]:
        """The files of all ranks."""
        return {file: content for rank in self.results[ranks] for file, content in rank[name]["snapshots"][1].items()}


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, warm_processes: None) -> Callable[[str], Wide]:
    """The gangs of a case. Those that only `make test-long` runs have gangs of their own."""

    @cache
    def made(folder: str, names: tuple[str, ...]) -> Wide:
        cases = Cases(Path())  # their settings and batches, not their results
        return Wide(made_once(tmp_path_factory, folder, lambda folder: Wide(folder, cases, names)), cases, names)

    def of(name: str) -> Wide:
        return made("tensor-parallel-long", LONG) if name in LONG else made("tensor-parallel", (*KINDS, *FAMILIES))

    return of


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in names]


def close(found: dict[str, Any], wanted: dict[str, Any], apart: float, skip: int = 0) -> None:
    for got, expected in zip(found["stats"], wanted["stats"][skip:], strict=True):
        assert got.loss == pytest.approx(expected.loss, abs=apart)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=100 * apart)
        assert (got.trained_tokens, got.skipped) == (expected.trained_tokens, 0)
    for got, expected in zip(found["weights"], wanted["weights"][skip:], strict=True):
        assert got.keys() == expected.keys()
        assert max(float(np.abs(got[name] - expected[name]).max()) for name in expected) < 200 * apart


@pytest.mark.learner
@pytest.mark.parametrize("name", marked([*KINDS, *MORE, *DIVIDED]))
def test_two_ranks_of_one_copy_make_the_updates_of_one_rank(answers: Callable[[str], Wide], name: str) -> None:
    """Each rank drops its slice of what one rank drops."""
    both = answers(name)
    close(joined(both.results[2], name), joined(both.results[1], name), apart(name))


@pytest.mark.learner
@pytest.mark.parametrize("name", marked(CHECKPOINTS))
def test_checkpoints_are_read_at_the_other_width(answers: Callable[[str], Wide], name: str) -> None:
    both = answers(name)
    for ranks in (1, 2):
        close(joined(both.continued[ranks], name), joined(both.results[1], name), apart(name), skip=1)


@pytest.mark.learner
def test_no_rank_writes_what_the_other_has(answers: Callable[[str], Wide]) -> None:
    both = answers("plain/2")
    sizes = [sum(map(len, rank["plain/2"]["snapshots"][1].values())) for rank in both.results[2]]
    alone = sum(map(len, both.results[1][0]["plain/2"]["snapshots"][1].values()))
    assert sum(sizes) < 1.1 * alone and max(sizes) < 0.75 * alone


@given(st.sampled_from(["llama", "qwen3"]), st.integers(1, 4), st.integers(1, 4), st.integers(2, 8))
def test_a_width_that_does_not_divide_the_heads_is_refused(family: str, heads: int, kv_heads: int, width: int) -> None:
    config = {"model_type": family, "num_attention_heads": heads * kv_heads, "num_key_value_heads": kv_heads, "intermediate_size": 64}
    why = refusal(config, width)
    fits = not any(size % width for size in (heads * kv_heads, kv_heads, 64))
    assert (why is None) == fits and (fits or why.startswith(f"{width} does not divide"))


def test_other_families_are_refused_by_name() -> None:
    why = refusal(json.loads('{"model_type": "mixtral"}'), 2)
    assert why is not None and "mixtral" in why
