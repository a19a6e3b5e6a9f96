"""The update written again from the paper: plain torch, one sequence at a time, no padding, no micro-batches, no ranks."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfless_ray.learn.batch import Batch


def load(files: dict[str, bytes], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()  # eval: no dropout


def sequences(batch: Batch) -> list[dict[str, Any]]:
    out, at, answer_at = [], 0, 0
    for i in range(len(batch)):
        length, prompt = int(batch.lengths[i]), int(batch.prompt_lengths[i])
        out.append(
            {
                "ids": torch.from_numpy(batch.tokens[at : at + length]), "prompt": prompt, "group": int(batch.groups[i]),
                "sampler": torch.from_numpy(batch.logprobs[answer_at : answer_at + length - prompt]),
                "advantage": float(batch.advantages[i]),
            }
        )
        at, answer_at = at + length, answer_at + length - prompt
    return out


def logprobs(model: torch.nn.Module, sequence: dict[str, Any], temperature: float) -> torch.Tensor:
    logits = model(sequence["ids"][None]).logits[0].float() / temperature
    places = range(sequence["prompt"], len(sequence["ids"]))
    return torch.stack([torch.log_softmax(logits[t - 1], -1)[sequence["ids"][t]] for t in places])


class Reference:
    """`master` holds float32 weights and is stepped; `model` computes, in the policy's dtype."""

    def __init__(self, files: dict[str, bytes], settings: dict[str, Any]) -> None:
        self.settings = settings
        self.dtype = getattr(torch, settings["policy"]["dtype"])
        self.model = load(files, self.dtype)
        self.start = copy.deepcopy(self.model)
        self.master = {n: p.detach().float().clone().requires_grad_() for n, p in self.model.named_parameters()}
        section = settings["learner"]
        self.optimizer = torch.optim.AdamW(
            self.master.values(), lr=1.0, betas=tuple(section["betas"]), weight_decay=section["weight_decay"]
        )
        self.steps = 0

    def update(self, batch: Batch) -> list[dict[str, float]]:
        every = sequences(batch)
        groups = np.array_split(sorted({s["group"] for s in every}), self.settings["algorithm"]["updates_per_step"])
        with torch.no_grad():
            for s in every:
                s["old"] = logprobs(self.model, s, self.settings["temperature"])
        return [self._step([s for s in every if s["group"] in part]) for part in groups]

    def _step(self, part: list[dict[str, Any]]) -> dict[str, float]:
        algorithm, section = self.settings["algorithm"], self.settings["learner"]
        self.model.zero_grad()
        all_tokens = sum(len(s["old"]) for s in part)
        total, clipped = 0.0, 0
        weights: list[float] = []
        for s in part:
            new = logprobs(self.model, s, self.settings["temperature"])
            factors, bounds = [], []  # of the ratio where it is inside its bounds; of the constant where it is not
            for now, old, sampler in zip(new.tolist(), s["old"].tolist(), s["sampler"].tolist(), strict=True):
                weight = min(math.exp(old - sampler), algorithm["importance_cap"]) if algorithm["importance_cap"] else 1.0
                weights.append(weight)
                ratio, advantage = math.exp(now - old), s["advantage"]
                outside = ratio > 1 + algorithm["clip_high"] if advantage > 0 else ratio < 1 - algorithm["clip_low"]
                bound = 1 + algorithm["clip_high"] if advantage > 0 else 1 - algorithm["clip_low"]
                clipped += outside
                factors.append(0.0 if outside else -weight * advantage)
                bounds.append(-weight * advantage * bound if outside else 0.0)
            tokens = torch.tensor(factors) * torch.exp(new - s["old"]) + torch.tensor(bounds)
            if algorithm["kl"]["coefficient"]:
                with torch.no_grad():
                    reference = logprobs(self.start, s, self.settings["temperature"])
                d = new - reference
                kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[algorithm["kl"]["estimator"]]
                tokens = tokens + algorithm["kl"]["coefficient"] * kl
            loss = tokens.sum() / (all_tokens if algorithm["loss_mean"] == "token" else len(new) * len(part))
            loss.backward()
            total += float(loss.detach())
        for name, parameter in self.model.named_parameters():
            self.master[name].grad = parameter.grad.float()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.master.values()]))
        for p in self.master.values():
            p.grad *= min(1.0, section["grad_clip"] / float(norm))
        rate = section["learning_rate"] * min(1.0, (self.steps + 1) / max(1, section["warmup_steps"]))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])
        apart = torch.cat([(s["old"] - s["sampler"]).abs() for s in part])
        return {
            "loss": total, "grad_norm": float(norm), "clip_share": clipped / all_tokens, "learning_rate": rate,
            "tokens": all_tokens, "importance": float(np.mean(weights)), "mismatch": float(apart.mean()),
            "mismatch_max": float(apart.max()),
        }

    def weights(self) -> dict[str, np.ndarray]:
        return {n: p.detach().float().numpy().copy() for n, p in self.model.named_parameters()}
