"""The tables of docs/simulator.md, made from benchmarks/results/ while the site is built, so that page and results cannot disagree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import FOLDER

AS_BUILT = "ours (as built)"
AT_BEST = ("fixed+", "global-cut", "rlhfless-paper", AS_BUILT, "ours")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pair(over: dict[str, float]) -> str:
    """Return speed over a baseline, and how much less a step costs."""
    percent = round(100 * over["saving"])
    return f"{over['speedup']:.2f}×, {f'−{percent}' if percent >= 0 else f'+{-percent}'} %"


def _mean(found: Sequence[dict[str, float]]) -> str:
    return pair({key: sum(one[key] for one in found) / len(found) for key in ("speedup", "saving")})


def _counted(entries: dict[str, Any]) -> str:
    """Return seeds and commits of a part's rows, in a sentence."""
    seeds, commits = (sorted({entry[key] for entry in entries.values()}) for key in ("seeds", "commit"))
    return f"Seeds a row: {' or '.join(map(str, seeds))}; at commit {', '.join(commit[:7] for commit in commits)}."


def best(entries: dict[str, Any]) -> str:
    """Return every policy at its best width, over `fixed` at its best width."""
    rows, columns = [], {policy: [] for policy in AT_BEST}  # type: dict[str, list[dict[str, float]]]
    for name, entry in entries.items():
        found = entry["rows"]["as it is"]
        for policy in AT_BEST:
            columns[policy].append(found[policy]["same"])
        share = found["fixed"]["rollout_s"] / found["fixed"]["step_s"]
        rows.append([name, f"{found['fixed']['step_s']:.0f} s", f"{share:.0%}", *(pair(found[p]["same"]) for p in AT_BEST)])
    rows.append(["**average**", "", "", *(_mean(columns[policy]) for policy in AT_BEST)])
    heads = ["setting", "step of `fixed`", "its rollout", *(f"`{p}`" for p in AT_BEST[:3]), "ours **as built**", "ours *planned*"]
    return f"{_table(heads, rows)}\n\n{_counted(entries)}"


def technology(entries: dict[str, Any]) -> str:
    """Return what each technology gives to `fixed`, and ours over `fixed` with the same."""
    rows = []
    for name, entry in entries.items():
        for variant, found in entry["rows"].items():
            cells = (found["fixed"]["plain"], found[AS_BUILT]["plain"], found[AS_BUILT]["same"], found["ours"]["same"])
            rows.append([name if variant == "as it is" else "", variant, *map(pair, cells)])
    heads = ["setting", "with", "`fixed`", "ours as built", "ours as built over `fixed` with the same", "ours *planned* over that"]
    return f"{_table(heads, rows)}\n\n{_counted(entries)}"


def lag(entries: dict[str, Any]) -> str:
    """Return each policy at each bound over synchronous `fixed`, and how old its tokens are."""
    rows = []
    for name, entry in entries.items():
        for bound, found in entry["rows"].items():
            for policy, row in found.items():
                ages = ", ".join(f"{share:.0%}" for share in row["tokens_by_lag"])
                rows.append([name, bound, f"`{policy}`", pair(row["plain"]), ages])
    heads = ["setting", "bound, steps", "policy", "over `fixed` at bound 0", "tokens 0, 1, … steps old"]
    return f"{_table(heads, rows)}\n\n{_counted(entries)}"


def ablation(entries: dict[str, Any]) -> str:
    policies = [p for p in next(iter(entries.values()))["rows"]["as it is"] if p != "fixed"]
    rows = [[p, *(pair(entry["rows"]["as it is"][p]["same"]) for entry in entries.values())] for p in policies]
    return f"{_table(['', *entries], rows)}\n\n{_counted(entries)}"


def sensitivity(entries: dict[str, Any]) -> str:
    rows = [
        [
            name,
            variant,
            f"{found['fixed']['rollout_s'] / found['fixed']['step_s']:.0%}",
            *(pair(found[p]["same"]) for p in ("fixed+", "ours")),
        ]
        for name, entry in entries.items()
        for variant, found in entry["rows"].items()
    ]
    return f"{_table(['setting', 'changed', 'rollout of `fixed`', '`fixed+`', 'ours *planned*'], rows)}\n\n{_counted(entries)}"


def device_model(content: dict[str, Any]) -> str:
    """Return published steps beside predicted ones."""
    rows = []
    for name, step in content["steps"].items():
        said, predicted = step["published"], step["predicted"]
        parts = ", ".join(
            f"{part.removesuffix('_s').replace('_', ' ')} {said[part]:g} / {predicted[part]:.0f}"
            for part in ("generation_s", "log_prob_s", "training_s", "weight_sync_s")
            if part in said
        )
        off = predicted["step_s"] / said["step_s"] - 1
        rows.append(
            [name, step["split"].replace("_", " "), f"{said['step_s']:g}", f"{predicted['step_s']:.0f}", f"{100 * off:+.0f} %", parts]
        )
    return _table(["step", "used for", "published, s", "predicted, s", "error", "parts, published / predicted, s"], rows)


def rollout(content: dict[str, Any]) -> str:
    """Return how ours compares with each rival in a rollout alone."""
    rows = []
    for rival in ("consolidate", "crude-mix", "rlhfless-paper", "oracle"):
        found = [target for target in content["targets"] if f" over {rival}," in target["name"]]
        values = sorted(target["value"] for target in found)
        kind = "speed" if rival == "oracle" else "time"
        rows.append([f"{kind} over `{rival}`", f"{sum(t['met'] for t in found)} of {len(found)}", f"{values[0]:.3f} to {values[-1]:.3f}"])
    return _table(["at the worst place of a frontier", "targets reached", "smallest to largest"], rows)


def break_even(content: dict[str, Any]) -> str:
    """Ours over `fixed`, above 1 a loss; and without devices that are held, where they may be."""
    rows = []
    for curve in content["curves"].values():
        for x, r in curve["points"].items():
            released = f"{r['released_time']:.2f}, {r['released_full']:.2f}" if r["held"] else "the same"
            rows.append([curve["varies"], f"{float(x):g}", f"{r['time']:.2f}", f"{r['full']:.2f}", f"{r['held']:.0%}", released])
    heads = ["varied", "", "time", "full cost", "steps held", "all given back: time, cost"]
    return f"{_table(heads, rows)}\n\nSeeds a row: {content['seeds']}; at commit {content['git'].get('commit', 'unknown')[:7]}."


def shared_pool(content: dict[str, Any]) -> str:
    """Many runs on one pool: what each policy makes of it, and how that compares with both baselines of RollMux."""
    rows = []
    for case, entry in content["cases"].items():
        for name, r in entry["policies"].items():
            over = (f"{entry['over'][name][base]['work_per_slot_s']:.2f}×" for base in ("disaggregated", "colocated", "queue"))
            times = " / ".join(f"{r[f'time_p{p}_s'] / 60:.0f}" for p in (50, 90, 100))
            shares = (f"{r['work_per_slot_s']:.0%}", f"{r['work_per_paid_s']:.0%}")
            minutes = (f"{r['makespan_s'] / 60:.0f}", f"{r['cost_per_run'] / 60:.0f}")
            rows.append([case if name == "disaggregated" else "", name, *shares, *over, *minutes, times])
    heads = [
        "pool and runs",
        "policy",
        "work per slot-second",
        "of those paid for",
        "work over disaggregated",
        "over colocated",
        "over the queue",
    ]
    heads += ["makespan, min", "cost a run, slot-min", "run times, min: median / p90 / longest"]
    seeds, commits = (sorted({entry[key] for entry in content["cases"].values()}) for key in ("seeds", "commit"))
    of_commits = ", ".join(commit[:7] for commit in commits)
    return f"{_table(heads, rows)}\n\nSeeds a row: {' or '.join(map(str, seeds))}; at commit {of_commits}."


def spot_paper(entries: dict[str, Any]) -> str:
    """Return what part of a pool on preemptible devices brings over `fixed` on own ones: at equal money, and at equal time."""
    rows = []
    for name, entry in entries.items():
        for i, row in enumerate(entry):
            cells = [f"{row['share']:.0%}", row["availability"] if row["share"] else ""]
            for policy in ("rlboost", "ours"):
                speedup, saving = row[policy]["speedup"], row[policy]["saving"]
                cells += [
                    "–" if speedup is None else f"{speedup:.2f}×",
                    "–" if saving is None else f"{-100 * saving:+.0f} %".replace("-", "−"),
                ]
            rows.append(["" if i else f"{name}: {row['fixed_s']:.0f} s", *cells])
    heads = ["setting, step of `fixed`", "preemptible", "availability", "RLBoost's policy, equal money", "equal time", "ours, equal money"]
    return _table([*heads, "equal time"], rows)


def spot_rlboost(entries: Sequence[dict[str, Any]]) -> str:
    """Return RLBoost's setting: published and simulated tokens per second, and both policies over own devices alone."""
    rows = []
    for row in entries:
        said = f"{row['published']:,}"
        if "fixed" in row:
            rows.append([row["instances"], said, f"{row['fixed']:,.0f}", "", "", ""])
        else:
            tokens = [f"{row[f'{policy}_tokens_per_s']:,.0f}" for policy in ("rlboost", "ours")]
            rows.append([row["instances"], said, *tokens, pair(row["rlboost"]), pair(row["ours"])])
    heads = [
        "instances of 2 H100",
        "published, tokens/s",
        "its policy, simulated",
        "ours",
        "its policy over 8 H100 alone",
        "ours over them",
    ]
    return _table(heads, rows)


def spot_large(entries: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            row["availability"],
            f"{row['responses']:,}",
            f"{row['step_s']:.0f} s",
            f"{row['plan_s']:.2f} s",
            f"{row['control_share']:.2%}",
            f"{row['lost']:.1f}",
            f"{row['stall_s']:.0f} s",
        ]
        for row in entries
    ]
    heads = [
        "availability",
        "responses",
        "step",
        "planning",
        "of the step",
        "responses on lost instances, a step",
        "longest time without a token",
    ]
    return _table(heads, rows)


TABLES: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {  # of which file and which part of it each is made
    "device model": ("device_model", "steps", device_model),
    "cluster best": ("cluster", "best", best),
    "cluster technology": ("cluster", "technology", technology),
    "cluster lag": ("cluster", "lag", lag),
    "cluster ablation": ("cluster", "ablation", ablation),
    "cluster sensitivity": ("cluster", "sensitivity", sensitivity),
    "cluster large": ("cluster", "large", best),
    "rollout policies": ("rollout_policies", "targets", rollout),
    "break even": ("break_even", "curves", break_even),
    "shared pool": ("shared_pool_simulated", "cases", shared_pool),
    "spot paper": ("spot", "paper", spot_paper),
    "spot rlboost": ("spot", "rlboost", spot_rlboost),
    "spot large": ("spot", "large", spot_large),
}


COMMANDS = {  # that write each file of results
    "device_model": "python -m benchmarks.fit_device_model",
    "cluster": "python -m benchmarks.cluster",
    "rollout_policies": "python -m benchmarks.rollout_policies",
    "break_even": "python -m benchmarks.break_even",
    "shared_pool_simulated": "python -m benchmarks.simulated.shared_pool",
    "spot": "python -m benchmarks.spot",
}


WITH_PARTS = ("cluster", "spot")


def tables(folder: Path = FOLDER) -> dict[str, str]:
    """Every table, from the results that lie in `folder`."""
    read = {name: json.loads(path.read_text()) for name in COMMANDS if (path := folder / f"{name}.json").exists()}
    return {name: _made(file, read.get(file, {}), part, make) for name, (file, part, make) in TABLES.items()}


def _made(file: str, content: dict[str, Any], part: str, make: Callable[[dict[str, Any]], str]) -> str:
    """Return a table. Those of files with parts are made of one of them, the others of a whole file."""
    entry = content.get("parts", {}).get(part) if file in WITH_PARTS else content.get(part) and content
    command = COMMANDS[file] + (f" --only {part}" if file in WITH_PARTS else "")
    return make(entry) if entry else f"Not simulated with this device model yet: `{command}` makes this table."
