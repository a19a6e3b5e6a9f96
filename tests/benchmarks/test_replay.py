"""Replayed functions: modelled times, the real loop around them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.replay import ReplayedEngineActor, Script, finish_times, prompt_key
from benchmarks.common.replay_setup import synthetic_lengths
from placement.speed.decode_speed import Speed
from rlhfless_ray.engine.control_queue import EngineCommand
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Request
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.tensor_slice import whole_slices
from tests.conftest import ROOT, environment

SETTINGS = EngineSettings(max_model_len=64, max_running=4, block_size=32, kv_cache_mb=8, gpu_memory_share=0.5, device="gpu")


def replayed(script: Script) -> ReplayedEngineActor:
    actor = ReplayedEngineActor({"replay.json": json.dumps(vars(script)).encode()}, SETTINGS)
    actor.open(1)
    return actor


def load(actor: ReplayedEngineActor) -> None:
    weights = whole_slices({"weight": np.array([7], np.uint8)})
    actor.load(1, weights, digests(weights))


def test_finish_times_are_those_of_decoding_together():
    speed, lengths = Speed(0.01, 0.001), np.array([5, 2, 9, 2])
    found = finish_times(lengths, speed)
    by_hand, t = {}, 0.0
    for token in range(1, 10):
        t += speed.base_s + speed.per_seq_s * sum(length >= token for length in lengths)
        by_hand[token] = t
    assert found == pytest.approx([by_hand[length] for length in lengths])
    assert found.max() == pytest.approx(speed.rollout_s(lengths))


def test_an_engine_answers_every_request_with_its_recorded_length_and_a_record_for_every_decode_step():
    prompts = [(1, 2), (3, 4, 5)]
    script = Script({prompt_key(p): [3 + 4 * i, 10 + i] for i, p in enumerate(prompts)}, 1e-3, 1e-4, 0.0, 0.0, clock=2.0)
    engine = replayed(script)
    load(engine)
    requests = [Request(k, prompts[k % 2], seed, 64, 1.0) for k, seed in enumerate((0, 1, 2, 3))]
    start = time.time()
    parts = list(engine.rollout(1, requests, 0.005, 1))
    ended = time.time()
    lengths = {done.key: len(done.token_ids) for done in written(requests, parts).values()}
    assert lengths == {r.key: script.length(r) for r in requests}
    steps = [step for _, records, _ in parts for step in records]
    assert len(steps) == max(lengths.values())
    assert [s.running for s in steps] == [sum(n > t for n in lengths.values()) for t in range(len(steps))]
    modelled = Speed(1e-3, 1e-4).rollout_s(np.array(list(lengths.values()))) / 2
    spans = [span for _, _, parts_spans in parts for span in parts_spans]
    assert ended - start >= modelled
    assert spans[-1].to_s - spans[0].from_s == pytest.approx(modelled, abs=2e-3)  # the span ends where the model says


def written(requests: list[Request], parts: list) -> dict:
    token_log = TokenLog(requests)
    token_log.assign(np.arange(len(requests)), 0)
    for progress, _, _ in parts:
        token_log.accept(0, "replayed", progress)
    return token_log.completions


def test_an_engine_cuts_and_goes_on_as_told(monkeypatch):
    clock = iter(range(10**9))
    script = Script({prompt_key((1, 2)): [50, 80]}, 1e-3, 1e-4, 0.0, 0.0)
    engine = replayed(script)
    monkeypatch.setattr("benchmarks.common.replay.time", SimpleNamespace(time=lambda: 0.004 * next(clock)))  # a few tokens a look
    with pytest.raises(RuntimeError, match="no weights yet"):
        next(engine.rollout(7, [], 0.01, 1))
    load(engine)
    first, second = Request(0, (1, 2), 0, 64, 1.0), Request(1, (1, 2), 1, 64, 1.0)
    call = engine.rollout(7, [first], 0.01, 1)
    parts = [next(call)]
    assert not engine.enqueue(6, EngineCommand(cut=(0,))) and engine.enqueue(7, EngineCommand((0,), add=(second,), what="move"))
    parts += list(call)
    token_log = TokenLog([first, second])
    token_log.owner[:] = 0
    ends = [token_log.accept(0, "replayed", progress) for progress, _, _ in parts]
    assert [i for _, cut in ends for i in cut] == [0] and not token_log.finished[0] and 0 < token_log.length[0] < 50
    assert token_log.completions[1].finish_reason == "length" and len(token_log.completions[1].token_ids) == 64
    assert [span.activity for _, _, spans in parts for span in spans].count("transfer") == 1
    token_log.assign(np.array([0]), 0)
    for progress, _, _ in engine.rollout(8, [token_log.request(0)], 0.01, 1):
        token_log.accept(0, "replayed", progress)
    assert len(token_log.completions[0].token_ids) == 50 and token_log.completions[0].finish_reason == "stop"


def test_synthetic_lengths_share_their_variance_as_said():
    log = np.log(synthetic_lengths(2000, 8, 10**6, seed=1))
    between = log.mean(1).var() - log.var(axis=1, ddof=1).mean() / 8
    assert between / log.var() == pytest.approx(0.65, abs=0.05)


@pytest.mark.ray
@pytest.mark.parametrize("benchmark", ["control", pytest.param("driver", marks=pytest.mark.long)])
def test_the_real_loop_runs_on_logical_gpus(benchmark):
    ended = subprocess.run(
        forked([sys.executable, "-m", f"benchmarks.{benchmark}", "--quick"]),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    found = json.loads((ROOT / "benchmarks" / "results" / "quick" / f"{benchmark}.json").read_text())
    assert found["replayed"] is True
    if benchmark == "control":
        assert len(found["actors"]) == 3 and all(1 <= n <= 4 for n in found["actors"])
        assert all(step["parts"]["generate"] > 0 and step["parts"]["learn"] > 0.99 for step in found["steps"])
    else:
        assert all(one["tokens_per_s"] > 0 and one["wall_s"] >= one["longest_alone_s"] for one in found["clocks"].values())
