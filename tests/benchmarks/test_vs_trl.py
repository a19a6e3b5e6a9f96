"""The comparison with TRL, without running either: same work, honest arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.run_process import MeasuredProcess
from benchmarks.peers.ceiling import Ceiling
from benchmarks.peers.run_ours import recipe
from benchmarks.peers.run_trl import settings
from benchmarks.peers.shared_work import LARGE, SMALL
from benchmarks.vs_trl import Compared, check_same_work, targets
from rlhfless_ray import Recipe


def measured(system: str, times: list[float], tokens: int = SMALL.samples * SMALL.max_tokens) -> MeasuredProcess:
    steps = [{"step_s": t, "generate_s": 0.8 * t, "learn_s": 0.2 * t, "score_s": 0.0, "tokens": tokens, "reward_mean": 0.5} for t in times]
    return MeasuredProcess(system, steps, 10.0, 1000.0, 1, 100.0)


def test_ratios_come_from_steady_medians_of_all_rounds() -> None:
    trl = [measured("trl", [50, 8, 8]), measured("trl", [50, 8, 8])]
    ours = [measured("rlhfless_ray", [20, 1, 2]), measured("rlhfless_ray", [20, 2, 2])]
    ceiling = Ceiling(one_engine_s=[1.0, 1.2, 1.1], many_engines_s=[0.7, 0.8, 0.9], logprobs_s=[0.9], learn_s=[1.0])
    compared = Compared(SMALL, 1, trl, ours, [ceiling], drop=1)
    assert compared.ratios()["speedup"] == pytest.approx(4.0)
    assert compared.ceiling_step_s == pytest.approx(1.8), "the faster of one engine and one per core"
    assert compared.ratios()["of_ceiling"] == pytest.approx(0.9)
    assert compared.samples_per_s(ours).median == pytest.approx(32.0)
    assert [target.met for target in targets(compared)] == [True, True]
    assert [target.met for target in targets(replace(compared, work=LARGE))] == [True, False], "95 % of the ceiling at 11 M"


def test_unequal_work_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"trl, step 1: 8000 tokens"):
        check_same_work(SMALL, [measured("trl", [1.0], tokens=8000)], [])


@pytest.mark.parametrize(("work", "millions"), [(SMALL, 0.67), (LARGE, 10.7)])
def test_both_sides_read_the_same_work(work, millions: float, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    files = work.write(tmp_path)
    assert files.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    tokenizer, config = AutoTokenizer.from_pretrained(files.policy), AutoConfig.from_pretrained(files.policy)
    assert tokenizer.eos_token_id == config.vocab_size, "the end of the sequence must be beyond what can be sampled"
    assert config.eos_token_id is None
    prompts = [row["prompt"] for row in files.rows()]
    assert {len(ids) for ids in tokenizer(prompts)["input_ids"]} == set(range(work.shortest_prompt, work.longest_prompt + 1))
    assert tokenizer.batch_decode(tokenizer(prompts[:9])["input_ids"]) == prompts[:9]
    ours = Recipe.parse(recipe(work, files, tmp_path / "runs", steps=3, threads=2))
    theirs = settings(work, files, steps=3, threads=2)
    assert ours.prompts.batch_prompts == theirs["prompts_per_step"]
    assert ours.rollout.samples_per_prompt == theirs["group"] and ours.rollout.max_tokens == theirs["max_tokens"]
    assert ours.learner.learning_rate == theirs["learning_rate"]
    assert ours.learner.weight_decay == 0.0 and ours.learner.grad_clip == 1.0 and ours.learner.betas == (0.9, 0.999)
    json.dumps(theirs)
