"""Peak memory and time of log-probabilities with entropies: naive, verl's, ours in chunks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.peak_rss import added_peak_bytes
from benchmarks.common.results import Spread, processor_ms
from rlhfless_ray.learn.logprobs import chunked_logprobs, tokens_per_chunk

Form = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Heads:
    """An output head of Qwen2.5's vocabulary; narrow, so that the vocabulary matrix is what counts."""

    tokens: int = 1024
    width: int = 256
    vocabulary: int = 151_936

    @property
    def matrix_bytes(self) -> int:
        return 4 * self.tokens * self.vocabulary


@dataclass(frozen=True)
class LogprobPeak:
    form: str
    gradient_bytes: int
    forward_bytes: int
    cpu_s: Spread

    def row(self, heads: Heads) -> tuple[str, ...]:
        share = self.gradient_bytes / heads.matrix_bytes
        return self.form, f"{self.gradient_bytes / 1e6:,.0f}", f"{self.forward_bytes / 1e6:,.0f}", f"{share:.2f}×", self.cpu_s.show()

    def share(self, of: LogprobPeak) -> float:
        return self.gradient_bytes / of.gradient_bytes


def naive(head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden).float(), dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def verl_form(functions: Any, head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    return functions.logprobs_from_logits(logits, targets, inplace_backward=False), functions.entropy_from_logits(logits)


def logprob_peaks(heads: Heads, verl: Any, repeats: int) -> list[LogprobPeak]:
    """The naive form first, then ours at its default chunk and at an eighth of the tokens, then verl's."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(heads.width, heads.vocabulary, bias=False)
    hidden = torch.randn(heads.tokens, heads.width, generator=generator)
    targets = torch.randint(heads.vocabulary, (heads.tokens,), generator=generator)
    ours = partial(_ours, heads.vocabulary)
    forms: dict[str, Form] = {
        "naive": naive,
        "ours, default chunk": partial(ours, None),
        f"ours, {heads.tokens // 8} tokens a chunk": partial(ours, heads.tokens // 8),
    }
    if verl is not None:
        forms["verl"] = partial(verl_form, importlib.import_module("verl.utils.torch_functional"))

    def learn(form: Form) -> None:
        x = hidden.clone().requires_grad_()
        logprobs, entropies = form(head, x, targets)
        torch.autograd.grad(logprobs.sum() + 0.01 * entropies.sum(), [x, *head.parameters()])

    def look(form: Form) -> None:
        with torch.no_grad():
            form(head, hidden, targets)

    found = []
    for name, form in forms.items():
        peaks = [added_peak_bytes(partial(work, form)) for work in (learn, look)]
        times = Spread.of(processor_ms(partial(learn, form)) / 1e3 for _ in range(repeats))
        found.append(LogprobPeak(name, *peaks, times))
    return found


def _ours(vocabulary: int, chunk: int | None, head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return chunked_logprobs(head, hidden, targets, chunk or tokens_per_chunk(vocabulary))
