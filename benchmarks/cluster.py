"""Every step policy on simulated clusters: RLHFless's settings and its large cluster, with ablation and sensitivity.

python -m benchmarks.cluster [--quick] [--seeds N] [--only PART …] [--policies NAME …]

All is deterministic by seed, so after a change of some policies these alone may be run again: the others' rows stay, each table
with the commits that its rows are of.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.results import make_console, result_folder, save, show_targets
from benchmarks.common.run_metadata import ROOT, provenance
from benchmarks.simulated.cluster_targets import targets
from benchmarks.simulated.cluster_variants import ABLATED, ABLATION, sensitivity
from benchmarks.simulated.drafted import measure_drafted
from benchmarks.simulated.fair_baselines import measure_fair
from benchmarks.simulated.lag_bounds import BOUNDS, measure_lags
from benchmarks.simulated.quantised import measure_quantised
from benchmarks.simulator_page import write_page
from placement.simulate import POLICIES, Setting, SimulatedRun, named, names, simulate
from placement.simulate.one_step_off import NOT_BUILT
from placement.simulate.partial_policies import AHEAD

CHEAPER = 0.5  # the second point: the settings' own `prefer`
PREFER = 0.75  # where every policy that has a knob is run: the paper claims speed first, then cost
PAPER = [name for name in names() if name.startswith("qwen")]
LARGE = [name for name in names() if name.startswith("llama")]
TUNED = 2  # seeds 0 and 1 were looked at while `ours` was made; results are of those that follow
AGAINST_ORACLE = ("qwen3b-gsm8k-grpo", "qwen7b-gpqa-grpo", "qwen3b-livecodebench-ppo")
PARTS = ("fair", "drafts", "quantised", "lag", "paper", "large", "oracle", "ablation", "sensitivity", "cheap")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0}


def row(runs: list[SimulatedRun], name: str) -> dict[str, Any]:
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


HEADS = ("policy", "step, s", "× fixed", "full, device-s", "saved", "busy saved", "× time bound", "× cost bound")


def setting_table(name: str, runs: list[SimulatedRun], console: Console, title: str) -> dict[str, Any]:
    rows = {policy: row(runs, policy) for policy in runs[0].policies}
    base = [s for r in runs for s in r.policies["fixed"].steps]
    share = float(np.mean([s.rollout_s / s.time_s for s in base]))
    table = Table(title=f"{title}: {name}, rollout {share:.0%} of `fixed`'s step", title_justify="left")
    for head in HEADS:
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
    return {"rollout_share_of_fixed": share, "seeds": len(runs), "steps": len(base) // len(runs), "policies": rows}


# ---- oracle at equal cost ---------------------------------------------------------------------------------------


def at_equal_cost(setting: Setting, seeds: Sequence[int], prefers: Sequence[float]) -> dict[str, float]:
    """Ours against the oracle: the oracle's time where it costs what ours costs, along its curve over `prefer` (linear
    between points; beyond its dearest point its fastest time)."""
    shares = []
    for seed in seeds:
        curve = []
        for prefer in prefers:
            run = simulate(setting.but(prefer=prefer), ["oracle"], seed).policies["oracle"]
            curve.append((run.full, run.step_s))
        cost, seconds = _lower_envelope(curve)
        ours = simulate(setting, ["ours"], seed).policies["ours"]
        shares.append(float(np.interp(ours.full, cost, seconds)) / ours.step_s)
    return {**spread(shares), "seeds": len(seeds)}


def _lower_envelope(curve: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Points by rising cost, each time the least reached at that cost or below."""
    cost, seconds = np.array(sorted(curve)).T
    return cost, np.minimum.accumulate(seconds)


def fair_table(name: str, found: dict[str, Any], console: Console) -> dict[str, Any]:
    """Show a setting of `measure_fair`. Returns it."""
    heads = ("all-reduce", "policy", "widths", "over plain `fixed`", "over `fixed` at its best width")
    table = Table(*heads, title=f"best widths: {name}", title_justify="left")
    for latency in found:
        for billing, rows in found[latency].items() if latency.endswith("µs") else ():
            for policy, r in rows.items():
                cells = (f"{r[key]['speedup']:.2f}×, {-r[key]['saving']:+.0%}" for key in ("plain", "same"))
                widths = ", ".join(f"{w} ({count})" for w, count in r["widths"].items())
                table.add_row(f"{latency}, {billing}", policy, widths, *cells)
    console.print(table)
    return found


def lag_table(name: str, found: dict[str, Any], console: Console) -> dict[str, Any]:
    """Show a setting of `measure_lags`. Returns it."""
    heads = ("bound", "policy", "over plain `fixed`", "over `fixed` at its best width", "tokens by lag")
    table = Table(*heads, title=f"bounds on the lag: {name}", title_justify="left")
    for bound in BOUNDS:
        for policy, r in found[bound].items():
            cells = (f"{r[key]['speedup']:.2f}×, {-r[key]['saving']:+.0%}" for key in ("plain", "same"))
            table.add_row(bound, policy, *cells, ", ".join(f"{share:.0%}" for share in r["tokens_by_lag"]))
    console.print(table)
    return found


# ---- the whole --------------------------------------------------------------------------------------------------


def plot(paper: dict[str, Any], path: Path) -> None:
    """Draw cost and time of every policy, relative to `fixed`, one panel per setting."""
    from matplotlib import pyplot

    columns = min(3, len(paper))
    rows = -(-len(paper) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, sharex=True, sharey=True)
    colours = pyplot.get_cmap("tab10")
    for at, (name, entry) in enumerate(paper.items()):
        axis = axes[at // columns][at % columns]
        for i, (policy, r) in enumerate(entry["policies"].items()):
            x = entry["policies"]["fixed"]["step_s"]["mean"] / r["step_s"]["mean"]
            y = r["full"]["mean"] / entry["policies"]["fixed"]["full"]["mean"]
            axis.errorbar(x, y, xerr=r["speedup"]["sd"], yerr=r["full_saving"]["sd"], fmt="o", color=colours(i % 10), label=policy, ms=4)
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


class Kept:
    """The result file, rewritten after every setting of a part: what is finished outlives a cut, and parts and settings
    may be run at different times or side by side."""

    def __init__(self, content: dict[str, Any], console: Console, quick: bool, some: Sequence[str] = ()) -> None:
        """`some`: policies that alone are run, the others' rows stay."""
        self.content, self.console, self.quick, self.some = content, console, quick, list(some)
        self.path = result_folder(quick) / "cluster.json"
        self.order: dict[str, list[str]] = {}

    def renewed(self, part: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
        """A table of some policies within the one that there is, which must have the same `fixed`."""
        entry, of = self.before(part).get(name), found["policies"]
        same = entry is not None and entry["seeds"] == found["seeds"]
        if not same or not math.isclose(entry["policies"]["fixed"]["step_s"]["mean"], of["fixed"]["step_s"]["mean"], rel_tol=1e-5):
            raise SystemExit(f"{part}: {name} is not there, or of other seeds, or its `fixed` differs: run it with all policies")
        return {**entry, "policies": {**entry["policies"], **{p: r for p, r in of.items() if p in entry["policies"] and p in self.some}}}

    def before(self, part: str) -> dict[str, Any]:
        return json.loads(self.path.read_text()).get(part, {}) if self.path.exists() else {}

    def begin(self, part: str, order: Sequence[str]) -> None:
        """order: the keys of a whole part; of others the file may hold leftovers, which go."""
        self.order[part] = list(order)

    def add(self, part: str, name: str, value: Any, seconds: float) -> None:
        """Merge a value into the file, which other processes may have changed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.content |= {other: kept for other in (*PARTS, "seconds", "commits") if (kept := self.before(other))}
            merged = {**self.content.get(part, {}), name: value}
            self.content[part] = {n: merged[n] for n in self.order[part] if n in merged}
            key, commit = f"{part}: {name}" + "".join(f", {policy}" for policy in self.some), provenance()["git"].get("commit", "")
            self.content["seconds"] = {**self.content.get("seconds", {}), key: seconds}
            self.content["commits"] = {**self.content.get("commits", {}), key: commit}
            save("cluster", self.content, targets(self.content), console=self.console, quick=self.quick)
        finally:
            os.close(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cluster")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one setting of a part, an eighth of its prompts: shows that it runs"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), help="some parts, in this order")
    parser.add_argument("--settings", nargs="*", choices=PAPER, default=None, help="some of the paper's settings")
    some = [*POLICIES, "april", AHEAD, NOT_BUILT]
    parser.add_argument("--policies", nargs="*", choices=some, default=[], help="these alone: the others' rows stay")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "cluster.png")
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    console = make_console()
    chosen = options.settings or (PAPER[:1] if options.quick else PAPER)
    content: dict[str, Any] = {"prefer": PREFER, "cheaper": CHEAPER, "first_seed": TUNED, "seconds": {}, "commits": {}}
    kept = Kept(content, console, options.quick, options.policies)

    measured = range(TUNED, TUNED + seeds)

    def of_size(name: str, **changes: Any) -> Setting:
        found = named(name)
        return found.but(prompts=found.prompts // 8, epochs=2, **changes) if options.quick else found.but(**changes)

    def fast(name: str) -> Setting:
        return of_size(name, prefer=PREFER)

    def table(setting: Setting, policies: Sequence[Any], name: str, title: str) -> dict[str, Any]:
        some = ["fixed", *(p for p in policies if p in options.policies)] if options.policies else policies
        return setting_table(name, [simulate(setting, some, seed) for seed in measured], console, title)

    def bounds(name: str) -> dict[str, Any]:
        return measure_lags(fast(name), measured, options.policies, kept.before("lag").get(name))

    cheap = ["fixed", "fixed+", "global-cut", "ours"]
    changed = sensitivity(fast(chosen[0]))
    parts: dict[str, tuple[Callable[[str], Any], list[str], list[str]]] = {  # what runs, of which keys, which of them now
        "fair": (lambda name: fair_table(name, measure_fair(fast(name), measured), console), PAPER, chosen),
        "drafts": (lambda name: measure_drafted(fast(name), measured), PAPER, chosen),
        "quantised": (lambda name: measure_quantised(fast(name), measured), PAPER, chosen),
        "lag": (lambda name: lag_table(name, bounds(name), console), PAPER, chosen),
        "paper": (lambda name: table(fast(name), list(POLICIES), name, "paper"), PAPER, chosen),
        "cheap": (lambda name: table(of_size(name, prefer=CHEAPER), cheap, name, f"prefer {CHEAPER}"), PAPER, chosen),
        "ablation": (lambda name: table(fast(name), ABLATION, name, "ablation"), list(ABLATED), [n for n in ABLATED if n in chosen]),
        "sensitivity": (
            lambda name: table(changed[name], ["fixed", "fixed+", "ours"], name, f"sensitivity of {chosen[0]}"),
            list(changed),
            list(changed),
        ),
        "oracle": (
            lambda name: at_equal_cost(fast(name), measured, (0.1, 0.4, 0.75, 0.95)),
            list(AGAINST_ORACLE),
            [n for n in AGAINST_ORACLE if n in chosen],
        ),
        "large": (lambda name: table(fast(name), list(POLICIES), name, "large cluster"), LARGE, LARGE[:1] if options.quick else LARGE),
    }
    for part in options.only:
        run, order, now = parts[part]
        kept.begin(part, order)
        for name in now:
            began = time.process_time()
            value = kept.renewed(part, name, run(name)) if options.policies and part != "lag" else run(name)
            kept.add(part, name, value, time.process_time() - began)
    show_targets(console, targets(content))
    if not options.quick:
        if "paper" in content:
            plot(content["paper"], options.plot)
            console.print(f"written: {options.plot}", highlight=False)
        write_page()


if __name__ == "__main__":
    main()
