"""The loss of each supervised task on a trainer: its model, its part in a micro-batch, and the means that are logged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlhfless_ray.learn.policy_model import TokenDistillation, TokenLogits, TokenLogprobs, TokenValues, load_critic, load_model
from rlhfless_ray.learn.tensor_parallel import divided
from rlhfless_ray.learn.trainer_rank import TrainerRank
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.losses import dpo_loss, kto_loss, pairwise_loss, step_loss

SQUARE = "square"  # of the rewards, from which an evaluation gets their deviation
DESIRABLE = "desirable"  # kto: share of the rows, from which the rewards of each kind get their means
MIN_DEVIATION = 1e-8  # of rewards, which others are divided by; as in OpenRLHF
PAIR_MEANS = ("accuracy", "margin", "chosen_reward", "rejected_reward")
Means = dict[str, float]


@dataclass(frozen=True)
class StepRows:
    """Rows of an optimizer step, or of a part of an evaluation, and what their loss needs besides the model.

    lengths: trained tokens of each sequence, (rows · per_row,). extras: a value for each row; prm: for each step of a response.
    reference: log-probabilities of the sequences under the reference, (rows · per_row,) float32. kl: kto: the estimate of z.
    """

    lengths: np.ndarray
    per_row: int
    extras: Tensor
    reference: Tensor | None = None
    kl: Tensor | None = None

    def by_row(self, values: Tensor, sequences: Tensor, here: Tensor) -> Tensor:
        """Sum values (tokens,) of a micro-batch by sequence. Returns (rows, per_row).

        `sequences`: of each token, in the batch. `here`: positions of the micro-batch's rows in the batch, ascending.
        """
        place = torch.searchsorted(here.to(values.device), sequences // self.per_row) * self.per_row + sequences % self.per_row
        sums = torch.zeros(len(here) * self.per_row, dtype=values.dtype, device=values.device)
        return sums.index_add(0, place, values).reshape(-1, self.per_row)

    def ratios(self, sums: Tensor, here: Tensor) -> Tensor:
        """Return the log-ratios of these sums (rows, per_row) to the reference."""
        assert self.reference is not None
        return sums - self.reference.reshape(-1, self.per_row)[here].to(sums.device)


class StageLoss:
    """The loss of a task.

    Attributes:
        metrics: names of the values that `part` returns; the loss is the first.
        has_reference: whether rows need log-probabilities under a reference.
        by_tokens: whether means are over tokens, so that parts of an evaluation are weighed by their tokens.
        by_steps: whether each trained token has a label of its own.
        predicts_next: whether a sequence has one more token, after that of the predicted value, see `WITH_NEXT`.
        trains_first: whether of each row only the first sequence is trained.
    """

    metrics: ClassVar[tuple[str, ...]] = ("loss",)
    has_reference = by_tokens = by_steps = predicts_next = trains_first = False

    def __init__(self, recipe: SupervisedRecipe, trainer: TrainerRank) -> None:
        self.recipe, self.section, self.trainer = recipe, recipe.loss, trainer
        self.scale: Means = {}  # rm: mean and deviation of the rewards in the last evaluation

    def load(self, folder: Path, second: Path | None, reward_tokens: list[int] | None, *, maps: bool) -> Any:
        """Load the model, in a module that returns what the loss needs. Arguments: see `SupervisedRank.open` and `load_model`."""
        return TokenLogprobs(self._causal(folder, maps=maps))

    def _causal(self, folder: Path, setting: str = "policy.path", *, maps: bool = False) -> nn.Module:
        policy = self.recipe.policy
        return load_model(folder, policy.dtype, policy.trust_remote_code, setting, maps=maps)

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        """Return a micro-batch's part of the rows' mean loss, and of the means of the other `metrics`. `here`: see `StepRows.by_row`."""
        raise NotImplementedError

    def finish(self, means: Means, evaluated: float = 0) -> None:
        """Turn sums over rows into the means that are logged. `evaluated`: number of rows of a whole evaluation; 0: of a step."""


class TokenLoss(StageLoss):
    """sft: the negative log-likelihood."""

    by_tokens = True

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        logprobs, _ = self.trainer.engine(1.0, **tensors)
        return -(logprobs * self._share(tensors, rows)).sum(), {}

    def _share(self, tensors: dict[str, Tensor], rows: StepRows) -> Tensor:
        """Return the weight of each token in the mean."""
        n, counts = len(rows.lengths), torch.from_numpy(rows.lengths)
        weights = torch.full((n,), 1.0 / int(rows.lengths.sum())) if self.section.mean == "token" else 1.0 / (n * counts)
        return weights.to(self.trainer.device)[tensors["sequence"]]


class DistillationLoss(TokenLoss):
    """kd: the negative log-likelihood, and the cross-entropy with a teacher's distribution."""

    metrics = ("loss", "nll", "distillation")

    def load(self, folder: Path, second: Path | None, reward_tokens: list[int] | None, *, maps: bool) -> Any:
        assert second is not None
        model = self._causal(folder, maps=maps)
        teacher: Any = self._causal(second, "teacher.path").eval().requires_grad_(False)
        if (width := self.trainer.section.tensor_parallel) > 1:
            teacher = divided(TokenLogprobs(teacher), width).model
        return TokenDistillation(model, teacher.to(self.trainer.device))

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        share = self._share(tensors, rows)
        logprobs, crosses = self.trainer.engine(**tensors)
        nll, distillation = -(logprobs * share).sum(), (crosses * share).sum()
        coefficient = self.section.teacher_weight
        parts = {"nll": float(nll.detach()), "distillation": float(distillation.detach())}
        return (1 - coefficient) * nll + coefficient * distillation, parts


class StepRewardLoss(StageLoss):
    """prm: the cross-entropy of the reward tokens at each step of a response."""

    metrics = ("loss", "accuracy")
    by_tokens = by_steps = predicts_next = True

    def load(self, folder: Path, second: Path | None, reward_tokens: list[int] | None, *, maps: bool) -> Any:
        return TokenLogits(self._causal(folder, maps=maps), reward_tokens)

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        logits = self.trainer.engine(**tensors)
        here, n = rows.extras.to(self.trainer.device)[tensors["flat"]], len(rows.extras)
        best = (here < 0.5).long() if logits.shape[1] == 2 else here.long()
        right = (logits.argmax(dim=1) == best).float().sum()
        return step_loss(logits, here).sum() / n, {"accuracy": float(right) / n}


class RewardLoss(StageLoss):
    """rm: the pairwise loss of a reward model."""

    metrics = ("loss", *PAIR_MEANS, SQUARE)
    predicts_next = True

    def load(self, folder: Path, second: Path | None, reward_tokens: list[int] | None, *, maps: bool) -> Any:
        policy, seed = self.recipe.policy, self.recipe.run.seed % 2**63
        options = policy.dtype, policy.trust_remote_code, self.section.value_head, seed, "policy.path"
        return TokenValues(load_critic(folder, *options, maps=maps))

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        both = rows.by_row(self.trainer.engine(**tensors), tensors["sequence"], here)
        n, margins = len(rows.extras), rows.extras[here].to(self.trainer.device)
        losses = pairwise_loss(both[:, 0], both[:, 1], margins, self.section.kind)
        return losses.sum() / n, {**_pair_means(both, n), SQUARE: float(both.detach().double().square().mean(dim=1).sum()) / n}

    def finish(self, means: Means, evaluated: float = 0) -> None:
        square = means.pop(SQUARE)
        if evaluated:
            mean = (means["chosen_reward"] + means["rejected_reward"]) / 2
            variance = max(0.0, square - mean**2) * 2 * evaluated / (2 * evaluated - 1)
            self.scale = {"mean": mean, "std": max(math.sqrt(variance), MIN_DEVIATION)}
            means |= {f"reward_{name}": value for name, value in self.scale.items()}


class PreferenceLoss(StageLoss):
    """dpo: the loss of pairs, relative to the reference."""

    metrics = ("loss", *PAIR_MEANS, "nll", "preference_loss")
    has_reference = True

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        logprobs, _ = self.trainer.engine(1.0, **tensors)
        sums = rows.by_row(logprobs, tensors["sequence"], here)
        ratios, section, n = rows.ratios(sums, here), self.section, len(rows.extras)
        losses = dpo_loss(ratios[:, 0], ratios[:, 1], section.beta, section.label_smoothing, section.kind)
        counts = torch.from_numpy(rows.lengths.reshape(-1, rows.per_row)[here.numpy(), 0]).to(sums.device)
        nll = -(sums[:, 0] / counts)
        loss = (losses + section.nll_coefficient * nll).sum() / n
        means = {"nll": float(nll.detach().sum()) / n, "preference_loss": float(losses.detach().sum()) / n}
        return loss, {**_pair_means(section.beta * ratios, n), **means}


class DesirabilityLoss(StageLoss):
    """kto: the loss of single responses with a label, relative to the reference."""

    metrics = ("loss", "accuracy", "kl", "chosen_reward", "rejected_reward", DESIRABLE)
    has_reference = trains_first = True

    def part(self, tensors: dict[str, Tensor], rows: StepRows, here: Tensor) -> tuple[Tensor, Means]:
        logprobs, _ = self.trainer.engine(1.0, **tensors)
        ratios = rows.ratios(rows.by_row(logprobs, tensors["sequence"], here), here)
        assert rows.kl is not None
        section, n, kl = self.section, len(rows.extras), rows.kl.to(ratios.device)
        desirable = rows.extras[here].to(ratios.device) > 0.5
        losses = kto_loss(ratios[:, 0], desirable, kl, section.beta, (section.desirable_weight, section.undesirable_weight))
        right = ((ratios[:, 0] > kl) == desirable).float().sum()
        rewards = section.beta * ratios[:, 0].detach().double()
        sums = {"chosen_reward": rewards[desirable].sum(), "rejected_reward": rewards[~desirable].sum(), DESIRABLE: desirable.sum()}
        means = {"accuracy": float(right) / n, "kl": float(rows.kl) * len(here) / n}
        return losses.sum() / n, means | {name: float(value) / n for name, value in sums.items()}

    def finish(self, means: Means, evaluated: float = 0) -> None:
        """Make rewards means over the desirable rows and over the others. They are sums, divided by all rows. No rows: no mean."""
        share = means.pop(DESIRABLE)
        for name, part in (("chosen_reward", share), ("rejected_reward", 1 - share)):
            total = means.pop(name)
            if part > 1e-9:
                means[name] = total / part


LOSSES: dict[str, type[StageLoss]] = {
    "sft": TokenLoss,
    "kd": DistillationLoss,
    "prm": StepRewardLoss,
    "rm": RewardLoss,
    "dpo": PreferenceLoss,
    "kto": DesirabilityLoss,
}


def _pair_means(both: Tensor, n: int) -> Means:
    """Return these pairs' part of the means over a batch of `n`: accuracy, margin and both rewards."""
    rewards = both.detach().double().cpu()
    difference = rewards[:, 0] - rewards[:, 1]
    values = float((difference > 0).sum()), float(difference.sum()), float(rewards[:, 0].sum()), float(rewards[:, 1].sum())
    return {name: value / n for name, value in zip(PAIR_MEANS, values, strict=True)}
