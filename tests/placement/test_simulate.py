from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from placement.simulate import POLICIES, PhaseTimes, load, named, names, parse, simulate
from placement.simulate.elastic_policy import elastic
from placement.simulate.plan_candidates import candidates
from placement.simulate.plan_search import Planner
from placement.simulate.setting import Setting
from placement.simulate.simulate_run import Forecasts, workload_of
from placement.simulate.simulate_step import StepInput
from placement.simulate.step_policies import fixed
from placement.simulate.synthetic_workload import replay, synthesise
from tests.placement.held_devices import most_devices

SMALL = {"like": "qwen3b-gsm8k-grpo", "prompts": 8, "samples": 4, "nodes": 1, "steps_per_epoch": 1, "epochs": 2}


def small(**changes: object) -> Setting:
    return parse({**SMALL, **changes})


def step_input(setting: Setting, seed: int = 0, step: int = 0) -> StepInput:
    work = workload_of(setting, seed)
    g = work.lengths.shape[2]
    return StepInput(
        work.lengths[step].ravel(),
        np.repeat(work.prompt_tokens[step], g),
        np.repeat(np.arange(setting.prompts), g),
        Forecasts(setting, seed).scenarios(work, step),
        seed,
    )


# ---- the arithmetic ---------------------------------------------------------------------------------------------


def test_one_engine_takes_exactly_the_replica_time() -> None:
    """One device, no start-up or migration: fixed seconds, base·max L + Σ (per_seq·L + per_ctx·(p·L + L²/2)), then the phases."""
    setting = small(devices_per_node=2, device={"like": "H200"}, start_scale=0)
    times = PhaseTimes.from_setting(setting)
    times = replace(times, reshard_s=0.0)
    given = step_input(setting)
    one = replace(given, lengths=given.lengths, group=given.group)
    run = fixed(replace(times, devices=times.width), one, None)  # type: ignore[arg-type]
    lengths, prompts, speed = given.lengths, given.prompts, times.speed
    replica = speed.base_s * lengths.max() + np.sum(speed.per_seq_s * lengths + speed.per_ctx_s * (prompts * lengths + lengths**2 / 2))
    unique = prompts[:: setting.samples].sum()
    phases = setting.phases
    prefill = phases["step_overhead_s"] + setting.model.flops_per_token * unique / (989.4e12 * phases["forward_efficiency"])
    assert run.rollout_s == pytest.approx(replica + prefill)
    tokens = (lengths + prompts).sum()
    assert run.time_s == pytest.approx(replica + prefill + times.prepare_s(tokens, 1) + times.learn_s(tokens, 1))


def test_phases_are_flops_over_peak_and_efficiency() -> None:
    times = PhaseTimes.from_setting(small())
    phases = times.setting.phases  # 1e5 tokens are one micro-batch of 12,500 on each device
    forward, training, half = (phases[key] for key in ("forward_efficiency", "training_efficiency", "half_efficiency_tokens"))
    flops = times.setting.model.flops_per_token * (1e5 / 8 + half)
    assert times.prepare_s(1e5, 8) == pytest.approx(2 * flops / (362.05e12 * forward))
    assert times.gradients_s(1e5, 8, 1) == pytest.approx(3 * flops / (362.05e12 * training))
    ppo = PhaseTimes.from_setting(small(algorithm="ppo", device="H200"))
    assert ppo.prepare_s(1e5, 8) == pytest.approx(3 * flops / (989.4e12 * forward))
    assert ppo.models == 2


@pytest.fixture(scope="module", params=["grpo", "ppo"])
def everything(request: pytest.FixtureRequest):
    return simulate(small(algorithm=request.param, prompts=4, prefer=0.7), seed=3)


@pytest.mark.slow
def test_holds_add_up_to_the_cost_and_fit_the_cluster(everything) -> None:
    for run in everything.policies.values():
        for step in run.steps:
            assert step.full == pytest.approx(sum(h.devices * (h.to_s - h.from_s) for h in step.holds)), run.policy
            assert all(h.to_s >= h.from_s - 1e-9 and (h.from_s >= 0 or h.what == "wake") for h in step.holds), run.policy
            assert most_devices(step) <= everything.setting.devices, run.policy


def test_no_policy_beats_the_bounds(everything) -> None:
    for run in everything.policies.values():
        for step, bound in zip(run.steps, everything.bounds, strict=True):
            assert step.time_s >= bound.time_s - 1e-9, run.policy
            assert step.full >= bound.cost - 1e-9, run.policy
            assert bound.cost - 1e-9 <= step.busy <= step.full + 1e-6, run.policy


def test_fixed_is_billed_for_every_device_all_the_time(everything) -> None:
    for name in ("fixed", "fixed+"):
        for step in everything.policies[name].steps:
            assert step.full == pytest.approx(step.time_s * everything.setting.devices)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    policies, tiny = ["fixed", "ours"], small(prompts=4, samples=2, epochs=1)
    a, b, c = simulate(tiny, policies, 1), simulate(tiny, policies, 1), simulate(tiny, ["fixed"], 2)
    for name in policies:
        assert [s.time_s for s in a.policies[name].steps] == [s.time_s for s in b.policies[name].steps]
        assert [s.full for s in a.policies[name].steps] == [s.full for s in b.policies[name].steps]
    assert a.policies["fixed"].step_s != c.policies["fixed"].step_s


@pytest.mark.slow
def test_the_plan_never_sees_the_lengths() -> None:
    """The same forecasts with other lengths behind them give the same step plan."""
    setting = small(prompts=4, samples=2)
    times, given = PhaseTimes.from_setting(setting), step_input(setting)
    plans = []
    for lengths in (given.lengths, given.lengths[::-1] * 1.5):
        planner = Planner(
            replace(given, lengths=lengths, cache={}),
            setting.prefer,
            lambda view: fixed(times, view, None),  # type: ignore[arg-type]
        )
        plans.append(planner.choose("ours", lambda view, k: elastic(times, view, k), candidates(times)))
    assert plans[0] == plans[1]


def test_more_updates_per_rollout_forbid_early_gradients() -> None:
    """With one update the learner can take gradients beside the tail; with four it may only prepare."""
    once, often = (PhaseTimes.from_setting(small(updates=u)) for u in (1, 4))
    given = step_input(small())
    plan = next(k for k in candidates(once) if k.early == k.late == 3 and k.share == 0.4)
    one, four = (elastic(times, replace(given, cache={}), plan) for times in (once, often))
    assert one.rollout_s == four.rollout_s
    assert one.time_s < four.time_s


def test_cold_starts_cost_what_is_published() -> None:
    warm, cold = PhaseTimes.from_setting(small()), PhaseTimes.from_setting(small(cold=True))
    assert cold.wake_s == 59.0 and warm.wake_s == pytest.approx(0.8 + 7.7e-12 * warm.setting.model.parameters)


# ---- workloads --------------------------------------------------------------------------------------------------


def test_variance_of_log_length_splits_as_published() -> None:
    work = synthesise("gsm8k", prompts=1000, samples=8, steps_per_epoch=5, epochs=12, response_limit=10**9, prompt_limit=1024, seed=0)
    log = np.full((12, 5000, 8), np.nan)
    for step, epoch in enumerate(work.epoch):
        log[epoch, work.prompts[step]] = np.log(work.lengths[step])
    total = log.var()
    within = log.var(axis=2, ddof=1).mean()
    of_prompt = log.mean(axis=(0, 2)).var(ddof=1)
    assert within / total == pytest.approx(0.261, abs=0.02)
    assert of_prompt / total == pytest.approx(0.648, abs=0.03)
    assert np.median(work.lengths) == pytest.approx(290, rel=0.1) and log.std() == pytest.approx(0.48, rel=0.05)


def test_a_distribution_may_be_changed_field_by_field() -> None:
    size = {"prompts": 64, "samples": 8, "steps_per_epoch": 1, "epochs": 1, "response_limit": 2048, "prompt_limit": 1024, "seed": 0}
    assert np.unique(synthesise({"like": "gpqa", "log_deviation": 0.0}, **size).lengths).tolist() == [600]
    with pytest.raises(ValueError, match="unknown field of a length distribution `median`; did you mean `median_tokens`"):
        synthesise({"median": 3}, **size)


def test_every_epoch_visits_the_same_prompts() -> None:
    work = synthesise("gpqa", prompts=64, samples=2, steps_per_epoch=99, epochs=3, response_limit=2048, prompt_limit=1024, seed=1)
    assert len(work.epoch) == 3 * (448 // 64)
    sets = [set(work.prompts[work.epoch == e].ravel().tolist()) for e in range(3)]
    assert sets[0] == sets[1] == sets[2] and work.lengths.max() <= 2048


def test_recorded_lengths_are_replayed(tmp_path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt,prompt_tokens,response_tokens\na,10,100\na,10,120\nb,20,5000\nb,20,30\n")
    work = replay(path, prompts=1, epochs=2, response_limit=2048)
    assert work.lengths[:2].tolist() == [[[100, 120]], [[2048, 30]]] and work.prompt_tokens.ravel().tolist() == [10, 20, 10, 20]
    path = tmp_path / "lengths.json"
    path.write_text('[[100, 120], {"prompt_tokens": 20, "lengths": [7, 8]}]')
    assert replay(path, prompts=2, epochs=1, response_limit=2048).lengths.tolist() == [[[100, 120], [7, 8]]]


def test_later_epochs_of_a_recording_are_drawn_anew_within_its_groups(tmp_path) -> None:
    rng = np.random.default_rng(5)
    center = np.exp(5 + 0.8 * rng.standard_normal((400, 1)))
    recorded = np.round(np.clip(center * np.exp(0.6 * rng.standard_normal((400, 8))), 1, 9000))
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(recorded.tolist()))
    work = replay(path, prompts=100, epochs=3, response_limit=10**5, seed=3)
    first, *later = work.lengths.reshape(3, 400, 8)
    assert (first == recorded).all()
    for epoch in later:
        assert all(set(drawn) <= set(group) for drawn, group in zip(epoch.tolist(), recorded.tolist(), strict=True))
        assert (epoch == recorded).mean() < 0.3, "the same samples would be known to the token"
    assert (later[0] == later[1]).mean() < 0.3
    single = replay(_column(tmp_path, recorded[:, 0]), prompts=100, epochs=2, response_limit=10**5).lengths.reshape(2, 400)
    assert set(single[1]) <= set(recorded[:, 0]) and (single[0] == single[1]).mean() < 0.1
    again = replay(path, prompts=100, epochs=3, response_limit=10**5, seed=4)
    assert (again.lengths[:4] == work.lengths[:4]).all() and (again.lengths[4:] != work.lengths[4:]).any()


def _column(folder: Path, lengths: np.ndarray) -> Path:
    path = folder / "single.csv"
    path.write_text("response_tokens\n" + "\n".join(str(int(n)) for n in lengths))
    return path


def test_a_trace_is_whatever_the_planner_reads(tmp_path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    rows = [{"prompt_index": i % 2, "prompt_tokens": 9, "tokens": 10 + i} for i in range(4)]
    (samples / "step_1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    of_run = replay(tmp_path, prompts=2, epochs=1, response_limit=2048)
    assert of_run.lengths.tolist() == [[[10, 12], [11, 13]]] and of_run.prompt_tokens.tolist() == [[9, 9]]
    path = tmp_path / "words.csv"
    path.write_text("mine,other\n3,1\n4,1\n")
    assert replay(path, prompts=2, epochs=1, response_limit=9, column="mine").lengths.ravel().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("t.csv", "response_tokens\n12\nx\n", "line 3, column `response_tokens`: `x` is not a number"),
        ("t.csv", "a,b\n5,6\n", "no column is known to be the lengths among a, b; say which (`plan --column`, `trace_column`"),
        ("t.json", "[[1, 2], [3]]", "prompt 2 has 1 responses and prompt 1 has 2"),
        ("t.json", "[[1]]", "1 prompts, fewer than the 2 of one step"),
    ],
)
def test_a_trace_that_cannot_be_replayed_says_why(tmp_path, file: str, text: str, said: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError) as caught:
        replay(tmp_path / file, prompts=2, epochs=1, response_limit=2048)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ---- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_every_shipped_setting_fits_its_cluster(name: str) -> None:
    times = PhaseTimes.from_setting(named(name))
    assert times.min_learner <= times.devices and times.capacity > named(name).response_limit + named(name).prompt_limit


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "a cluster without devices runs nothing"),
        ({"devices_per_node": 0}, "`devices_per_node` must be at least 1, not 0"),
        ({"device": "L40"}, "unknown device `L40`; did you mean `L40S`?"),
        ({"model": "qwen2.5-3"}, "unknown model `qwen2.5-3`; did you mean `qwen2.5-3b`?"),
        ({"lengths": "gsm8"}, "did you mean `gsm8k`?"),
        ({"trace_column": "tokens"}, "`trace_column` names the column of lengths in `trace`, not 'tokens'"),
        ({"nodes": 10**11}, "more than 10,000,000 are not simulated"),
        ({"epochs": 10**11}, "more than 10,000,000 are not simulated"),
        ({"prefer": True}, "`prefer` must lie in 0 … 1"),
        ({"phases": {"warm_start_s": []}}, "`phases.warm_start_s` must be a positive, finite number, not []"),
        ({"device": {"like": "H100", "memory_bytes": []}}, "`memory_bytes` must be a positive, finite number, not []"),
        ({"device": {"like": "H100", "decode_efficiency": 5}}, "`decode_efficiency` is a share of the bandwidth"),
        ({"device": {"like": "H100", "name": {"a": 1}}}, "`name` must be a word"),
        ({"sample": 4}, "unknown key `sample`; did you mean `samples`?"),
        ({"rollout": {"max_tokens": 4}}, "these are sections of a training recipe; write device, nodes and others"),
        ({"algorithm": "gppo"}, "unknown algorithm"),
        ({"samples": 1}, "GRPO compares the responses of one prompt"),
        ({"prefer": 2}, "`prefer` must lie in 0"),
        ({"tensor_parallel": 3}, "does not divide the 8 devices"),
        ({"model": "llama-2-70b"}, "needs"),
        ({"phases": {"warm_start": 3}}, "unknown phase parameter `warm_start`"),
        ({"phases": 3}, "`phases` must be a mapping"),
        ({"lengths": 5}, "`lengths` must name a distribution"),
        ({"whiten": "maybe"}, "`whiten` must be true or false, not 'maybe'"),
        ({"deadline_s": 3}, "for a deadline or a budget use `rlhfless plan`"),
        ({"device": {"like": "H100", "net_bytes_per_s": "fast"}}, "must be a positive, finite number, not 'fast'"),
        ({"device": {"like": "H100", "memory_bytes_per_s": float("inf")}}, "`memory_bytes_per_s` must be a positive, finite"),
        ({"phases": {"warm_start_s": float("inf")}}, "`phases.warm_start_s` must be a positive, finite"),
        ({"lengths": {"median_tokens": float("nan")}}, "`median_tokens` must be a finite number"),
        ({"start_scale": float("nan")}, "`start_scale` must be finite"),
        ({"model": "/nowhere/config.json"}, "/nowhere/config.json: cannot read a model configuration from it"),
        ({"device": "H200", "devices_per_node": 6, "tensor_parallel": 6}, "6 devices cannot share the 16 heads"),
        ({"prompts": 10**6}, "has 7473"),
    ],
)
def test_a_mistake_in_a_setting_is_one_sentence(change: dict, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        simulate(small(**change), ["fixed"])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_setting_from_a_file(tmp_path) -> None:
    (tmp_path / "lengths.json").write_text("[[50, 60], [70, 80]]")
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(
            {
                "like": "qwen3b-gsm8k-grpo",
                "trace": "lengths.json",
                "prompts": 2,
                "samples": 2,
                "nodes": 1,
                "epochs": 2,
                "device": {"like": "L40S", "memory_bytes_per_s": 900e9},
            }
        )
    )
    run = simulate(load(tmp_path / "mine.yaml"), ["fixed"])
    assert run.setting.name == "mine" and len(run.policies["fixed"].steps) == 2


def test_a_recording_says_how_many_samples_a_prompt_has(tmp_path) -> None:
    (tmp_path / "lengths.json").write_text("[50, 60, 70, 80]")
    trace = {"trace": tmp_path / "lengths.json", "prompts": 2, "epochs": 1, "nodes": 2}
    with pytest.raises(ValueError, match="one response to each prompt, and GRPO compares several"):
        simulate(small(**trace), ["fixed"])
    assert simulate(small(**trace, algorithm="ppo"), ["fixed"]).setting.samples == 1


def test_an_unknown_policy_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown policy `orcale`; did you mean `oracle`\?"):
        simulate(small(), ["orcale"])


def test_every_policy_says_what_it_is() -> None:
    assert all((policy.__doc__ or "").strip() for policy in POLICIES.values())


@pytest.mark.slow
def test_a_model_that_decodes_in_less_time_than_it_starts_is_simulated():
    """Decisions followed one another so quickly that they were used up before the engines had started."""
    tiny = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 100}
    assert 0 < simulate(small(model=tiny), ["fixed"]).policies["fixed"].steps[0].time_s < 60
