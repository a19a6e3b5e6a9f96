"""What computing each distinct prompt prefix once saves: `python -m benchmarks.prefix [--quick] [--base] [--large] [--repeats N]`.

Real vLLM engines and the real service on a local Ray. 64 prompts share a header and have 60 to 124 tokens of their own; each is
answered by a group of samples. Groups are split over the rollout engines, or kept on one engine each. A step is measured up to
the first token of every response, so that all of it is prefill; the engines of a step are played one after the other on one
process with an empty cache, so engine-seconds add up and nothing competes for the cores. With the service on, engine-seconds
are those of the prefill instance and of the engines: computing, saving, sealing, fetching, checking and loading. Times are processor
seconds of the engines' processes; those of the wall stand beside them in the JSON.

Two policies of random weights: about the quickstart's size (0.8 M parameters), where half of what an engine does is the handling of
requests, and one of 13 M, the base case alone. `--large`: one of 494 M in bfloat16 instead, with fewer prompts and headers.

Of a prompt, what fills no block cannot be found in an engine's own cache: without the service it is computed for each sample.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.prefix_engines import LARGE, VOCABULARY, open_engine, policy
from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from placement.scaling.prefix_benefit import PrefixChoice, PrefixSpeed, choose_prefix
from placement.scaling.resize_policy import assign_groups
from rlhfless_ray.prefix.block_hash import distinct_prefixes
from rlhfless_ray.prefix.page_service import PrefixService, Producer
from rlhfless_ray.prefix.prefix_stats import prefix_demand
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.tensor_slice import whole_slices

BLOCK = 32
HEADERS, ENGINES, GROUPS = (64, 256, 1024, 4096), (1, 2, 4), (4, 8, 16)
BASE = (1024, 4, 8)
PROMPTS, QUICK_PROMPTS, LARGE_PROMPTS = 64, 12, 8
OWN = (60, 124)  # tokens of a prompt besides the header
WITHIN_S = 900.0


@dataclass(frozen=True)
class PrefixCase:
    header: int
    engines: int
    group: int
    split: bool  # every engine has samples of every prompt, or each prompt has its engine

    @property
    def layout(self) -> str:
        return "split" if self.split else "together"


@dataclass(frozen=True)
class PrefixMeasurement:
    """One case: engine-seconds and prompt tokens computed without and with the service, what the planner would have chosen."""

    case: PrefixCase
    off_s: Spread
    on_s: Spread
    auto_s: Spread
    off_wall_s: Spread
    on_wall_s: Spread
    prefill_s: Spread
    off_tokens: int
    on_tokens: int
    distinct_tokens: int
    ratio: float
    choice: PrefixChoice
    decide_s: Spread

    def row(self) -> tuple[str, ...]:
        saved = self.off_s.median / self.on_s.median
        return (
            str(self.case.header), str(self.case.engines), str(self.case.group), self.case.layout, self.off_s.show(), self.on_s.show(),
            f"{saved:.2f}×", f"{self.off_tokens:,} → {self.on_tokens:,}", f"{self.ratio:.3f}", "on" if self.choice.on else "off",
            f"{self.off_s.median / self.auto_s.median:.2f}×", f"{self.choice.break_even_tokens:.0f}",
        )  # fmt: skip


class PrefixWorld:
    def __init__(self, name: str, longest: int) -> None:
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                 object_store_memory=2**30 if name != LARGE else 3 * 2**30)  # fmt: skip
        files, weights = policy(name, longest)
        slices = whole_slices(weights)
        shared = (ray.put(slices), digests(slices), longest, BLOCK)
        dtype = "bfloat16" if name == LARGE else "float32"
        del weights, slices
        self.plain, self.user, self.maker = (open_engine(files, *shared, keeps, dtype) for keeps in (False, True, True))
        self.page_bytes = ray.get(self.maker.kind.remote()).page_bytes
        self.service = PrefixService("benchmark", 2**29, heartbeat_s=120)
        self.service.start()
        self.speed = PrefixSpeed.first_guess(1e-4, self.page_bytes)
        self.version = 1

    def close(self) -> None:
        import ray

        self.service.stop()
        ray.shutdown()


def prompts_of(case: PrefixCase, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    header = rng.integers(2, VOCABULARY, case.header)
    return [np.r_[header, rng.integers(2, VOCABULARY, rng.integers(*OWN))].astype(np.int32) for _ in range(count)]


def shares_of(case: PrefixCase, count: int) -> list[np.ndarray]:
    """Prompt numbers of each engine's requests."""
    prompt = np.repeat(np.arange(count), case.group)
    if case.split:
        return [prompt[engine :: case.engines] for engine in range(case.engines)]
    return [prompt[share] for share in assign_groups(np.ones(len(prompt)), prompt, case.engines)]


def measure(world: PrefixWorld, case: PrefixCase, count: int, repeats: int) -> PrefixMeasurement:
    import ray

    off, on, auto, decide = [], [], [], []
    off_wall, on_wall, prefill = [], [], []
    for repeat in range(repeats):
        prompts, shares = prompts_of(case, count, 100 * repeat + case.header), shares_of(case, count)

        def play(actor: Any, refs: list[list[Any]], prompts: list[np.ndarray] = prompts, shares: Any = shares) -> list[Any]:
            return [
                ray.get(actor.answer_first.remote(world.version, prompts, share.tolist(), some, WITHIN_S), timeout=WITHIN_S)
                for share, some in zip(shares, refs, strict=True)
            ]

        left = play(world.plain, [[] for _ in shares])
        costs, lists = world.speed.costs(), [p.tolist() for p in prompts]
        begin = time.thread_time()
        choice = choose_prefix(prefix_demand(lists, shares, BLOCK), costs, page_bytes=world.page_bytes)
        decide.append(time.thread_time() - begin)
        prepared = world.service.prepare(world.version, lists, [Producer(world.maker, 1)], WITHIN_S)
        if prepared.failed or world.service.failures:
            raise RuntimeError(f"the service failed: {[*prepared.failed, *world.service.failures]}")
        jobs = ray.get(world.maker.take_jobs.remote())
        sent = play(world.user, [prepared.needed_by(sorted(set(share.tolist()))) for share in shares])
        world.service.keep_only(-1)  # the next repeat's header is another one, but its pages need room
        for (_, done), job in zip(prepared.done, jobs, strict=True):
            world.speed.observe_job(done.tokens, done.pages, done.prefill_s * job.busy, done.save_s * job.busy)
        for one in sent:
            world.speed.observe_fetch(one.pages, one.fetch_s * one.busy, one.loaded, one.load_s * one.busy)
        off.append(sum(one.cpu_s for one in left))
        on.append(sum(one.cpu_s for one in [*jobs, *sent]))
        auto.append(decide[-1] + (on[-1] if choice.on else off[-1]))
        off_wall.append(sum(one.wall_s for one in left))
        on_wall.append(sum(one.wall_s for one in [*jobs, *sent]))
        prefill.append(sum(one.cpu_s for one in jobs))
    computed = sum(job.tokens for job in jobs)
    distinct = distinct_prefixes(prompts, BLOCK).distinct_tokens
    requests = count * case.group
    engines = sum(one.tokens for one in sent)
    return PrefixMeasurement(
        case, Spread.of(off), Spread.of(on), Spread.of(auto), Spread.of(off_wall), Spread.of(on_wall), Spread.of(prefill),
        sum(one.tokens for one in left), computed + engines, distinct, (computed + engines - requests) / distinct, choice,
        Spread.of(decide),
    )  # fmt: skip


def cases(quick: bool) -> list[PrefixCase]:
    """One thing varied at a time around the base case, both layouts."""
    if quick:
        return [PrefixCase(header, 2, 4, split) for header in (64, 1024) for split in (True, False)]
    header, engines, group = BASE
    found = [(h, engines, group) for h in HEADERS] + [(header, e, group) for e in ENGINES] + [(header, engines, g) for g in GROUPS]
    return [PrefixCase(h, e, g, split) for (h, e, g), split in itertools.product(dict.fromkeys(found), (True, False))]


def large_cases() -> list[PrefixCase]:
    """Around the break-even: short headers, few engines."""
    return [PrefixCase(header, engines, 4, True) for header, engines in ((64, 2), (256, 2), (1024, 2), (256, 4))]


def targets(tables: dict[str, list[PrefixMeasurement]]) -> list[Target]:
    every = [row for rows in tables.values() for row in rows]
    together = [row.off_s.median / row.auto_s.median for row in every if not row.case.split]
    bases = [(name, row) for name, rows in tables.items() for row in rows if row.case == PrefixCase(*BASE, True)]
    what = "64 prompts, 1,024 shared, groups of 8 over 4 engines: off / on engine-s"
    return [
        *(Target(f"{what}, {name}", row.off_s.median / row.on_s.median, least=2.5, unit="×") for name, row in bases),
        Target("prompt tokens computed per distinct token, on, at most", max(row.ratio for row in every), most=1.0005),
        Target("the same, at least", min(row.ratio for row in every), least=0.9995),
        Target("groups together: off / auto, worst case", min(together), least=0.98, unit="×"),
    ]


def show(console: Any, name: str, rows: list[PrefixMeasurement]) -> None:
    title = f"Engine-seconds until every response has its first token, policy {name}"
    heads = ("header", "engines", "group", "groups", "off s", "on s", "off/on", "tokens off → on", "computed/distinct", "auto", "off/auto")
    table = Table(*heads, "pays from", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row.row())
    console.print(table)


def run(name: str, chosen: list[PrefixCase], count: int, repeats: int) -> tuple[list[PrefixMeasurement], dict[str, Any]]:
    world = PrefixWorld(name, max(case.header for case in chosen) + OWN[1] + 2)
    try:
        measure(world, PrefixCase(64, 2, 4, True), 4, 1)  # warms up
        measure(world, PrefixCase(512, 2, 4, True), 4, 1)
        rows = [measure(world, case, count, repeats) for case in chosen]
    finally:
        world.close()
    found = [{**vars(row), "case": vars(row.case), "choice": vars(row.choice)} for row in rows]
    return rows, {"page_bytes": world.page_bytes, "costs": vars(world.speed.costs()), "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--base", action="store_true", help="the base case alone")
    parser.add_argument("--large", action="store_true", help="a policy of 494 M parameters alone, without targets")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    console = make_console()
    base = [PrefixCase(*BASE, True), PrefixCase(*BASE, False)]
    plan = {"quickstart": base if options.base else cases(options.quick)} | ({} if options.quick else {"medium": base})
    count, repeats = (QUICK_PROMPTS, 1) if options.quick else (PROMPTS, options.repeats)
    if options.large:
        plan, count = {LARGE: large_cases()}, LARGE_PROMPTS
    tables, said = {}, {}
    for name, chosen in plan.items():
        tables[name], said[name] = run(name, chosen, count, repeats)
        show(console, name, tables[name])
    met = [] if options.large else targets(tables)
    show_targets(console, met)
    setting = {"prompts": count, "own_tokens": OWN, "block_size": BLOCK}
    save("prefix_large" if options.large else "prefix", {**setting, "policies": said}, met, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
