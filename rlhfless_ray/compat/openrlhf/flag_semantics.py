"""Meaning of flags: when a flag has no effect, which settings its value becomes, and how a resource hint is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfless_ray.compat.openrlhf.flags import place
from rlhfless_ray.compat.openrlhf.normalise import GATING, LEVEL, MODE, PROMPT_LIMIT, SAMPLE_BUFFER_SINCE, THRESHOLD, Values

Make = Callable[[Any, Any], dict[str, Any]]  # a value and all values → settings

ALL = 10**8  # OpenRLHF's value for "all rows", and for "all the disk"
PLACE_FREED_SINCE = "0.8.2"  # before, a batch kept its place in the asynchronous queue while it was trained
RLOO_NOT_WHITENED_SINCE, KL_CUT_SINCE, STEPS_FROM_ZERO_SINCE = "0.8.5", "0.8.6", "0.9.1"

NO_SET = "there is no evaluation data set"

# ---------------------------------------------------------------- when a flag has no effect


def before(v: Values, version: str) -> bool:
    return place(v.version) < place(version)


def unless(name: str, why: str) -> Callable[[Values], str]:
    """Return a function that returns `why` if another flag is off."""
    return lambda v: "" if v[name] else why


def when(name: str, why: str) -> Callable[[Values], str]:
    """Return a function that returns `why` if another flag is on."""
    return lambda v: why if v[name] else ""


def no_critic(v: Values) -> str:
    return "" if v.has_critic else f"there is no critic with {v.estimator}"


def no_reference(v: Values) -> str:
    return "" if v.has_reference else "the KL coefficient is 0, there is no reference model"


def no_reward_model(v: Values) -> str:
    return "rewards come from a file, URL or agent, there is no reward model" if v.external_reward else ""


def no_evaluation(v: Values) -> str:
    if not v["eval.dataset"]:
        return NO_SET
    return "" if v["eval.steps"] > 0 else "evaluation is off"


def no_evaluation_of_set(v: Values) -> str:
    return no_evaluation(v) if v["eval.dataset"] else ""


def no_lora(v: Values) -> str:
    return "" if v["ds.lora.rank"] else "the LoRA rank is 0"


def no_correction(v: Values) -> str:
    if v[LEVEL] == "off":
        return "the importance correction is off"
    return "gspo's correction is a ratio to the sampler, without a band" if v["actor.policy_loss_type"] == "gspo" else ""


def no_checkpoints(v: Values) -> str:
    writes = v["ckpt.save_steps"] > 0 or v["ckpt.load_enable"] or best_metric(v) != "none"
    return "" if writes else "no checkpoints are requested"


def no_limited_checkpoints(v: Values) -> str:
    return no_checkpoints(v) or ("only models are written, which no flag limits" if v["ckpt.disable_ds"] else "")


def no_generate_batch(v: Values) -> str:
    return f"OpenRLHF {v.version} does not read it" if v.since("0.9.1") and not v.since(SAMPLE_BUFFER_SINCE) else ""


def no_discount(v: Values) -> str:
    return "" if v.traits.discounts else f"{v.estimator} does not discount"


def not_whitened(v: Values) -> str:
    return "" if whitened(v) else f"{v.estimator} is not whitened"


def no_kl_target(v: Values) -> str:
    return no_reference(v) or ("" if v["algo.kl.target"] else "no KL target")


def no_value_model(v: Values) -> str:
    return "" if v.has_critic else no_reward_model(v)


def no_value_head(v: Values) -> str:
    return "" if v.has_critic or not v.external_reward else "there is neither critic nor reward model"


def no_overlong_buffer(v: Values) -> str:
    return "no overlong buffer is set" if v["reward.overlong_buffer_len"] is None else ""


def no_run_name(v: Values) -> str:
    shown = v["logger.wandb.key"] or v["logger.tensorboard_dir"] or "logger.wandb.run_name" in v.set_by
    return "" if shown else "Weights & Biases and TensorBoard are off"


def no_muon(model: str) -> Callable[[Values], str]:
    return lambda v: unused(model, v) or ("" if v[f"{model}.optim"] == "muon" else f"the {model}'s optimizer is adam")


def unused(model: str, v: Values) -> str:
    return no_critic(v) if model == "critic" else ""


def best_metric(v: Values) -> str:
    return v["ckpt.best_metric_key"] if v["eval.dataset"] and v["eval.steps"] > 0 else "none"


# ---------------------------------------------------------------- values → settings


def text(key: str) -> Make:
    """Return a function that sets a text, which is empty without a value."""
    return lambda x, v: {key: x or ""}


def inverse(key: str) -> Make:
    """Return a function that sets a switch of the recipe to the opposite of the flag."""
    return lambda x, v: {key: not x}


def limit(key: str, unlimited: float | None) -> Make:
    """Return a function that sets a limit. OpenRLHF's value for all stands for `unlimited`."""
    return lambda x, v: {key: x if x < ALL else unlimited}


def lengths(x: Any, v: Values) -> dict[str, Any]:
    total, response, prompt = v["data.max_len"], v["rollout.max_new_tokens"], v[PROMPT_LIMIT]
    longest = total - (1 if response is None else response)
    settings: dict[str, Any] = {"prompts.max_prompt_tokens": min(longest, prompt) if prompt is not None else longest}
    if response is None:
        settings["rollout.max_total_tokens"], settings["rollout.max_tokens"] = total, total - 1
    else:
        settings["rollout.max_tokens"] = response
    return settings


def dataset(section: str) -> Make:
    """Return a function that puts one data set, or a list of several, into a section."""

    def make(x: str | None, v: Any) -> dict[str, Any]:
        if x is not None and ("," in x or "@" in x):
            return {f"{section}.paths": [part.strip() for part in x.split(",")]}
        return {f"{section}.path": x}

    return make


def probabilities(section: str) -> Make:
    """Return a function that sets the shares of several data sets. A single one is read in its order, so it has none."""

    def make(x: str | None, v: Any) -> dict[str, Any]:
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


def optimizer_steps(x: int, v: Values) -> dict[str, Any]:
    """If the batch does not divide the rollout, the rest is carried to the next one. With dynamic batches it is dropped."""
    samples = v["rollout.batch_size"] * v["rollout.n_samples_per_prompt"]
    if samples == x:
        return {"algorithm.updates_per_step": 1}
    if samples % x == 0:
        return {"algorithm.batch_samples": x}
    return {"algorithm.batch_samples": x, "algorithm.remainder": "drop" if v["train.dynamic_batch_enable"] else "carry"}


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def switched_dtype(x: Any, folder: str | None) -> dict[str, Any]:
    """Return the dtype of the other launchers, for which `--bf16` is a switch until 0.9.1. Without it the folder's own dtype is used."""
    name = ("bf16" if x else stored_dtype(Path(folder or "")) or "float32") if isinstance(x, bool) else x
    return {"policy.dtype": DTYPES.get(str(name), str(name))}


def param_dtype(x: str, v: Values) -> dict[str, Any]:
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


def zero_stage(x: int, v: Values) -> dict[str, Any]:
    """Raise stage 0 to 1 for bfloat16, whose float32 weights only a stage keeps here, and for offload."""
    needs_one = v["ds.adam_offload"] or param_dtype(v["ds.param_dtype"], v)["policy.dtype"] == "bfloat16"
    return {"learner.zero_stage": max(x, 1) if needs_one and x == 0 else x}


def zero_stage_here(v: Values) -> str:
    return f"ZeRO stage {zero_stage(v['ds.zero_stage'], v)['learner.zero_stage']}"


def attention(v: Values) -> str:
    return f"the model's attention kernel, equal to {v['ds.attn_implementation']} up to rounding"


def target_modules(x: str | list[str], v: Any) -> dict[str, Any]:
    return {"lora.target_modules": [x] if isinstance(x, str) else x}


def micro_batch(x: int, v: Values) -> dict[str, Any]:
    return {"learner.micro_batch_tokens": x * v["data.max_len"]}


def clip(x: Any, v: Values) -> dict[str, Any]:
    low, high = v["actor.eps_clip_low_high"] or (v["actor.eps_clip"],) * 2
    return {"algorithm.clip_low": low, "algorithm.clip_high": high}


def correction(x: Any, v: Values) -> dict[str, Any]:
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


def loss_mean(x: str, v: Values) -> dict[str, Any]:
    """Return the policy loss's mean. KL loss and entropy bonus are means over tokens in every version."""
    sequence = x == "seq-mean-token-mean" or v["actor.policy_loss_type"] == "gspo"
    return {"algorithm.loss_mean": "sequence", "algorithm.regularization_mean": "token"} if sequence else {"algorithm.loss_mean": "token"}


def frozen_steps(x: int, v: Values) -> dict[str, Any]:
    """Return the number of steps without training of the policy. Up to 0.9.0 OpenRLHF counts steps from 1, since then from 0."""
    frozen = max(x if before(v, STEPS_FROM_ZERO_SINCE) else x + 1, 0)
    return {"critic.freeze_policy_steps": frozen} if frozen or v.has_critic else {}


def whitened(v: Values) -> bool:
    return v.traits.whitens or (v.estimator == "rloo" and before(v, RLOO_NOT_WHITENED_SINCE))


def estimator(x: str, v: Values) -> dict[str, Any]:
    """Whiten rloo's advantages as versions up to 0.8.4 do."""
    return {"algorithm.advantage.estimator": x} | ({"algorithm.advantage.whiten": True} if x == "rloo" and whitened(v) else {})


def kl_place(x: bool, v: Values) -> dict[str, Any]:
    return {"algorithm.kl.place": "loss" if x else "reward"}


def kl_estimator(x: str, v: Values) -> dict[str, Any]:
    """Leave a token's KL estimate unlimited, as versions up to 0.8.5 do."""
    return {"algorithm.kl.estimator": x} | ({"algorithm.kl.limit": None} if before(v, KL_CUT_SINCE) else {})


def overlong(x: int | None, v: Values) -> dict[str, Any]:
    """Apply the full penalty at the response limit, or without one at the sequence limit."""
    settings: dict[str, Any] = {"reward.overlong_buffer_tokens": x}
    if x is not None and v["rollout.max_new_tokens"] is None:
        settings["reward.overlong_limit_tokens"] = v["data.max_len"]
    if x is not None and v["train.agent_func_path"]:
        settings["reward.overlong_feedback"] = True
    return settings


def normalized(x: bool, v: Values) -> dict[str, Any]:
    """Normalize reward model and critic, each with the numbers in its own config."""
    return ({} if v.external_reward else {"reward.normalize": x}) | ({"critic.normalize": x} if v.has_critic else {})


def value_head(x: str, v: Values) -> dict[str, Any]:
    return ({"critic.value_head": x} if v.has_critic else {}) | ({} if v.external_reward else {"reward.value_head": x})


def filter_range(x: bool, v: Values) -> dict[str, Any]:
    return {"algorithm.filter_range": v["algo.dynamic_filtering_range"] if x else None}


def reward_source(x: str | None, v: Values) -> dict[str, Any]:
    if not x or v["train.agent_func_path"]:
        return {}
    if x.endswith(".py"):
        return {"reward.function": f"{x}:reward_func", "reward.contract": "openrlhf"}
    return {"reward.url": x.split(",")}


def agent(x: str | None, v: Values) -> dict[str, Any]:
    """Limit a turn only by the remaining tokens of the whole length."""
    return {"agent.path": x, "agent.max_tokens": v["data.max_len"]} if x else {"agent.path": ""}


def template(x: Any, v: Values) -> dict[str, Any]:
    return {"prompts.template": "chat" if v["data.apply_chat_template"] else "none"}


def input_template(x: str | None, v: Values) -> dict[str, Any]:
    return {"prompts.input_template": x if x and "{}" in x and not v["data.apply_chat_template"] else None}


def evaluation_set(x: str | None, v: Values) -> dict[str, Any]:
    return {"evaluate.prompts": 0} if no_evaluation(v) else {"evaluate.path": x, "evaluate.greedy": False}


def evaluation_steps(x: int, v: Values) -> dict[str, Any]:
    return {"evaluate.prompts": 0} if no_evaluation(v) else {"evaluate.every_steps": x}


def best_checkpoint(x: str, v: Values) -> dict[str, Any]:
    return {"checkpoint.best_metric": best_metric(v)}


def decay(section: str) -> Callable[[float, Values], dict[str, Any]]:
    def make(x: float, v: Values) -> dict[str, Any]:
        skips = {"learner.decay_all": False} if x and section == "learner" else {}
        return {f"{section}.weight_decay": x, **skips}

    return make


def schedule(model: str, section: str) -> Callable[[Any, Values], dict[str, Any]]:
    def make(x: Any, v: Values) -> dict[str, Any]:
        """Return no settings for a constant rate without warm-up, the recipe's default, and else a schedule over all steps."""
        name, warmup = v[f"{model}.lr_scheduler"], v[f"{model}.lr_warmup_ratio"]
        if section == "learner" and (name == "constant" or (name == "constant_with_warmup" and not warmup)):
            return {"learner.warmup_steps": 0}
        settings = {f"{section}.schedule": name, f"{section}.warmup_share": warmup}
        if name == "cosine_with_min_lr":
            settings[f"{section}.min_rate_share"] = v[f"{model}.min_lr_ratio"]
        return settings

    return make


def wandb(x: str | None, v: Any) -> dict[str, Any]:
    return {"watch.wandb": "online" if x else "off"}


def tensorboard(x: str | None, v: Any) -> dict[str, Any]:
    return {"watch.tensorboard": True, "watch.tensorboard_path": x} if x else {"watch.tensorboard": False}


def folder_name(text: str) -> str:
    """Return a text as the name of a run's folder."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


# ---------------------------------------------------------------- how hints are read


def trainer(v: Values) -> str:
    ranks = v.world("actor")
    return f"{ranks} rank{'s' * (ranks > 1)} of the learner at most; results do not depend on their number"


def size(model: str, section: str) -> Callable[[Any, Values], dict[str, Any]]:
    return lambda x, v: {} if model == "ref" and v["ds.lora.rank"] else {f"{section}.ranks": v.ranks(model)}


def takes(model: str, what: str) -> Callable[[Values], str]:
    """Return a function that says how a model's size is read."""

    def reading(v: Values) -> str:
        if model == "actor":
            return trainer(v)
        if model == "ref" and v["ds.lora.rank"]:
            return f"with LoRA {what} is the policy without its adapters, in the learner"
        ranks = v.ranks(model)
        return f"{what} takes {ranks} slot{'s' * (ranks > 1)} at most"

    return reading


def width(v: Values) -> str:
    devices = v["vllm.tensor_parallel_size"]
    return (
        "an engine takes one slot"
        if devices == 1
        else f"an engine takes {devices} GPUs of one node, and one slot where slots are CPU cores"
    )


def engines(v: Values) -> str:
    if not v.engines:
        return "OpenRLHF needs a number of engines; here the plan of each step decides"
    return f"{v.engines} engine{'s' * (v.engines > 1)} at most; the plan of each step decides how many there are"


def queue_steps(v: Values) -> int:
    """Return how many steps old a sample of OpenRLHF's queue may be. A place is free again before its batch is trained."""
    return int(v["train.async_queue_size"]) + (not v.since(PLACE_FREED_SINCE))


def asynchronous(v: Values) -> dict[str, Any]:
    """Return the settings of asynchronous training. A queue of several batches needs responses that outlive a step here."""
    if not v["train.partial_rollout_enable"]:
        return {"rollout.max_lag_steps": 1}
    prompts = 0 if no_generate_batch(v) else v["rollout.vllm_generate_batch_size"] or 0
    begun = max(queue_steps(v), prompts / v["rollout.batch_size"])
    return {"rollout.max_lag_steps": math.ceil(begun), "rollout.partial": "continue", "rollout.ahead": True, "rollout.oversample": begun}


def generate_batch(prompts: int | None, v: Values) -> dict[str, Any]:
    """Return the settings of a generation batch. One that is not above the rollout's changes no result."""
    return asynchronous(v) if _leaves_over(v) and v["train.partial_rollout_enable"] else {}


def no_sample_buffer(v: Values) -> str:
    refused = _leaves_over(v) and not v["train.partial_rollout_enable"]
    return f"a generation batch above the rollout's {NOT_HERE} without partial rollouts" if refused else ""


def _leaves_over(v: Values) -> bool:
    return (v["rollout.vllm_generate_batch_size"] or 0) > v["rollout.batch_size"]


NOT_HERE = "has no counterpart here yet"
SHARED = "functions pass slots to each other here, so models need not share a GPU"
PARKED = "a process without work gives its device back in any case"
OFFLOADED = "moments and float32 weights of policy and critic stay in host memory, where torch's AdamW updates them"
BUDGET = "bounds memory; the loss is normalised over the whole optimizer step, so it changes no result"
