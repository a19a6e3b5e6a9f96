"""Train a drafter on the policy's sampled tokens, in a separate process.

The drafter learns the policy's distribution from its tokens, by cross-entropy. If it is behind the policy or has died, fewer drafts are
accepted. Responses do not change, because engines verify every draft.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rlhfless_ray.types import Span
from rlhfless_ray.weights.load_policy import quiet_libraries
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tensor_file import Files

KEPT_TOKENS = 200_000  # tokens of the newest sequences, from which batches are drawn
BATCH_TOKENS = 1024  # tokens of an update, padding included; small, because the end of a rollout waits for the running update
WINDOW_TOKENS = 512  # longest part of a sequence that an update reads
WARM_UP = 20  # updates in which the learning rate rises
MOST_NORM = 1.0  # limit of a gradient's norm
MOMENTS = ("exp_avg", "exp_avg_sq")  # as AdamW names them
UPDATES = "updates"  # name of their number among the moments


@dataclass(frozen=True)
class DrafterSettings:
    learning_rate: float
    temperature: float  # at which the tokens were sampled
    device: str = "cpu"
    deterministic: bool = False  # see `run.deterministic`


@dataclass(frozen=True)
class SampledSequence:
    """A sequence to train on. `tokens`: (n,) int32, prompt included. `logprobs`: (n,) float32, the policy's; NaN for tokens that it
    has not sampled."""

    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class DrafterStats:
    """Statistics of a training call. `loss`, `kl`: means over its updates, per token; `kl` is the policy's log p minus the drafter's."""

    updates: int
    tokens: int  # tokens that the updates read
    loss: float
    kl: float
    update_s: float  # seconds of the last update
    spans: list[Span]


class DrafterTrainer:
    """A causal language model with its optimizer and the newest sequences."""

    def __init__(self, folder: Path, settings: DrafterSettings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from rlhfless_ray.learn.deterministic import use_deterministic_kernels

        quiet_libraries()
        if settings.deterministic:
            use_deterministic_kernels()
        self.settings, self.torch = settings, torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self.model.train()
        self.last_token = len(self.model.get_input_embeddings().weight) - 1  # a policy may sample padding beyond this vocabulary
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.updates = 0
        self.sequences: deque[SampledSequence] = deque()
        self.tokens = 0  # in `sequences`
        self.rng = np.random.default_rng(0)

    def move(self, device: str) -> None:
        """Move weights and moments to a device."""
        self.model.to(device)
        for state in self.optimizer.state.values():
            state.update({name: value.to(device) for name, value in state.items() if name != "step"})

    def load(self, weights: dict[str, np.ndarray]) -> None:
        with self.torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.torch.from_numpy(weights[name]))

    def weights(self) -> dict[str, np.ndarray]:
        """Return a copy of the weights, float32. Tied ones appear once."""
        return {name: parameter.detach().cpu().numpy().copy() for name, parameter in self.model.named_parameters()}

    def moments(self) -> dict[str, np.ndarray]:
        """Return a copy of the optimizer's moments, float32 by `parameter.moment`, and the number of updates that made them."""
        state, found = self.optimizer.state, {UPDATES: np.array(self.updates)}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}.{kind}": state[parameter][kind].cpu().numpy().copy() for kind in MOMENTS if parameter in state}
        return found

    def load_moments(self, moments: dict[str, np.ndarray]) -> None:
        """Continue with these moments, and with the learning rate after as many updates."""
        self.updates = int(moments[UPDATES])
        for name, parameter in self.model.named_parameters():
            if f"{name}.{MOMENTS[0]}" in moments:
                kinds = {kind: self.torch.from_numpy(moments[f"{name}.{kind}"].copy()).to(parameter.device) for kind in MOMENTS}
                self.optimizer.state[parameter] = {"step": self.torch.tensor(float(self.updates)), **kinds}

    def add(self, sequences: Sequence[SampledSequence]) -> None:
        self.sequences += sequences
        self.tokens += sum(len(one.tokens) for one in sequences)
        while self.tokens > KEPT_TOKENS and len(self.sequences) > 1:
            self.tokens -= len(self.sequences.popleft().tokens)

    def train(self, tokens: int, goes_on: Callable[[float], bool]) -> tuple[list[tuple[float, float]], int, float]:
        """Make updates until they have read `tokens` tokens.

        Returns (loss, kl) of each update, the number of tokens read, and the seconds of the last update. `goes_on`: called before each
        update with the seconds of the previous one (0 before the first); training ends when it returns False.
        """
        means_of_updates, read, took_s = [], 0, 0.0
        while self.sequences and read < tokens and goes_on(took_s):
            begin = time.monotonic()
            *means, count = self._update()
            means_of_updates.append((means[0], means[1]))
            read, took_s = read + count, time.monotonic() - begin
        return means_of_updates, read, took_s

    def _update(self) -> tuple[float, float, int]:
        torch = self.torch
        tokens, logprobs = self._batch()
        at = torch.from_numpy(np.minimum(tokens, self.last_token)).to(self.settings.device)
        sampled = torch.from_numpy(logprobs[:, 1:]).to(self.settings.device)
        learned = ~sampled.isnan()
        # Padding follows a sequence, so with causal attention it does not affect the sequence's tokens.
        logits = self.model(at, use_cache=False).logits[:, :-1].float() / self.settings.temperature
        drafted = torch.log_softmax(logits, -1).gather(2, at[:, 1:, None]).squeeze(2)[learned]
        loss = -drafted.mean()
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min(1.0, self.updates / WARM_UP)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MOST_NORM)
        self.optimizer.step()
        return loss.item(), (sampled[learned] - drafted).mean().item(), int(learned.sum())

    def _batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw parts of sequences at random, each with a sampled token.

        Returns tokens (parts, columns) and the policy's log-probabilities, NaN in the padding.
        """
        parts: list[SampledSequence] = []
        while True:
            one = self.sequences[int(self.rng.integers(len(self.sequences)))]
            # around a sampled token, because most parts of a long prompt have none
            learned = self.rng.choice(np.flatnonzero(~np.isnan(one.logprobs)))
            begin = max(0, min(learned - self.rng.integers(1, WINDOW_TOKENS), len(one.tokens) - WINDOW_TOKENS))
            part = SampledSequence(one.tokens[begin : begin + WINDOW_TOKENS], one.logprobs[begin : begin + WINDOW_TOKENS])
            columns = max(len(part.tokens), *(len(other.tokens) for other in parts)) if parts else len(part.tokens)
            if parts and columns * (len(parts) + 1) > BATCH_TOKENS:
                break
            parts.append(part)
        columns = max(len(part.tokens) for part in parts)
        tokens, logprobs = np.zeros((len(parts), columns), np.int64), np.full((len(parts), columns), np.nan, np.float32)
        for row, part in enumerate(parts):
            tokens[row, : len(part.tokens)], logprobs[row, : len(part.tokens)] = part.tokens, part.logprobs
        return tokens, logprobs


class DrafterActor:
    """The process of the drafter's training. A plain class, which the pool wraps in an actor."""

    concurrency_groups: ClassVar = {"control": 1}  # `stop` runs beside `train`

    def __init__(self, files: Files, settings: DrafterSettings) -> None:
        """Only import, so that a process can be prewarmed without a lease. `files`: files of the drafter's folder."""
        start = time.time()
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM  # noqa: F401

        self.files, self.settings = files, settings
        self.stopped = 0  # the newest call that has to end
        self.imported = Span("start", "import torch", start, time.time())

    def open(self, threads: int) -> dict[str, Any]:
        from rlhfless_ray.local.process_memory import own_memory_mb

        start = time.time()
        with tempfile.TemporaryDirectory(prefix="rlhfless-drafter-") as name:
            self.trainer = DrafterTrainer(write_folder(Path(name) / "model", self.files), self.settings)
        spans = [self.imported, Span("start", "load the drafter", start, time.time())]
        return {"memory_mb": own_memory_mb(), "spans": spans}

    def train(
        self,
        call: int,
        sequences: list[SampledSequence],
        tokens: int,
        seconds: float,
        threads: int,
        weights: dict[str, np.ndarray] | None,
        moments: dict[str, np.ndarray] | None,
    ) -> tuple[DrafterStats, dict[str, np.ndarray]]:
        """Train on these and earlier sequences until the updates have read `tokens` tokens, for at most about `seconds`.

        `call`: number of this call, for `stop`. `weights`, `moments`: to continue from; None: this process's own.
        """
        import torch

        start, end = time.time(), time.monotonic() + seconds
        torch.set_num_threads(threads)
        if weights is not None:
            self.trainer.load(weights)
        if moments is not None:
            self.trainer.load_moments(moments)
        self.trainer.move(self.settings.device)
        self.trainer.add(sequences)
        means, read, update_s = self.trainer.train(tokens, lambda took_s: self.stopped < call and time.monotonic() + took_s < end)
        loss, kl = np.mean(means, axis=0).tolist() if means else (0.0, 0.0)
        done = DrafterStats(len(means), read, loss, kl, update_s, [Span("work", "train the drafter", start, time.time())])
        return done, self.trainer.weights()

    def moments(self) -> dict[str, np.ndarray]:
        """Return the optimizer's moments, for a checkpoint."""
        return self.trainer.moments()

    def stop(self, call: int) -> None:
        """End a call after its current update. Runs beside it."""
        self.stopped = max(self.stopped, call)

    def park(self) -> dict[str, Any]:
        """Leave the device."""
        import torch

        from rlhfless_ray.local.process_memory import report_parked_memory

        start = time.time()
        self.trainer.move("cpu")
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        return report_parked_memory([Span("transfer", "leave the device", start, time.time())])
