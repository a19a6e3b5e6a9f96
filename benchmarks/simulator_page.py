"""The tables of docs/simulator.md, written from benchmarks/results/: `python -m benchmarks.simulator_page`.

Each stands between `<!-- NAME -->` and `<!-- end -->`; what is between them is replaced, so that page and results cannot
disagree.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import FOLDER, Target
from benchmarks.common.run_metadata import ROOT
from benchmarks.simulated.cluster_targets import of, over, room, targets
from benchmarks.simulated.cluster_variants import AS_BUILT
from benchmarks.simulated.lag_bounds import BOUNDS, mean_over
from placement.simulate.partial_policies import AHEAD

PAGE = ROOT / "docs" / "simulator.md"
NAMED = ("fixed+", "global-cut", "rlhfless-paper", "ours", "oracle")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(rows: dict[str, Any], policy: str) -> str:
    return _pair(of(rows, policy, "speedup"), of(rows, policy, "full_saving"))


def _pair(speed: float, saved: float) -> str:
    return f"{speed:.2f}×, {_less(saved)}"


def _average(rows: Sequence[dict[str, Any]]) -> str:
    """Return means over settings, of rows with `speedup` and `saving`."""
    return _pair(*(sum(row[key] for row in rows) / len(rows) for key in ("speedup", "saving")))


def _by_column(heads: Sequence[str], settings: dict[tuple[str, ...], list[dict[str, Any]]]) -> str:
    """Return a table of settings and their average. settings: by first cells, rows with `speedup` and `saving`."""
    rows = [[*lead, *(_pair(one["speedup"], one["saving"]) for one in found)] for lead, found in settings.items()]
    average = [_average(column) for column in zip(*settings.values(), strict=True)]
    return _table(heads, [*rows, ["**average**", *[""] * (len(heads) - 1 - len(average)), *average]])


def _less(share: float) -> str:
    percent = round(100 * share)
    return f"−{percent} %" if percent >= 0 else f"+{-percent} %"


def _counted(entries: dict[str, Any], content: dict[str, Any], part: str) -> str:
    """Seeds and commits of a part's rows, in a sentence."""
    seeds = sorted({int(entry["seeds"]) for entry in entries.values()})
    commits = sorted({c[:7] for key, c in content.get("commits", {}).items() if key.startswith(f"{part}: ")})
    return f"Seeds a row: {' or '.join(map(str, seeds))}; at commit {', '.join(commits) or 'unknown'}."


def paper(content: dict[str, Any]) -> str:
    entries = content["paper"]
    rows = []
    for name, entry in entries.items():
        p = entry["policies"]
        spread = p["ours"]["speedup"]["sd"]
        rows.append(
            [
                name,
                f"{entry['rollout_share_of_fixed']:.0%}",
                *(_cell(p, policy) for policy in NAMED[:3]),
                f"{of(p, 'ours', 'speedup'):.2f}× ± {spread:.2f}, {_less(of(p, 'ours', 'full_saving'))}",
                _cell(p, "oracle"),
                f"{p['fixed']['time_over_bound']['mean']:.2f}×",
            ]
        )
    average = [_pair(over(entries, policy, "speedup"), over(entries, policy, "full_saving")) for policy in NAMED]
    rows.append(["**average**", "", *average, f"{room(entries):.2f}×"])
    table = _table(["setting", "rollout share", *(f"`{policy}`" for policy in NAMED), "speed at most"], rows)
    return f"{table}\n\n{_counted(entries, content, 'paper')}"


def fair(content: dict[str, Any]) -> str:
    """Everybody at its best width: ours over the plain baseline and over the same technology, by both ways of billing."""
    entries = content["fair"]
    columns = [  # all-reduce, billing, policy, over which `fixed`, head
        ("30 µs", "sold", "fixed", "plain", "`fixed` over plain"),
        ("30 µs", "sold", "ours", "plain", "`ours` over plain"),
        ("30 µs", "sold", "ours", "same", "**`ours` over `fixed`**"),
        ("30 µs", "billed", "ours", "plain", "all billed: over plain"),
        ("30 µs", "billed", "ours", "same", "all billed: over `fixed`"),
        ("70 µs", "sold", "fixed", "plain", "70 µs: `fixed` over plain"),
        ("70 µs", "sold", "ours", "plain", "70 µs: `ours` over plain"),
        ("70 µs", "sold", "ours", "same", "70 µs: `ours` over `fixed`"),
    ]
    rows = {(name,): [entry[a][b][policy][over] for a, b, policy, over, _ in columns] for name, entry in entries.items()}
    table = _by_column(["setting", *(head for *_, head in columns)], rows)
    return f"{table}\n\n{_counted(entries, content, 'fair')}"


def drafted(content: dict[str, Any]) -> str:
    """What drafts give to `fixed` and to ours, as built and as planned, over `fixed` without and with the same drafts."""
    entries = content["drafts"]
    columns = [  # drafts, policy, over which `fixed`, head
        ("text", "fixed", "plain", "`fixed+spec` over `fixed`"),
        ("off", AS_BUILT, "plain", "ours as built, no drafts, over `fixed`"),
        ("text", AS_BUILT, "plain", "**ours as built** over `fixed`"),
        ("text", AS_BUILT, "same", "**ours as built** over `fixed+spec`"),
        ("text", "ours", "same", "*planned* over `fixed+spec`"),
        ("trained", "fixed", "plain", "trained drafter: `fixed+spec` over `fixed`"),
        ("trained", AS_BUILT, "plain", "trained drafter: **ours as built** over `fixed`"),
        ("trained", AS_BUILT, "same", "trained drafter: **ours as built** over `fixed+spec`"),
        ("trained", "ours", "same", "trained drafter: *planned* over `fixed+spec`"),
    ]
    rows = {}
    for name, entry in entries.items():
        chances = " / ".join(f"{entry['acceptance'][drafts]:.2f}" for drafts in ("text", "trained"))
        rows[name, chances] = [entry["rows"][drafts][policy][over] for drafts, policy, over, _ in columns]
    table = _by_column(["setting", "acceptance", *(head for *_, head in columns)], rows)
    return f"{table}\n\n{_counted(entries, content, 'drafts')}"


def quantised(content: dict[str, Any]) -> str:
    """What 8-bit weights give to `fixed` and to ours, with engines of one device and of the best width."""
    entries = content["quantised"]
    columns = [  # width, policy, over which `fixed`, head
        ("1", "fixed", "plain", "width 1: `fixed` over plain"),
        ("1", AS_BUILT, "plain", "width 1: **ours as built** over plain"),
        ("1", AS_BUILT, "same", "width 1: **ours as built** over `fixed`"),
        ("1", "ours", "plain", "width 1: *planned* over plain"),
        ("1", "ours", "same", "width 1: *planned* over `fixed`"),
        ("best", "fixed", "off", "best width: `fixed` over `fixed` in bf16"),
        ("best", AS_BUILT, "off", "best width: **ours as built** over `fixed` in bf16"),
        ("best", AS_BUILT, "same", "best width: **ours as built** over `fixed`"),
        ("best", "ours", "same", "best width: *planned* over `fixed`"),
    ]
    rows = {(name,): [entry["rows"][width][policy][over] for width, policy, over, _ in columns] for name, entry in entries.items()}
    table = _by_column(["setting", *(head for *_, head in columns)], rows)
    return f"{table}\n\n{_counted(entries, content, 'quantised')}"


def quantised_rivals(content: dict[str, Any]) -> str:
    """Means over settings of every policy with 8-bit weights."""
    entries, rows = content["quantised"].values(), []
    for width in next(iter(entries))["rows"]:
        for policy in next(iter(entries))["rows"][width]:
            found = [entry["rows"][width][policy] for entry in entries]
            rows.append([width, f"`{policy}`", *(_average([row[over] for row in found]) for over in ("plain", "off", "same"))])
    heads = ["width", "policy", "over plain `fixed`", "over `fixed` of this width in bf16", "over `fixed` with 8-bit weights"]
    return _table(heads, rows)


def fair_rivals(content: dict[str, Any]) -> str:
    """Means over settings of every policy at its best width, over plain `fixed` and over `fixed` at its best width."""
    entries = content["fair"].values()
    rows = []
    for latency, billing, said in (
        ("30 µs", "sold", "30 µs"),
        ("30 µs", "billed", "30 µs, all devices billed"),
        ("70 µs", "sold", "70 µs"),
    ):
        for policy in next(iter(entries))[latency][billing]:
            found = [entry[latency][billing][policy] for entry in entries]
            cells = (_average([row[over] for row in found]) for over in ("plain", "same"))
            widths: Counter[str] = Counter()
            for row in found:
                widths.update(row["widths"])
            shown = ", ".join(f"{w}: {count}" for w, count in sorted(widths.items(), key=lambda item: int(item[0])))
            rows.append([said, f"`{policy}`", *cells, shown])
    return _table(["all-reduce", "policy", "over plain `fixed`", "over `fixed` at its best width", "steps by width"], rows)


def lag(content: dict[str, Any]) -> str:
    """Each policy at each bound on the lag: means over settings."""
    entries = content["lag"]
    rows = []
    for bound in BOUNDS:
        for policy in next(iter(entries.values()))[bound]:
            pairs = (mean_over(entries, bound, policy, base) for base in ("plain", "same"))
            shares = zip(*(entry[bound][policy]["tokens_by_lag"] for entry in entries.values()), strict=True)
            tokens = ", ".join(f"{sum(share) / len(entries):.0%}" for share in shares)
            rows.append([bound, f"`{policy}`", *(_pair(*one) for one in pairs), tokens])
    heads = ["bound, steps", "policy", "over plain `fixed`", "over `fixed` at its best width", "tokens that are 0, 1, … steps old"]
    return f"{_table(heads, rows)}\n\nMeans over {', '.join(f'`{name}`' for name in entries)}. {_counted(entries, content, 'lag')}"


def lag_settings(content: dict[str, Any]) -> str:
    """A column for each bound on the lag: ours and the baselines in each setting, over synchronous `fixed` at its best width."""
    entries, rows = content["lag"], []
    for policy in ("ours", AHEAD, "fixed", "april"):
        bounds = [bound for bound in BOUNDS if policy in next(iter(entries.values()))[bound]]
        for name, entry in entries.items():
            found = {bound: _pair(*(entry[bound][policy]["same"][key] for key in ("speedup", "saving"))) for bound in bounds}
            rows.append([f"`{policy}`", name, *(found.get(bound, "") for bound in BOUNDS)])
        means = {bound: _pair(*mean_over(entries, bound, policy, "same")) for bound in bounds}
        rows.append([f"`{policy}`", "**average**", *(means.get(bound, "") for bound in BOUNDS)])
    return f"{_table(['policy', 'setting', *BOUNDS], rows)}\n\n{_counted(entries, content, 'lag')}"


def time_(content: dict[str, Any]) -> str:
    """Where `fixed` and ours spend a step beyond the bound."""
    rows = []
    for name, entry in content["paper"].items():
        for policy in ("fixed", "ours"):
            r = entry["policies"][policy]
            step, rollout = r["step_s"]["mean"], r["rollout_s"]["mean"]
            bound = step / r["time_over_bound"]["mean"]
            seconds = (bound, rollout, step - rollout, step)
            rows.append([name if policy == "fixed" else "", f"`{policy}`", *(f"{s:.1f}" for s in seconds)])
    heads = ["setting", "policy", "the longest response alone, and its own learning", "rollout", "after the last response", "step"]
    return _table(heads, rows)


def oracle(content: dict[str, Any]) -> str:
    entries = content["oracle"]
    rows = [[name, f"{100 * e['mean']:.1f} % ± {100 * e['sd']:.1f}"] for name, e in entries.items()]
    return f"{_table(['setting', 'share of the oracle’s speed at equal cost'], rows)}\n\n{_counted(entries, content, 'oracle')}"


def ablation(content: dict[str, Any]) -> str:
    entries = content["ablation"]
    names = [name for name in next(iter(entries.values()))["policies"] if name != "fixed"]
    rows = [[name, *(_cell(entry["policies"], name) for entry in entries.values())] for name in names]
    return f"{_table(['', *entries], rows)}\n\n{_counted(entries, content, 'ablation')}"


def sensitivity(content: dict[str, Any]) -> str:
    entries = content["sensitivity"]
    rows = [
        [name, f"{entry['rollout_share_of_fixed']:.0%}", *(_cell(entry["policies"], p) for p in ("fixed+", "ours"))]
        for name, entry in entries.items()
    ]
    return f"{_table(['changed', 'rollout share', '`fixed+`', '`ours`'], rows)}\n\n{_counted(entries, content, 'sensitivity')}"


def large(content: dict[str, Any]) -> str:
    entries = content["large"]
    names = list(next(iter(entries.values()))["policies"])
    rows = []
    for name, entry in entries.items():
        p = entry["policies"]
        rows += [
            [f"{name}: step", *(f"{of(p, n, 'step_s'):.1f} s" for n in names)],
            ["against `fixed`", *("" if n == "fixed" else _cell(p, n) for n in names)],
            ["above the bounds, time and cost", *(f"{of(p, n, 'time_over_bound'):.2f}, {of(p, n, 'cost_over_bound'):.2f}" for n in names)],
        ]
    return f"{_table(['', *(f'`{n}`' for n in names)], rows)}\n\n{_counted(entries, content, 'large')}"


def cheap(content: dict[str, Any]) -> str:
    entries = content["cheap"]
    rows = [[name, *(_cell(entry["policies"], p) for p in ("fixed+", "global-cut", "ours"))] for name, entry in entries.items()]
    return f"{_table(['setting', '`fixed+`', '`global-cut`', '`ours`'], rows)}\n\n{_counted(entries, content, 'cheap')}"


def reached(content: dict[str, Any]) -> str:
    return target_table(targets(content))


def target_table(found: Sequence[Target]) -> str:
    rows = []
    for target in found:
        wanted = f"≥ {target.least:g}" if target.least is not None else f"≤ {target.most:g}"
        verdict = "reached" if target.met else f"**missed**: {target.why}"
        rows.append([target.name, f"{wanted}{target.unit}", f"{target.value:.4g}{target.unit}", verdict])
    return _table(["target", "wanted", "reached", ""], rows)


def rollout(content: dict[str, Any]) -> str:
    """Targets of rollouts alone: how many were reached, and those that were not."""
    found = _saved_targets(content)
    missed = [target for target in found if not target.met]
    kinds = {"single rollouts": [t for t in found if "means of" not in t.name], "means": [t for t in found if "means of" in t.name]}
    counts = "; of ".join(f"{kind}, {sum(t.met for t in some)} of {len(some)}" for kind, some in kinds.items())
    return f"Targets reached: of {counts}. The others:\n\n{target_table(missed)}"


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


def shared_pool_targets(content: dict[str, Any]) -> str:
    return target_table(_saved_targets(content))


def _saved_targets(content: dict[str, Any]) -> list[Target]:
    return [Target(**{key: row.get(key, "") for key in Target.__dataclass_fields__}) for row in content["targets"]]


TABLES: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {  # of which file and which part of it each is made
    "cluster fair": ("cluster", "fair", fair),
    "cluster fair rivals": ("cluster", "fair", fair_rivals),
    "cluster drafts": ("cluster", "drafts", drafted),
    "cluster quantised": ("cluster", "quantised", quantised),
    "cluster quantised rivals": ("cluster", "quantised", quantised_rivals),
    "cluster lag": ("cluster", "lag", lag),
    "cluster lag settings": ("cluster", "lag", lag_settings),
    "cluster targets": ("cluster", "paper", reached),
    "cluster paper": ("cluster", "paper", paper),
    "cluster time": ("cluster", "paper", time_),
    "cluster cheap": ("cluster", "cheap", cheap),
    "cluster oracle": ("cluster", "oracle", oracle),
    "cluster ablation": ("cluster", "ablation", ablation),
    "cluster sensitivity": ("cluster", "sensitivity", sensitivity),
    "cluster large": ("cluster", "large", large),
    "rollout policies": ("rollout_policies", "targets", rollout),
    "break even": ("break_even", "curves", break_even),
    "shared pool": ("shared_pool_simulated", "cases", shared_pool),
    "shared pool targets": ("shared_pool_simulated", "cases", shared_pool_targets),
}


FILES = ("cluster", "rollout_policies", "break_even", "shared_pool_simulated")


def filled(page: str, tables: dict[str, str]) -> str:
    """`page` with every table put between its marks. Raises ValueError where a mark is missing."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", "\n<!-- end -->"
        if page.count(begin) != 1 or end not in page.partition(begin)[2]:
            raise ValueError(f"docs/simulator.md: one place for {begin.strip()} … {end.strip()} is needed")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return page


def tables(folder: Path = FOLDER) -> dict[str, str]:
    """Every table, from the results that lie in `folder`."""
    read = {name: json.loads(path.read_text()) for name in FILES if (path := folder / f"{name}.json").exists()}
    return {name: make(read[file]) if read.get(file, {}).get(part) else "(not run yet)" for name, (file, part, make) in TABLES.items()}


def write_page(path: Path = PAGE) -> None:
    path.write_text(filled(path.read_text(), tables()))


if __name__ == "__main__":
    write_page()
