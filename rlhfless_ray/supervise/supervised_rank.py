"""One rank of a supervised stage: a model, its loss on a batch of rows, and the passes without gradient that the loss needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
from rlhfless_ray.learn.micro_batch_tensors import packed, padded
from rlhfless_ray.learn.micro_batches import MicroBatch, PromptSharing
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_model, scalar_config
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe import AlgorithmConfig
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import Examples, RankCut, cut_rows
from rlhfless_ray.supervise.stage_losses import LOSSES, Means, StepRows
from rlhfless_ray.weights.model_folder import as_folder
from rlhfless_ray.weights.tensor_file import Files

CORE_TOKENS = 512  # of packed rows on cores, where larger micro-batches take more memory and save no time


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
        self.alive, self.recipe, self.rank, self.ranks = alive, recipe, rank, ranks
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
        self.loss = LOSSES[recipe.task](recipe, self.trainer)
        self.device = self.trainer.device
        self.sharing = PromptSharing(width=1, obstacle="not open")
        self.packs_rows = False  # whether rows may lie end to end
        self.references: dict[int, np.ndarray] = {}  # by data set: log-probabilities of its sequences under the reference

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
        policy, needs_reference = recipe.policy, self.loss.has_reference and known is None
        computes_whole = needs_reference and second is None and state is not None  # the initial weights, which a checkpoint replaces
        maps = self.trainer.stage == 3 and not computes_whole
        with as_folder(model) as folder:
            wrapped = self.loss.load(folder, second, reward_tokens, maps=maps)
        with nullcontext() if recipe.task == "rm" else self.trainer.checking_head(wrapped.model, maps=maps):
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

    def _reference_sums(self, module: torch.nn.Module, examples: Examples, packs: bool) -> np.ndarray:
        """Return the summed log-probabilities of each sequence's trained tokens, (sequences,) float64, without gradient.

        `packs`: whether rows may lie end to end in the module's model.
        """
        sums = torch.zeros(len(examples.lengths), dtype=torch.float64)
        for rows, batch in self._parts(examples, 8):
            part = self._sequence_sums(module, batch, self._cut(batch, examples, packs))
            if self.loss.trains_first:
                part += self._sequence_sums(module, batch, self._cut(batch, examples, packs, mismatched=True))
            sums[torch.from_numpy(examples.sequences_of(rows))] = part.double()
        return self.trainer.over_ranks(sums).numpy()

    def _parts(self, examples: Examples, batches: int) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield all rows in parts of `batches` batches: numbers of the rows, and the rows."""
        size = max(1, batches * self.recipe.data.batch_rows)
        for start in range(0, len(examples), size):
            rows = np.arange(start, min(start + size, len(examples)))
            yield rows, examples.batch(rows)
            self.alive()

    def _trained(self, of_sequences: np.ndarray, per_row: int) -> np.ndarray:
        """Return the values of those sequences that are trained, (rows, sequences of each). `of_sequences`: a value of each sequence."""
        return of_sequences.reshape(-1, per_row)[:, : 1 if self.loss.trains_first else per_row]

    def _cut(self, batch: Batch, examples: Examples, packs: bool, mismatched: bool = False) -> RankCut:
        """Return this rank's micro-batches. `mismatched`: of the sequences that are not trained.

        Ranks that share a copy of the model have the same ones, as have ranks that share sequences. Until the model is divided, each rank
        has a whole copy.
        """
        max_tokens = self.recipe.learner.max_micro_batch_tokens
        width = self.trainer.section.sequence_parallel if self.trainer.slices is None else self.trainer.slices.width
        place = self.rank // width, self.ranks // width
        numbers = np.arange(len(batch))
        together = numbers.reshape(-1, examples.per_row)[:, 1:] if mismatched else self._trained(numbers, examples.per_row)
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
        flat = self.trainer.passes(lambda tensors: module(1.0, **tensors)[0], batch, cut.micro_batches, tensors_of)
        owner = torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lengths))
        return torch.zeros(len(batch)).index_add_(0, owner, flat.cpu())

    def config(self) -> bytes:
        """Return config.json of a reward model: a sequence classifier with one label, with the scale of its rewards if that is known."""
        return scalar_config(self.trainer.engine.module.model, **self.loss.scale)

    # ---- a step -----------------------------------------------------------------------------------------------

    def step(self, examples: Examples, rows: np.ndarray, data: int = 0) -> StepResult:
        """Make one optimizer step on these rows. `data`: number of their data set."""
        batch = examples.batch(rows)
        means, trained, tokens = self._passes(batch, examples, rows, data, learn=True)
        self.loss.finish(means)
        return StepResult(means, trained, tokens, *self.trainer.update(math.isfinite(means["loss"])))

    def evaluate(self, examples: Examples, data: int = 1) -> StepResult:
        """Return the loss and the other metrics over a whole data set, without training."""
        totals, tokens, count = dict[str, float](), 0, 0.0
        self.trainer.engine.eval()
        for rows, batch in self._parts(examples, 4):
            means, trained, _ = self._passes(batch, examples, rows, data, learn=False)
            weight = trained if self.loss.by_tokens and self.recipe.loss.mean == "token" else len(rows)
            totals = {name: totals.get(name, 0.0) + value * weight for name, value in means.items()}
            tokens, count = tokens + trained, count + weight
        self.trainer.engine.train()
        means = {name: value / count for name, value in totals.items()}
        self.loss.finish(means, count)
        return StepResult(means, tokens)

    def _passes(self, batch: Batch, examples: Examples, rows: np.ndarray, data: int, learn: bool) -> tuple[Means, int, int]:
        """Run the batch through the model, with gradients if `learn`.

        Returns means over the batch, the number of tokens that the loss counts, and that of all tokens.
        """
        cuts, is_packed = self._cut(batch, examples, self.packs_rows)
        extras, lengths, per_row = (
            torch.from_numpy(examples.labels_of(rows) if self.loss.by_steps else examples.extras[rows]),
            batch.response_lengths,
            examples.per_row,
        )
        reference = torch.from_numpy(self.references[data][examples.sequences_of(rows)]).float() if self.loss.has_reference else None
        kl = self._kl(batch, examples, reference) if self.loss.trains_first and reference is not None else None
        of_step, totals = StepRows(lengths, per_row, extras, reference, kl), dict.fromkeys(self.loss.metrics, 0.0)
        first = list(self._trained(np.arange(per_row), per_row).T)

        def loss_of(tensors: dict[str, Tensor], cut: MicroBatch) -> Tensor:
            here = torch.from_numpy(np.unique(np.concatenate(cut or first) // per_row))
            loss, parts = self.loss.part(tensors, of_step, here)
            if cut:
                for name, value in {"loss": float(loss.detach()), **parts}.items():
                    totals[name] += value
            return loss

        self.trainer.accumulate(batch, cuts, loss_of, first=first, tensors_of=packed if is_packed else padded, learns=learn)
        summed = self.trainer.over_ranks(torch.tensor(list(totals.values()), dtype=torch.float64))
        counted = self._trained(batch.lengths - self.loss.predicts_next, per_row)
        trained = counted if self.recipe.task == "rm" else self._trained(lengths, per_row)
        return dict(zip(totals, summed.tolist(), strict=True)), int(trained.sum()), int(counted.sum())

    def _kl(self, batch: Batch, examples: Examples, reference: Tensor) -> Tensor:
        """Estimate KTO's z on the mismatched sequences of the whole batch: the mean log-ratio, at least 0."""
        cut = self._cut(batch, examples, self.packs_rows, mismatched=True)
        sums = self.trainer.over_ranks(self._sequence_sums(self.trainer.engine, batch, cut).double())
        return (sums - reference.double()).reshape(-1, 2)[:, 1].mean().clamp(min=0).float()
