"""The benchmark of many runs on one pool: baselines at their best, ratios by seed, and why a target was missed."""

from __future__ import annotations

import pytest

from benchmarks.simulated.shared_pool import Case, best, measure, policies, runs_of, targets
from benchmarks.simulated.simulate_pool import simulate_pool

SMALL = Case(6, ["qwen3b-gsm8k-grpo"], runs=3, steps=2, between_s=5.0, parts=(1, 2, 3, 6), slowdowns=(3.0,))


def test_a_baseline_has_the_settings_that_serve_it_best_and_too_small_partitions_drop_out() -> None:
    runs = runs_of(SMALL, 7)
    outcome, said = best(runs, 6, policies(SMALL)["colocated"])
    tried = [simulate_pool(runs, 6, policy).work_per_slot_s for policy in list(policies(SMALL)["colocated"])[:3]]
    assert outcome.work_per_slot_s == max(tried) and said in ("parts 1, trainers 0", "parts 2, trainers 0", "parts 3, trainers 0")


def test_ratios_are_paired_by_seed_and_a_missed_target_says_how_much_room_there_was() -> None:
    entry = measure(SMALL, range(7, 9))
    assert entry["over"]["market"]["queue"]["makespan_s"] < 1
    assert entry["over"]["queue"]["queue"]["work_per_slot_s"] == pytest.approx(1)
    assert all(0 < row["work_per_slot_s"] <= 1 and row["time_p50_s"] <= row["time_p100_s"] for row in entry["policies"].values())
    assert all(row["work_per_slot_s"] <= entry["most_per_slot_s"] <= 1 for row in entry["policies"].values())
    entry["over"]["market"]["colocated"]["work_per_slot_s"] = 1.1
    missed = [target for target in targets({"small": entry}) if not target.met]
    assert missed and all("no schedule can exceed" in target.why for target in missed)
