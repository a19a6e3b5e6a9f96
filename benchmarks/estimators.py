"""Advantages, losses, log-probabilities and packing: time, memory, padding, and agreement with verl and OpenRLHF.

python -m benchmarks.estimators [--quick] [--alone] [--repeats N]
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.common.estimate import estimate
from benchmarks.common.peak_rss import added_peak_bytes
from benchmarks.common.results import Target, make_console, save, show_targets
from benchmarks.learning import estimator_agreement as agreement
from benchmarks.learning.estimator_speed import Inputs, Timing, timings
from benchmarks.learning.logprob_memory import Heads, LogprobPeak, logprob_peaks
from benchmarks.peers.peer_env import peer_python
from rlhfless_ray.learn.losses import clipped_loss, sequence_ratios
from rlhfless_ray.learn.packing import padded
from rlhfless_ray.learn.whiten import whiten

LENGTHS = Path(__file__).resolve().parent.parent / "placement" / "catalog" / "data" / "lengths.yaml"
SAME_TOKENS = ((4096, 1024), (1024, 4096), (256, 16_384))
NEAR = 1e-6  # of what is compared in float64 although a library computes part of it in float32


@dataclass(frozen=True)
class Padding:
    """Shares of padded positions (0 to 1) at a token budget."""

    samples: int
    budget_tokens: int
    ranks: int
    by_length: float
    best_cut: float
    best_cut_count: int

    def row(self) -> tuple[str, ...]:
        return (
            f"{self.samples:,}",
            f"{self.budget_tokens:,}",
            str(self.ranks),
            f"{100 * self.by_length:.1f} %",
            f"{100 * self.best_cut:.1f} %",
            str(self.best_cut_count),
        )


def gsm8k_lengths(samples: int, seed: int, group: int = 8) -> np.ndarray:
    """Prompt and response tokens of each sample: the log-normals of `placement/catalog/data/lengths.yaml`."""
    data = {name: value[0] for name, value in yaml.safe_load(LENGTHS.read_text())["gsm8k"].items()}
    rng = np.random.default_rng(seed)
    prompts = data["prompt_tokens"] * np.exp(data["prompt_log_deviation"] * rng.normal(size=samples // group))
    answers = data["median_tokens"] * np.exp(data["log_deviation"] * rng.normal(size=samples))
    return (np.repeat(np.maximum(np.round(prompts), 1), group) + np.clip(np.round(answers), 1, 1024)).astype(np.int64)


def by_length(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """The plain way: sorted by length, each micro-batch as full as it gets."""
    order, cuts, start = np.argsort(-lengths, kind="stable"), [], 0
    while start < len(order):
        size = max(1, budget // int(lengths[order[start]]))
        cuts.append(order[start : start + size])
        start += size
    return cuts


def padding_share(lengths: np.ndarray, micro_batches: list[list[np.ndarray]]) -> float:
    """Return the share of padded positions if each micro-batch is padded to its longest sequence: 0 to 1."""
    parts = [part for mine in micro_batches for part in mine if len(part)]
    positions = sum(int(lengths[part].max()) * len(part) for part in parts)
    return 1 - int(np.sum(lengths)) / positions if positions else 0.0


def padding(samples: int, budget: int, ranks: int) -> Padding:
    lengths = gsm8k_lengths(samples, seed=samples)
    cut = padded(lengths, budget, ranks)
    return Padding(
        samples,
        budget,
        ranks,
        padding_share(lengths, [by_length(lengths, budget)]),
        padding_share(lengths, cut),
        sum(len(part) > 0 for mine in cut for part in mine),
    )


def peak_per_token(shapes: tuple[tuple[int, int], ...]) -> dict[str, list[float]]:
    """Bytes per token that advantages and loss add, for as many tokens in ever longer sequences."""
    found: dict[str, list[float]] = {"GAE, KL and whitening": [], "GSPO loss and gradient": []}
    for samples, tokens in shapes:
        x = Inputs(samples, tokens)

        def advantages(x: Inputs = x) -> None:
            values = x.array("values")
            whiten(estimate("gae", x.scores, x.lengths, kl=values, kl_coefficient=0.1, values=values, lambd=0.95)[0])

        def loss(x: Inputs = x) -> None:
            t = x.flat("logprobs").detach().requires_grad_()
            ratios = sequence_ratios(t, x.flat("old"), x.sequence, x.samples)
            torch.autograd.grad(clipped_loss(ratios, x.flat("advantages"), 0.2, 0.2)[0].mean(), t)

        for name, work in (("GAE, KL and whitening", advantages), ("GSPO loss and gradient", loss)):
            found[name].append(added_peak_bytes(work) / (samples * tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tensors, two repeats: does it run?")
    parser.add_argument("--alone", action="store_true", help="without verl and OpenRLHF (no environment is made)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.alone and importlib.util.find_spec("verl") is None:
        os.execv(peer_python(), [str(peer_python()), "-m", "benchmarks.estimators", *sys.argv[1:]])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    logging.disable(logging.WARNING)
    verl, openrlhf = load_peers(arguments.alone)
    console = make_console()
    repeats = 2 if arguments.quick else arguments.repeats
    size = (64, 256) if arguments.quick else (4096, 4096)
    content: dict[str, Any] = {"clock": "process_time", "threads": 1, "samples": size[0], "tokens": size[1]}
    targets: list[Target] = []
    if openrlhf:
        differences = agreement.advantages_differ(openrlhf, 4)
        differences = {f"OpenRLHF advantages {name}": value for name, value in differences.items()}
        differences |= agreement.losses_differ(openrlhf, verl, 4) | agreement.verl_advantages_differ(verl, 4)
        content["agreement"] = differences
        show_agreement(console, differences)
        targets.append(Target("largest difference to verl and OpenRLHF", max(differences.values()), most=NEAR))
    timed = timings(Inputs(*size), verl, openrlhf, repeats)
    show_timings(console, timed, size)
    compared = [t for t in timed if t.verl_ms or t.openrlhf_ms]
    targets += [Target(f"{t.what}: time over the faster library's", t.ours_ms.median / t.fastest_peer_ms(), most=1) for t in compared]
    shapes = tuple((n // 16, t // 16) for n, t in SAME_TOKENS) if arguments.quick else SAME_TOKENS
    per_token = peak_per_token(shapes)
    show_memory(console, per_token, shapes)
    targets += [Target(f"{name}: peak of the longest over the shortest", v[-1] / v[0], most=1.2) for name, v in per_token.items()]
    heads = Heads(tokens=64, width=32, vocabulary=4096) if arguments.quick else Heads()
    peaks = logprob_peaks(heads, verl, repeats=1 if arguments.quick else 3)
    show_peaks(console, peaks, heads)
    targets.append(Target("log-probabilities: peak over the naive form's, with gradient", peaks[1].share(peaks[0]), most=0.5))
    grid = [(n, b, r) for n in (64, 256, 1024) for b in (4096, 8192, 16_384) for r in (1, 4)]
    shares = [padding(*setting) for setting in grid]
    show_padding(console, shares)
    targets.append(Target("padding on GSM8K lengths, worst setting", 100 * max(s.best_cut for s in shares), most=5, unit=" %"))
    show_targets(console, targets)
    content |= {
        "timings": [vars(t) for t in timed],
        "peak_bytes_per_token": per_token,
        "same_tokens": shapes,
        "logprobs": {"sizes": vars(heads), "forms": [vars(p) for p in peaks]},
        "padding": [vars(s) for s in shares],
    }
    save("estimators", content, targets, console=console, quick=arguments.quick)


def load_peers(alone: bool) -> tuple[Any, Any]:
    if alone:
        return None, None
    from benchmarks.peers.peer_functions import load_openrlhf, load_verl

    return load_verl(), load_openrlhf()


def show_agreement(console: Console, differences: dict[str, float]) -> None:
    table = Table("what", "largest difference", title="Agreement on random tensors: values and gradients", title_justify="left")
    for name, value in differences.items():
        table.add_row(name, f"{value:.1e}")
    console.print(table)


def show_timings(console: Console, timed: list[Timing], size: tuple[int, int]) -> None:
    title = f"{size[0]:,} samples × {size[1]:,} tokens, milliseconds of processor time (one thread)"
    table = Table("", "ours", "verl", "OpenRLHF", "loop over tokens", title=title, title_justify="left")
    for timing in timed:
        table.add_row(*timing.row())
    console.print(table)


def show_memory(console: Console, per_token: dict[str, list[float]], shapes: tuple[tuple[int, int], ...]) -> None:
    names = [f"{n:,} × {t:,}" for n, t in shapes]
    table = Table("peak added, bytes per token", *names, title="No quadratic memory: as many tokens, longer", title_justify="left")
    for name, values in per_token.items():
        table.add_row(name, *(f"{v:.0f}" for v in values))
    console.print(table)


def show_peaks(console: Console, peaks: list[LogprobPeak], heads: Heads) -> None:
    title = f"Log-probabilities and entropies of {heads.tokens:,} tokens, vocabulary {heads.vocabulary:,}, width {heads.width}, float32"
    columns = ("peak MB, with gradient", "peak MB, forward", "of one full matrix", "processor s, with gradient")
    table = Table("", *columns, title=title, title_justify="left")
    for peak in peaks:
        table.add_row(*peak.row(heads))
    console.print(table)


def show_padding(console: Console, shares: list[Padding]) -> None:
    columns = ("samples", "budget", "ranks", "sorted by length", "best cut", "micro-batches")
    table = Table(
        *columns, title="Padded positions on GSM8K lengths (log-normal, placement/catalog/data/lengths.yaml)", title_justify="left"
    )
    for share in shares:
        table.add_row(*share.row())
    console.print(table)


if __name__ == "__main__":
    main()
