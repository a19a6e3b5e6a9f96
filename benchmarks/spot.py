"""Own and preemptible devices in the simulator, beside RLBoost, for the tables of docs/simulator.md.

python -m benchmarks.spot [--quick] [--trace FILE] [--only PART …]

FILE: a recorded availability, rows of seconds and nodes. All is deterministic by seed. The result file is rewritten after each setting.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common.availability import Availability as Trace
from benchmarks.common.results import Target, make_console, result_folder, save, show_targets
from benchmarks.common.run_metadata import provenance
from benchmarks.simulated.cluster_parts import wide
from benchmarks.simulated.instance_counts import InstanceCounts
from benchmarks.simulated.pool_run import PREFERS, Course, MixedPoolRun, PoolFigures, at_equal, fixed_figures, inputs_of
from benchmarks.simulated.pool_steps import PoolMarket, PoolPlan, run_step
from placement import Pool, frontier
from placement.simulate import PhaseTimes, Setting, parse

SEED = 2  # seeds 0 and 1 were looked at while policies were made
PRICE = 1 / 3  # of a preemptible device, over an own one
INTERVAL_S = 0.25  # the recipe's rollout.stream_interval_s
SETTINGS = ("qwen3b-gsm8k-grpo", "qwen7b-gpqa-grpo")
SHARES = (0.0, 0.3, 0.7)  # of the pool that may be preemptible
SCALES = (1.0, 1.4, 2.0)  # devices of the pool, over those of `fixed`
DRAWN_HOURS, DRAWN_SEED = 200.0, 1
OWN_PRICE, SPOT_PRICE = 83.79, 21.28  # USD per hour of 8 H100 (RLBoost's REPRODUCE.md)
PUBLISHED_TOKENS_PER_S = {0: 10_000, 1: 12_000, 2: 14_000, 3: 16_000, 4: 18_000}  # the same: by instances of two H100
RLBOOST = {  # run_async_grpo8b_pipeline.sh. Its lengths are not published: these give its baseline's tokens per second
    "name": "rlboost-qwen3-8b",
    "device": "H100",
    "nodes": 1,
    "devices_per_node": 8,
    "model": "qwen3-8b",
    "algorithm": "grpo",
    "prompts": 128,
    "samples": 8,
    "prompt_limit": 512,
    "response_limit": 14336,
    "tensor_parallel": 2,
    "lengths": {"like": "gsm8k", "median_tokens": 4500, "log_deviation": 0.7, "prompt_tokens": 100, "prompts": 90_000},
}
LARGE, NOTICE_S = 300, 120.0  # devices, and the seconds of notice there


def course_of(trace: Trace) -> InstanceCounts:
    return InstanceCounts(np.array(trace.times_s, float), np.array(trace.nodes), float(trace.end_s))


def availabilities(path: Path | None) -> dict[str, InstanceCounts]:
    """Return the courses of availability by name: always full, drawn from statistics, and the recording if there is one."""
    found = {"full": InstanceCounts.constant(16), "drawn": course_of(Trace.draw(DRAWN_SEED, DRAWN_HOURS))}
    return found | ({"recorded": course_of(Trace.read(path))} if path is not None else {})


def shared(setting: Setting, courses: dict[str, InstanceCounts], course: Course, scales: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return a row for each share of preemptible devices and course: RLBoost's policy and ours over `fixed` on own devices."""
    base, rows = fixed_figures(setting, course, SEED), list[dict[str, Any]]()
    for share in SHARES:
        for name, trace in courses.items() if share else (("full", courses["full"]),):
            theirs, ours = list[PoolFigures](), list[PoolFigures]()
            for scale in scales if share else scales[:1]:
                most = round(setting.devices * scale)
                run = MixedPoolRun(setting, PoolMarket(setting.devices, most, trace, round(most * share), PRICE, INTERVAL_S), course, SEED)
                theirs.append(run.rlboost())
                ours += [run.ours(prefer) for prefer in PREFERS]
            figures = {"rlboost": at_equal(theirs, base), "ours": at_equal(ours, base)}
            rows.append({"share": share, "availability": name, "fixed_s": base.step_s, **figures})
    return rows


def rlboost_rows(course: Course, console: Console) -> None:
    """Save RLBoost's setting by instances. Lag zero: on-policy, as published."""
    setting = parse(dict(RLBOOST))
    base, price = fixed_figures(setting, course, SEED), SPOT_PRICE / OWN_PRICE
    rows = [{"instances": "0", "published": PUBLISHED_TOKENS_PER_S[0], "fixed": base.tokens_per_s}]
    for n in list(PUBLISHED_TOKENS_PER_S)[1:]:
        run = MixedPoolRun(setting, PoolMarket(8, 8 + 2 * n, InstanceCounts.constant(n), 2 * n, price, INTERVAL_S), course, SEED)
        theirs, ours = run.rlboost(), run.ours(1.0)
        row = {"instances": str(n), "rlboost": theirs.over(base), "ours": ours.over(base)}
        tokens = {"rlboost_tokens_per_s": theirs.tokens_per_s, "ours_tokens_per_s": ours.tokens_per_s}
        rows.append({**row, **tokens, "published": PUBLISHED_TOKENS_PER_S[n]})
        _save("rlboost", rows, console, quick=False)


def large(courses: dict[str, InstanceCounts], course: Course) -> list[dict[str, Any]]:
    """Return what planning takes of a step on 300 devices, and the longest time without a token. Of the own third one half learns."""
    setting = wide(SETTINGS[0]).but(nodes=38, prompts=512, max_lag_steps=1, tensor_parallel=1)
    times, given, rows = PhaseTimes.from_setting(setting), inputs_of(setting, 1, SEED)[0], list[dict[str, Any]]()
    own, most_spot = LARGE // 3, 2 * LARGE // 3
    pools = [
        Pool(times.speed, PRICE, most_spot, preempt_per_hour=0.5, notice_s=NOTICE_S, interval_s=INTERVAL_S, restart_s=59.0),
        Pool(times.speed, max_actors=own // 2),
    ]
    began = time.process_time()
    frontier(given.scenarios, pools=pools, prompts=given.prompts, thin=0.005)
    plan_s = time.process_time() - began
    plan = PoolPlan(own // 2, own // 2, most_spot, 1, 0.0)
    for name, trace in courses.items():
        market = PoolMarket(own, LARGE, trace, most_spot, PRICE, INTERVAL_S, NOTICE_S)
        at_s = np.array([0.0]) if name == "full" else trace.at_s[1 :: max(1, len(trace.at_s) // (4 * course.moments))] - 5.0
        steps = [run_step(times, given, plan, market, market.holdings(1, max(0.0, float(t)), k)) for k, t in enumerate(at_s)]
        step_s = float(np.mean([step.time_s for step in steps]))
        control = {"plan_s": plan_s, "control_share": plan_s / step_s, "stall_s": max(step.stall_s for step in steps), "notice_s": NOTICE_S}
        lost = float(np.mean([step.lost for step in steps]))
        rows.append({"availability": name, "responses": len(given.lengths), "step_s": step_s, "lost": lost, **control})
    return rows


def targets_of(parts: dict[str, Any]) -> list[Target]:
    """Return the targets of the pools of which 70 % are preemptible, and of the large one."""
    found = []
    for name, rows in parts.get("paper", {}).items():
        for row in rows:
            if row["share"] == SHARES[-1]:
                best = max((row["ours"]["speedup"] or 0) / 1.4, (row["ours"]["saving"] or 0) / 0.3)
                gone = "own devices do everything at full price while there are no instances"
                why = "" if best >= 1 else gone if row["availability"] != "full" else "few own devices learn, which is most of a step"
                found.append(
                    Target(
                        f"{name}, {row['availability']}: 1.4x at equal money, or 30 % at equal time: the better over its target",
                        best,
                        least=1,
                        why=why,
                    )
                )
    for row in parts.get("rlboost", [])[1:]:
        ratio = row["ours_tokens_per_s"] / row["rlboost_tokens_per_s"]
        why = "" if ratio >= 1 else "one instance leaves little to plan, and shares of seeding are tried in coarse steps"
        found.append(Target(f"RLBoost's setting, {row['instances']} instances: ours over its policy", ratio, least=1, why=why))
    for row in parts.get("large", []):
        found.append(
            Target(f"{LARGE} devices, {row['availability']}: planning over the step", 100 * row["control_share"], most=1, unit=" %")
        )
        found.append(
            Target(f"{LARGE} devices, {row['availability']}: longest time without a token", row["stall_s"], most=row["notice_s"], unit=" s")
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.spot")
    parser.add_argument("--quick", action="store_true", help="one small setting: shows that it runs")
    parser.add_argument("--trace", type=Path, help="recorded availability: rows of seconds and nodes")
    parser.add_argument("--only", nargs="*", choices=("paper", "rlboost", "large"), default=("paper", "rlboost", "large"))
    parser.add_argument("--lags", nargs="*", type=int, choices=(0, 1), default=(0, 1))
    options = parser.parse_args()
    console, quick = make_console(), options.quick
    courses = availabilities(options.trace)
    course = Course(moments=2, steps=1) if quick else Course()
    if quick:
        courses = {name: courses[name] for name in ("full", "drawn")}
    for lag in options.lags if "paper" in options.only else ():
        for name in SETTINGS[: 1 if quick else None]:
            setting = wide(name).but(max_lag_steps=lag, **({"prompts": 8} if quick else {}))
            rows = shared(setting, courses, course, SCALES[:1] if quick else SCALES)
            _save("paper", {f"{name}, lag {lag}": rows}, console, quick)
    if "rlboost" in options.only and not quick:
        rlboost_rows(course, console)
    if "large" in options.only and not quick:
        _save("large", large(courses, course), console, quick)


def _save(part: str, rows: Any, console: Console, quick: bool) -> None:
    """Add rows to what is already in the result file, and show the targets."""
    path = result_folder(quick) / "spot.json"
    parts: dict[str, Any] = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts[part] = {**parts.get(part, {}), **rows} if isinstance(rows, dict) else rows
    targets = targets_of(parts)
    save("spot", {"commit": provenance()["git"].get("commit", ""), "parts": parts}, targets, console=console, quick=quick)
    show_targets(console, targets)


if __name__ == "__main__":
    main()
