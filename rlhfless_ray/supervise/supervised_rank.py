"""One rank of a supervised stage: a model, its loss on a batch of rows, and the passes without gradient that the loss needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.learn import packed_attention
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batch_tensors import packed, padded, passed
from rlhfless_ray.learn.micro_batches import PromptSharing
from rlhfless_ray.learn.policy_model import (
    TokenDistillation,
    TokenLogits,
    TokenLogprobs,
    TokenValues,
    load_critic,
    load_model,
    scalar_config,
)
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.tensor_parallel import divided
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import AlgorithmConfig
from rlhfless_ray.recipe.supervised_sections import BY_TOKEN, WITH_NEXT, WITH_REFERENCE, SupervisedRecipe
from rlhfless_ray.supervise.examples import Examples, RankCut, cut_rows
from rlhfless_ray.supervise.losses import dpo_loss, kto_loss, pairwise_loss, step_loss
from rlhfless_ray.weights.model_folder import as_folder
from rlhfless_ray.weights.tensor_file import Files

SQUARE = "square"  # of the rewards, from which `evaluate` gets their deviation
DESIRABLE = "desirable"  # kto: share of the rows, from which the rewards of each kind get their means
METRICS = {
    "sft": ("loss",),
    "rm": ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", SQUARE),
    "dpo": ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "nll", "preference_loss"),
    "kto": ("loss", "accuracy", "kl", "chosen_reward", "rejected_reward", DESIRABLE),
    "kd": ("loss", "nll", "distillation"),
    "prm": ("loss", "accuracy"),
}
CORE_TOKENS = 512  # of packed rows on cores, where larger micro-batches take more memory and save no time
MIN_DEVIATION = 1e-8  # of rewards, which others are divided by; as in OpenRLHF


@dataclass(frozen=True)
class StepResult:
    """Means over the rows of an optimizer step or an evaluation."""

    metrics: dict[str, float]
    trained_tokens: int  # tokens that the loss counts; rm: all
    tokens: int = 0  # tokens of the sequences, context included
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    next_learning_rate: float = 0.0
    skipped: str = ""  # why the step was not applied


class SupervisedRank:
    """A rank that trains. Call `open` once, then `step` for each optimizer step.

    Every rank makes the same calls with the same rows in the same order.
    """

    def __init__(
        self, recipe: SupervisedRecipe, steps: int, rank: int = 0, ranks: int = 1, device: str = "cpu", alive: Callable[[], object] = int
    ) -> None:
        """`alive`: called regularly in passes over whole data sets, to report progress."""
        self.alive = alive
        self.recipe, self.rank, self.ranks = recipe, rank, ranks
        self.task, self.loss = recipe.task, recipe.loss
        self.seed = recipe.run.seed % 2**63
        self.trainer = TrainerRank(
            RankSettings(
                learner=recipe.learner.on_ranks(ranks),
                lora=recipe.lora,
                algorithm=AlgorithmConfig(),
                policy=recipe.policy,
                optimizer_steps=steps,
                temperature=1.0,
                seed=recipe.run.seed,
                deterministic=recipe.run.deterministic,
                rank=rank,
                device=device,
            )
        )
        self.device = self.trainer.device
        self.sharing = PromptSharing(width=1, obstacle="not open")
        self.packs_rows = False  # whether rows may lie end to end
        self.references: dict[int, np.ndarray] = {}  # by data set: log-probabilities of its sequences under the reference
        self.scale: dict[str, float] = {}  # rm: mean and deviation of the rewards in the last evaluation

    # ---- life -------------------------------------------------------------------------------------------------

    def open(
        self,
        model: Files | Path,
        second: Path | None,
        data: list[Examples],
        known: list[np.ndarray] | None,
        state: Any,
        reward_tokens: list[int] | None = None,
    ) -> list[np.ndarray]:
        """Build the engine. Returns the reference's log-probabilities of the sequences in each data set, [] without a reference.

        Args:
            model: folder of the initial model, or its files.
            second: folder of another reference, or of the teacher.
            data: data sets whose rows `step` and `evaluate` will get.
            known: the result of an earlier call, which is then not computed again.
            state: see `read_state`; None at the beginning.
            reward_tokens: prm: the tokens whose logits are compared; None: all.
        """
        recipe = self.recipe
        self.trainer.join_process_group(None)
        with as_folder(model) as folder:
            policy, needs_reference = recipe.policy, self.task in WITH_REFERENCE and known is None
            computes_whole = needs_reference and second is None and state is not None  # the initial weights, which a checkpoint replaces
            maps = self.trainer.stage == 3 and not computes_whole
            if self.task == "rm":
                options = policy.dtype, policy.trust_remote_code, self.loss.value_head, self.seed, "policy.path"
                wrapped: Any = TokenValues(load_critic(folder, *options, maps=maps))
            else:
                loaded = load_model(folder, policy.dtype, policy.trust_remote_code, maps=maps)
                if self.task == "kd":
                    assert second is not None
                    teacher = load_model(second, policy.dtype, policy.trust_remote_code, "teacher.path").eval().requires_grad_(False)
                    if (width := self.trainer.section.tensor_parallel) > 1:
                        teacher = divided(TokenLogprobs(teacher), width).model
                    wrapped = TokenDistillation(loaded, teacher.to(self.device))
                else:
                    wrapped = TokenLogits(loaded, reward_tokens) if self.task == "prm" else TokenLogprobs(loaded)
        with nullcontext() if self.task == "rm" else self.trainer.checking_head(wrapped.model, maps=maps):
            self.sharing = PromptSharing.of(wrapped.model, recipe.learner.share_prompts, recipe.lora.dropout)
            self.trainer.slice_sequences(wrapped)
            self.packs_rows = self._has_packing([wrapped.model, *getattr(wrapped, "teachers", ())])
            if needs_reference and (second is not None or not maps):
                base, packs = wrapped, self.packs_rows
                if second is not None:
                    reference = load_model(second, policy.dtype, policy.trust_remote_code, "reference.path")
                    base = self.trainer.slice_sequences(TokenLogprobs(reference))
                    packs = packs and self._has_packing([reference])
                known = [self._reference_sums(base.to(self.device), examples, packs) for examples in data]
                del base
            self.trainer.open(wrapped, state)
        if needs_reference and known is None:  # as its own reference, divided among the ranks
            self.trainer.engine.eval()
            known = [self._reference_sums(self.trainer.engine, examples, self.packs_rows) for examples in data]
            self.trainer.engine.train()
        self.references = dict(enumerate(known or []))
        return known or []

    def _has_packing(self, models: list[Any]) -> bool:
        """Let rows lie end to end in these models if the recipe and all of them allow it. Returns whether they do.

        Raises UserError if the recipe insists and a model does not allow it.
        """
        wanted, dropout = self.recipe.learner.pack_rows, self.recipe.lora.dropout
        if wanted is False or (wanted == "auto" and self.device.type != "cpu"):
            return False
        obstacle = next(filter(None, (PromptSharing.of(model, dropout=dropout).obstacle for model in models)), "")
        if obstacle and wanted is True:
            raise UserError(f"learner.pack_rows: rows cannot be packed: {obstacle}; leave it out")
        if obstacle or self.trainer.sequences is not None:
            return False
        for model in models:
            packed_attention.install(model)
        return True

    def _reference_sums(self, module: Any, examples: Examples, packs: bool) -> np.ndarray:
        """Return the summed log-probabilities of each sequence's trained tokens, (sequences,) float64, without gradient.

        `packs`: whether rows may lie end to end in the module's model.
        """
        sums = torch.zeros(len(examples.lengths), dtype=torch.float64)
        size = max(1, 8 * self.recipe.data.batch_rows)
        for start in range(0, len(examples), size):
            rows = np.arange(start, min(start + size, len(examples)))
            batch = examples.batch(rows)
            part = self._sequence_sums(module, batch, self._cut(batch, examples, packs))
            if self.task == "kto":
                part += self._sequence_sums(module, batch, self._cut(batch, examples, packs, mismatched=True))
            sums[torch.from_numpy(examples.sequences_of(rows))] = part.double()
            self.alive()
        return self.trainer.over_ranks(sums).numpy()

    def _cut(self, batch: Batch, examples: Examples, packs: bool, mismatched: bool = False) -> RankCut:
        """Return this rank's micro-batches. kto: of the rows' own responses, or of the `mismatched` responses.

        Ranks that share a copy of the model have the same ones, as have ranks that share sequences. Until the model is divided, each rank
        has a whole copy.
        """
        max_tokens = self.recipe.learner.max_micro_batch_tokens
        width = self.trainer.section.sequence_parallel if self.trainer.slices is None else self.trainer.slices.width
        place = self.rank // width, self.ranks // width
        together = np.arange(len(batch)).reshape(-1, examples.per_row)
        if self.task == "kto":
            together = together[:, [int(mismatched)]]
        return cut_rows(batch, together, max_tokens, self.sharing, *place, packed_tokens=self._packed_tokens() if packs else None)

    def _packed_tokens(self) -> int:
        """Return the most tokens of a micro-batch of packed rows."""
        learner = self.trainer.section
        meets = self.ranks > 1 and (self.trainer.stage >= 2 or learner.tensor_parallel > 1)  # in every micro-batch, which takes time
        if learner.micro_batch_tokens == "auto" and self.device.type == "cpu" and not meets:
            return CORE_TOKENS
        return learner.max_micro_batch_tokens

    def _sequence_sums(self, module: Any, batch: Batch, cut: RankCut) -> Tensor:
        """Return log-probabilities summed over tokens, (sequences,), on the host and without gradient. Sequences of other ranks have 0."""
        tensors_of = packed if cut.is_packed else padded
        flat = passed(lambda tensors: module(1.0, **tensors)[0], batch, cut.micro_batches, self.device, tensors_of)
        owner = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lengths))
        return torch.zeros(len(batch)).index_add_(0, owner, flat.cpu())

    def config(self) -> bytes:
        """Return config.json of a reward model: a sequence classifier with one label, with the scale of its rewards if that is known."""
        return scalar_config(self.trainer.engine.module.model, **self.scale)

    # ---- a step -----------------------------------------------------------------------------------------------

    def step(self, examples: Examples, rows: np.ndarray, data: int = 0) -> StepResult:
        """Make one optimizer step on these rows. `data`: number of their data set."""
        batch = examples.batch(rows)
        sums, tokens = self._passes(batch, examples, rows, data, learn=True)
        sums.pop(SQUARE, None)
        _divide_by_kind(sums)
        rate = self.trainer.rate()
        norm, applied, reason = self.trainer.step(math.isfinite(sums["loss"]))
        counted = batch.lengths[::2] if self.task == "kto" else batch.lengths - (self.task in WITH_NEXT)
        return StepResult(sums, tokens, int(counted.sum()), norm, rate, self.trainer.rate(), "" if applied else reason)

    def evaluate(self, examples: Examples, data: int = 1) -> StepResult:
        """Return the loss and the other metrics over a whole data set, without training."""
        size, totals, tokens, count = max(1, 4 * self.recipe.data.batch_rows), dict[str, float](), 0, 0.0
        self.trainer.engine.eval()
        for start in range(0, len(examples), size):
            rows = np.arange(start, min(start + size, len(examples)))
            batch = examples.batch(rows)
            sums, trained = self._passes(batch, examples, rows, data, learn=False)
            weight = trained if self.task in BY_TOKEN and self.loss.mean == "token" else len(rows)
            totals = {name: totals.get(name, 0.0) + value * weight for name, value in sums.items()}
            tokens, count = tokens + trained, count + weight
            self.alive()
        self.trainer.engine.train()
        means = {name: value / count for name, value in totals.items()}
        _divide_by_kind(means)
        if self.task == "rm":
            mean = (means["chosen_reward"] + means["rejected_reward"]) / 2
            variance = max(0.0, means.pop(SQUARE) - mean**2) * 2 * count / (2 * count - 1)
            self.scale = {"mean": mean, "std": max(math.sqrt(variance), MIN_DEVIATION)}
            means |= {f"reward_{name}": value for name, value in self.scale.items()}
        return StepResult(means, tokens)

    def _passes(self, batch: Batch, examples: Examples, rows: np.ndarray, data: int, learn: bool) -> tuple[dict[str, float], int]:
        """Run the batch through the model, with gradients if `learn`. Returns means over the batch, and the number of trained tokens."""
        cuts, is_packed = self._cut(batch, examples, self.packs_rows)
        lengths = batch.response_lengths
        reference = None
        if self.task in WITH_REFERENCE:
            reference = torch.from_numpy(self.references[data][examples.sequences_of(rows)]).float()
        kl = self._kl(batch, examples, reference) if self.task == "kto" and reference is not None else None
        extras = torch.from_numpy(examples.labels_of(rows) if self.task == "prm" else examples.extras[rows])
        totals: dict[str, float] = {}
        for cut in cuts:
            # A rank without work still joins the collectives: the first row at weight 0.
            numbers = cut or list(np.arange(1 if self.task == "kto" else examples.per_row)[:, None])
            sequences = np.concatenate(numbers)
            tensors = (packed if is_packed else padded)(batch, numbers, self.device)
            with self.trainer.dropping(batch, sequences) if learn else nullcontext(), torch.set_grad_enabled(learn):
                loss, parts = self._loss(batch, tensors, np.unique(sequences // examples.per_row), lengths, reference, kl, extras)
                if learn:
                    self.trainer.backward(loss if cut else loss * 0.0)
            if cut:
                for name, value in {"loss": float(loss.detach()), **parts}.items():
                    totals[name] = totals.get(name, 0.0) + value
        names = METRICS[self.task]  # a rank without work has measured none
        summed = self.trainer.over_ranks(torch.tensor([totals.get(name, 0.0) for name in names], dtype=torch.float64))
        totals = dict(zip(names, summed.tolist(), strict=True))
        if self.task == "rm":
            return totals, int(batch.lengths.sum()) - len(batch)
        return totals, int(lengths[:: examples.per_row].sum() if self.task == "kto" else lengths.sum())

    def _loss(
        self,
        batch: Batch,
        tensors: dict[str, Tensor],
        rows: np.ndarray,
        lengths: np.ndarray,
        reference: Tensor | None,
        kl: Tensor | None,
        extras: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return a micro-batch's part of the batch's mean loss, and of the means of other logged values.

        `rows`: positions of its rows in the batch. `lengths`: trained tokens of each sequence of the batch. `extras`: one value for each
        row; prm: for each step.
        """
        engine = self.trainer.engine
        if self.task == "prm":
            return self._step_loss(tensors, extras)
        if self.task in BY_TOKEN:
            return self._token_loss(tensors, lengths)
        per_row = len(batch) // len(extras)
        n = len(extras)
        local = torch.from_numpy(rows)
        if self.task == "rm":
            values = engine(**tensors)
            both = _by_row(values, tensors["sequence"], rows, per_row)
            margins = extras[local].to(self.device)
            losses = pairwise_loss(both[:, 0], both[:, 1], margins, self.loss.kind)
            return losses.sum() / n, {**_pair_means(both, n), SQUARE: float(both.detach().double().square().mean(dim=1).sum()) / n}
        logprobs, _ = engine(1.0, **tensors)
        assert reference is not None
        sums = _by_row(logprobs, tensors["sequence"], rows, per_row)
        ratios = sums - reference.reshape(-1, per_row)[local].to(self.device)
        beta = self.loss.beta
        if self.task == "dpo":
            losses = dpo_loss(ratios[:, 0], ratios[:, 1], beta, self.loss.label_smoothing, self.loss.kind)
            counts = torch.from_numpy(lengths.reshape(-1, per_row)[rows, 0]).to(self.device)
            nll = -(sums[:, 0] / counts)
            loss = (losses + self.loss.nll_coefficient * nll).sum() / n
            means = {"nll": float(nll.detach().sum()) / n, "preference_loss": float(losses.detach().sum()) / n}
            return loss, {**_pair_means(beta * ratios, n), **means}
        assert kl is not None
        desirable = extras[local].to(self.device) > 0.5
        weights_of = (self.loss.desirable_weight, self.loss.undesirable_weight)
        losses = kto_loss(ratios[:, 0], desirable, kl.to(self.device), beta, weights_of)
        right = ((ratios[:, 0] > kl.to(self.device)) == desirable).float().sum()
        rewards = beta * ratios[:, 0].detach().double()
        sums_of = {"chosen_reward": rewards[desirable].sum(), "rejected_reward": rewards[~desirable].sum(), DESIRABLE: desirable.sum()}
        means = {"accuracy": float(right) / n, "kl": float(kl) * len(rows) / n}
        return losses.sum() / n, means | {name: float(value) / n for name, value in sums_of.items()}

    def _token_loss(self, tensors: dict[str, Tensor], lengths: np.ndarray) -> tuple[Tensor, dict[str, float]]:
        """sft, kd: return the same as `_loss` for a loss that is a mean over tokens."""
        n, counts = len(lengths), torch.from_numpy(lengths)
        weights = torch.full((n,), 1.0 / int(lengths.sum())) if self.loss.mean == "token" else 1.0 / (n * counts)
        share = weights.to(self.device)[tensors["sequence"]]
        if self.task == "sft":
            logprobs, _ = self.trainer.engine(1.0, **tensors)
            return -(logprobs * share).sum(), {}
        logprobs, crosses = self.trainer.engine(**tensors)
        nll, distillation = -(logprobs * share).sum(), (crosses * share).sum()
        coefficient = self.loss.teacher_weight
        parts = {"nll": float(nll.detach()), "distillation": float(distillation.detach())}
        return (1 - coefficient) * nll + coefficient * distillation, parts

    def _step_loss(self, tensors: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        """prm: return the same as `_loss` for a loss that is a mean over the steps of a batch."""
        logits = self.trainer.engine(**tensors)
        here, n = labels.to(self.device)[tensors["flat"]], len(labels)
        best = (here < 0.5).long() if logits.shape[1] == 2 else here.long()
        right = (logits.argmax(dim=1) == best).float().sum()
        return step_loss(logits, here).sum() / n, {"accuracy": float(right) / n}

    def _kl(self, batch: Batch, examples: Examples, reference: Tensor) -> Tensor:
        """Estimate KTO's z on the mismatched sequences of the whole batch: the mean log-ratio, at least 0."""
        cut = self._cut(batch, examples, self.packs_rows, mismatched=True)
        sums = self.trainer.over_ranks(self._sequence_sums(self.trainer.engine, batch, cut).double())
        return (sums - reference.double()).reshape(-1, 2)[:, 1].mean().clamp(min=0).float()


def _by_row(values: Tensor, sequences: Tensor, rows: np.ndarray, per_row: int) -> Tensor:
    """Sum values (tokens,) by sequence. Returns (rows, per_row), in the order of `rows`."""
    place = torch.full((int(rows.max()) + 1,), -1, dtype=torch.int64, device=values.device)
    place[torch.from_numpy(rows).to(values.device)] = torch.arange(len(rows), device=values.device)
    index = place[sequences // per_row] * per_row + sequences % per_row
    return torch.zeros(len(rows) * per_row, dtype=values.dtype, device=values.device).index_add(0, index, values).reshape(-1, per_row)


def _divide_by_kind(means: dict[str, float]) -> None:
    """kto: make rewards means over the desirable rows and over the others. They are sums, divided by all rows. No rows: no mean."""
    if (share := means.pop(DESIRABLE, None)) is None:
        return
    for name, part in (("chosen_reward", share), ("rejected_reward", 1 - share)):
        total = means.pop(name)
        if part > 1e-9:
            means[name] = total / part


def _pair_means(both: Tensor, n: int) -> dict[str, float]:
    """Return these pairs' part of the means over a batch of `n`: accuracy, margin and both rewards."""
    rewards = both.detach().double().cpu()
    difference = rewards[:, 0] - rewards[:, 1]
    return {
        "accuracy": float((difference > 0).sum()) / n,
        "margin": float(difference.sum()) / n,
        "chosen_reward": float(rewards[:, 0].sum()) / n,
        "rejected_reward": float(rewards[:, 1].sum()) / n,
    }
