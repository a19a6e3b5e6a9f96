"""The critic's update written again: plain torch, one sequence at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_reference import plain, sequences
from transformers import AutoModel, get_scheduler

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.rank_settings import CriticSettings


class CriticReference:
    def __init__(self, files: dict[str, bytes], settings: CriticSettings, score: np.ndarray, mean: float = 0.0, std: float = 1.0) -> None:
        """`score` (1, width): the head's first weights; mean and std: of the values, which are normalized."""
        self.settings, self.mean, self.std = plain(settings), mean, std
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self.body = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.score = torch.from_numpy(score.copy()).requires_grad_()
        self.take_over(
            {f"model.{name}": p for name, p in self.body.named_parameters()} | {"score.weight": self.score},
            lambda ids: self.body(ids).last_hidden_state[0],
            lambda hidden: (hidden * self.score[0]).sum(),
        )

    def take_over(self, named: dict[str, Any], body: Any, head: Any) -> None:
        """Train these weights, which body (ids → hidden states) and head (a hidden state → value) compute with."""
        self.named, self.hidden, self.head = named, body, head
        section = self.settings["critic"]
        plain = [p for name, p in self.named.items() if name.endswith("bias") or "norm" in name]
        decayed = [p for name, p in self.named.items() if not (name.endswith("bias") or "norm" in name)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": section["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
            lr=section["learning_rate"],
            betas=tuple(section["betas"]),
            eps=section["adam_eps"],
        )
        self.schedule = get_scheduler(
            "cosine_with_min_lr",
            self.optimizer,
            num_warmup_steps=3,
            num_training_steps=12,  # 6 steps of 2; ceil(0.2 * 12)
            scheduler_specific_kwargs={"min_lr": 0.1 * section["learning_rate"]},
        )

    def values(self, sequence: dict[str, Any]) -> torch.Tensor:
        hidden = self.hidden(sequence["ids"][None])
        values = torch.stack([self.head(hidden[t - 1]).squeeze() for t in range(sequence["prompt"], len(sequence["ids"]))])
        return (values - self.mean) / self.std

    def update(self, batch: Batch) -> tuple[np.ndarray, list[dict[str, float]]]:
        """The values before, and what each optimizer step did."""
        assert batch.returns is not None
        every = sequences(batch)
        with torch.no_grad():
            before = [self.values(s) for s in every]
        starts = np.concatenate([[0], np.cumsum(batch.response_lengths)])
        for s, old, start in zip(every, before, starts, strict=False):
            s["old"], s["returns"] = old, torch.from_numpy(batch.returns[start : start + len(old)])
        halves = np.array_split(sorted({s["group"] for s in every}), 2)
        return torch.cat(before).numpy(), [self._step([s for s in every if s["group"] in half]) for half in halves]

    def _step(self, part: list[dict[str, Any]]) -> dict[str, float]:
        clip, tokens, clipped = self.settings["critic"]["value_clip"], sum(len(s["old"]) for s in part), 0
        self.optimizer.zero_grad()
        total = 0.0
        for s in part:
            losses = []
            for value, old, wanted in zip(self.values(s), s["old"].tolist(), s["returns"].tolist(), strict=True):
                outside = abs(value.item() - old) > clip
                near = old + clip * (1 if value.item() > old else -1) if outside else value
                far = (float(near) - wanted) ** 2 > (value.item() - wanted) ** 2 if outside else False
                clipped += far
                losses.append((torch.tensor(float(near) - wanted) if far else value - wanted) ** 2 / 2)
            loss = torch.stack(losses).sum() / tokens
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), self.settings["critic"]["grad_clip"])
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        return {"loss": total, "grad_norm": float(norm), "rate": rate, "clip_share": clipped / tokens}
