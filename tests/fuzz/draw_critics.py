"""Random cases of the critic's update."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.rank_settings import CriticSettings, critic_settings
from rlhfless_ray.recipe import Recipe
from tests.fuzz.draw_updates import SEED
from tests.fuzz.float64_policy import VOCABULARY, model_files

RUN_STEPS = 3


@dataclass(frozen=True)
class CriticCase:
    settings: CriticSettings
    batches: list[Batch]

    @property
    def files(self) -> dict[str, bytes]:
        files = model_files("qwen2", scalar_head="score")
        return {**files, "config.json": json.dumps({**json.loads(files["config.json"]), "mean": 0.3, "std": 0.6}).encode()}


def draw_settings(rng: np.random.Generator, ranks: int) -> CriticSettings:
    sizes = {"batch_samples": 4} if rng.random() < 0.3 else {"updates_per_step": int(rng.choice([1, 2]))}
    tree = {
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "run": {"seed": SEED, "steps": RUN_STEPS},
        "algorithm": {"advantage": {"estimator": "gae"}, "epochs": int(rng.choice([1, 2])), **sizes},
        "learner": {
            "zero_stage": int(rng.integers(4)), "micro_batch_tokens": int(rng.choice([1, 60, 10**6])),
            "share_prompts": str(rng.choice(["auto", "off"])),
        },
        "critic": {
            "ranks": ranks, "learning_rate": 0.05, "adam_eps": 1.0, "weight_decay": float(rng.choice([0.0, 0.3])),
            "grad_clip": float(rng.choice([0.0, 0.5])), "normalize": bool(rng.random() < 0.5),
            "value_clip": [None, 0.5, 0.05, 0.0][rng.integers(4)],
            **({"schedule": "constant", "warmup_share": 0.0, "min_rate_share": 0.0} if rng.random() < 0.3 else {}),
        },
    }  # fmt: skip
    return critic_settings(Recipe.parse(tree))


def draw_case(seed: int) -> CriticCase:
    rng = np.random.default_rng([seed, 3])
    settings = draw_settings(rng, ranks=1 + seed % 2)
    return CriticCase(settings, [_draw_batch(rng, settings) for _ in range(2)])


def _draw_batch(rng: np.random.Generator, settings: CriticSettings) -> Batch:
    whole = settings.algorithm.updates_per_step == 1 and settings.algorithm.batch_samples is None
    rows, masks = [], []
    for group in range(int(rng.integers(3, 5))):
        prompt = tuple(rng.integers(2, VOCABULARY, rng.integers(1, 30)).tolist())
        for _ in range(int(rng.integers(1, 4))):
            response = rng.integers(2, VOCABULARY, rng.integers(1, 13)).astype(np.int32)
            rows.append((prompt, response, np.zeros(len(response), np.float32), 0.0, group))
            mask = rng.random(len(response)) < 0.7
            mask[0] |= not (whole and len(rows) > 1 and rng.random() < 0.3)
            masks.append(mask)
    batch = Batch.of(rows, masks if rng.random() < 0.5 else None)  # type: ignore[arg-type]
    spread = rng.choice([0.1, 1.0], 2)
    values, returns = ((s * rng.normal(size=len(batch.logprobs))).astype(np.float32) for s in spread)
    return replace(batch, values=values if rng.random() < 0.7 else None, returns=returns)


def with_values(batch: Batch, values: np.ndarray) -> Batch:
    return replace(batch, values=values)
