"""Every step policy on simulated clusters: RLHFless's settings and its large cluster, with ablation and sensitivity.

python -m benchmarks.cluster [--quick] [--seeds N] [--only PART …]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cluster_variants import ABLATED, ABLATION, sensitivity
from benchmarks.provenance import ROOT
from benchmarks.results import Target, make_console, result_folder, save, show_targets
from placement.simulate import POLICIES, Run, Setting, named, names, simulate

CHEAPER = 0.5  # the second point: the settings' own `prefer`
PREFER = 0.75  # where every policy that has a knob is run: the paper claims speed first, then cost
PAPER = [name for name in names() if name.startswith("qwen")]
LARGE = [name for name in names() if name.startswith("llama")]
TUNED = 2  # seeds 0 and 1 were looked at while `ours` was made; results are of those that follow
PARTS = ("paper", "large", "oracle", "ablation", "sensitivity", "cheap")


def measure(setting: Setting, policies: Sequence[Any], seeds: int) -> list[Run]:
    return [simulate(setting, policies, TUNED + seed) for seed in range(seeds)]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0}


def row(runs: list[Run], name: str) -> dict[str, Any]:
    """Figures of a policy over seeds, ratios paired by seed with `fixed`."""
    of, base = [r.policies[name] for r in runs], [r.policies["fixed"] for r in runs]
    pairs = list(zip(of, base, strict=True))
    return {
        "step_s": spread([p.step_s for p in of]),
        "rollout_s": spread([float(np.mean([s.rollout_s for s in p.steps])) for p in of]),
        "full": spread([p.full for p in of]),
        "busy": spread([p.busy for p in of]),
        "speedup": spread([b.step_s / p.step_s for p, b in pairs]),
        "full_saving": spread([1 - p.full / b.full for p, b in pairs]),
        "busy_saving": spread([1 - p.busy / b.busy for p, b in pairs]),
        "time_over_bound": spread([p.step_s / r.bound_s for p, r in zip(of, runs, strict=True)]),
        "cost_over_bound": spread([p.full / r.bound_cost for p, r in zip(of, runs, strict=True)]),
        "cpu_s": float(np.sum([p.cpu_s for p in of])),
        "plan": of[-1].steps[-1].reason,
    }


def settings_table(runs: dict[str, list[Run]], console: Console, title: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, of in runs.items():
        rows = {policy: row(of, policy) for policy in of[0].policies}
        base = of[0].policies["fixed"].steps
        share = float(np.mean([s.rollout_s / s.time_s for r in of for s in r.policies["fixed"].steps]))
        found[name] = {"rollout_share_of_fixed": share, "seeds": len(of), "steps": len(base), "policies": rows}
        table = Table(title=f"{title}: {name}, rollout {share:.0%} of `fixed`'s step", title_justify="left")
        for head in (
            "policy",
            "step, s",
            "× fixed",
            "full, device-s",
            "saved",
            "busy saved",
            "× time bound",
            "× cost bound",
        ):
            table.add_column(head, justify="left" if head == "policy" else "right")
        for policy, r in rows.items():
            table.add_row(
                policy,
                f"{r['step_s']['mean']:.2f} ± {r['step_s']['sd']:.2f}",
                f"{r['speedup']['mean']:.2f} ± {r['speedup']['sd']:.2f}",
                f"{r['full']['mean']:.0f} ± {r['full']['sd']:.0f}",
                f"{r['full_saving']['mean']:+.0%}",
                f"{r['busy_saving']['mean']:+.0%}",
                f"{r['time_over_bound']['mean']:.2f}",
                f"{r['cost_over_bound']['mean']:.2f}",
            )
        console.print(table)
    return found


# ---- oracle at equal cost ---------------------------------------------------------------------------------------


def at_equal_cost(setting: Setting, seeds: int, prefers: Sequence[float]) -> dict[str, float]:
    """Ours against the oracle: the oracle's time where it costs what ours costs, along its curve over `prefer` (linear
    between points; beyond its dearest point its fastest time)."""
    shares = []
    for seed in range(TUNED, TUNED + seeds):
        curve = []
        for prefer in prefers:
            run = simulate(setting.but(prefer=prefer), ["oracle"], seed).policies["oracle"]
            curve.append((run.full, run.step_s))
        cost, seconds = _lower_envelope(curve)
        ours = simulate(setting, ["ours"], seed).policies["ours"]
        shares.append(float(np.interp(ours.full, cost, seconds)) / ours.step_s)
    return spread(shares)


def _lower_envelope(curve: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Points by rising cost, each time the least reached at that cost or below."""
    cost, seconds = np.array(sorted(curve)).T
    return cost, np.minimum.accumulate(seconds)


# ---- the whole --------------------------------------------------------------------------------------------------


def targets(paper: dict[str, Any], oracle: dict[str, dict[str, float]]) -> list[Target]:
    rows = {name: entry["policies"] for name, entry in paper.items()}
    speed = {n: r["ours"]["speedup"]["mean"] for n, r in rows.items()}
    full = {n: r["ours"]["full_saving"]["mean"] for n, r in rows.items()}
    busy = {n: r["ours"]["busy_saving"]["mean"] for n, r in rows.items()}
    best = max(rows, key=lambda n: speed[n])
    plus = [
        min(
            r["fixed+"]["step_s"]["mean"] / r["ours"]["step_s"]["mean"],
            r["fixed+"]["full"]["mean"] / r["ours"]["full"]["mean"],
        )
        for r in rows.values()
    ]
    cut = [1 - r["ours"]["full"]["mean"] / r["global-cut"]["full"]["mean"] for r in rows.values()]
    found = [
        Target(f"best setting ({best}): speed over fixed", speed[best], least=1.35, unit="×"),
        Target(f"best setting ({best}): full cost saved", 100 * full[best], least=45, unit=" %"),
        Target(f"best setting ({best}): busy cost saved", 100 * busy[best], least=45, unit=" %"),
        Target("average speed over fixed", float(np.mean(list(speed.values()))), least=1.23, unit="×"),
        Target("average full cost saved", 100 * float(np.mean(list(full.values()))), least=39, unit=" %"),
        Target("average busy cost saved", 100 * float(np.mean(list(busy.values()))), least=39, unit=" %"),
        Target("worst axis against fixed+, worst setting", min(plus), least=1.0, unit="×"),
        Target("settings ahead of fixed+ on both axes", sum(p > 1 for p in plus), least=len(plus)),
        Target("full cost below global-cut, average", 100 * float(np.mean(cut)), least=12.8, unit=" %"),
    ]
    if oracle:
        worst = 100 * min(o["mean"] for o in oracle.values())
        found.append(Target("oracle's speed reached at equal cost, worst", worst, least=92, unit=" %"))
    return found


def why(paper: dict[str, Any]) -> str:
    """Where targets are missed, the room that there was: the bound, the clairvoyant plan, and what PPO forbids."""
    lines = ["room for speed, by setting (fixed / lower bound; the oracle's and our share of it):"]
    for name, entry in paper.items():
        rows = entry["policies"]
        bound = rows["fixed"]["time_over_bound"]["mean"]
        lines.append(
            f"  {name}: at most {bound:.2f}×; oracle {rows['oracle']['speedup']['mean']:.2f}×, ours {rows['ours']['speedup']['mean']:.2f}×"
            + (" (PPO: the policy's gradients wait for the whole batch)" if name.endswith("ppo") else "")
        )
    return "\n".join(lines)


def plot(paper: dict[str, Any], path: Path) -> str | None:
    """Cost and time of every policy, relative to `fixed`, one panel per setting. Returns why not, where matplotlib is
    missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no picture: it needs matplotlib (pip install matplotlib)"
    columns = min(3, len(paper))
    rows = -(-len(paper) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, sharex=True, sharey=True)
    colours = pyplot.get_cmap("tab10")
    for at, (name, entry) in enumerate(paper.items()):
        axis = axes[at // columns][at % columns]
        for i, (policy, r) in enumerate(entry["policies"].items()):
            x = entry["policies"]["fixed"]["step_s"]["mean"] / r["step_s"]["mean"]
            y = r["full"]["mean"] / entry["policies"]["fixed"]["full"]["mean"]
            axis.errorbar(
                x,
                y,
                xerr=r["speedup"]["sd"],
                yerr=r["full_saving"]["sd"],
                fmt="o",
                color=colours(i % 10),
                label=policy,
                ms=4,
            )
        axis.axvline(1, color="grey", lw=0.5)
        axis.axhline(1, color="grey", lw=0.5)
        axis.set_title(name, fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("speed, × fixed")
    for line in axes:
        line[0].set_ylabel("full cost, × fixed")
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def recall(kept: Path, content: dict[str, Any], run: Sequence[str]) -> None:
    """Take from the result file the parts that are not run now, so that parts may be run one by one or side by side."""
    if not kept.exists() or set(run) == set(PARTS):
        return
    before = json.loads(kept.read_text())
    for part in PARTS:
        if part not in run and part in before:
            content[part] = before[part]
            content["seconds"][part] = before["seconds"].get(part, float("nan"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cluster")
    parser.add_argument("--quick", action="store_true", help="one seed, two settings: shows that it runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--settings", nargs="*", default=None, help="some of the paper's settings")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "cluster.png")
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    console = make_console()
    chosen = options.settings or (PAPER[:1] if options.quick else PAPER)
    content: dict[str, Any] = {"prefer": PREFER, "seeds": seeds, "first_seed": TUNED, "seconds": {}}
    kept = result_folder(options.quick) / "cluster.json"
    recall(kept, content, options.only)

    def timed(part: str, of: Callable[[], Any]) -> None:
        if part not in options.only:
            return
        began = time.process_time()
        content[part] = of()
        content["seconds"][part] = time.process_time() - began
        recall(kept, content, options.only)
        listed = targets(content["paper"], content.get("oracle", {})) if "paper" in content else []
        save("cluster", content, listed, console=console, quick=options.quick)

    def paper() -> dict[str, Any]:
        """Kept setting by setting, so that some may be run at a time."""
        for name in chosen:
            began = time.process_time()
            runs = measure(named(name).but(prefer=PREFER), list(POLICIES), seeds)
            rows = settings_table({name: runs}, console, "paper")
            rows[name]["cpu_s"] = time.process_time() - began
            before = json.loads(kept.read_text()).get("paper", {}) if kept.exists() else {}
            together = {**before, **rows}
            content["paper"] = {n: together[n] for n in PAPER if n in together}
            recall(kept, content, ["paper"])
            save(
                "cluster",
                content,
                targets(content["paper"], content.get("oracle", {})),
                console=console,
                quick=options.quick,
            )
        return json.loads(kept.read_text())["paper"]

    def large() -> dict[str, Any]:
        some = ["fixed", "fixed+", "disaggregated", "global-cut", "rlhfless-paper", "ours", "oracle"]
        found = {}
        for name in LARGE[:1] if options.quick else LARGE:
            setting = named(name).but(prefer=PREFER, epochs=2)
            found.update(settings_table({name: measure(setting, some, min(seeds, 3))}, console, "large cluster"))
        return found

    def oracle() -> dict[str, dict[str, float]]:
        some = [n for n in ("qwen3b-gsm8k-grpo", "qwen7b-gpqa-grpo", "qwen3b-livecodebench-ppo") if n in chosen]
        return {n: at_equal_cost(named(n).but(prefer=PREFER), min(seeds, 2), (0.1, 0.4, 0.75, 0.95)) for n in some}

    def ablation() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ABLATED if set(ABLATED) <= set(chosen) else chosen[:1]:
            found.update(settings_table({name: measure(named(name).but(prefer=PREFER), ABLATION, seeds)}, console, "ablation"))
        return found

    def cheap() -> dict[str, Any]:
        some = ["fixed", "fixed+", "global-cut", "ours"]
        found: dict[str, Any] = {}
        for name in chosen:
            found.update(settings_table({name: measure(named(name).but(prefer=CHEAPER), some, seeds)}, console, f"prefer {CHEAPER}"))
        return found

    def sensitive() -> dict[str, Any]:
        base = named(chosen[0]).but(prefer=PREFER)
        runs = {label: measure(s, ["fixed", "fixed+", "ours"], min(seeds, 2)) for label, s in sensitivity(base).items()}
        return settings_table(runs, console, f"sensitivity of {chosen[0]}")

    timed("paper", paper)
    timed("cheap", cheap)
    timed("ablation", ablation)
    timed("sensitivity", sensitive)
    timed("oracle", oracle)
    timed("large", large)
    if "paper" in content:
        show_targets(console, targets(content["paper"], content.get("oracle", {})))
        console.print(why(content["paper"]), highlight=False)
        missing = None if options.quick else plot(content["paper"], options.plot)
        console.print(missing or ("" if options.quick else f"written: {options.plot}"), highlight=False)
    console.print("seconds of this process: " + ", ".join(f"{k} {v:.0f}" for k, v in content["seconds"].items()), highlight=False)


if __name__ == "__main__":
    main()
