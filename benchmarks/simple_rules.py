"""Is the planner ever behind a simple rule at equal cost?  `python -m benchmarks.simple_rules [--quick] [--draws N] [--traces FOLDER]`

Each set of lengths is drawn several times, with what is forecast of them. On each draw every rule places the responses for each number of
actors, and the planner for each preference between cost and time. Points are means over the draws, because the longest response of one
draw is luck. They are compared at 25 costs that both reach.

placed once   `frontier` on the forecast's scenarios against `random`, `equal groups` (equal numbers of similar forecasts) and
              `longest first` (each to the actor with the least forecast work), timed on the true lengths
with moves    `decide_moves` in simulated rollouts against `consolidate`, `random` and `fixed`, with free and with costly moves
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.rollout_policies import SPEED, ratios
from benchmarks.simulated.rollout_cases import GSM8K, TRACES, Drawn, answers, lognormal, problems, tokens, window
from benchmarks.simulated.simulate_rollout import simulate_rollout
from placement import LengthForecaster, Objective, Speed, choose, frontier

RESPONSES, ACTORS = 512, 16
SPEEDS = {"reading weights": SPEED, "computing": Speed(1e-3, 1e-4)}  # what most of a decode step is
PREFER = np.r_[0.0, np.linspace(0.1, 0.95, 18), 1.0]
KNOBS = (0.0, 0.12, 0.24, 0.36, 0.6, 1.0)
COSTS = {"free moves": {}, "moves 0.1 s, starts 0.3 s": {"migrate_s": 0.1, "start_s": 0.3}}
MOST_BEHIND = 1.003
RANDOM_SPLITS = 4  # per draw and number of actors


def heavy_tail(seed: int, n: int = RESPONSES) -> Drawn:
    """Pareto lengths up to 8,192 tokens, whose prompts differ by 0.3 in log length."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.normal(0, 0.3, n // 8), 8)
    drawn = np.minimum(100 * np.exp(prompt)[:, None] * (1 + rng.pareto(1.6, (n, 65))), 8192).round() + 1
    return drawn[:, 0], drawn[:, 1:]


def two_peaks(seed: int, n: int = RESPONSES) -> Drawn:
    """Short answers of about 150 tokens and long ones of about 1,500, which some prompts nearly always get."""
    rng = np.random.default_rng(seed)
    chance = np.repeat(np.where(rng.random(n // 8) < 0.15, 0.8, 0.02), 8)
    drawn = np.where(rng.random((n, 65)) < chance[:, None], 1500, 150) * np.exp(rng.normal(0, 0.3, (n, 65)))
    return drawn[:, 0].round() + 1, drawn[:, 1:].round() + 1


def learned(seed: int, n: int = RESPONSES) -> Drawn:
    """Log-normal lengths as `LengthForecaster` forecasts them on the third visit of their prompts."""
    rng, prompts = np.random.default_rng(seed), n // 8
    effect, row = rng.normal(0, 0.5, prompts), list(range(prompts))
    forecaster, size = LengthForecaster(200.0), rng.integers(20, 200, prompts)
    for _ in range(2):
        forecaster.observe(row, size, list(np.exp(5.4 + effect[:, None] + rng.normal(0, 0.35, (prompts, 8))).round()))
    truth = np.exp(5.4 + np.repeat(effect, 8) + rng.normal(0, 0.35, n)).round()
    return truth, forecaster.scenarios(row, size, 8, 64, seed).astype(float)


def length_sets(traces: Path) -> dict[str, Callable[[int], Drawn]]:
    """Return what draws lengths and scenarios by seed, for each set. Recorded sets are left out where their file is missing."""
    found: dict[str, Callable[[int], Drawn]] = {
        "log-normal": lambda seed: lognormal(RESPONSES, seed),
        "log-normal, useless forecast": lambda seed: lognormal(RESPONSES, seed, known=False),
        "log-normal, learned forecast": learned,
        "heavy tail": heavy_tail,
        "two peaks": two_peaks,
    }
    if (traces / GSM8K).exists():
        table = answers(traces / GSM8K)
        found["GSM8K, four models"] = lambda seed: problems(table, seed, RESPONSES // 4)
    if (traces / "conversation_lengths.csv").exists():
        every = tokens(traces / "conversation_lengths.csv")
        found["conversations, weak forecast"] = lambda seed: window(every, seed, RESPONSES)
    return found


def timed(truth: np.ndarray, groups: list[np.ndarray], speed: Speed) -> tuple[float, float]:
    seconds = [speed.rollout_s(truth[group]) for group in groups if len(group)]
    return max(seconds), sum(seconds)


def longest_first(work: np.ndarray, actors: int) -> list[np.ndarray]:
    """Give each response, the longest forecast first, to the actor with the least forecast work."""
    loads, groups = [(0.0, a) for a in range(actors)], [list[int]() for _ in range(actors)]
    for i in np.argsort(-work, kind="stable").tolist():
        load, a = heapq.heappop(loads)
        groups[a].append(i)
        heapq.heappush(loads, (load + work[i], a))
    return [np.array(group) for group in groups]


def placed_once(draw: Callable[[int], Drawn], speed: Speed, draws: int) -> dict[str, np.ndarray]:
    """Return (points, 2) mean times and costs of the planner and of each rule."""
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in ("planner", "random", "equal groups", "longest first")}
    for seed in range(draws):
        truth, scenarios = draw(1000 + seed)
        rng, said, counts = np.random.default_rng(seed), scenarios.mean(1), range(1, ACTORS + 1)
        plans = frontier(scenarios, speed, max_actors=ACTORS, thin=0.005)
        chosen = [choose(plans, Objective(prefer=float(p))).plan for p in PREFER]
        order = np.argsort(-said, kind="stable")
        splits = [[timed(truth, np.array_split(rng.permutation(len(truth)), m), speed) for m in counts] for _ in range(RANDOM_SPLITS)]
        found["planner"].append([timed(truth, list(plan.groups), speed) for plan in chosen])
        found["random"].append([tuple(point) for point in np.mean(splits, axis=0)])
        found["equal groups"].append([timed(truth, np.array_split(order, m), speed) for m in counts])
        found["longest first"].append([timed(truth, longest_first(said, m), speed) for m in counts])
    return {name: np.mean(points, axis=0) for name, points in found.items()}


def with_moves(draw: Callable[[int], Drawn], draws: int, costs: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Return (knobs, 2) mean times and costs of our policy and of each rule in simulated rollouts."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for seed in range(draws):
        truth, scenarios = draw(1000 + seed)
        for policy in ("ours", "consolidate", "random", "fixed"):
            play = partial(simulate_rollout, truth, scenarios, SPEED, policy=policy, max_actors=ACTORS, seed=seed, **costs)
            results = [play(prefer=knob) for knob in (KNOBS[-1:] if policy == "fixed" else KNOBS)]
            found.setdefault("planner" if policy == "ours" else policy, []).append([(one.time_s, one.cost) for one in results])
    return {name: np.mean(points, axis=0) for name, points in found.items()}


def gaps(points: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the planner's time over each rule's at equal cost, at the median cost and at the worst one."""
    over = {name: ratios(points["planner"], some, 0) for name, some in points.items() if name != "planner"}
    return {name: {"median": float(np.median(one)), "worst": float(one.max())} for name, one in over.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=16, help="of each set, for responses that are placed once")
    parser.add_argument("--moving-draws", type=int, default=6, help="of each set, for simulated rollouts")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of gsm8k_response_lengths.json and conversation_lengths.csv")
    parser.add_argument("--quick", action="store_true", help="one draw of one set, to see that it runs")
    options = parser.parse_args()
    console, began, content = make_console(), time.process_time(), dict[str, Any]()
    draws, moving = (1, 1) if options.quick else (options.draws, options.moving_draws)
    sets = dict(list(length_sets(options.traces).items())[: 1 if options.quick else None])
    columns = ("lengths", "how", "rule", "time at equal cost, median", "worst")
    table = Table(*columns, title="The planner over simple rules", title_justify="left")
    for name, draw in sets.items():
        played = {f"placed once, {kind}": placed_once(draw, speed, draws) for kind, speed in SPEEDS.items()}
        played |= {how: with_moves(draw, moving, costs) for how, costs in COSTS.items()}
        for how, points in played.items():
            found = gaps(points)
            content[f"{name}; {how}"] = {"points": points, "over": found}
            for rule, over in found.items():
                table.add_row(name, how, rule, f"{over['median']:.3f}", f"{over['worst']:.3f}")
    console.print(table)
    worst = {rule: max((c["over"][rule]["worst"], name) for name, c in content.items() if rule in c["over"]) for rule in _rules(content)}
    targets = [Target(f"time over {rule} at its worst", gap, most=MOST_BEHIND, why=where) for rule, (gap, where) in worst.items()]
    show_targets(console, targets)
    result = {"speeds": {name: asdict(speed) for name, speed in SPEEDS.items()}, "draws": [draws, moving], "sets": content}
    save("simple_rules", result, targets, console=console, quick=options.quick)
    console.print(f"{time.process_time() - began:.0f} s of this process", highlight=False)


def _rules(content: Mapping[str, Any]) -> list[str]:
    return sorted({rule for one in content.values() for rule in one["over"]})


if __name__ == "__main__":
    main()
