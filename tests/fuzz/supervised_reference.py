"""Steps of supervised stages in float64, from the papers: one sequence at a time."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.supervise.examples import Examples
from tests.fuzz.adamw import Float64AdamW
from tests.fuzz.float64_policy import Float64Policy
from tests.fuzz.sections import Read, of_kind

Row = list[dict[str, Any]]  # the sequences of a row: of a pair the chosen and the rejected one; of kto the row's own and a mismatched one


def rows_of(examples: Examples) -> list[Row]:
    sequences, start, label = [], 0, 0
    for length in examples.lengths.tolist():
        trained = np.flatnonzero(examples.mask[start : start + length])
        labels = torch.from_numpy(examples.labels[label : label + len(trained)].astype(np.float64))
        sequences.append({"ids": examples.tokens[start : start + length].tolist(), "places": torch.from_numpy(trained), "labels": labels})
        start, label = start + length, label + len(trained)
    return [sequences[i : i + examples.per_row] for i in range(0, len(sequences), examples.per_row)]


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.logaddexp(torch.zeros_like(x), -x)


@dataclass
class SupervisedReference:
    """`second`: files of a reference or a teacher; None: the reference is the initial model."""

    task: str
    files: dict[str, bytes]
    second: dict[str, bytes] | None
    loss: Read
    learner: Read
    examples: Examples
    reward_tokens: list[int] | None

    def __post_init__(self) -> None:
        self.rows = rows_of(self.examples)
        self.model = Float64Policy(self.files, self.loss.value_head if self.task == "rm" else "")
        self.other = copy.deepcopy(self.model) if self.second is None else Float64Policy(self.second)
        self.optimizer = Float64AdamW(self.model.weights, self.learner, lambda _: self.learner.learning_rate)

    def step(self, numbers: np.ndarray) -> dict[str, float]:
        """Make one optimizer step. Returns its statistics."""
        rows, extras = [self.rows[i] for i in numbers], self.examples.extras[numbers].astype(np.float64).tolist()
        ways = {"sft": self._sft, "kd": self._kd, "rm": self._rm, "dpo": self._dpo, "kto": self._kto, "prm": self._prm}
        loss, stats = of_kind(self.task, ways)(rows, extras)
        loss.backward()
        return {"loss": float(loss.detach()), **stats, "grad_norm": self.optimizer.step()}

    def _distributions(self, model: Float64Policy, s: dict[str, Any]) -> Tensor:
        return torch.log_softmax(model.outputs(s["ids"])[s["places"] - 1], -1)

    def _logprobs(self, model: Float64Policy, s: dict[str, Any]) -> Tensor:
        return self._distributions(model, s).gather(1, torch.as_tensor(s["ids"])[s["places"]][:, None])[:, 0]

    def _mean(self, parts: list[Tensor]) -> Tensor:
        """Average over all tokens, or over sequences of the mean of each. `parts`: a number for each token of each sequence."""
        ways = {"token": lambda: torch.cat(parts).mean(), "sequence": lambda: torch.stack([x.mean() for x in parts]).mean()}
        mean: Tensor = of_kind(self.loss.mean, ways)()
        return mean

    def _sft(self, rows: list[Row], _: list[float]) -> tuple[Tensor, dict[str, float]]:
        return -self._mean([self._logprobs(self.model, s) for (s,) in rows]), {}

    def _kd(self, rows: list[Row], _: list[float]) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy with the teacher's distribution, and with the rows."""
        crosses = []
        for (s,) in rows:
            with torch.no_grad():
                taught = self._distributions(self.other, s).exp()
            crosses.append(-(taught * self._distributions(self.model, s)).sum(-1))
        nll, distillation = -self._mean([self._logprobs(self.model, s) for (s,) in rows]), self._mean(crosses)
        weight = self.loss.teacher_weight
        return (1 - weight) * nll + weight * distillation, {"nll": float(nll.detach()), "distillation": float(distillation.detach())}

    def _rm(self, rows: list[Row], margins: list[float]) -> tuple[Tensor, dict[str, float]]:
        """Bradley-Terry (arXiv 2307.09288, section 3.2.2). A reward is read before the token that counts as trained."""
        rewards = torch.stack([torch.stack([self.model.outputs(s["ids"])[s["places"] - 1, 0].sum() for s in row]) for row in rows])
        gap = rewards[:, 0] - rewards[:, 1]
        ways = {
            "sigmoid": lambda: -log_sigmoid(gap - torch.tensor(margins, dtype=torch.float64)),
            "logexp": lambda: torch.log1p(torch.exp(-gap)),
        }
        return of_kind(self.loss.kind, ways)().mean(), _of_pairs(rewards)

    def _ratios(self, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
        """Return log π/π_ref of each sequence (rows, 2), and log π of each row's first tokens."""
        ratios, first = [], []
        for row in rows:
            own = [self._logprobs(self.model, s) for s in row]
            with torch.no_grad():
                other = [self._logprobs(self.other, s).sum() for s in row]
            ratios.append(torch.stack([x.sum() - y for x, y in zip(own, other, strict=True)]))
            first.append(own[0])
        return torch.stack(ratios), first

    def _dpo(self, rows: list[Row], _: list[float]) -> tuple[Tensor, dict[str, float]]:
        """DPO with smoothed labels (arXiv 2305.18290, cDPO), or IPO (arXiv 2310.12036, equation 17)."""
        ratios, chosen = self._ratios(rows)
        gap, beta, smoothing = ratios[:, 0] - ratios[:, 1], self.loss.beta, self.loss.label_smoothing
        ways = {
            "sigmoid": lambda: -(1 - smoothing) * log_sigmoid(beta * gap) - smoothing * log_sigmoid(-beta * gap),
            "ipo": lambda: (gap - 1 / (2 * beta)) ** 2,
        }
        preference = of_kind(self.loss.kind, ways)().mean()
        nll = -torch.stack([x.mean() for x in chosen]).mean()
        stats = {**_of_pairs(beta * ratios), "nll": float(nll.detach()), "preference_loss": float(preference.detach())}
        return preference + self.loss.nll_coefficient * nll, stats

    def _kto(self, rows: list[Row], labels: list[float]) -> tuple[Tensor, dict[str, float]]:
        """KTO (arXiv 2402.01306, equations 7 and 8). z is the mean log-ratio of the mismatched responses, at least 0."""
        ratios, _ = self._ratios(rows)
        z = max(0.0, float(ratios[:, 1].detach().mean()))
        losses, rewards, right = [], {"chosen_reward": list[float](), "rejected_reward": list[float]()}, 0
        for r, label in zip(ratios[:, 0], labels, strict=True):
            is_good = label > 0.5
            sign, weight = (1, self.loss.desirable_weight) if is_good else (-1, self.loss.undesirable_weight)
            losses.append(weight * (1 - torch.sigmoid(sign * self.loss.beta * (r - z))))
            rewards["chosen_reward" if is_good else "rejected_reward"].append(self.loss.beta * float(r.detach()))
            right += (float(r.detach()) > z) == is_good
        means = {name: float(np.mean(values)) for name, values in rewards.items() if values}
        return torch.stack(losses).mean(), {"kl": z, **means}

    def _prm(self, rows: list[Row], _: list[float]) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy of the reward tokens. With two, a label is the probability of the first one."""
        losses = []
        for (s,) in rows:
            logits = self.model.outputs(s["ids"])[s["places"] - 1]
            every = torch.log_softmax(logits if self.reward_tokens is None else logits[:, self.reward_tokens], -1)
            for row, label in zip(every, s["labels"].tolist(), strict=True):
                losses.append(-(label * row[0] + (1 - label) * row[1]) if len(row) == 2 else -row[int(label)])
        return torch.stack(losses).mean(), {}


def _of_pairs(rewards: Tensor) -> dict[str, float]:
    """Return the statistics of pairs that do not depend on the sign of a difference, which rounding may decide."""
    both = rewards.detach()
    means = {"chosen_reward": both[:, 0], "rejected_reward": both[:, 1], "margin": both[:, 0] - both[:, 1]}
    return {name: float(x.mean()) for name, x in means.items()}
