"""Random cases of the policy's update: options of the recipe, and batches that reach them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.rank_settings import RankSettings, learner_settings
from rlhfless_ray.recipe import Recipe
from tests.fuzz.float64_policy import CHOSEN, EXPERTS, VOCABULARY, Float64Policy, model_files

SEED = 5  # of the runs


@dataclass(frozen=True)
class UpdateCase:
    settings: RankSettings
    family: str
    batches: list[Batch]
    microbatches: str = "each"  # "each" sequence is one, or "one" has all, or "any"
    has_masks: bool = False
    has_empty: bool = False  # whether some sequences have no trained token

    @property
    def features(self) -> set[tuple[str, object]]:
        """Return what the case has beside the options of its recipe, and combinations of them."""
        algorithm, learner = self.settings.algorithm, self.settings.learner
        loss = algorithm.loss
        found: set[tuple[str, object]] = {("ZeRO stage", learner.zero_stage), ("ranks", learner.ranks)}
        if loss.correction_mode == "mask" and loss.correction_high != 5:
            found.add(("band", (loss.correction_level, loss.correction_gating)))
        if self.has_empty:
            found |= {("empty", algorithm.loss_mean), ("empty", loss.correction_level)}
        return found

    @property
    def files(self) -> dict[str, bytes]:
        return model_files(self.family)


def draw_algorithm(rng: np.random.Generator) -> dict[str, Any]:
    """Draw a valid section `algorithm`, apart from `advantage`."""
    pick = rng.choice

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    kind = one_of("ppo", "ppo", "gspo")
    level = one_of("off", "token", "seq")
    loss: dict[str, Any] = {
        "kind": kind,
        "dual_clip": one_of(None, 1.02, 3.0),
        "entropy_coefficient": one_of(None, 0.0, 0.05),
        "correction_level": level,
    }
    if level != "off":
        gating = one_of("ratio", "binary_kl", "tv")
        mode = one_of("mask", "clip") if (level, gating) == ("token", "ratio") else "mask"
        high = {"ratio": one_of(5.0, 1.3), "binary_kl": one_of(5.0, 0.002, 0.02), "tv": one_of(5.0, 0.02, 0.1)}[gating]
        loss |= {"correction_gating": gating, "correction_mode": mode, "correction_high": high}
        loss["correction_low"] = one_of(0.0, 0.8) if gating == "ratio" else 0.0
    cap = 0.0 if level != "off" else one_of(0.0, 1.2, 2.0)
    if kind == "gspo" and level == "off" and rng.random() < 0.5:
        loss["ratio_to"], cap = "sampler", 0.0
    experts = one_of("none", "none", "none", "balanced", "replayed", "both")
    loss |= {"router_aux": 0.3 if experts in ("balanced", "both") else 0.0, "router_replay": experts in ("replayed", "both")}
    algorithm: dict[str, Any] = {
        "clip_low": one_of(0.005, 0.05, 0.2, 0.8),
        "clip_high": one_of(0.005, 0.05, 0.2, 3.0),
        "importance_cap": cap,
        "loss_mean": "sequence" if kind == "gspo" else str(pick(["token", "sequence"])),
        "regularization_mean": one_of(None, "token", "sequence"),
        "epochs": one_of(1, 1, 2),
        "loss": loss,
    }
    if rng.random() < 0.3:
        algorithm |= {"batch_samples": int(pick([4, 5])), "remainder": one_of("short", "drop", "carry")}
    else:
        algorithm["updates_per_step"] = one_of(1, 1, 2)
    place = one_of("loss", "loss", "reward")
    kl: dict[str, Any] = {"coefficient": one_of(0.0, 0.2, 0.2), "place": place, "estimator": one_of("k1", "k2", "k3")}
    kl |= {"limit": one_of(10.0, 0.02, None), "horizon": one_of(10_000, 2_000)}
    kl["target"] = one_of(None, 0.1) if kl["coefficient"] else None
    kl["unbiased_gradient"] = place == "loss" and one_of(True, False)
    return {**algorithm, "kl": kl}


def draw_settings(rng: np.random.Generator, ranks: int) -> tuple[RankSettings, str]:
    """Draw the settings of a rank, and how sequences lie in micro-batches ("each" or "one", or "any" where it does not matter)."""
    algorithm = draw_algorithm(rng)
    size = int(rng.choice([1, 60, 200, 10**6]))
    microbatches = "any"
    if algorithm["loss"]["router_aux"]:
        microbatches = "one" if ranks == 1 and rng.random() < 0.5 else "each"
        size = 10**6 if microbatches == "one" else 1
    learner = {
        "ranks": ranks,
        "zero_stage": int(rng.integers(4)),
        "micro_batch_tokens": size,
        "share_prompts": "off" if microbatches != "any" or rng.random() < 0.3 else "auto",
        "gradient_checkpointing": bool(rng.random() < 0.2),
        "learning_rate": 0.05,
        "warmup_steps": int(rng.choice([0, 2])),
        "weight_decay": float(rng.choice([0.0, 0.3])),
        "decay_all": bool(rng.random() < 0.5),
        "betas": [0.9, 0.95],
        "adam_eps": 1.0,  # steps in proportion to the gradient: with less, rounding decides the direction of small gradients
        "grad_clip": float(rng.choice([0.0, 0.2])),
    }
    tree = {
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "run": {"seed": SEED}, "algorithm": algorithm, "learner": learner,
        "rollout": {"temperature": float(rng.choice([1.0, 0.7])), **_without_prefixes(algorithm)},
    }  # fmt: skip
    return learner_settings(Recipe.parse(tree)), microbatches


def _without_prefixes(algorithm: dict[str, Any]) -> dict[str, Any]:
    return {"prefix_kv": "off", "partial_kv": "recompute"} if algorithm["loss"]["router_replay"] else {}


def draw_plan(seed: int) -> UpdateCase:
    """Draw a case without its batches, which take a hundred times as long."""
    rng = np.random.default_rng([seed, 1])
    settings, microbatches = draw_settings(rng, ranks=1 + seed % 2)
    algorithm = settings.algorithm
    family = "mixtral" if algorithm.loss.router_aux or algorithm.loss.router_replay else "qwen2"
    has_masks = bool(rng.random() < 0.5)
    one_step = algorithm.updates_per_step == 1 and algorithm.batch_samples is None  # another step might be empty
    return UpdateCase(settings, family, [], microbatches, has_masks, has_masks and one_step)


def draw_case(seed: int) -> UpdateCase:
    case = draw_plan(seed)
    rng, policy = np.random.default_rng([seed, 5]), Float64Policy(case.files)
    return replace(case, batches=[_draw_batch(rng, case, policy) for _ in range(2)])


def _draw_batch(rng: np.random.Generator, case: UpdateCase, policy: Float64Policy) -> Batch:
    algorithm, temperature = case.settings.algorithm, case.settings.temperature
    groups, samples = int(rng.integers(3, 5)), int(rng.integers(2, 4))
    gap = rng.choice([0.0, 1e-6, 0.2, 0.6])  # between engine and learner
    long = rng.random() < 0.3  # prompts that are worth sharing
    rows: list[Any] = []
    masks: list[np.ndarray | None] = []
    experts: list[np.ndarray] = []
    for group in range(groups):
        prompt = tuple(rng.integers(2, VOCABULARY, rng.integers(25, 35) if long else rng.integers(1, 6)).tolist())
        of_prompt = _draw_experts(rng, len(prompt), policy)
        for _ in range(samples):
            response = rng.integers(2, VOCABULARY, rng.integers(1, 13)).astype(np.int32)
            ids = [*prompt, *response.tolist()]
            with torch.no_grad():
                every = torch.log_softmax(policy.outputs(ids) / temperature, -1)
            places = np.arange(len(prompt), len(ids))
            logprobs = every[places - 1, response].numpy() + gap * rng.normal(size=len(response))
            advantages = rng.normal(size=len(response)) if rng.random() < 0.5 else np.full(len(response), rng.normal())
            rows.append((prompt, response, np.minimum(logprobs, -1e-4), advantages, group))
            mask = rng.random(len(response)) < 0.7
            empty = case.has_empty and len(rows) > 1 and rng.random() < 0.3
            if not empty:
                mask[rng.integers(len(mask))] = True
            masks.append(mask & (not empty) if case.has_masks else None)
            chosen = _draw_experts(rng, len(ids) - 1, policy)
            chosen[: len(prompt)] = of_prompt[: len(chosen)]  # a row that several responses share has the prompt once
            experts.append(chosen)
    batch = Batch.of(rows, masks, experts if algorithm.loss.router_replay else ())
    return _with_passes(rng, case, batch)


def _draw_experts(rng: np.random.Generator, tokens: int, policy: Float64Policy) -> np.ndarray:
    """Return different experts of each token, (tokens, routers, experts per token) uint8. Those of some tokens are unknown."""
    layers = policy.config["num_hidden_layers"]
    chosen = np.argsort(rng.random((tokens, layers, EXPERTS)), -1)[..., :CHOSEN].astype(np.uint8)
    chosen[rng.random(tokens) < 0.1] = 255
    return chosen


def _with_passes(rng: np.random.Generator, case: UpdateCase, batch: Batch) -> Batch:
    """Add what passes before the update may have given: old and reference's log-probabilities, lags, steps, the KL's coefficient."""
    algorithm, given = case.settings.algorithm, copy.copy(vars(batch))
    count = len(batch.logprobs)
    carries = algorithm.remainder == "carry"
    if carries or rng.random() < 0.5:
        given["old"] = np.minimum(batch.logprobs + rng.choice([0.05, 0.3]) * rng.normal(size=count), -1e-4).astype(np.float32)
    if algorithm.kl.coefficient and rng.random() < 0.5:
        given["reference"] = (batch.logprobs + rng.choice([0.05, 1.0]) * rng.normal(size=count)).astype(np.float32)
    if rng.random() < 0.5:
        given["lags"] = rng.integers(0, 3, count).astype(np.int8)
    if algorithm.kl.target is not None:
        given["kl_coefficient"] = 0.35
    if carries:
        order = rng.permutation(len(batch))
        given["steps"] = tuple(np.sort(part) for part in np.split(order, [len(order) // 2]))
    return Batch(**given)
