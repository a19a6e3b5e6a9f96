"""What drafting gains by batch and temperature. `python -m benchmarks.speculation [--only CASE …] [--rounds N] [--texts FILE]`.

Engines of one policy, without drafts and with them, answer the same requests in turn, in one process on one core. Times are of the
processor, so that other work does not count. `chain` is the quickstart's policy after its warm start: groups of 8 responses, other prompts
in each round, and responses that repeat themselves. `random` has as many parameters and random weights: there is little to draft from but
at temperature 0. `27M` says what `chain` says and computes as much as 27 M parameters (`common/widen.py`). It is drafted for from text, by
`chain`'s own policy, by a drafter of 1 M parameters that starts from random weights and has learned from 24 steps' responses, and by an
EAGLE-3 head of 0.3 M that has learned from the policy's states in the same responses. `texts` needs a JSONL file with the columns
`question` and `answer`: a policy of 2 M parameters learns 32 of them until the loss is 0.3 nats a token, and is made to compute as much as
27 M. Its prompts return from round to round, as in epochs. The first rounds, in which drafts have nothing to go by, do not count. Rows of
few short responses take more rounds. `tail` is the speed while at most four responses of a rollout were left. Intervals are those of
rounds drawn again (95 %): a round is a pair of the same work, so what slows both engines of it does not count. At temperature 1 `random`
shows what `auto` costs where it gains nothing: many short rounds in random order, whose median ratio counts, and a second engine without
drafts (`again`), which shows what the machine's noise alone does. Cases that are left out keep their rows of the last run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common.results import FOLDER, Target, make_console, save, show_targets
from benchmarks.common.run_metadata import commit
from benchmarks.peers.shared_work import HALF_BILLION, SMALL
from rlhfless_ray.weights.tensor_file import Files

CASES = ("chain", "random", "27M", "texts", "494M")
BATCHES = {"chain": (1, 4, 16, 64), "random": (1, 4, 16, 64), "27M": (1, 4, 16), "texts": (64, 16, 4, 1), "494M": (1, 4)}
TEMPERATURES = {"chain": (1.0, 0.5, 0.0), "random": (1.0, 0.0), "27M": (1.0, 0.5), "texts": (1.0, 0.5), "494M": (1.0, 0.0)}
GROUP, WARM = 8, 2
TAIL = 4  # responses that are left in the tail of a rollout
COST = ("random", 1.0)  # case and temperature of the rows that show what drafting costs
COST_ROUNDS, COST_TOKENS = 120, 32
LEAST_RESPONSES = {"chain": 400, "random": 100, "27M": 48}  # of each engine in a row, which raise the number of rounds
TOKENS = {"chain": 160, "random": 96, "27M": 160, "texts": 150, "494M": 32}
LARGER = 512, 8  # hidden size and layers of 27 M parameters
LEARNED_STEPS, STEP_PROMPTS = 24, 32  # of the quickstart, from whose responses the drafters of `27M` have learned
HEAD_HIDDEN, HEAD_PASSES = 128, 6
DRAFTER_HIDDEN, DRAFTER_LAYERS = 192, 2


def kinds_of(case: str) -> dict[str, str]:
    """Return the case's engines: name → `rollout.speculation`."""
    if case == "27M":
        return {"off": "off", "text": "auto", "own": "auto", "trained": "auto", "head": "auto"}
    return {kind: kind for kind in ("off", "on", "auto")} | ({"again": "off"} if case == COST[0] else {})


def files_of(case: str, scratch: Path) -> Files:
    from benchmarks.common.widen import widened
    from benchmarks.learns import warm_policy
    from rlhfless_ray import Recipe
    from rlhfless_ray.weights.model_folder import read_folder

    if case in ("chain", "27M"):
        files = warm_policy(Recipe.load("recipes/quickstart.yaml"))
        return files if case == "chain" else widened(files, *LARGER)
    return read_folder((SMALL if case == "random" else HALF_BILLION).write(scratch / case).policy)


def prompts_of(case: str, files: Files, count: int, number: int, pool: Sequence[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Return the prompts of a round. `pool`: the prompts of `texts`, which return."""
    if pool:
        return [pool[(number * count + i) % len(pool)] for i in range(count)]
    if case not in ("chain", "27M"):
        rng = np.random.default_rng(number)
        return [tuple(rng.integers(2, 60, 24).tolist()) for _ in range(count)]
    from rlhfless_ray.prompts.builtin_tasks import task
    from rlhfless_ray.weights.load_policy import load_tokenizer

    tokenizer = load_tokenizer(files, False)
    return [tuple(tokenizer(row["prompt"])["input_ids"]) for row in task("chain").rows(count, number, "train")]


def drafters_of(case: str, scratch: Path) -> dict[str, Path]:
    """Return the folders of the drafters, by engine."""
    from rlhfless_ray import Recipe
    from rlhfless_ray.rollout.speculation import read_drafter
    from rlhfless_ray.weights.model_folder import write_folder

    if case != "27M":
        return {}
    sizes = [f"rollout.drafter_hidden_size={DRAFTER_HIDDEN}", f"rollout.drafter_layers={DRAFTER_LAYERS}"]
    recipe = Recipe.load("recipes/quickstart.yaml", ["rollout.speculation=auto", "rollout.drafter_train=on", *sizes])
    policy = files_of("chain", scratch)
    untrained = read_drafter(recipe, None, policy)
    assert untrained is not None
    return {"own": write_folder(scratch / "own", policy), "trained": write_folder(scratch / "trained", untrained)}


def engine(case: str, name: str, kind: str, files: Files, scratch: Path, drafter: Path | None = None) -> Any:
    """Build an engine with its weights."""
    import torch

    from rlhfless_ray.engine.engine_settings import EngineSettings
    from rlhfless_ray.engine.vllm_engine import VllmEngine
    from rlhfless_ray.weights.model_folder import stored_weights, without_weights, write_folder
    from rlhfless_ray.weights.tensor_file import as_numpy

    settings = EngineSettings(
        max_model_len=320,
        max_running=64,
        block_size=32,
        kv_cache_mb=256,
        gpu_memory_share=0.5,
        speculation=kind,  # type: ignore[arg-type]
        dtype="bfloat16" if case == "494M" else "float32",
    )
    made = VllmEngine(write_folder(scratch / f"{case}-{name}", without_weights(files)), settings, drafter=drafter)
    made.load(1, {name: as_numpy(tensor) for name, tensor in stored_weights(files)})
    torch.set_num_threads(1)
    _clock_steps(made)
    return made


def _clock_steps(engine: Any) -> None:
    """Record the seconds of the processor of each engine step in `processor_s`."""
    step, engine.processor_s = engine._step, []

    def clocked() -> Any:
        begin = time.process_time()
        try:
            return step()
        finally:
            engine.processor_s.append(time.process_time() - begin)

    engine._step = clocked


def tail_s(engine: Any, first: int) -> float:
    """Return the seconds of the engine's steps from number `first` on in which at most `TAIL` responses were left."""
    return sum(seconds for step, seconds in zip(engine.steps[first:], engine.processor_s[first:], strict=True) if step.running <= TAIL)


def answer(engine: Any, requests: list[Any]) -> tuple[dict[int, list[int]], float]:
    """Return the responses by key, and the seconds of the processor that they took."""
    begin, tokens = time.process_time(), {request.key: [] for request in requests}
    for news in engine.generate(requests):
        ends = np.cumsum(news.counts)
        for key, count, end in zip(news.keys.tolist(), news.counts.tolist(), ends.tolist(), strict=True):
            tokens[key] += news.token_ids[end - count : end].tolist()
    return tokens, time.process_time() - begin


def responses_of(policy: Files, scratch: Path) -> list[list[tuple[tuple[int, ...], list[int]]]]:
    """Return (prompt, response) pairs of `chain`, by step."""
    from rlhfless_ray.types import Request

    source, steps = engine("chain", "source", "off", policy, scratch), []
    for step in range(LEARNED_STEPS):
        steps.append([])
        prompts = prompts_of("chain", policy, STEP_PROMPTS, 10_000 + step)
        for part in range(0, STEP_PROMPTS * GROUP, 64):
            keys = range(part, part + 64)
            found, _ = answer(
                source, [Request(key, prompts[key // GROUP], 10**6 + 1000 * step + key, TOKENS["chain"], 1.0) for key in keys]
            )
            steps[-1] += [(prompts[key // GROUP], tokens) for key, tokens in found.items()]
    return steps


def trained(folder: Path, steps: list[list[tuple[tuple[int, ...], list[int]]]]) -> dict[str, np.ndarray]:
    """Return the drafter's weights after it has learned from responses, as a run trains it."""
    from rlhfless_ray.rollout.drafter_trainer import DrafterSettings, DrafterTrainer, SampledSequence
    from rlhfless_ray.rollout.trained_drafter import PASSES

    trainer = DrafterTrainer(folder, DrafterSettings(2e-3, 1.0))
    for pairs in steps:
        said = []
        for prompt, tokens in pairs:
            logprobs = np.concatenate([np.full(len(prompt), np.nan, np.float32), np.zeros(len(tokens), np.float32)])
            said.append(SampledSequence(np.array([*prompt, *tokens], np.int32), logprobs))
        trainer.add(said)
        trainer.train(PASSES * sum(int(np.isfinite(one.logprobs).sum()) for one in said), lambda seconds: True)
    return trainer.weights()


def measure(case: str, rounds: int, scratch: Path, texts: Path | None) -> list[dict[str, Any]]:
    """Return a row for each temperature and batch: tokens per second by engine, what became of the drafts, and the engine steps.

    The steps without drafts over those with them are the speed if drafting and verifying took no time.
    """
    from benchmarks.common.learned_texts import learned_texts
    from benchmarks.common.widen import widened
    from rlhfless_ray.engine.control_queue import DraftNews
    from rlhfless_ray.types import Request
    from rlhfless_ray.weights.model_folder import write_folder

    rows, kinds, drafters = [], kinds_of(case), drafters_of(case, scratch)
    pool: list[tuple[int, ...]] = []
    if case == "texts":
        assert texts is not None
        small, pool, loss = learned_texts(texts)
        print(f"the policy has learned {len(pool)} texts to {loss:.2f} nats a token", flush=True)
        files = widened(small, *LARGER)
    else:
        files = files_of(case, scratch)
    weights = None
    if drafters:
        from benchmarks.common.widen import widened_head
        from rlhfless_ray.rollout.train_head import head_config, train_head
        from rlhfless_ray.weights.model_folder import config_of

        steps = responses_of(files_of("chain", scratch), scratch)
        weights = trained(drafters["trained"], steps)
        sequences = [[*prompt, *tokens] for pairs in steps for prompt, tokens in pairs]
        small = files_of("chain", scratch)
        trained_head = train_head(
            write_folder(scratch / "chain", small), head_config(config_of(small), HEAD_HIDDEN), sequences, HEAD_PASSES
        )
        head = widened_head(trained_head, LARGER[0])
        drafters["head"] = write_folder(scratch / "head", head)
    engines = {name: engine(case, name, kind, files, scratch, drafters.get(name)) for name, kind in kinds.items()}
    if weights is not None:
        engines["trained"].update_drafts(DraftNews({}, (), weights))
    names, drafting = list(kinds), list(kinds)[1:]
    numbers, order = itertools.count(), np.random.default_rng(0)
    for temperature, batch in itertools.product(TEMPERATURES[case], BATCHES[case]):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        costs = (case, temperature) == COST
        tokens = COST_TOKENS if costs else TOKENS[case]
        made, same, row_rounds = 0, 0, max(rounds, COST_ROUNDS if costs else LEAST_RESPONSES.get(case, 0) // batch)
        first_steps: dict[str, int] = {}
        for one in engines.values():
            one.take_stats()
            one.processor_s.clear()
        for round_number in range(WARM + row_rounds):
            if round_number == WARM:
                first_steps = {name: len(one.steps) for name, one in engines.items()}
            prompts = prompts_of(case, files, max(1, batch // GROUP), next(numbers), pool)
            asked = [
                Request(key, prompts[key // GROUP % len(prompts)], 1000 * round_number + key, tokens, temperature) for key in range(batch)
            ]
            found = {}
            for name in order.permutation(names).tolist():
                found[name], taken = answer(engines[name], asked)
                if round_number >= WARM:
                    seconds[name].append(taken)
            made += batch
            same += sum(all(found[name][key] == found["off"][key] for name in names) for key in found["off"])
        tails = {name: tail_s(one, first_steps[name]) for name, one in engines.items()}
        steps = {name: one.take_stats().steps for name, one in engines.items()}
        rows.append(
            {
                "case": case,
                "temperature": temperature,
                "batch": batch,
                "rounds": row_rounds,
                "commit": commit().get("commit", ""),
                "over_off": {name: faster(seconds["off"], seconds[name], by_round=costs) for name in drafting},
                "interval": {name: interval(seconds["off"], seconds[name], by_round=costs) for name in drafting},
                # at temperature 0 the equal responses of a group end together
                "tail": {name: tails["off"] / tails[name] for name in drafting} if batch > TAIL and all(tails.values()) else {},
                "drafted": {name: sum(step.drafted for step in steps[name]) for name in drafting},
                "accepted": {name: sum(step.accepted for step in steps[name]) for name in drafting},
                "by_model": {name: np.sum([step.by_model for step in steps[name]], axis=0).tolist() for name in drafting},
                "draft_share": {
                    name: sum(step.draft_s for step in steps[name]) / sum(step.seconds for step in steps[name]) for name in drafting
                },
                "steps": {name: len(found) - first_steps[name] for name, found in steps.items()},
                "same_responses": same / made,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def faster(off_s: Sequence[float], drafting_s: Sequence[float], by_round: bool = False) -> float:
    """Return the ratio of two engines' total seconds in the same rounds. `by_round`: the median of the rounds' ratios."""
    return float(np.median(np.array(off_s) / np.array(drafting_s)) if by_round else sum(off_s) / sum(drafting_s))


def interval(off_s: Sequence[float], drafting_s: Sequence[float], by_round: bool = False) -> list[float]:
    """Return the 95 % interval of `faster`, by drawing the rounds again."""
    off, drafting = np.array(off_s), np.array(drafting_s)
    drawn = np.random.default_rng(0).integers(0, len(off), (2000, len(off)))
    ratios = np.median(off[drawn] / drafting[drawn], 1) if by_round else off[drawn].sum(1) / drafting[drawn].sum(1)
    return np.quantile(ratios, (0.025, 0.975)).tolist()


def lowest(what: str, rows: Sequence[dict[str, Any]], names: Sequence[str], least: float) -> Target:
    """Return a target for the slowest of some rows and engines, with the reason of a miss."""
    row, name = min(((row, name) for row in rows for name in names if name in row["over_off"]), key=lambda one: one[0]["over_off"][one[1]])
    why = f"{row['case']}, {row['batch']} at temperature {row['temperature']}"
    if steps := row.get("steps"):
        why += f": {steps['off'] / steps[name]:.2f}× if drafts took no time"
    target = Target(what, row["over_off"][name], least=least, unit="×", why=why)
    return replace(target, why="") if target.met else target


def _between(row: dict[str, Any], name: str) -> str:
    return " ({:.2f} to {:.2f})".format(*row["interval"][name]) if "interval" in row else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, help="some of the cases (default: all, `texts` with --texts)")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--texts", type=Path, help="JSONL file with the columns question and answer")
    options = parser.parse_args()
    options.only = options.only or [case for case in CASES if case != "texts" or options.texts]
    if "texts" in options.only and not options.texts:
        parser.error("the case texts needs --texts FILE")
    console = make_console()
    with TemporaryDirectory(prefix="speculation-") as scratch:
        rows = [row for case in options.only for row in measure(case, options.rounds, Path(scratch), options.texts)]
    before = FOLDER / "speculation.json"
    kept = json.loads(before.read_text())["rows"] if before.exists() else []
    rows = [row for case in CASES for row in (rows if case in options.only else kept) if row["case"] == case]
    table = Table("policy", "temperature", "batch", "speed", "tail", "accepted", "drafting", "same responses", title="Speed over no drafts")
    for row in rows:
        table.add_row(
            row["case"],
            f"{row['temperature']}",
            f"{row['batch']}",
            ", ".join(f"{name} {speed:.2f}×{_between(row, name)}" for name, speed in row["over_off"].items()),
            ", ".join(f"{speed:.2f}×" for speed in row.get("tail", {}).values()),
            ", ".join(f"{row['accepted'][name] / max(count, 1):.0%} of {count}" for name, count in row["drafted"].items()),
            ", ".join(f"{share:.1%}" for share in row.get("draft_share", {}).values()),
            f"{row['same_responses']:.1%}",
        )
    console.print(table)
    by_case = {case: [row for row in rows if row["case"] == case] for case in CASES}
    few = {case: [row for row in found if row["batch"] <= 4] for case, found in by_case.items()}
    targets = [lowest("auto over off, anywhere", rows, ["auto", "text", "own", "trained", "head"], 0.98)]
    if few["27M"]:
        targets.append(lowest("a trained drafter over off, 27 M, at most 4 responses", few["27M"], ["trained"], 1.5))
        targets.append(lowest("an EAGLE-3 head over off, 27 M, at most 4 responses", few["27M"], ["head"], 1.5))
    if tails := [row["tail"]["trained"] for row in by_case["27M"] if row.get("tail")]:
        targets.append(Target("a trained drafter over off, 27 M, the last four responses", min(tails), least=1.5, unit="×"))
    if tail := [row for row in by_case["chain"] if row["batch"] > TAIL and row["temperature"] == 1 and row.get("tail")]:
        value = min(row["tail"]["auto"] for row in tail)
        targets.append(Target("auto over off, chain, the last four responses at temperature 1", value, least=1.3, unit="×"))
    for case, name in (("chain", "auto"), ("27M", "text"), ("texts", "auto")):
        if cold := [row for row in few[case] if row["temperature"] <= 0.5]:
            what = f"drafts from text over off, {case}, at most 4 responses and temperature 0.5"
            targets.append(lowest(what, cold, [name], 1.8))
    show_targets(console, targets)
    save("speculation", {"rows": rows}, targets, console=console)


if __name__ == "__main__":
    main()
