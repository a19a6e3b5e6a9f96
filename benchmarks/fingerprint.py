"""Print hashes of what the planner and the simulator compute, to check that a change of code is not a change of results.

    python -m benchmarks.fingerprint > before.json      # on the old code
    python -m benchmarks.fingerprint --compare before.json      # on the new code: exit code 1 and the names that differ

    python -m benchmarks.fingerprint --runs             # real runs of every rollout mode: tokens, log-probabilities, weights, ledger
    python -m benchmarks.fingerprint --record           # the same, and record anew where their partial rollouts cut responses

Results of runs are in benchmarks/results/fingerprint_runs.json, and `--runs` compares with them.
Numbers are rounded to six significant digits before hashing, because other processors and BLAS builds differ in the last bits.
`--digits 17` compares every bit, on one machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement import LengthForecaster, Objective, Pool, Speed, choose, frontier
from placement.forecast.forecaster import forecast_quality
from placement.forecast.scenarios import Scenarios
from placement.measurements.term import Term
from placement.migration.decide_moves import LiveState, Settings, decide_moves
from placement.planning.bounds import CostBound, rollout_bounds
from placement.planning.workload import RolloutWorkload
from placement.scaling.prefix_benefit import PrefixCosts, PrefixDemand, choose_prefix
from placement.scaling.resize_policy import ResizeHistory, Transition, assign_groups, best_held_plan, decide, time_value
from placement.simulate import POLICIES, parse, simulate, simulate_run
from placement.simulate.rollout import NAMES
from placement.simulate.synthetic_workload import SyntheticWorkload
from placement.speed.decode_speed import SpeedFit

DIGITS = 6
RUNS = Path(__file__).parent / "results" / "fingerprint_runs.json"
SPEED = Speed(8.5e-3, 3e-5, 2e-8)
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"like": "qwen3b-gsm8k-grpo", "nodes": 1, "devices_per_node": 4, "prompts": 8, "samples": 4, "epochs": 2},
    "ppo": {"like": "qwen3b-gpqa-ppo", "nodes": 1, "devices_per_node": 8, "prompts": 24, "epochs": 2},
}


def numbers(value: Any, digits: int) -> Any:
    """Reduce results to JSON: dataclasses by field order, floats rounded to `digits` significant digits, strings left out."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "cpu_s"]
    if isinstance(value, dict):
        return [[str(key), numbers(item, digits)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [numbers(item, digits) for item in value if not isinstance(item, str)]
    if isinstance(value, (bool, np.bool_)) or value is None:
        return bool(value) if value is not None else None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return f"{float(value):.{digits}g}" if value else "0"  # -0.0 is 0
    return type(value).__name__


def digest(value: Any, digits: int = DIGITS) -> str:
    """Hash a result, as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(numbers(value, digits)).encode()).hexdigest()[:16]


def lengths_of(seed: int, n: int, draws: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw true lengths (n,), scenarios (n, draws) of them and the prompt of each (n,), four responses to a prompt."""
    rng = np.random.default_rng(seed)
    group = np.arange(n) // 4
    mean = np.log(150) + rng.normal(0, 0.5, int(group[-1]) + 1)[group]
    group_correlation = rng.normal(0, 0.3, (int(group[-1]) + 1, draws))[group]
    scenarios = np.round(np.exp(mean[:, None] + group_correlation + rng.normal(0, 0.4, (n, draws)))).clip(1, 2000)
    return np.round(np.exp(mean + rng.normal(0, 0.5, n))).clip(1, 2000), scenarios, group


def planner(seed: int) -> dict[str, Any]:
    """Frontiers of known lengths and of scenarios, the choices on them, and lower bounds."""
    found: dict[str, Any] = {}
    pools = [Pool(SPEED, 1.0, 3, start_s=0.5), Pool(Speed(0.012, 2e-5), 0.5, 4, preempt_per_hour=3.0, start_s=1.0)]
    for n, options in ((9, {}), (40, {"prompts": 50.0}), (160, {"thin": 0.01}), (120, {"capacity": 9000, "prompts": 30.0})):
        truth, scenarios, _ = lengths_of(seed, n)
        known = frontier(truth, SPEED, max_actors=6, **options)
        drawn = frontier(scenarios, SPEED, max_actors=6, transfer_s=0.2, **options)
        found[f"known {n}"], found[f"scenarios {n}"] = known, drawn
        if not options:
            found[f"pools {n}"] = frontier(truth, pools=pools)
        objectives = Objective(prefer=0.3), Objective(knee=True), Objective(deadline_s=known[len(known) // 2].time_s)
        found[f"choices {n}"] = [choose(known, objective) for objective in objectives]
        work = RolloutWorkload.from_arguments(truth, SPEED, max_actors=6)
        found[f"bounds {n}"] = rollout_bounds(scenarios, SPEED, 6), CostBound(work, 0, work.kinds[0]).cost(known[-1].time_s)
    truth, scenarios, _ = lengths_of(seed, 60)
    found["pools"], found["pools of scenarios"] = frontier(truth, pools=pools), frontier(scenarios, pools=pools, thin=0.02)
    return found


def scaling(seed: int) -> dict[str, Any]:
    """Resizing, dealing and prefix decisions."""
    truth, scenarios, group = lengths_of(seed, 80)
    plans = frontier(scenarios, SPEED, max_actors=8, thin=0.01)
    found: dict[str, Any] = {"deal": assign_groups(truth, group, 5)}
    history = ResizeHistory().record(0, 3).record(2, 6).record(5, 2)
    for prefer in (0.2, 0.5, 0.9):
        objective = Objective(prefer=prefer)
        worth, chosen = time_value(objective, plans), choose(plans, objective).plan
        for current in (0, 1, 4, 8):
            decision = decide(
                current,
                chosen,
                best_held_plan(plans, current, objective),
                transition=Transition(0.4, restart_s=0.3),
                history=history,
                step=6,
                value_per_s=worth,
            )
            found[f"decide {prefer} {current}"] = decision
    demand = PrefixDemand(16, 6000, 380, 2000, truth[:4] * 20, truth[:4], np.full(4, 120.0), np.full(4, 90.0))
    for trunk in (0, 400, 2000):
        costs = PrefixCosts(2e-4, 1e-4, 1e-4, 2e-4, 0.002, 0.01, 0.05)
        found[f"prefix {trunk}"] = choose_prefix(dataclasses.replace(demand, trunk_tokens=trunk), costs, time_value=2.0, max_instances=3)
    return found


def fits(seed: int) -> dict[str, Any]:
    """Online fits of decode speed and of an affine time."""
    rng = np.random.default_rng(seed)
    fit, term = SpeedFit(Speed(0.01, 1e-4)), Term(0.05, 1e-5)
    for _ in range(3):
        running, context = rng.integers(1, 64, 200), rng.integers(100, 9000, 200)
        fit.observe(running, (0.008 + 5e-5 * running + 1e-7 * context) * np.exp(rng.normal(0, 0.05, 200)), context)
        units = rng.integers(100, 5000, 20)
        term.observe(units, (0.02 + 3e-5 * units) * np.exp(rng.normal(0, 0.1, 20)))
    return {"speed": (fit.speed, fit.spread, fit.state()), "term": (term.beta, term.missed.interval(1.0, 0.9), term.state())}


def forecasts(seed: int) -> dict[str, Any]:
    """Length forecasts over three visits of the same prompts, revised while a step runs."""
    rng = np.random.default_rng(seed)
    forecaster = LengthForecaster(200.0, max_tokens=600)
    prompts, tokens = np.arange(20), rng.integers(10, 90, 20)
    effect, found = rng.normal(0, 0.5, 20), {}
    for visit in range(3):
        drawn = forecaster.predict(prompts, tokens, 4).draw(24, seed=visit)
        truth = np.exp(np.log(120) + np.repeat(effect, 4) + rng.normal(0, 0.4, 80)).round().clip(1, 600)
        generated = np.minimum(truth, 100.0)
        revised = drawn.revise(generated, np.where(truth <= 100, truth, np.nan))
        found[f"visit {visit}"] = drawn.lengths, revised, forecast_quality(drawn.lengths, truth)
        forecaster.observe(prompts, tokens, list(truth.reshape(20, 4)))
    found["shares"] = forecaster.shares(), forecaster.forecast(prompts, tokens)
    return found


def moves(seed: int) -> dict[str, Any]:
    """Single migration decisions, with free and with costly moves."""
    truth, scenarios, _ = lengths_of(seed, 120)
    forecast, found = Scenarios.from_matrix(scenarios), dict[str, Any]()
    actor = np.random.default_rng(seed).integers(0, 5, 120)
    for progress in (0.0, 40.0, 150.0):
        finished = truth <= progress
        left = forecast.left(np.minimum(truth, progress), finished)[~finished].round()
        live = LiveState(left, np.full(len(left), 80.0), actor[~finished], tuple(range(5)))
        for cost in (0.0, 0.1):
            found[f"{progress} {cost}"] = decide_moves(live, SPEED, Settings(0.05, 8, cost, 0.0, 3 * cost))
    return found


def rollouts(seed: int) -> dict[str, Any]:
    """Whole rollouts under every policy."""
    truth, scenarios, _ = lengths_of(seed, 48)
    prompts = np.full(48, 40.0)
    cases: dict[str, dict[str, Any]] = {
        "free": {},
        "costly": {"migrate_s": 0.1, "start_s": 0.3, "prefer": 0.7},
        "cache": {"migrate_s": 0.05, "capacity": 4000, "prompts": prompts},
    }
    return {
        f"{name} {policy}": simulate_rollout(truth, scenarios, SPEED, policy=policy, max_actors=6, seed=seed, **options)
        for name, options in cases.items()
        for policy in NAMES
    }


class RoundedForecasts(simulate_run.Forecasts):
    """Scenarios drawn around the true lengths, rounded: those of `LengthForecaster` differ between processors in their last digits."""

    def scenarios(self, workload: SyntheticWorkload, step: int) -> np.ndarray:
        rng, lengths = np.random.default_rng(self.seed * 1000 + step), workload.lengths[step].ravel()
        drawn = np.round(lengths[:, None] * np.exp(rng.normal(0, 0.4, (len(lengths), simulate_run.SCENARIOS))))
        return drawn.clip(1, self.setting.response_limit)


def steps(seed: int, setting: str) -> dict[str, Any]:
    """Whole steps on a small simulated cluster under every policy."""
    with patch.object(simulate_run, "Forecasts", RoundedForecasts):
        run = simulate(parse(SETTINGS[setting]), tuple(POLICIES), seed)
    return {"bounds": run.bounds, **{name: done.steps for name, done in run.policies.items()}}


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "planner": planner,
    "scaling": scaling,
    "fits": fits,
    "forecasts": forecasts,
    "moves": moves,
    "rollouts": rollouts,
    "steps grpo": lambda seed: steps(seed, "grpo"),
    "steps ppo": lambda seed: steps(seed, "ppo"),
}


def fingerprint(parts: list[str], seeds: list[int], digits: int = DIGITS) -> dict[str, str]:
    """Compute {"part, seed, entry": hash} for the named parts."""
    return {
        f"{part}, seed {seed}, {name}": digest(value, digits)
        for part in parts
        for seed in seeds
        for name, value in PARTS[part](seed).items()
    }


def run_hashes(known: dict[str, Any], record: bool) -> dict[str, Any]:
    """Return {run: {"orders", "hashes"}} of all modes. `known`: those of before, whose orders are repeated unless recorded anew."""
    from benchmarks.common.repeated_run import MODES, hashes
    from benchmarks.common.repeated_run import record as record_orders

    found: dict[str, Any] = {}
    for mode in MODES:
        partial = MODES[mode].get("partial") is not None
        for agent in (False,) if partial else (False, True):
            name = f"{mode}, agent" if agent else mode
            with tempfile.TemporaryDirectory() as folder:
                orders = {} if not partial else record_orders(mode, Path(folder)) if record else known[name]["orders"]
                found[name] = {"hashes": hashes(mode, agent, Path(folder), orders), "orders": orders}
            print(f"{name}: {len(found[name]['hashes'])} results", file=sys.stderr, flush=True)
    return found


def compare_runs(record: bool) -> int:
    """Run every mode, and write or compare the results."""
    known = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    found = run_hashes(known, record)
    if record:
        RUNS.write_text(json.dumps(found) + "\n")
        return 0
    differ = [(run, name) for run, one in found.items() for name, value in one["hashes"].items() if known[run]["hashes"].get(name) != value]
    total = sum(len(one["hashes"]) for one in found.values())
    print(*(f"differs: {run}, {name}" for run, name in differ), f"{len(differ)} of {total} results differ", sep="\n")
    return 1 if differ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--digits", type=int, default=DIGITS, help="significant digits compared")
    parser.add_argument("--compare", type=Path, help="a file that an earlier run printed")
    parser.add_argument("--runs", action="store_true", help="run every rollout mode instead, and compare")
    parser.add_argument("--record", action="store_true", help="run every rollout mode instead, and record the results")
    given = parser.parse_args()
    if given.runs or given.record:
        return compare_runs(given.record)
    found = fingerprint(given.parts, given.seeds, given.digits)
    if given.compare is None:
        json.dump(found, sys.stdout, indent=1)
        return 0
    before = json.loads(given.compare.read_text())
    differ = [name for name, value in found.items() if before.get(name) != value]
    print(*(f"differs: {name}" for name in differ), f"{len(differ)} of {len(found)} results differ", sep="\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
