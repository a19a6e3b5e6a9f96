"""The simulator against recorded runs: on a run that the model itself made, the prediction is exact; noise shows as error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.validate_simulator import fit, read, validate
from placement.simulate.rollout.fixed import random_split
from placement.speed.decode_speed import Speed

SPEED, START, LEARN, PER_TOKEN, OTHER = Speed(8e-3, 2e-4), 0.3, 0.1, 5e-5, 0.05


def record(folder: Path, noise: float = 0.0, steps: int = 20, engines: int = 1) -> Path:
    """A run folder whose times follow the model; all samples kept."""
    rng = np.random.default_rng(0)
    (folder / "samples").mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        lengths = np.clip(np.round(rng.lognormal(4.0, 0.6, 32)), 1, 512)
        split = random_split(len(lengths), engines, step)
        rollout = START + max(SPEED.rollout_s(lengths[split == e]) for e in range(engines))
        rollout *= 1 + noise * rng.standard_normal()
        learn = LEARN + PER_TOKEN * lengths.sum()
        rows.append(
            {
                "step": step,
                "step_s": rollout + learn + OTHER + 1.0,
                "phase/rollout_s": rollout,
                "phase/learn_s": learn,
                "phase/eval_s": 1.0,
                "pool/rollout_actors": engines,
                "tokens/generated": int(lengths.sum()),
                "length/max": float(lengths.max()),
                "length/mean": float(lengths.mean()),
                "length/p50": float(np.median(lengths)),
            }
        )
        (folder / "samples" / f"step_{step}.jsonl").write_text("".join(json.dumps({"tokens": int(n)}) + "\n" for n in lengths))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 21, "torn')
    return folder


def test_terms_are_recovered_and_steps_predicted(tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    steps = read(run)
    assert [s.number for s in steps] == list(range(2, 21))  # the first is start-up, the torn line is passed over
    times = fit(steps[:9])
    assert times.speed.base_s == pytest.approx(SPEED.base_s) and times.speed.per_seq_s == pytest.approx(SPEED.per_seq_s)
    assert times.start_s == pytest.approx(START) and times.per_token_s == pytest.approx(PER_TOKEN)
    assert validate(run)["error_percent"]["p90"] < 0.01


def test_several_engines_are_simulated_response_by_response(tmp_path: Path) -> None:
    found = validate(record(tmp_path / "run", engines=2, steps=40))
    assert found["predicted"] == 20 and found["error_percent"]["mean"] < 5


def test_a_run_that_does_not_follow_the_model_shows_it(tmp_path: Path) -> None:
    assert validate(record(tmp_path / "run", noise=0.5, steps=40))["error_percent"]["mean"] > 10


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="at least 8 are needed"):
        read(record(tmp_path / "run", steps=6))
    with pytest.raises(SystemExit, match=r"has no metrics\.jsonl"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["quickstart_1824", "quickstart_1924"])
def test_recorded_runs_of_the_quickstart_are_predicted_within_15_percent(tmp_path: Path, name: str) -> None:
    """Real runs on two cores (of 256 lengths a step 64 are kept): fitted on the first half, the second predicted."""
    recorded = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    (tmp_path / "samples").mkdir()
    for step in recorded["steps"]:
        tokens = step.pop("sample_tokens")
        (tmp_path / "samples" / f"step_{step['step']}.jsonl").write_text("".join(json.dumps({"tokens": n}) + "\n" for n in tokens))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in recorded["steps"]))
    found = validate(tmp_path)
    assert found["predicted"] >= 40 and found["error_percent"]["mean"] < 15
