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
from rlhfless_ray.learn.rank_settings import CriticSettings, RankSettings
from rlhfless_ray.local.laptop.cpu_bfloat16 import use_float32_products


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
                "ids": torch.from_numpy(batch.tokens[at : at + length]),
                "prompt": prompt,
                "group": int(batch.groups[i]),
                "sampler": torch.from_numpy(batch.logprobs[answer_at : answer_at + length - prompt]),
                "advantages": batch.advantages[answer_at : answer_at + length - prompt].tolist(),
            }
        )
        at, answer_at = at + length, answer_at + length - prompt
    return out


def distributions(model: torch.nn.Module, sequence: dict[str, Any], temperature: float) -> torch.Tensor:
    """Log-probabilities of every token at every place of the response."""
    logits = model(sequence["ids"][None]).logits[0].float() / temperature
    return torch.log_softmax(logits[sequence["prompt"] - 1 : len(sequence["ids"]) - 1], -1)


def logprobs(model: torch.nn.Module, sequence: dict[str, Any], temperature: float) -> torch.Tensor:
    every = distributions(model, sequence, temperature)
    return torch.stack([every[k, token] for k, token in enumerate(sequence["ids"][sequence["prompt"] :])])


def plain(settings: RankSettings) -> dict[str, Any]:
    """The settings as dicts, a copy of the reference's own."""
    own = {"optimizer_steps": settings.optimizer_steps, "ema_beta": settings.ema_beta, "lora": settings.lora.model_dump()}
    return {
        "learner": {**settings.learner.model_dump(), **own},
        "critic": settings.critic.model_dump() if isinstance(settings, CriticSettings) else None,
        "algorithm": settings.algorithm.model_dump(),
        "policy": settings.policy.model_dump(),
        "temperature": settings.temperature,
        "seed": settings.seed,
    }


class Reference:
    """`master` holds float32 weights and is stepped; `model` computes, in the policy's dtype."""

    def __init__(self, files: dict[str, bytes], given: RankSettings) -> None:
        self.settings = settings = plain(given)
        self.dtype = getattr(torch, settings["policy"]["dtype"])
        use_float32_products(settings["policy"]["dtype"], "cpu")  # as the learner, where the processor has no bfloat16
        self.model = load(files, self.dtype)
        self.start = copy.deepcopy(self.model)
        if settings["learner"]["lora"]["rank"]:
            self.model = with_adapters(self.model, settings["learner"]["lora"], settings["seed"])
        self.master = {n: p.detach().float().clone().requires_grad_() for n, p in trained(self.model)}
        section = settings["learner"]
        self.optimizer = torch.optim.AdamW(
            self.master.values(), lr=1.0, betas=tuple(section["betas"]), weight_decay=section["weight_decay"]
        )
        self.steps = 0

    def update(self, batch: Batch) -> list[dict[str, float]]:
        every = sequences(batch)
        algorithm = self.settings["algorithm"]
        rng = np.random.default_rng([self.settings["seed"], self.steps])
        parts: list[list[dict[str, Any]]] = [[every[i] for i in part] for part in batch.steps or ()]
        for _ in range(algorithm["epochs"] if batch.steps is None else 0):
            if size := algorithm["batch_samples"]:
                order = rng.permutation(len(every))
                parts += [[every[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
            else:
                groups = np.array_split(sorted({s["group"] for s in every}), algorithm["updates_per_step"])
                parts += [[s for s in every if s["group"] in part] for part in groups]
        with torch.no_grad():
            for s in every:
                s["old"] = logprobs(self.model, s, self.settings["temperature"])
        if batch.steps is not None:  # carried samples: what their own rollout said
            assert batch.old is not None
            ends = np.cumsum(batch.response_lengths)
            for s, end, length in zip(every, ends, batch.response_lengths, strict=True):
                s["old"] = torch.from_numpy(batch.old[end - length : end])
        return [self._step(part) for part in parts]

    def _weights(self, s: dict[str, Any]) -> list[float]:
        """Of the tokens, for what sampler and learner differ in."""
        algorithm, loss = self.settings["algorithm"], self.settings["algorithm"]["loss"]
        ratios = [math.exp(old - sampler) for old, sampler in zip(s["old"].tolist(), s["sampler"].tolist(), strict=True)]
        low, high = loss["correction_low"], loss["correction_high"]
        if loss["correction_level"] == "off":
            return [min(r, algorithm["importance_cap"]) for r in ratios] if algorithm["importance_cap"] else [1.0] * len(ratios)
        if loss["correction_level"] == "seq":
            mean = math.prod(ratios) ** (1 / len(ratios))
            return ratios if low <= mean <= high else [0.0] * len(ratios)
        if loss["correction_mode"] == "clip":
            return [min(max(r, low), high) for r in ratios]
        return [r if low <= r <= high else 0.0 for r in ratios]

    def _capped(self, s: dict[str, Any]) -> list[bool]:
        """Of its tokens, or of itself, whether the weight was changed."""
        algorithm, loss = self.settings["algorithm"], self.settings["algorithm"]["loss"]
        if loss["correction_level"] == "off":
            return [w == algorithm["importance_cap"] for w in self._weights(s)]
        ratios = torch.exp(s["old"] - s["sampler"])
        if loss["correction_level"] == "seq":
            ratios = torch.prod(ratios)[None] ** (1 / len(ratios))
        return [not loss["correction_low"] <= r <= loss["correction_high"] for r in ratios.tolist()]

    def _step(self, part: list[dict[str, Any]]) -> dict[str, float]:
        algorithm, section = self.settings["algorithm"], self.settings["learner"]
        loss_section, kl_section = algorithm["loss"], algorithm["kl"]
        self.model.zero_grad()
        all_tokens = sum(len(s["old"]) for s in part)
        total, clipped = 0.0, 0
        weights: list[float] = []
        moved: list[float] = []
        gaps: list[float] = []
        capped: list[list[bool]] = []
        for s in part:
            whole = distributions(self.model, s, self.settings["temperature"])
            new = torch.stack([whole[k, token] for k, token in enumerate(s["ids"][s["prompt"] :])])
            ratios = torch.exp(new - s["old"])
            moved += [old - now for old, now in zip(s["old"].tolist(), new.tolist(), strict=True)]
            if kl_section["coefficient"]:
                with torch.no_grad():
                    start = logprobs(self.start, s, self.settings["temperature"])
                now = new if kl_section["place"] == "loss" else s["old"]
                gaps += [a - b for a, b in zip(now.tolist(), start.tolist(), strict=True)]
            if loss_section["kind"] == "gspo":
                ratios = torch.exp((new - s["sampler" if loss_section["ratio_to"] == "sampler" else "old"]).double())
                ratios = (torch.prod(ratios) ** (1 / len(ratios))).float() * torch.ones(len(new))
            weights += (mine := self._weights(s))
            capped.append(self._capped(s))
            each = []
            for ratio, advantage, weight in zip(ratios, s["advantages"], mine, strict=True):
                outside = ratio > 1 + algorithm["clip_high"] if advantage > 0 else ratio < 1 - algorithm["clip_low"]
                bound = 1 + algorithm["clip_high"] if advantage > 0 else 1 - algorithm["clip_low"]
                clipped += int(outside)
                gain = bound * advantage if outside else ratio * advantage
                so_far = gain.item() if torch.is_tensor(gain) else gain
                if loss_section["dual_clip"] and advantage < 0 and so_far < loss_section["dual_clip"] * advantage:
                    gain = loss_section["dual_clip"] * advantage
                each.append(-weight * gain * torch.ones(()))
            tokens, more = torch.stack(each), torch.zeros(len(each))
            if kl_section["coefficient"] and kl_section["place"] == "loss":
                with torch.no_grad():
                    reference = logprobs(self.start, s, self.settings["temperature"])
                d = new - reference
                kl = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kl_section["estimator"]]
                if kl_section["unbiased_gradient"]:
                    kl = kl.detach() + (torch.exp(new - s["old"]) * d).detach() * (new - new.detach())
                more = more + kl_section["coefficient"] * kl
            if loss_section["entropy_coefficient"]:
                more = more + loss_section["entropy_coefficient"] * (whole.exp() * whole).sum(-1)
            by_mean = {"token": all_tokens, "sequence": len(new) * len(part)}
            loss = tokens.sum() / by_mean[algorithm["loss_mean"]]
            loss = loss + more.sum() / by_mean[algorithm["regularization_mean"] or algorithm["loss_mean"]]
            if loss.requires_grad:  # a short response may be clipped whole
                loss.backward()
            total += float(loss.detach())
        for name, parameter in trained(self.model):
            self.master[name].grad = parameter.grad.float()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.master.values()]))
        for p in self.master.values():
            p.grad *= min(1.0, section["grad_clip"] / float(norm))
        rate = section["learning_rate"] * min(1.0, (self.steps + 1) / max(1, section["warmup_steps"]))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for name, parameter in trained(self.model):
                parameter.copy_(self.master[name])
        apart = torch.cat([(s["old"] - s["sampler"]).abs() for s in part])
        return {
            "loss": total,
            "grad_norm": float(norm),
            "clip_share": clipped / all_tokens,
            "learning_rate": rate,
            "next_rate": section["learning_rate"] * min(1.0, (self.steps + 1) / max(1, section["warmup_steps"])),
            "tokens": all_tokens,
            "importance": float(np.mean(weights)),
            "mismatch": float(apart.mean()),
            "mismatch_max": float(apart.max()),
            "capped": float(np.mean(np.concatenate(capped))),
            "ppo_kl": float(np.mean(moved)),
            "reference_gap": float(np.mean(gaps or [0.0])),
            "sampler_kl": float(torch.cat([s["sampler"] - s["old"] for s in part]).mean()),
        }

    def weights(self) -> dict[str, np.ndarray]:
        model = self.model
        if hasattr(model, "merge_and_unload"):
            model = copy.deepcopy(model).merge_and_unload()
        return {n: p.detach().float().numpy().copy() for n, p in model.named_parameters()}


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def with_adapters(model: torch.nn.Module, section: dict[str, Any], seed: int, task: str | None = "CAUSAL_LM") -> torch.nn.Module:
    """peft's own model, its first values from the same seed as the learner's."""
    from peft import LoraConfig, get_peft_model

    targets = section["target_modules"]
    config = LoraConfig(
        r=section["rank"],
        lora_alpha=section["alpha"],
        task_type=task,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config, autocast_adapter_dtype=False)
