"""Meaning of flags: when a flag has no effect, which settings its value becomes, and how a resource hint is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.normalise import GATING, LEVEL, MODE, PROMPT_LIMIT, SAMPLE_BUFFER_SINCE, THRESHOLD, Values

Settings = JsonObject  # recipe key → value
Make = Callable[[Any, Any], Settings]  # a value and all values → settings

ALL = 10**8  # OpenRLHF's value for "all rows", and for "all the disk"
PLACE_FREED_SINCE = "0.8.2"  # before, a batch kept its place in the asynchronous queue while it was trained
KL_CUT_SINCE, STEPS_FROM_ZERO_SINCE = "0.8.6", "0.9.1"

# ---------------------------------------------------------------- when a flag has no effect


def no_generate_batch(v: Values) -> str:
    return f"OpenRLHF {v.version} does not read it" if v.since("0.9.1") and not v.since(SAMPLE_BUFFER_SINCE) else ""


# ---------------------------------------------------------------- values → settings


def lengths(x: object, v: Values) -> Settings:
    total, response, prompt = v["data.max_len"], v["rollout.max_new_tokens"], v[PROMPT_LIMIT]
    longest = total - (1 if response is None else response)
    settings: Settings = {"prompts.max_prompt_tokens": min(longest, prompt) if prompt is not None else longest}
    if response is None:
        settings["rollout.max_total_tokens"], settings["rollout.max_tokens"] = total, total - 1
    else:
        settings["rollout.max_tokens"] = response
    return settings


def dataset(section: str, missing: str | None = None) -> Make:
    """Return a function that puts one data set, or a list of several, into a section."""

    def make(x: str | None, v: object) -> Settings:
        if x is not None and ("," in x or "@" in x):
            return {f"{section}.paths": [part.strip() for part in x.split(",")]}
        return {f"{section}.path": missing if x is None else x}

    return make


def probabilities(section: str) -> Make:
    """Return a function that sets the shares of several data sets. A single one is read in its order, so it has none."""

    def make(x: str | None, v: object) -> Settings:
        shares = shares_of(x) or []
        return {f"{section}.probabilities": shares if len(shares) > 1 else None}

    return make


def template_problem(template: str | None) -> str:
    """Return why a prompt cannot be put into a template, or an empty string. One without `{}` is not used."""
    from rlhfless_ray.recipe.data_sections import one_gap

    try:
        one_gap(template if template and "{}" in template else "{}")
    except ValueError as error:
        return f"the template {error}"
    return ""


def template_notes(flag: str, template: str | None) -> list[str]:
    """Return the warnings of OpenRLHF's launchers about a template."""
    if not template:
        return []
    if "{}" not in template:
        return [f"{flag}: the template has no {{}}, so it is not used"]
    return [f"{flag}: the template has a backslash and an n instead of a newline; in bash write $'\\n'"] if "\\n" in template else []


def shares_of(text: str | None) -> list[float] | None:
    """Return the numbers of a text such as `0.5,0.5`, or None for other text."""
    try:
        return [float(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        return None


def optimizer_steps(x: int, v: Values) -> Settings:
    """If the batch does not divide the rollout, the rest is carried to the next one. With dynamic batches it is dropped."""
    samples = v["rollout.batch_size"] * v["rollout.n_samples_per_prompt"]
    if samples == x:
        return {"algorithm.updates_per_step": 1}
    if samples % x == 0:
        return {"algorithm.batch_samples": x}
    return {"algorithm.batch_samples": x, "algorithm.remainder": "drop" if v["train.dynamic_batch_enable"] else "carry"}


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def switched_dtype(x: object, folder: str | None) -> Settings:
    """Return the dtype of the other launchers, for which `--bf16` is a switch until 0.9.1. Without it the folder's own dtype is used."""
    name = ("bf16" if x else stored_dtype(Path(folder or "")) or "float32") if isinstance(x, bool) else x
    return {"policy.dtype": DTYPES.get(str(name), str(name))}


def param_dtype(x: str, v: Values) -> Settings:
    """Return the dtype. `checkpoint`, the meaning of no --bf16 before 0.9.2, is read from the model's folder."""
    dtype = stored_dtype(Path(v["actor.model_name_or_path"])) if x == "checkpoint" else x
    return {"policy.dtype": DTYPES.get(dtype or x, dtype or x)}


def unknown_dtype(v: Values) -> str:
    """Return why the default dtype is refused, or an empty string if the model's folder specifies a dtype."""
    if param_dtype(v["ds.param_dtype"], v)["policy.dtype"] != "checkpoint":
        return ""
    return f"`{v['actor.model_name_or_path']}` is not a folder from which the dtype of its weights can be read; give --bf16"


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype in config.json, else that of the first floating-point weight, as transformers' `auto`. None if unknown."""
    from rlhfless_ray.weights.model_folder import stored_tensors

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if configured := config.get("dtype") or config.get("torch_dtype"):
        return str(configured).removeprefix("torch.")
    return next((entry["dtype"] for entry in stored_tensors(folder).values() if entry["dtype"] in DTYPES), None)


def zero_stage(x: int, v: Values) -> Settings:
    """Raise stage 0 to 1 for bfloat16, whose float32 weights only a stage keeps here, and for offload."""
    needs_one = v["ds.adam_offload"] or param_dtype(v["ds.param_dtype"], v)["policy.dtype"] == "bfloat16"
    return {"learner.zero_stage": max(x, 1) if needs_one and x == 0 else x}


def zero_stage_here(v: Values) -> str:
    return f"ZeRO stage {zero_stage(v['ds.zero_stage'], v)['learner.zero_stage']}"


def correction(x: object, v: Values) -> Settings:
    low, high = v[THRESHOLD][0], v[THRESHOLD][-1]
    if v[LEVEL] == "off":
        return {"algorithm.importance_cap": 0.0} | ({"algorithm.uncorrected_lag": True} if v["train.async_enable"] else {})
    if v["actor.policy_loss_type"] == "gspo":  # there the switch changes the ratio, without a band
        return {"algorithm.importance_cap": 0.0, "algorithm.loss.ratio_to": "sampler"}
    if (v[LEVEL], v[MODE], v[GATING], low) == ("token", "clip", "ratio", 0):
        return {"algorithm.importance_cap": high}
    name = "algorithm.loss.correction_{}".format
    return {
        "algorithm.importance_cap": 0.0,
        name("level"): v[LEVEL],
        name("mode"): v[MODE],
        name("gating"): v[GATING],
        name("low"): low,
        name("high"): high,
    }


def loss_mean(x: str, v: Values) -> Settings:
    """Return the policy loss's mean. KL loss and entropy bonus are means over tokens in every version."""
    if x == "seq-mean-token-mean" or v["actor.policy_loss_type"] == "gspo":
        return {"algorithm.loss_mean": "sequence", "algorithm.regularization_mean": "token"}
    return {"algorithm.loss_mean": "token"}


def frozen_steps(x: int, v: Values) -> Settings:
    """Return the number of steps without training of the policy. Up to 0.9.0 OpenRLHF counts steps from 1, since then from 0."""
    frozen = max(x + 1 if v.since(STEPS_FROM_ZERO_SINCE) else x, 0)
    return {"critic.freeze_policy_steps": frozen} if frozen or v.has_critic else {}


def estimator(x: str, v: Values) -> Settings:
    """Whiten rloo's advantages as versions up to 0.8.4 do."""
    return {"algorithm.advantage.estimator": x} | ({"algorithm.advantage.whiten": True} if x == "rloo" and v.whitens else {})


def kl_estimator(x: str, v: Values) -> Settings:
    """Leave a token's KL estimate unlimited, as versions up to 0.8.5 do."""
    return {"algorithm.kl.estimator": x} | ({} if v.since(KL_CUT_SINCE) else {"algorithm.kl.limit": None})


def overlong(x: int | None, v: Values) -> Settings:
    """Apply the full penalty at the response limit, or without one at the sequence limit."""
    settings: Settings = {"reward.overlong_buffer_tokens": x}
    if x is not None and v["rollout.max_new_tokens"] is None:
        settings["reward.overlong_limit_tokens"] = v["data.max_len"]
    if x is not None and v["train.agent_func_path"]:
        settings["reward.overlong_feedback"] = True
    return settings


def reward_source(x: str | None, v: Values) -> Settings:
    if not x or v["train.agent_func_path"]:
        return {}
    if x.endswith(".py"):
        return {"reward.function": f"{x}:reward_func", "reward.contract": "openrlhf"}
    return {"reward.url": x.split(",")}


def agent(x: str | None, v: Values) -> Settings:
    """Limit a turn only by the remaining tokens of the whole length."""
    return {"agent.path": x, "agent.max_tokens": v["data.max_len"]} if x else {"agent.path": ""}


def tensorboard(x: str | None, v: object) -> Settings:
    return {"watch.tensorboard": True, "watch.tensorboard_path": x} if x else {"watch.tensorboard": False}


def schedule(model: str, section: str) -> Make:
    def make(x: object, v: Values) -> Settings:
        """Return no settings for a constant rate without warm-up, the recipe's default, and else a schedule over all steps."""
        name, warmup = v[f"{model}.lr_scheduler"], v[f"{model}.lr_warmup_ratio"]
        if section == "learner" and (name == "constant" or (name == "constant_with_warmup" and not warmup)):
            return {"learner.warmup_steps": 0}
        settings = {f"{section}.schedule": name, f"{section}.warmup_share": warmup}
        if name == "cosine_with_min_lr":
            settings[f"{section}.min_rate_share"] = v[f"{model}.min_lr_ratio"]
        return settings

    return make


def folder_name(text: str) -> str:
    """Return a text as the name of a run's folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


# ---------------------------------------------------------------- how hints are read


def queue_steps(v: Values) -> int:
    """Return how many steps old a sample of OpenRLHF's queue may be. A place is free again before its batch is trained."""
    return int(v["train.async_queue_size"]) + (not v.since(PLACE_FREED_SINCE))


def asynchronous(v: Values) -> Settings:
    """Return the settings of asynchronous training. A queue of several batches needs responses that outlive a step here."""
    if not v["train.partial_rollout_enable"]:
        return {"rollout.max_lag_steps": 1}
    prompts = 0 if no_generate_batch(v) else v["rollout.vllm_generate_batch_size"] or 0
    begun = max(queue_steps(v), prompts / v["rollout.batch_size"])
    return {"rollout.max_lag_steps": math.ceil(begun), "rollout.partial": "continue", "rollout.ahead": True, "rollout.oversample": begun}


def generate_batch(prompts: int | None, v: Values) -> Settings:
    """Return the settings of a generation batch. One that is not above the rollout's changes no result."""
    return asynchronous(v) if _leaves_over(v) and v["train.partial_rollout_enable"] else {}


def no_sample_buffer(v: Values) -> str:
    refused = _leaves_over(v) and not v["train.partial_rollout_enable"]
    return f"a generation batch above the rollout's {NOT_HERE} without partial rollouts" if refused else ""


def _leaves_over(v: Values) -> bool:
    return (v["rollout.vllm_generate_batch_size"] or 0) > v["rollout.batch_size"]


OFFLOADED = "moments and float32 weights of policy and critic stay in host memory, where torch's AdamW updates them"
BUDGET = "bounds memory; the loss is normalised over the whole optimizer step, so it changes no result"
NOT_HERE = "has no counterpart here yet"
