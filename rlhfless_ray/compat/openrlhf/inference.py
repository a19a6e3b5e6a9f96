"""Translate command lines of OpenRLHF's batch_inference and interactive_chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.elastic_flags import separate
from rlhfless_ray.compat.openrlhf.flag_semantics import stored_dtype
from rlhfless_ray.compat.openrlhf.inference_table import BATCH, GENERATES, HF, RULES, VLLM
from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation, Values, defaults, read_line
from rlhfless_ray.compat.openrlhf.recipe_keys import nested
from rlhfless_ray.recipe.generation import GenerationRecipe

TRANSFORMERS_TOP_K = 50  # of `generate`, where neither its caller nor generation_config.json names one


@dataclass
class InferenceTranslation(LauncherTranslation):
    """A command line as settings. Keys that begin with `batch_inference` or `chat` are not recipe keys."""

    @property
    def generates(self) -> bool:
        return self.settings.get("batch_inference.task") in GENERATES

    def recipe(self) -> GenerationRecipe | None:
        """Return the recipe of a generation, None for the others."""
        if not self.generates:
            return None
        of_recipe = {key: value for key, value in self.settings.items() if not key.startswith("batch_inference.")}
        with self.flags_in_errors():
            return GenerationRecipe.of(nested(of_recipe), BATCH).with_named(self.own)


def translate_inference(launcher: str, tokens: Sequence[str]) -> InferenceTranslation:
    """Translate a command line. Raises UserError if no version accepts it."""
    theirs, ours, wanted = separate(tokens)
    line = read_line(launcher, theirs, wanted)
    given = line.given
    values = defaults(launcher, line.version) | {flag[2:]: value for flag, value in given.items()}
    translation = InferenceTranslation(launcher=launcher, line=line)
    for rule in RULES[launcher]:
        if rule.name in values:
            translation.apply(rule, f"--{rule.name}", values, f"--{rule.name}" in given)
    if translation.generates:
        translation.settings |= _always(values)
        translation.notes += _notes(values)
    translation.set_own(ours, GenerationRecipe if translation.generates else None)
    return translation


def _always(values: Values) -> JsonObject:
    settings: JsonObject = {"prompts.overlong": "cut_left", "prompts.answer_column": "", "watch.wandb": "off", "watch.tensorboard": False}
    if values["eval_task"] == VLLM:
        settings["policy.dtype"] = str(stored_dtype(Path(values["pretrain"] or "")) or "float32")
    elif values["eval_task"] == HF and not values["greedy_sampling"]:
        settings["rollout.top_k"] = _top_k_of_transformers(Path(values["pretrain"] or ""))
    return settings


def _top_k_of_transformers(folder: Path) -> int:
    """Return the top-k that transformers' `generate` uses for a model if its caller names none."""
    try:
        found = json.loads((folder / "generation_config.json").read_bytes()).get("top_k", TRANSFORMERS_TOP_K)
    except (OSError, ValueError, AttributeError):  # a broken file is refused when the model is loaded
        found = TRANSFORMERS_TOP_K
    return max(found, 0) if isinstance(found, int) else 0  # null switches it off


def _notes(values: Values) -> list[str]:
    if values["eval_task"] != HF:
        return []
    notes = [
        "responses are in the order of the data set; OpenRLHF shuffles them",
        "prompts above --prompt_max_len lose their first tokens; OpenRLHF cuts the last ones here",
    ]
    if not values["greedy_sampling"]:
        top_k = _top_k_of_transformers(Path(values["pretrain"] or ""))
        likeliest = f"the {top_k} likeliest" if top_k else "all of the vocabulary"
        drawn = f"tokens are drawn from {likeliest} (top_k), as by transformers, which OpenRLHF uses here"
        notes.append(f"{drawn}; --elastic.rollout.top_k changes it")
    return notes
