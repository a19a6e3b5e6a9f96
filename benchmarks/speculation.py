"""What drafting gains by batch and temperature. `python -m benchmarks.speculation [--only CASE …] [--rounds N]`.

Engines of one policy with `rollout.speculation` off, on and auto answer the same requests in turn, in one process on one core. Times are
of the processor, so that other work does not count. `chain` is
the quickstart's policy after its warm start: groups of 8 responses, other prompts in each round, and responses that repeat
themselves. `random` has as many parameters and random weights: there is little to draft from but at temperature 0. The first rounds, in
which drafts have nothing to go by, do not count. Cases that are left out keep their rows of the last run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import FOLDER, Target, make_console, save, show_targets
from benchmarks.peers.shared_work import HALF_BILLION, SMALL

KINDS = ("off", "on", "auto")
CASES = ("chain", "random", "494M")
BATCHES = {"chain": (1, 4, 16, 64), "random": (1, 4, 16, 64), "494M": (1, 4)}
TEMPERATURES = {"chain": (1.0, 0.5, 0.0), "random": (1.0, 0.0), "494M": (1.0, 0.0)}
GROUP, WARM = 8, 2
TOKENS = {"chain": 160, "random": 96, "494M": 32}


def files_of(case: str, scratch: Path) -> dict[str, bytes]:
    from rlhfless_ray import Recipe
    from rlhfless_ray.weights.load_policy import initial_policy
    from rlhfless_ray.weights.model_folder import read_folder

    if case == "chain":
        return initial_policy(Recipe.load("recipes/quickstart.yaml"))[0]
    return read_folder((SMALL if case == "random" else HALF_BILLION).write(scratch / case).policy)


def prompts_of(case: str, files: dict[str, bytes], count: int, number: int) -> list[tuple[int, ...]]:
    if case != "chain":
        rng = np.random.default_rng(number)
        return [tuple(rng.integers(2, 60, 24).tolist()) for _ in range(count)]
    from rlhfless_ray.prompts.builtin_tasks import task
    from rlhfless_ray.weights.load_policy import load_tokenizer

    tokenizer = load_tokenizer(files, False)
    return [tuple(tokenizer(row["prompt"])["input_ids"]) for row in task("chain").rows(count, number, "train")]


def measure(case: str, rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """Return a row for each temperature and batch: tokens per second by kind, and what became of the drafts."""
    import torch

    from rlhfless_ray.rollout.engine_settings import EngineSettings
    from rlhfless_ray.rollout.vllm_engine import VllmEngine
    from rlhfless_ray.types import Request
    from rlhfless_ray.weights.model_folder import stored_weights, without_weights, write_folder
    from rlhfless_ray.weights.tensor_file import as_numpy

    files, engines, rows = files_of(case, scratch), {}, []
    weights = {name: as_numpy(tensor) for name, tensor in stored_weights(files)}
    for kind in KINDS:
        settings = EngineSettings(
            max_model_len=320,
            max_running=64,
            block_size=32,
            kv_cache_mb=128,
            gpu_memory_share=0.5,
            speculation=kind,
            dtype="bfloat16" if case == "494M" else "float32",
        )
        engines[kind] = VllmEngine(write_folder(scratch / f"{case}-{kind}", without_weights(files)), settings)
        engines[kind].load(1, weights)
        torch.set_num_threads(1)

    def answer(kind: str, requests: list[Request]) -> tuple[dict[int, list[int]], float]:
        begin, tokens = time.process_time(), {request.key: [] for request in requests}
        for news in engines[kind].generate(requests):
            ends = np.cumsum(news.counts)
            for key, count, end in zip(news.keys.tolist(), news.counts.tolist(), ends.tolist(), strict=True):
                tokens[key] += news.token_ids[end - count : end].tolist()
        return tokens, time.process_time() - begin

    numbers = itertools.count()
    for temperature, batch in itertools.product(TEMPERATURES[case], BATCHES[case]):
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        made, same = 0, 0
        for engine in engines.values():
            engine.take_steps()
        for round_number in range(WARM + rounds):
            prompts = prompts_of(case, files, max(1, batch // GROUP), next(numbers))
            asked = [
                Request(key, prompts[key // GROUP % len(prompts)], 1000 * round_number + key, TOKENS[case], temperature)
                for key in range(batch)
            ]
            found = {}
            for kind in KINDS[round_number % 3 :] + KINDS[: round_number % 3]:
                found[kind], taken = answer(kind, asked)
                if round_number >= WARM:
                    seconds[kind].append(taken)
            made += batch
            same += sum(all(found[kind][key] == found["off"][key] for kind in KINDS) for key in found["off"])
        steps = {kind: engine.take_steps() for kind, engine in engines.items()}
        rows.append(
            {
                "case": case,
                "temperature": temperature,
                "batch": batch,
                "over_off": {kind: median(o / s for o, s in zip(seconds["off"], seconds[kind], strict=True)) for kind in KINDS[1:]},
                "drafted": {kind: sum(step.drafted for step in steps[kind]) for kind in KINDS[1:]},
                "accepted": {kind: sum(step.accepted for step in steps[kind]) for kind in KINDS[1:]},
                "draft_share": sum(step.draft_s for step in steps["auto"]) / sum(step.seconds for step in steps["auto"]),
                "same_responses": same / made,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="some of the cases")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    console = make_console()
    with TemporaryDirectory(prefix="speculation-") as scratch:
        rows = [row for case in options.only for row in measure(case, options.rounds, Path(scratch))]
    before = FOLDER / "speculation.json"
    kept = json.loads(before.read_text())["rows"] if before.exists() else []
    rows = [row for case in CASES for row in (rows if case in options.only else kept) if row["case"] == case]
    table = Table(
        "policy", "temperature", "batch", "on", "auto", "accepted (auto)", "look-up", "same responses", title="Speed over no drafts"
    )
    for row in rows:
        share = row["accepted"]["auto"] / max(row["drafted"]["auto"], 1)
        table.add_row(
            row["case"],
            f"{row['temperature']}",
            f"{row['batch']}",
            *(f"{row['over_off'][kind]:.2f}×" for kind in KINDS[1:]),
            f"{share:.0%} of {row['drafted']['auto']}",
            f"{row.get('draft_share', 0.0):.1%}",
            f"{row['same_responses']:.1%}",
        )
    console.print(table)
    small = [row["over_off"]["auto"] for row in rows if row["case"] == "chain" and row["batch"] <= 4 and row["temperature"] <= 0.5]
    targets = [Target("auto over off, anywhere", min(row["over_off"]["auto"] for row in rows), least=0.98, unit="×")]
    if small:
        targets.append(Target("auto over off, chain, at most 4 responses and temperature 0.5", min(small), least=1.8, unit="×"))
    show_targets(console, targets)
    save("speculation", {"rounds": options.rounds, "rows": rows}, targets, console=console)


if __name__ == "__main__":
    main()
