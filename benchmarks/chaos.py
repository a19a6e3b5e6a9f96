"""Random faults of every kind in one run: `python -m benchmarks.chaos [--quick] [--faults N] [--real N] [--drivers N] [--partial N]
[--deaths N]`.

A run on a local cluster of several nodes, struck once in every step, next to one that is not: the same samples, each once, the
same learning (a replayed learner's weights are a digest of all it was given, in order), nothing left behind. Replayed engines
for the volume; real ones, with `--real`, for a part: there the weights of every version are DeepSpeed's, and the same to the bit,
so what is learned with faults is what is learned without. The driver is killed and resumed in processes of its own. Partial rollouts
depend on speed, so there every group must be trained once, whole and in time. A run whose Ray or driver is killed or stopped must say so,
leave nothing behind and go on. A part that fails is told with its reason, and the others are run and written down all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.common.fault_injection import (
    KINDS,
    PAGE_KINDS,
    Chaos,
    FaultInjector,
    InjectedFault,
    Nodes,
    compare,
    left_behind,
    left_of,
    outcome,
    quick_to_see_hangs,
    quiet_ray,
    step_rows,
)
from benchmarks.common.partial_outcome import wrong_of
from benchmarks.common.ray_deaths import KILLED, STOPPED, signalled
from benchmarks.common.replay_setup import ReplaySetup, build, recipe_for, synthetic_lengths
from benchmarks.common.results import Target, make_console, save, show_targets
from rlhfless_ray.recipe import Recipe

PROMPTS, SAMPLES, TOKENS = 4, 4, 96
REAL_KINDS = (
    "engine killed at work",
    "engine hung",
    "parked engine killed",
    "reward process killed",
    "learner killed",
    "node lost",
    *PAGE_KINDS,
)
SILENCE_S = 5.0  # after which an engine hangs; a real one may have to load weights in it
PARTIAL: dict[str, dict[str, Any]] = {
    "in turn": {"partial": "continue", "max_lag_steps": 2, "oversample": 2},
    "ahead": {"partial": "continue", "max_lag_steps": 2, "oversample": 2, "ahead": True},
}
BUDGET = 10**6  # here faults are what is wanted
DEADLINE_S = 600.0  # of leases, and twice that of a driver: a machine that does something else too is no fault
LEAST = 5  # of each kind, in all parts together


def shuffled(faults: int, kinds: tuple[str, ...], seed: int) -> list[str]:
    """As many of each kind as of any other; but what only real engines can have comes `LEAST` times first, if there is room."""
    own = [kind for kind in kinds if kind in PAGE_KINDS]
    first = own * LEAST if faults >= 2 * LEAST * len(own) else []
    others = [kind for kind in kinds if kind not in PAGE_KINDS or not first]
    rest = [others[i % len(others)] for i in range(faults - len(first))] if others else own * faults
    return [str(kind) for kind in np.random.default_rng(seed).permutation([*first, *rest][:faults])]


def drive(run: FaultInjector) -> dict[str, Any]:
    began_s = time.monotonic()
    with run:
        ray_folder = run.cluster.temporary  # of a Ray of its own
        for _ in run:
            pass
    rows = step_rows(run.folder.path)
    names = ("faults/bugs", "faults/preempted", "faults/learner_restarts", "faults/updates_redone", "rollout/orphans")
    found = outcome(run.folder.path)
    rewards = [float(np.mean([row[-1] for row in found[step] if row[-1] is not None])) for step in sorted(found)]
    return {
        "path": run.folder.path,
        "samples": found,
        "published": run.published,
        "rewards": rewards,
        "ray": ray_folder,
        "seconds": time.monotonic() - began_s,
        "steps": len(rows),
        **{name: sum(row.get(name) or 0 for row in rows) for name in names},
    }


def replayed(folder: Path, faults: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Strike a run with replayed engines, where faults come in numbers."""
    kinds = shuffled(faults, tuple(KINDS), seed)
    steps = faults + faults // 4 + 6  # a strike that finds nothing takes a step more
    nodes = Nodes(3)
    try:
        world = small_world(folder)
        clean = on_cluster(nodes, InjectedFault(recipe(world, folder / "clean", steps), lambda run, moment: None))
        say(f"the run without faults: {clean['steps']} steps in {clean['seconds']:.0f} s")
        chaos = Chaos(kinds, nodes, seed, say)
        with quick_to_see_hangs():
            struck = on_cluster(nodes, InjectedFault(recipe(world, folder / "struck", steps), chaos))
        left = left_behind(nodes.address)
        return told(struck, clean, chaos, left) | {"nodes_lost": nodes.removed}
    finally:
        nodes.close()


def real_steps(faults: int) -> int:
    return faults + faults // 4 + 4


def real(
    folder: Path, faults: int, seed: int, say: Callable[[str], None], kinds: tuple[str, ...] = REAL_KINDS, ranks: int = 1
) -> dict[str, Any]:
    """On vLLM and DeepSpeed; log-probabilities are those of float32, so samples can be the same. Nothing is accumulated ahead, and a rank
    has one thread, so weights are the same to the bit. The run without faults has a Ray of its own, the other is on a cluster of three
    nodes."""
    from tests.conftest import small_recipe

    def recipe_of(name: str) -> Recipe:
        tree = small_recipe(
            folder,
            run__name=name,
            run__steps=real_steps(faults),
            watch__samples_per_step=0,
            functions__max_replacements=BUDGET,
            functions__lease_deadline_s=DEADLINE_S,
            evaluate__prompts=0,
            rollout__min_actors=2,
            rollout__prefix_kv="on",
            rollout__stream_interval_s=0.05,
            rollout__silence_s=2 * SILENCE_S,
            learner__overlap="off",
            learner__ranks=ranks,
            learner__zero_stage=2 * (ranks > 1),
        )
        return Recipe.parse(tree)

    clean = drive(FaultInjector(recipe_of("clean"), lambda run, moment: None))
    say(f"the run without faults: {clean['steps']} steps in {clean['seconds']:.0f} s")
    nodes = Nodes(2, store_bytes=256 * 2**20, head_cores=1)  # too few: there is always something on the others
    try:
        chaos = Chaos(shuffled(faults, kinds, seed), nodes, seed, say)
        struck = on_cluster(nodes, FaultInjector(recipe_of("struck"), chaos))
        left = left_of(clean["ray"]) | left_behind(nodes.address)
        return told(struck, clean, chaos, left) | {"nodes_lost": nodes.removed}
    finally:
        nodes.close()


def told(struck: dict[str, Any], clean: dict[str, Any], chaos: Chaos, left: dict[str, int]) -> dict[str, Any]:
    """Return what the result file keeps of a run with faults and of one without."""
    kept = ("seconds", "steps", "faults/bugs", "faults/preempted", "faults/learner_restarts", "faults/updates_redone", "rollout/orphans")
    return {
        "faults": dict(Counter(kind for _, kind, _ in chaos.done)), "not_done": dict(Counter(chaos.kinds)), "log": chaos.done,
        "wrong": compare(struck, clean), "left": left, "clean_s": clean["seconds"], **{name: struck[name] for name in kept},
        "compared": {"samples": sum(map(len, clean["samples"].values())), "versions": len(clean["published"])},
        # of the first and the last steps: what was learned, with faults and without
        "reward": {name: [float(np.mean(one["rewards"][:LEAST])), float(np.mean(one["rewards"][-LEAST:]))] for name, one in
                   (("struck", struck), ("clean", clean))},
    }  # fmt: skip


def partial_rollouts(folder: Path, faults: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Faults of every kind while responses outlive steps, half of them with rollouts beside the update, and drivers killed."""
    found: dict[str, Any] = {"faults": Counter(), "wrong": Counter(), "left": Counter(), "compared": Counter()}
    nodes, world = Nodes(3), small_world(folder)
    try:
        for name, rollout in PARTIAL.items():
            chaos = Chaos(shuffled(faults // len(PARTIAL), tuple(KINDS), seed), nodes, seed, say)
            given = recipe(world, folder / name, len(chaos.kinds) + len(chaos.kinds) // 4 + 6, rollout=rollout)
            with quick_to_see_hangs():
                struck = on_cluster(nodes, InjectedFault(given, chaos))
            found["faults"] += Counter(kind for _, kind, _ in chaos.done)
            found["wrong"] += Counter(wrong_of(struck["path"], given))
            found["left"] += Counter(left_behind(nodes.address))
            found["compared"] += Counter({"samples": sum(map(len, struck["samples"].values()))})
            say(f"{name}: {struck['steps']} steps in {struck['seconds']:.0f} s")
    finally:
        nodes.close()
    killed = drivers(folder, max(1, faults // 10), seed, say, PARTIAL["in turn"])
    return {key: dict(value + Counter(killed[key])) for key, value in found.items()}


def drivers(folder: Path, times: int, seed: int, say: Callable[[str], None], rollout: dict[str, Any] | None = None) -> dict[str, Any]:
    """Drivers killed by SIGKILL at random moments, each followed by one that resumes. `rollout`: settings of partial rollouts."""
    rng, nodes = np.random.default_rng(seed), Nodes(2)
    try:
        world, steps = small_world(folder), 2 * times + 2
        clean = None
        if rollout is None:
            clean = on_cluster(nodes, InjectedFault(recipe(world, folder / "clean", steps), lambda run, moment: None))
        moments = ("begin", "rollout", "score", "update", "publish", "published")
        kills = [(2 * k + 2, str(rng.choice(moments))) for k in range(times)]
        began_s = time.monotonic()
        for k, (step, moment) in enumerate([*kills, (0, "")]):
            given = recipe(world, folder / "struck", steps, checkpoint={"every_steps": 1}, rollout=rollout or {})
            tree = given.model_dump(exclude_unset=True)
            job = {"recipe": tree, "address": nodes.address, "step": step, "moment": moment, "resume": k > 0}
            command = [sys.executable, "-m", "benchmarks.chaos", "--drive", json.dumps(job)]
            done = subprocess.run(command, timeout=2 * DEADLINE_S, stderr=subprocess.PIPE, text=True)
            if done.returncode != (-signal.SIGKILL if moment else 0):
                what = f"was to be killed at step {step}, {moment}," if moment else "was to end the run"
                raise RuntimeError(f"the driver that {what} ended with {done.returncode}: {done.stderr[-2000:]}")
            say(f"driver {k + 1} of {times + 1}: " + (f"killed at step {step}, {moment}" if moment else "went on to the end"))
        [path] = (folder / "struck" / "runs").iterdir()
        struck = {"samples": outcome(path), "published": json.loads((path / "published.json").read_text())}
        struck["published"] = {int(version): checksum for version, checksum in struck["published"].items()}
        wrong = wrong_of(path, given) if clean is None else compare(struck, {**clean, "published": {steps: clean["published"][steps]}})
        left = left_behind(nodes.address)
        return {
            "faults": {"driver killed": times}, "wrong": wrong, "left": left, "log": kills, "seconds": time.monotonic() - began_s,
            "compared": {"samples": sum(map(len, (clean or struck)["samples"].values())), "versions": int(clean is not None)},
        }  # fmt: skip
    finally:
        nodes.close()


def driven(job: dict[str, Any]) -> None:
    """Run a driver that kills itself at a moment of a step."""

    def strike(run: FaultInjector, moment: str) -> None:
        if (run.parts.session.step.number, moment) == (job["step"], job["moment"]):
            os.kill(os.getpid(), signal.SIGKILL)

    quiet_ray()
    ray.init(address=job["address"], log_to_driver=False, logging_level="ERROR")
    run = InjectedFault(Recipe.parse(job["recipe"]), strike, resume=job["resume"])
    drive(run)
    (run.folder.path / "published.json").write_text(json.dumps(run.published))


def on_cluster(nodes: Nodes, run: FaultInjector) -> dict[str, Any]:
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        return drive(run)
    finally:
        ray.shutdown()


def small_world(folder: Path) -> ReplaySetup:
    lengths = synthetic_lengths(4 * PROMPTS, SAMPLES, TOKENS, seed=0)
    return build(folder, lengths, base_s=0.005, per_seq_s=1e-4, start_s=0.1, learn_s=0.1, clock=1.0)


def recipe(world: ReplaySetup, folder: Path, steps: int, rollout: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return recipe_for(
        world,
        folder,
        steps=steps,
        prompts=PROMPTS,
        samples=SAMPLES,
        actors=4,
        max_tokens=TOKENS,
        objective={"prefer": 1.0},
        functions={"slot": "cpu", "max_replacements": BUDGET, "lease_deadline_s": DEADLINE_S},
        reward={"timeout_s": 1.0},
        rollout={"stream_interval_s": 0.05, "silence_s": SILENCE_S, **(rollout or {})},
        watch={"samples_per_step": 0},
        **sections,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=105, help="on replayed engines")
    parser.add_argument("--drivers", type=int, default=5, help="drivers killed")
    parser.add_argument("--real", type=int, default=0, help="faults on real engines; 20 take about ten minutes on two cores")
    parser.add_argument("--partial", type=int, default=32, help="with partial rollouts, on replayed engines; and a tenth as many drivers")
    parser.add_argument("--deaths", type=int, default=len(KILLED) + len(STOPPED), help="signals to Ray's own processes and to drivers")
    parser.add_argument("--kinds", nargs="*", choices=REAL_KINDS, default=REAL_KINDS, help="of faults on real engines")
    parser.add_argument("--ranks", type=int, default=1, help="of the real learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="each kind once: shows that it runs")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        driven(json.loads(options.drive))
        return
    if options.quick:
        options.faults, options.drivers, options.partial, options.deaths = len(KINDS), 1, len(KINDS), 2
    # else its results do not replace those of one that is whole
    whole = not options.quick and bool((options.faults and options.drivers) or not (options.faults or options.drivers or options.real))
    part_name = "chaos" if options.faults or options.drivers or options.real else f"chaos_{'partial' if options.partial else 'deaths'}"
    quiet_ray()
    console, found = make_console(), {}
    on_real = partial(real, kinds=tuple(options.kinds), ranks=options.ranks)
    parts: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
        "replayed": (replayed, options.faults), "drivers": (drivers, options.drivers), "real": (on_real, options.real),
        "partial": (partial_rollouts, options.partial), "deaths": (signalled, options.deaths),
    }  # fmt: skip
    for name, (part, count) in parts.items():
        if count:
            with tempfile.TemporaryDirectory(prefix="rlhfless-chaos-") as folder:
                found[name] = tried(partial(part, Path(folder), count, options.seed), partial(told_now, console, name))
            save(part_name, {"options": vars(options), **found}, reached(options, found), console=console, quick=not whole)
    table = Table("part", "fault", "times", title="faults survived", title_justify="left")
    for name, one in found.items():
        for kind, times in one.get("faults", {}).items():
            table.add_row(name, kind, str(times))
    console.print(table)
    show_targets(console, reached(options, found))
    for name, one in found.items():
        if "failed" in one:
            console.print(f"the part `{name}` failed: {one['failed']}", style="red", markup=False, highlight=False)
    if any("failed" in one for one in found.values()):
        sys.exit(1)


def told_now(console: Console, part: str, said: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {part}: {said}", markup=False, highlight=False)


def tried(part: Callable[[Callable[[str], None]], dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    """Run a part. Returns its result, or why it failed: the other parts are run all the same."""
    try:
        return part(say=say)  # type: ignore[call-arg]
    except Exception as error:
        say(f"failed: {type(error).__name__}: {error}")
        return {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc().splitlines()}


def reached(options: argparse.Namespace, found: dict[str, Any]) -> list[Target]:
    """Return the targets that the parts so far decide."""
    counts: Counter[str] = Counter()
    for one in found.values():
        counts += Counter(one.get("faults", {}))
    wrong, left = (sum(sum(one.get(what, {}).values()) for one in found.values()) for what in ("wrong", "left"))
    targets = [
        Target("parts that failed", sum("failed" in one for one in found.values()), most=0),
        Target("samples lost, twice, other or too many; versions with other weights; ends without their words", wrong, most=0),
        Target("placement groups, actors, processes and session folders left behind", left, most=0),
    ]
    if "compared" in found.get("real", {}):
        same = found["real"]["compared"]["versions"] - found["real"]["wrong"]["versions with other weights"]
        name = "versions of DeepSpeed's weights that are the same, bit for bit, with faults"
        targets.append(Target(name, same, least=real_steps(options.real)))
    if not options.quick and options.faults and options.drivers:
        kinds = {*KINDS, "driver killed", *(PAGE_KINDS if options.real else ())}
        targets += [
            Target("faults", sum(counts.values()), least=100),
            Target("faults of the rarest kind", min(counts[kind] for kind in kinds), least=LEAST),
        ]
        if options.real:
            targets.append(Target("faults on real engines", sum(found.get("real", {}).get("faults", {}).values()), least=20))
    return targets


if __name__ == "__main__":
    main()
