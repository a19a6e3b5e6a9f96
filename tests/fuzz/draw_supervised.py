"""Random cases of supervised stages: options of the recipe, and tokenized rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import Example, Examples
from tests.fuzz.float64_policy import VOCABULARY, model_files

TASKS = ("sft", "rm", "dpo", "kto", "kd", "prm")


@dataclass(frozen=True)
class SupervisedCase:
    settings: SupervisedRecipe
    examples: Examples
    steps: list[np.ndarray]  # rows of each optimizer step
    second: dict[str, bytes] | None = None  # files of a reference or a teacher
    reward_tokens: list[int] | None = None
    packs: bool = False  # whether rows lie end to end

    @property
    def files(self) -> dict[str, bytes]:
        return model_files("qwen2", scalar_head=self.settings.loss.value_head if self.settings.task == "rm" else "")


def draw_settings(rng: np.random.Generator, task: str, ranks: int) -> SupervisedRecipe:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    losses: dict[str, dict[str, Any]] = {
        "sft": {"mean": one_of("token", "sequence")},
        "rm": {"kind": one_of("sigmoid", "logexp"), "value_head": one_of("score", "v_head")},
        "dpo": {"kind": one_of("sigmoid", "ipo"), "beta": one_of(0.1, 0.7), "nll_coefficient": one_of(0.0, 0.4)},
        "kto": {"beta": one_of(0.1, 0.7), "desirable_weight": one_of(1.0, 1.4), "undesirable_weight": one_of(1.0, 0.3)},
        "kd": {"mean": one_of("token", "sequence"), "teacher_weight": one_of(0.4, 1.0, 0.0)},
        "prm": {},
    }
    loss = losses[task]
    if loss.get("kind") == "sigmoid" and task == "dpo":
        loss["label_smoothing"] = one_of(0.0, 0.2)
    # Gradients of ipo are large beside adam_eps, which would make much of the rounding of small ones: they are scaled.
    packs = one_of("auto", True, False)
    learner = {
        "ranks": ranks, "zero_stage": int(rng.integers(4)), "micro_batch_tokens": one_of("auto", 1, 80), "pack_rows": packs,
        "share_prompts": one_of("auto", "off") if packs is not True else "auto", "gradient_checkpointing": bool(rng.random() < 0.2),
        "learning_rate": 0.05, "adam_eps": 1.0, "weight_decay": one_of(0.0, 0.3), "decay_all": one_of(True, False),
        "grad_clip": one_of(0.0, 0.2) if loss.get("kind") != "ipo" else 0.2,
    }  # fmt: skip
    data = {"path": "rows.jsonl", "placeholder_token": ";"} if task == "prm" else {"task": "chain"}
    more = {"teacher": {"path": "teacher"}} if task == "kd" else {}
    policy = {"path": "model"} if task == "prm" else {}
    tree = {"task": task, "policy": policy, "data": {**data, "batch_rows": 8}, "loss": loss, "learner": learner, **more}
    return SupervisedRecipe.parse(tree)


def draw_case(seed: int) -> SupervisedCase:
    rng = np.random.default_rng([seed, 4])
    task = TASKS[seed % len(TASKS)]
    settings = draw_settings(rng, task, ranks=1 + seed // len(TASKS) % 2)
    reward_tokens = [None, [5, 9], [5, 9, 11]][rng.integers(3)] if task == "prm" else None
    count = 7
    rows = [_draw_row(rng, task, reward_tokens) for _ in range(count)]
    extras = np.round(rng.random(count)) if task == "kto" else rng.random(count)
    two = rng.permutation(count)
    return SupervisedCase(
        settings=settings,
        examples=Examples.of(rows, extras.tolist()),
        steps=[two[:4], two[rng.integers(3, 6) :]],
        second=model_files("qwen2", seed=1) if task == "kd" or (task in ("dpo", "kto") and rng.random() < 0.5) else None,
        reward_tokens=reward_tokens,
        packs=settings.learner.pack_rows is True,
    )


def _draw_row(rng: np.random.Generator, task: str, reward_tokens: list[int] | None) -> list[Example]:
    def tokens(least: int, most: int) -> list[int]:
        return rng.integers(2, VOCABULARY, rng.integers(least, most)).tolist()

    prompt = tokens(15, 25) if rng.random() < 0.4 else tokens(1, 6)
    if task == "rm":  # the value is read before the last token
        texts = [[*prompt, *tokens(1, 12)] for _ in range(2)]
        return [Example([*text, 1], len(text)) for text in texts]
    if task == "prm":
        steps = tokens(3, 20)
        mask = rng.random(len(steps)) < 0.4
        mask[rng.integers(len(mask))] = True
        size = len(reward_tokens or range(VOCABULARY))
        labels = rng.random(int(mask.sum())) if size == 2 else rng.integers(0, size, int(mask.sum()))
        return [Example([2, *steps], 1, mask, labels.tolist())]
    row = []
    for number in range(2 if task in ("dpo", "kto") else 1):
        own = prompt if number == 0 or rng.random() < 0.7 else tokens(1, 6)
        response = tokens(1, 12)
        mask = None
        if rng.random() < 0.4:  # several turns
            mask = rng.random(len(response)) < 0.6
            mask[rng.integers(len(mask))] = True
        row.append(Example([*own, *response], len(own), mask))
    return row
