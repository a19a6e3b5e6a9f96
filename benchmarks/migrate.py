"""Moving responses between engines: `python -m benchmarks.migrate [--quick] [--only latency|real|replayed]`.

latency   a response is moved back and forth between two engines that decode others too: from the cut to the first token there, by
          the length of its context, which is computed again (re-prefill), comes as KV pages, or comes as pages of which the full
          ones were copied while it was still decoded (`--size 494M`: with the shape of Qwen2.5-0.5B, in bfloat16)
real      the runtime on this machine's cores, on a long-tailed workload: the step's time and full cost without moves, by the
          RLHFless paper's rule (tau) and by ours (auto); same seed, hence the same tokens
replayed  the same comparison on logical GPUs with replayed engines, for a number of engines that this machine does not have, whose
          sequences cost so much (--per-seq-ms) that several are worth holding; there a moved response starts at once

As it is it ends within minutes; `--rounds 3 --steps 12 --drop 3 --clock 2 --prefer 0.2 0.8` takes half an hour and is less noisy.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.replay_setup import build, logical_gpus, recipe_for, synthetic_lengths
from benchmarks.common.replayed_runtime import ReplayedRuntime
from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from benchmarks.common.run_process import read_metrics, train
from benchmarks.elastic import Mode, check_same_work
from benchmarks.peers.shared_work import HALF_BILLION
from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.rollout import inflight_migrations
from rlhfless_ray.rollout.inflight_migrations import MigrationRequest
from rlhfless_ray.rollout.migration_policy import MigrationPolicy, MigrationRequests
from rlhfless_ray.weights.tensor_file import Files

PROMPTS, SAMPLES = 16, 8  # of a step of the real runs
RULES = ("off", "tau", "auto")
WAYS = ("prefill", "pages", "copied")
MOVE_S = 0.1  # wanted of a move, at the median
VOCABULARY = 256  # an untrained policy ends a response with about one token in so many
SHOWN = ("step_s", "full_slot_s", "rollout_slot_s", "engines", "moved", "move_p50_s")


# ---- latency ----------------------------------------------------------------------------------------------------------


class Shuttle(MigrationPolicy):
    """One response after another goes to the other engine, by each way in turn.

    It begins when no prompt is left to compute, and each move waits until the last one's response has a token from its new engine.
    Otherwise a pause would be that of other work.
    """

    def __init__(self, count: int) -> None:
        super().__init__("auto", 0.7)
        self.count, self.next = count, 0
        self.moved, self.target, self.tokens = -1, -1, 0  # the last moved response, its new engine, and its tokens when it got there

    def _is_under_way(self, token_log: Any) -> bool:
        i = self.moved
        if i < 0 or token_log.finished[i]:
            return False
        if token_log.owner[i] != self.target:  # in two stages it decodes on while its pages are copied
            self.tokens = token_log.length[i]
        return bool(token_log.length[i] <= self.tokens)

    def decide(self, token_log: Any, engines: list[int], steps: list[Any]) -> Any:
        live = [i for i in range(self.count) if not token_log.finished[i]]
        if len(engines) < 2 or not live or not token_log.length.all() or self._is_under_way(token_log):
            return MigrationRequests()
        i = live[self.next % len(live)]
        self.next += 1
        source = int(token_log.owner[i])
        target = next(number for number in engines if number != source)
        self.moved, self.target, self.tokens = i, target, token_log.length[i]
        way = WAYS[self.next % len(WAYS)]
        inflight_migrations.COPY_TOKENS = 0 if way == "copied" else 1 << 30
        how = "prefill" if way == "prefill" else "pages"
        return MigrationRequests((MigrationRequest(np.array([i]), source, target, way, how),), time_saved_s=1.0)

    def observe(self, context_tokens: float, seconds: float, how: str = "prefill") -> None:
        pass


def _half_billion(folder: Path, context_tokens: int) -> Files:
    from rlhfless_ray.weights.model_folder import read_folder

    return read_folder(replace(HALF_BILLION, context_tokens=context_tokens).write(folder).policy)


def latency(contexts: list[int], tokens: int, others: int, size: str, folder: Path) -> dict[int, dict[str, list[float]]]:
    """Pauses of the moves in seconds by context tokens and way; each engine decodes `others` responses of `tokens` tokens besides."""
    import ray

    from placement.scaling.resize_policy import Hold
    from rlhfless_ray.engine.exact_actor import ExactEngineActor
    from rlhfless_ray.functions.instance import start_actor
    from rlhfless_ray.functions.lease import LeaseManager
    from rlhfless_ray.functions.ledger import Ledger
    from rlhfless_ray.functions.worker_pool import WorkerPool
    from rlhfless_ray.rollout.driver import RolloutDriver
    from rlhfless_ray.rollout.live_rollout import DriverSettings
    from rlhfless_ray.rollout.request_source import PlainRequests, WantedResponses
    from rlhfless_ray.types import Request
    from rlhfless_ray.weights.channel import stored_version
    from rlhfless_ray.weights.model_folder import stored_weights, without_weights
    from rlhfless_ray.weights.tensor_file import as_numpy

    longs = 12 if size == "small" else 6
    files = policy(ends=False) if size == "small" else _half_billion(folder, max(contexts) + tokens)
    weights = {name: as_numpy(tensor) for name, tensor in stored_weights(files)}
    settings = EngineSettings(
        max_model_len=max(contexts) + tokens,
        dtype="float32" if size == "small" else "bfloat16",
        max_running=64,
        block_size=32,
        kv_cache_mb=512,
        gpu_memory_share=0.5,
        prefix_kv=True,  # it keeps pages
    )
    ledger = Ledger("cpu", 1.0)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    found: dict[int, dict[str, list[float]]] = {}
    try:
        leases = LeaseManager("cpu", ledger, 60.0, "migrate")
        pool = WorkerPool(
            "rollout", lambda slot: start_actor(ExactEngineActor, slot, "cpu", {}, without_weights(files), settings), leases, 60.0
        )
        pool.resize(2, [], need=2)
        for instance in pool.working:
            instance.start_result(120.0)
        version = stored_version(1, weights)
        rng = np.random.default_rng(0)
        for context in (64, *contexts):  # the first rollout of an engine compiles what it needs
            sizes = [context] * longs + [32] * (2 * others)
            requests = [Request(key, tuple(rng.integers(5, VOCABULARY, size).tolist()), key, tokens, 1.0) for key, size in enumerate(sizes)]
            shares = [np.arange(len(sizes))[number::2] for number in range(2)]
            source = PlainRequests(None, WantedResponses(requests, [], np.full(len(sizes), float(tokens)), 1))
            source.samples.add = lambda ended: []  # type: ignore[method-assign]  # there are no prompts
            driving = DriverSettings(0.05, 60.0, 2, lambda tail_s, needed: Hold(1, "kept"), lambda *_: None)
            driver = RolloutDriver(pool, source, version, driving, plugins=[Shuttle(longs)])
            stream = driver.run(shares, deadline_s=600.0)
            # An engine that a response comes back to has its old blocks, so first moves alone count.
            first = {moved.key: moved for moved in reversed(stream.moved)}.values()
            found[context] = {way: [moved.pause_s for moved in first if moved.reason == way] for way in WAYS}
        del found[64]
        pool.close()
        leases.release_all()
    finally:
        ray.shutdown()
    return found


def policy(ends: bool) -> dict[str, bytes]:
    """An untrained policy of the quickstart's size over a vocabulary of 256, so that lengths are about geometric, differently for
    each prompt. `ends` false: without an end-of-sequence token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhfless_ray.prompts.builtin_tasks import task
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.weights.load_policy import load_tokenizer
    from rlhfless_ray.weights.tiny_model import folder_files, scratch_policy

    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"hidden_size": 128}})
    files = scratch_policy(recipe, task("chain"))
    config = json.loads(files["config.json"]) | {"vocab_size": VOCABULARY, "max_position_embeddings": 8192}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = folder_files(Qwen2ForCausalLM(Qwen2Config.from_dict(config)), load_tokenizer(files, False))
    if not ends:
        for name in ("config.json", "generation_config.json"):
            made[name] = json.dumps(json.loads(made[name]) | {"eos_token_id": None}).encode()
    return made


# ---- steps ------------------------------------------------------------------------------------------------------------


def read(rows: list[dict[str, Any]], drop: int) -> list[dict[str, float]]:
    return [
        {
            "step_s": row["step_s"],
            "full_slot_s": row["cost/full_slot_s"],
            "rollout_slot_s": row["cost/rollout_slot_s"],
            "tokens": row["tokens/generated"],
            "moved": row["rollout/moved"],
            "move_p50_s": float("nan") if row["rollout/move_p50_s"] is None else row["rollout/move_p50_s"],
            "longest": row["length/max"],
            "median": row["length/p50"],
            "decisions": row["rollout/move_decisions"],
            "engines": row["pool/rollout_actors"],
        }
        for row in rows
        if row["step"] > drop
    ]


def write_long_tailed(root: Path, model: Path, steps: int, cores: int) -> Path:
    """Write the recipe of a run whose lengths stay as they are, with at least so many engines."""
    tree = {
        "run": {"steps": steps},
        "policy": {"path": str(model)},
        "prompts": {"task": "chain", "batch_prompts": PROMPTS, "rows": 64},
        "evaluate": {"prompts": 0},
        "reward": {"function": "task"},
        "rollout": {"samples_per_prompt": SAMPLES, "max_tokens": 1200, "kv_cache_mb": 512, "stream_interval_s": 0.1, "min_actors": cores},
        "learner": {"learning_rate": 1e-9, "max_slots_per_rank": cores},
        "watch": {"tensorboard": False, "wandb": "off", "samples_per_step": 1},
    }
    root.mkdir(parents=True)
    recipe = root / "recipe.yaml"
    recipe.write_text(json.dumps(tree))  # JSON is YAML
    return recipe


def real(mode: Mode, model: Path, options: Any, root: Path, overrides: list[str]) -> list[dict[str, float]]:
    """All begin with as many engines, and what differs is the moves."""
    recipe = write_long_tailed(root, model, options.steps, options.cores)
    _, rows = train(recipe, [f"rollout.max_actors={options.cores}", *overrides, *mode.overrides], root)
    return read(rows, options.drop)


def replayed(mode: Mode, options: Any, folder: Path, gpus: int, prefer: float) -> list[dict[str, float]]:
    """A step of `--prompts` × 8 on logical GPUs, at `--clock` times the speed of the script."""
    prompts, samples, max_tokens = options.prompts, 8, 4096
    lengths = synthetic_lengths(4 * prompts, samples, max_tokens, seed=0)
    world = build(folder, lengths, base_s=8.5e-3, per_seq_s=1e-3 * options.per_seq_ms, start_s=1.0, learn_s=2.0, clock=options.clock)
    sections = json.loads(mode.overrides[0])
    recipe = recipe_for(
        world,
        folder,
        steps=options.steps,
        prompts=prompts,
        samples=samples,
        actors=gpus,
        max_tokens=max_tokens,
        objective={"prefer": prefer},
        functions={"slot": "gpu"},
        rollout={**sections, "samples_per_prompt": samples, "max_tokens": max_tokens, "max_actors": gpus, "stream_interval_s": 0.1},
    )
    with logical_gpus(gpus), ReplayedRuntime(recipe) as run:
        for _ in run:
            pass
        path = run.folder.path
    return read(read_metrics(path), options.drop)


def compare(console: Any, title: str, found: dict[str, list[dict[str, float]]], rounds: int, *, replayed: bool = False) -> dict[str, Any]:
    check_same_work(found, rounds)
    spreads = {name: {key: Spread.of(s[key] for s in steps if np.isfinite(s[key])) for key in SHOWN} for name, steps in found.items()}
    columns = ("migrate", "engines", "step, s", "full cost, slot-s", "rollout's", "moved a step", "time of off", "its cost")
    table = Table(*columns, title=title, title_justify="left")
    ratios = {}
    for name, spread in spreads.items():
        ratios[name] = {key: spread[key].median / spreads["off"][key].median for key in ("step_s", "full_slot_s")}
        table.add_row(
            name,
            spread["engines"].show(1),
            spread["step_s"].show(),
            spread["full_slot_s"].show(),
            spread["rollout_slot_s"].show(),
            spread["moved"].show(2),
            f"{ratios[name]['step_s']:.2f}×",
            f"{ratios[name]['full_slot_s']:.2f}×",
        )
    console.print(table)
    lengths = {key: Spread.of(s[key] for s in found["off"]) for key in ("median", "longest")}
    return {"replayed": replayed, "rules": spreads, "ratios": ratios, "lengths": lengths, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value, of the real runs")
    parser.add_argument("--only", choices=("latency", "real", "replayed"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--size", choices=("small", "494M"), default="small", help="of the policy, for latency")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=8, help="logical, of the replayed runs")
    parser.add_argument("--prompts", type=int, default=32, help="of a replayed step")
    parser.add_argument("--per-seq-ms", type=float, default=0.2, help="of a decode step, for each of its sequences, replayed")
    parser.add_argument("--clock", type=float, default=4.0, help="speed of the replay")
    parser.add_argument("--prefer", type=float, nargs="+", default=[0.8], help="of the replayed runs")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--drop", type=int, default=2, help="first steps of a run that are not steady state")
    parser.add_argument("--quick", action="store_true", help="everything small: shows that it runs, measures nothing")
    options = parser.parse_args()
    if options.quick:
        options.contexts, options.rounds, options.steps, options.drop = [64, 256], 1, 3, 1
        options.gpus, options.prompts, options.prefer, options.clock = 3, 8, [0.5], 8.0
    console = make_console()
    targets, content = [], {"options": vars(options)}
    with tempfile.TemporaryDirectory(prefix="rlhfless-migrate-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        if options.only in (None, "latency"):
            large = options.size != "small"
            tokens, others = (200, 1) if large else (40 * (5 if options.quick else 20), 8)
            moves = latency(options.contexts, tokens, others, options.size, scratch / "policy")
            spreads = {
                context: {way: Spread.of(1e3 * s for s in seconds) for way, seconds in ways.items()} for context, ways in moves.items()
            }
            title = f"From the cut to the first token elsewhere, {options.size}"
            heads = ("context, tokens", "by re-prefill, ms", "by KV pages, ms", "copied ahead, ms", "moves")
            table = Table(*heads, title=title, title_justify="left")
            for context, spread in spreads.items():
                counts = " + ".join(str(spread[way].count) for way in WAYS)
                table.add_row(str(context), *(spread[way].show() for way in WAYS), counts)
            console.print(table)
            for way, name in zip(WAYS, ("re-prefill", "KV pages", "KV pages in two stages"), strict=True):
                p50 = float(np.median([s for ways in moves.values() for s in ways[way]]))
                targets.append(Target(f"a move by {name}, median", 1e3 * p50, most=1e3 * MOVE_S, unit=" ms"))
            content["latency_ms"] = spreads
        if options.only in (None, "real"):
            from rlhfless_ray.weights.model_folder import write_folder

            model = write_folder(scratch / "model", policy(ends=True))
            every = [Mode(rule, (f"rollout.migrate='{rule}'",)) for rule in RULES]
            found: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
            for number in range(options.rounds):
                for mode in every:  # in turn, so that what else the machine does falls on all of them
                    console.print(f"round {number + 1} of {options.rounds}: {mode.name}", highlight=False)
                    found[mode.name] += real(mode, model, options, scratch / f"real-{number}-{mode.name}", options.overrides)
            content["real"] = compare(console, f"Real engines on {options.cores} cores, one step", found, options.rounds)
            targets += judge("real", content["real"])
        if options.only in (None, "replayed"):
            for prefer in options.prefer:
                found = {rule: [] for rule in RULES}
                for rule in RULES:
                    mode = Mode(rule, (json.dumps({"migrate": rule}),))
                    found[rule] += replayed(mode, options, scratch / f"replayed-{prefer}-{rule}", options.gpus, prefer)
                title = f"{options.gpus} logical GPUs, replayed engines, prefer {prefer:g}, one step"
                content[f"replayed, prefer {prefer:g}"] = compare(console, title, found, 1, replayed=True)
                targets += judge(f"replayed, prefer {prefer:g}", content[f"replayed, prefer {prefer:g}"])
    show_targets(console, targets)
    save("migrate", content, targets, console=console, quick=options.quick or options.only is not None)


def judge(name: str, compared: dict[str, Any]) -> list[Target]:
    ratio = compared["ratios"]["auto"]
    return [Target(f"{name}: time × cost of auto over off", ratio["step_s"] * ratio["full_slot_s"], most=1.0, unit="×")]


if __name__ == "__main__":
    main()
