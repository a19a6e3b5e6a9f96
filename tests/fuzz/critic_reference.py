"""The critic's update in float64: one sequence at a time, whole optimizer steps, no ranks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.batch import Batch
from tests.fuzz.adamw import Float64AdamW
from tests.fuzz.float64_policy import Float64Policy
from tests.fuzz.sections import Read, of_kind
from tests.fuzz.update_reference import sequences_of, steps_of


@dataclass
class CriticReference:
    """`total`: optimizer steps of the run, for the learning rate's schedule."""

    files: dict[str, bytes]
    algorithm: Read
    critic: Read
    learner: Read  # the critic's: stages and micro-batches of `learner`, the optimizer of `critic`
    seed: int
    total: int

    def __post_init__(self) -> None:
        self.model = Float64Policy(self.files, "score")
        self.optimizer = Float64AdamW(self.model.weights, self.learner, self._rate)
        config = json.loads(self.files["config.json"])
        self.scale = (config["mean"], config["std"]) if self.critic.normalize else (0.0, 1.0)
        self.margin = np.inf

    def _rate(self, done: int) -> float:
        """Return the learning rate after `done` steps. Warm-up begins at 0."""
        peak, warmup = self.learner.learning_rate, math.ceil(self.total * self.learner.warmup_share)
        share = (done - warmup) / max(1, self.total - warmup)
        floor = self.learner.min_rate_share
        cosine = (1 - floor) * (1 + math.cos(math.pi * share)) / 2 + floor
        shares = {"constant": 1.0, "linear": 1 - share, "cosine_with_min_lr": cosine}
        if self.learner.schedule != "constant" and done < warmup:
            return float(peak * done / warmup)
        return float(peak * of_kind(self.learner.schedule, shares))

    def _values(self, s: dict[str, Any]) -> Tensor:
        mean, deviation = self.scale
        return (self.model.outputs(s["ids"])[s["places"] - 1, 0] - mean) / deviation

    def values(self, batch: Batch) -> np.ndarray:
        with torch.no_grad():
            return torch.cat([self._values(s) for s in sequences_of(batch)]).numpy()

    def update(self, batch: Batch) -> dict[str, float]:
        sequences = sequences_of(batch)
        found = [self._step([sequences[i] for i in step]) for step in steps_of(batch, self.algorithm, self.seed, self.optimizer.done)]
        merged = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        return merged | {"trained_tokens": sum(one["trained_tokens"] for one in found)}

    def _step(self, step: list[dict[str, Any]]) -> dict[str, float]:
        clip, losses, values, clipped = self.critic.value_clip, [], [], []
        for s in step:
            now, old, target = self._values(s), s["values"], s["returns"]
            loss, far = (now - target) ** 2 / 2, torch.zeros(len(now), dtype=torch.bool)
            if clip is not None:
                bounded = torch.minimum(torch.maximum(now, old - clip), old + clip)
                other = (bounded - target) ** 2 / 2
                far = ((now - old).abs() > clip) & (other > loss)
                self.margin = min([self.margin, *((now - old).detach().abs() - clip).abs().tolist()])
                loss = torch.where(far, other, loss)
            losses.append(loss)
            values.append(now.detach())
            clipped.append(far.double())
        loss = torch.cat(losses).mean()
        loss.backward()
        rate = self._rate(self.optimizer.done)
        return {
            "loss": float(loss.detach()),
            "value_mean": float(torch.cat(values).mean()),
            "return_mean": float(torch.cat([s["returns"] for s in step]).mean()),
            "clip_share": float(torch.cat(clipped).mean()),
            "trained_tokens": sum(map(len, values)),
            "learning_rate": rate,
            "grad_norm": self.optimizer.step(),
        }
