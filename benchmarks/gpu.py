"""The GPU path on one device, in under ten minutes: `python -m benchmarks.gpu [--cpu]`.

For policies of the shapes of Qwen2.5-0.5B and 1.5B with random weights in bfloat16: an engine's start, parking, waking and update; its
tokens per second against bare vLLM; the learner's step against plain torch; how far their log-probabilities are apart; and steps of a
whole run. `--cpu` makes the same measurements with toys in float32, which shows only that this command works. A part that fails leaves
its cells empty, and the others are measured all the same. While a part is measured, the next one imports its libraries. `--parts` measures
some of them, and keeps what was measured of the others before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.results import FOLDER, make_console, save
from benchmarks.common.run_metadata import ROOT
from benchmarks.peers.run_ours import recipe, run_ours
from benchmarks.peers.shared_work import BILLION_AND_A_HALF, HALF_BILLION, LARGE, SMALL, SharedWork
from rlhfless_ray import Recipe
from rlhfless_ray.local.machine_memory import visible_gpus

DEVICE = [replace(work, prompts=8, group=8, max_tokens=128, micro_sequences=8) for work in (HALF_BILLION, BILLION_AND_A_HALF)]
TOYS = [SMALL, LARGE]
WORK = {work.name: work for work in (*DEVICE, *TOYS)}
STEPS, UPDATES = 4, 3
PART_S = 240.0  # timeout of one part
GO = "go\n"  # tells a waiting part to measure
PARTS = ("engine", "bare", "learner", "plain", "run")
ROWS = (
    ("engine: start", "s", "start_s"),
    ("engine: first weights", "s", "load_s"),
    ("engine: update to the next version", "s", "update_s"),
    ("engine: memory at work", "MB", "working_mb"),
    ("engine: memory while parked", "MB", "parked_mb"),
    ("engine: park", "s", "park_s"),
    ("engine: wake, weights loaded", "s", "wake_s"),
    ("engine: same tokens after it was parked", "1: yes", "same_after_park"),
    ("engine: tokens per second", "", "tokens_per_s"),
    ("bare vLLM: tokens per second", "", "bare_tokens_per_s"),
    ("learner: step", "s", "step_s"),
    ("plain torch: step", "s", "plain_step_s"),
    ("learner: memory at work", "MB", "learner_mb"),
    ("learner: memory while parked", "MB", "learner_parked_mb"),
    ("log-probabilities: mean difference", "nats", "mean_apart"),
    ("log-probabilities: largest difference", "nats", "largest_apart"),
    ("run: first step", "s", "run_first_step_s"),
    ("run: step", "s", "run_step_s"),
    ("run: generation of a step", "s", "run_generate_s"),
    ("run: learning of a step", "s", "run_learn_s"),
    ("run: publishing of a step", "s", "run_publish_s"),
    ("run: log-probabilities, mean difference", "nats", "run_mismatch"),
)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class GpuPart:
    """One part's input, in a process of its own: a part must not find memory that another one left.

    Each part is a generator. It imports its libraries, yields nothing, and then yields what it measured.
    """

    def __init__(self, name: str, scratch: Path, device: str) -> None:
        from transformers import AutoTokenizer

        from rlhfless_ray.weights.model_folder import read_folder

        self.work, self.scratch, self.device = WORK[name], scratch, device
        self.folder = scratch / "policy"
        self.files = read_folder(self.folder)
        self.recipe = Recipe.parse(content(self.work, scratch, device))
        texts = [json.loads(line)["prompt"] for line in (scratch / "prompts.jsonl").read_text().splitlines()[: self.work.prompts]]
        self.prompts = [tuple(ids) for ids in AutoTokenizer.from_pretrained(self.folder)(texts, add_special_tokens=False)["input_ids"]]
        self.sampled = scratch / "sampled.npz"

    def memory_mb(self) -> float:
        """Return the device's used memory; without a device this process's."""
        from rlhfless_ray.local.process_memory import own_memory_mb

        if self.device == "cpu":
            return own_memory_mb()
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20

    def engine(self) -> Iterator[dict[str, Any]]:
        from rlhfless_ray.engine.engine_settings import engine_settings
        from rlhfless_ray.engine.exact_actor import ExactEngineActor
        from rlhfless_ray.types import Request
        from rlhfless_ray.weights.checksum import digests
        from rlhfless_ray.weights.model_folder import stored_weights, without_weights
        from rlhfless_ray.weights.tensor_file import as_numpy
        from rlhfless_ray.weights.tensor_slice import whole_slices

        settings = engine_settings(self.recipe, self.work.longest_prompt, self.device)
        weights = whole_slices({name: as_numpy(tensor) for name, tensor in stored_weights(self.files)})
        told = digests(weights)
        actor = ExactEngineActor(without_weights(self.files), settings)
        yield {}
        start_s, _ = timed(lambda: actor.open(threads()))
        load_s, _ = timed(lambda: actor.load(1, weights, told))
        asked = [
            Request(key, self.prompts[key // self.work.group], key, self.work.max_tokens, self.work.temperature)
            for key in range(self.work.samples)
        ]

        def generate() -> Any:
            parts = [deltas for deltas, _, _ in actor.rollout(1, asked, 1e9, threads())]
            return parts[-1]

        generate()
        seconds, deltas = timed(generate)
        working_mb = self.memory_mb()
        versions = iter(range(2, 2 + UPDATES))
        update_s = median(timed(lambda: actor.load(next(versions), weights, told))[0] for _ in range(UPDATES))
        park_s, _ = timed(actor.park)
        parked_mb = self.memory_mb()
        wake_s, _ = timed(lambda: actor.load(9, weights, told))
        again = generate()
        np.savez(self.sampled, keys=deltas.keys, counts=deltas.counts, token_ids=deltas.token_ids, logprobs=deltas.logprobs)
        yield {
            "start_s": start_s + actor.imported.to_s - actor.imported.from_s,
            "load_s": load_s,
            "update_s": update_s,
            "working_mb": working_mb,
            "parked_mb": parked_mb,
            "park_s": park_s,
            "wake_s": wake_s,
            "tokens_per_s": len(deltas.token_ids) / seconds,
            "same_after_park": float(np.array_equal(again.token_ids, deltas.token_ids)),
        }

    def bare(self) -> Iterator[dict[str, Any]]:
        """vLLM's own sampler, with the log-probabilities of the sampled tokens, which our engine gives too."""
        from rlhfless_ray.engine.prepare_vllm import prepare

        prepare(self.device == "cpu")
        import torch
        from vllm import LLM, SamplingParams, TokensPrompt

        yield {}
        rollout = self.recipe.rollout
        own = {"kv_cache_memory_bytes": rollout.engine_kv_mb * 2**20, "enforce_eager": True} if self.device == "cpu" else {}
        engine = LLM(
            model=str(self.folder),
            dtype=self.recipe.policy.dtype,
            distributed_executor_backend="uni",
            skip_tokenizer_init=True,
            max_model_len=self.work.longest_prompt + self.work.max_tokens,
            max_num_seqs=rollout.max_running,
            block_size=rollout.block_size,
            gpu_memory_utilization=rollout.gpu_memory_share,
            disable_log_stats=True,
            **own,
        )
        torch.set_num_threads(threads())
        params = SamplingParams(
            temperature=self.work.temperature, max_tokens=self.work.max_tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids in self.prompts for _ in range(self.work.group)]
        engine.generate(prompts, params, use_tqdm=False)
        seconds, outputs = timed(lambda: engine.generate(prompts, params, use_tqdm=False))
        yield {"bare_tokens_per_s": sum(len(output.outputs[0].token_ids) for output in outputs) / seconds}

    def batch(self) -> Any:
        """Return the engine's responses. If that part failed, random ones."""
        from rlhfless_ray.learn.batch import Batch

        if self.sampled.exists():
            found = np.load(self.sampled)
        else:
            shape = (self.work.samples, self.work.max_tokens)
            tokens = np.random.default_rng(1).integers(2, 60, shape, dtype=np.int32).ravel()
            logprobs = np.full(len(tokens), -5.0, np.float32)
            found = {"keys": np.arange(shape[0]), "counts": np.full(*shape), "token_ids": tokens, "logprobs": logprobs}
        ends = np.cumsum(found["counts"])[:-1]
        tokens, logprobs = np.split(found["token_ids"], ends), np.split(found["logprobs"], ends)
        groups = found["keys"] // self.work.group
        advantages = np.random.default_rng(0).normal(size=len(groups))
        return Batch.of(
            [(self.prompts[g], t, p, float(a), int(g)) for g, t, p, a in zip(groups, tokens, logprobs, advantages, strict=True)]
        )

    def learner(self) -> Iterator[dict[str, Any]]:
        import socket

        import torch

        from rlhfless_ray.learn.learner_rank import LearnerRank
        from rlhfless_ray.learn.rank_settings import learner_settings
        from rlhfless_ray.learn.trainer_rank import TrainerRank  # noqa: F401

        yield {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torch.set_num_threads(threads())
        rank, batch = LearnerRank(learner_settings(self.recipe, 0, self.device)), self.batch()
        rank.open(self.files, ("127.0.0.1", port))
        found = rank.agreement(rank.cutter.of_pass(batch)[0], self.work.temperature, 1.0)
        apart = np.abs(found - batch.logprobs)
        times = [timed(lambda: self.done(rank.update(rank.cutter.of_update(batch)[0])))[0] for _ in range(UPDATES + 1)]
        working_mb = self.memory_mb()
        if self.device == "gpu":
            rank.leave_device()
        parked_mb = self.memory_mb()
        if self.device == "gpu":
            rank.return_to_device()
        rank.update(rank.cutter.of_update(batch)[0])
        yield {
            "step_s": median(times[1:]),
            "learner_mb": working_mb,
            "learner_parked_mb": parked_mb,
            **({"mean_apart": float(apart.mean()), "largest_apart": float(apart.max())} if self.sampled.exists() else {}),
        }

    def done(self, result: Any) -> Any:
        """Wait for the device."""
        if self.device == "gpu":
            import torch

            torch.cuda.synchronize()
        return result

    def plain(self) -> Iterator[dict[str, Any]]:
        """The same sequences and micro-batches in plain torch, without float32 copies of bfloat16 weights."""
        import torch
        from transformers import AutoModelForCausalLM

        yield {}
        torch.set_num_threads(threads())
        device = "cuda" if self.device == "gpu" else "cpu"
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self.recipe.policy.dtype)).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.work.learning_rate, weight_decay=0.0, fused=True)
        batch = self.batch()
        sequences = [torch.from_numpy(part).to(device) for part in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])]
        answer, size = self.work.max_tokens, self.work.micro_sequences

        def update() -> None:
            for first in range(0, len(sequences), size):
                part = sequences[first : first + size]
                ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
                ends = torch.tensor([len(one) for one in part], device=device)
                columns = ends[:, None] - answer - 1 + torch.arange(answer, device=device)
                rows = torch.arange(len(part), device=device)[:, None]
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[rows, columns]).float() / self.work.temperature
                logprobs = torch.log_softmax(logits, -1).gather(2, ids[rows, columns + 1].unsqueeze(2)).squeeze(2)
                (-torch.exp(logprobs - logprobs.detach()).sum() / batch.response_lengths.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        times = [timed(lambda: self.done(update()))[0] for _ in range(UPDATES + 1)]
        yield {"plain_step_s": median(times[1:])}


def threads() -> int:
    return len(os.sched_getaffinity(0))


def content(work: SharedWork, scratch: Path, device: str) -> dict[str, Any]:
    """Return the recipe of the run, which the parts follow too."""
    from benchmarks.peers.shared_work import Files

    found = recipe(work, Files(scratch / "policy", scratch / "prompts.jsonl", scratch / "reward.py"), scratch / "runs", STEPS, threads())
    found["policy"]["dtype"] = work.dtype
    found["functions"] = {"slot": device}
    if device == "gpu":
        found["rollout"]["max_actors"] = 1
        found["learner"]["max_slots_per_rank"] = 1
    if work.dtype == "bfloat16":
        found["learner"]["zero_stage"] = 1
    return found


def measure(work: SharedWork, parts: Sequence[str], scratch: Path, device: str, say: Callable[[str], None]) -> Generator[dict[str, Any]]:
    """Yield what each part measured, or the reason of its failure under "failed"."""
    waiting = iter([WaitingPart(part, work, scratch, device) for part in parts if part != "run"])
    following = next(waiting, None)
    if following is not None:
        following.start()
    try:
        for part in parts:
            start, current = time.perf_counter(), following
            if part != "run" and (following := next(waiting, None)) is not None:
                following.start()
            found: dict[str, Any] = {}
            try:
                found = whole_run(work, scratch, device) if part == "run" else current.result()  # type: ignore[union-attr]
            except RuntimeError as error:
                found = {"failed": {part: str(error)}}
            say(f"{work.name}: {part}{', which failed' if 'failed' in found else ''}, {time.perf_counter() - start:.0f} s")
            yield found
    finally:
        if following is not None:
            following.end()


class WaitingPart:
    """A part's process, which imports its libraries and then waits for its turn."""

    def __init__(self, part: str, work: SharedWork, scratch: Path, device: str) -> None:
        self.command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--part", part, work.name, str(scratch), device]
        self.log = scratch / f"{part}.log"

    def start(self) -> None:
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)

    def result(self) -> dict[str, Any]:
        """Let it measure. Raises RuntimeError with the end of its log if it fails or takes too long."""
        try:
            output, _ = self.process.communicate(GO, timeout=PART_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise RuntimeError(f"took longer than {PART_S:.0f} s: {self.log.read_text()[-3000:]}") from None
        if self.process.returncode:
            raise RuntimeError(self.log.read_text()[-3000:])
        return dict(json.loads(output.splitlines()[-1]))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def whole_run(work: SharedWork, scratch: Path, device: str) -> dict[str, Any]:
    run = run_ours(content(work, scratch, device), scratch, timeout_s=PART_S)
    medians = {f"run_{name}": median(step[name] for step in run.steady(1)) for name in ("step_s", "generate_s", "learn_s", "publish_s")}
    return {**medians, "run_first_step_s": run.steps[0]["step_s"], "run_mismatch": run.steps[-1].get("learn/mismatch_mean")}


def run_part(part: str, name: str, folder: str, device: str) -> NoReturn:
    """Measure in this process when standard input says so, print the result and exit. Exit without a result if the input ends first."""
    try:
        measured = getattr(GpuPart(name, Path(folder), device), part)()
        next(measured)
        if sys.stdin.readline() == GO:
            print(json.dumps(next(measured)), flush=True)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # vLLM's exit hooks linger, after a failure for minutes


def choose_parts(works: Sequence[SharedWork], wanted: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the parts of each policy: all, or those among `wanted`. Raises ValueError for names that are none."""
    if not wanted:
        return {work.name: list(PARTS) for work in works}
    chosen = {work.name: [part for part in PARTS if f"{work.name}:{part}" in wanted] for work in works}
    if unknown := set(wanted) - {f"{name}:{part}" for name, parts in chosen.items() for part in parts}:
        raise ValueError(f"--parts: {', '.join(sorted(unknown))}: policies are {', '.join(chosen)}, parts are {', '.join(PARTS)}")
    return chosen


def measure_policies(
    works: Sequence[SharedWork], chosen: dict[str, list[str]], found: dict[str, dict[str, Any]], device: str, console: Console
) -> None:
    """Measure the chosen parts of each policy, and put the results into `found`."""
    for work in works:
        row = found.setdefault(work.name, {})
        row["failed"] = {part: why for part, why in row.get("failed", {}).items() if part not in chosen[work.name]}
        if not chosen[work.name]:
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
            work.write(Path(scratch))
            say = partial(console.print, highlight=False)
            with closing(measure(work, chosen[work.name], Path(scratch), device, say)) as parts:
                for part in parts:
                    row["failed"] |= part.pop("failed", {})
                    row |= part
                    print(json.dumps({work.name: row}), file=sys.stderr, flush=True)  # results so far, if interrupted


def show(found: dict[str, dict[str, Any]], title: str, console: Console) -> bool:
    """Print the table and what failed. Returns whether a part failed."""
    table = Table("", *found, title=title, title_justify="left")
    for label, unit, key in ROWS:
        table.add_row(f"{label}{unit and f', {unit}'}", *(f"{row[key]:.3g}" if key in row else "" for row in found.values()))
    console.print(table)
    failed = [f"{name}: the part {part} failed: {why}" for name, row in found.items() for part, why in row["failed"].items()]
    for sentence in failed:
        console.print(sentence, highlight=False, markup=False)
    return bool(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="toys on CPU: shows that this command works, not how fast a GPU is")
    parser.add_argument("--parts", nargs="+", metavar="POLICY:PART", help="some of them, for example 494M:run 1.5B:engine")
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)  # part, policy, folder, device: measure and print
    options = parser.parse_args()
    if options.part:
        run_part(*options.part)
    if not options.cpu and not visible_gpus():
        print("benchmarks.gpu: this machine shows no GPU; run it on one, or with --cpu to see that the command works", file=sys.stderr)
        raise SystemExit(2)
    console, start = make_console(), time.monotonic()
    device, works = ("cpu", TOYS) if options.cpu else ("gpu", DEVICE)
    try:
        chosen = choose_parts(works, options.parts)
    except ValueError as error:
        parser.error(str(error))
    kept = FOLDER / "gpu.json"
    before: dict[str, Any] = json.loads(kept.read_text()) if options.parts and kept.exists() else {"device": device, "policies": {}}
    found: dict[str, dict[str, Any]] = {name: before["policies"].get(name, {}) for name in chosen} if before["device"] == device else {}
    measure_policies(works, chosen, found, device, console)
    failed = show(found, "Toys on CPU, not a measurement of a GPU" if options.cpu else "One GPU", console)
    seconds = time.monotonic() - start
    console.print(f"took {seconds:.0f} s", highlight=False)
    save("gpu", {"device": device, "seconds": seconds, "policies": found}, [], console=console, quick=options.cpu)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
