"""Repeat the launcher's own validations, and the values that it changes after parsing.

OpenRLHF stops with a failed assertion, or later with an unrelated exception. Here a UserError names the flags.
"""

from __future__ import annotations

import re

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.flag_semantics import asynchronous, queue_steps, shares_of, template_notes, template_problem
from rlhfless_ray.compat.openrlhf.flag_table import rule_of
from rlhfless_ray.compat.openrlhf.normalise import GATING, LEVEL, MODE, PROMPT_LIMIT, SAMPLE_BUFFER_SINCE, THRESHOLD, Values

COUNTS = (
    *("rollout.batch_size", "rollout.n_samples_per_prompt", "rollout.micro_batch_size", "train.batch_size", "train.micro_batch_size"),
    *("train.num_episodes", "train.max_epochs", "train.async_queue_size", "ds.ring_attn_size", "ds.tensor_parallel_size"),
    *("vllm.tensor_parallel_size", "logger.logging_steps", "ckpt.max_num", "data.max_samples", "eval.n_samples_per_prompt"),
    *(f"{model}.{part}" for model in ("actor", "critic", "ref", "reward") for part in ("num_nodes", "num_gpus_per_node")),
)
CHOICES: dict[str, tuple[str, ...]] = {  # for values that argparse does not check and a library rejects later
    "ds.attn_implementation": ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention"),
    "ds.grad_accum_dtype": tuple(
        spelling
        for names in (("fp32", "float32", "float"), ("fp16", "float16", "half"), ("bf16", "bfloat16", "bfloat"))
        for spelling in (*names, f"torch.{names[1]}")
    ),
    "vllm.sync_backend": ("nccl", "gloo", "mpi", "ucc", "xccl", "hccl"),
}
MAX_LAG = 8  # largest rollout.max_lag_steps
HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?(:\w+)?")  # an attention kernel of the Hugging Face hub


def check(v: Values) -> list[str]:
    """Apply the launcher's changes to `v` and return its warnings. Raises UserError."""
    notes: list[str] = []
    _check_choices(v)
    _check_paths(v)
    _check_probabilities(v)
    _check_sampling(v, notes)
    _check_loss(v, notes)
    _check_placement(v, notes)
    return notes


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise UserError(sentence)


def _check_choices(v: Values) -> None:
    for name, choices in CHOICES.items():
        text = v[name]
        is_kernel = name == "ds.attn_implementation" and HUB_KERNEL.fullmatch(text or "")
        _require(
            not text or text.removeprefix("paged|") in choices or bool(is_kernel),
            f"{v.spelled(name)}: `{text}` is not known; choose from {', '.join(choices)}",
        )


def _check_paths(v: Values) -> None:
    _require(bool(v["actor.model_name_or_path"]), f"{v.spelled('actor.model_name_or_path')}: name the model to train")
    _require(bool(v["data.prompt_dataset"]), f"{v.spelled('data.prompt_dataset')}: name the data set of prompts")
    agent = v["train.agent_func_path"]
    _require(not agent or agent.endswith(".py"), f"{v.spelled('train.agent_func_path')}: `{agent}` must be a Python file (.py)")
    _require(
        v.external_reward or bool(v["reward.model_name_or_path"]),
        f"{v.spelled('reward.remote_url')}: there is no reward; give a .py file or a URL, or name a reward model with "
        f"{v.named('reward.model_name_or_path')} or an agent with {v.named('train.agent_func_path')}",
    )
    if v.has_critic and not v["critic.model_name_or_path"]:
        reward_model = v["reward.model_name_or_path"] if not v.external_reward else None
        v.value["critic.model_name_or_path"] = reward_model.split(",")[0] if reward_model else v["actor.model_name_or_path"]
    _require(
        not v["eval.dataset"] or v.external_reward,
        f"{v.spelled('eval.dataset')}: evaluation needs {v.named('reward.remote_url')} or {v.named('train.agent_func_path')}",
    )


def _check_probabilities(v: Values) -> None:
    text, name = v["data.prompt_probs"], v.spelled("data.prompt_probs")
    if not text:
        return
    shares, sets = shares_of(text), len(v["data.prompt_dataset"].split(","))
    if shares is None:
        raise UserError(f"{name}: expected numbers separated by commas, got `{text}`")
    _require(len(shares) == sets, f"{name}: {len(shares)} probabilities for {sets} data sets")
    _require(min(shares) > 0 and abs(sum(shares) - 1) < 1e-6, f"{name}: must be positive and add up to 1 (got {text})")


def _check_sampling(v: Values, notes: list[str]) -> None:
    samples = v["rollout.n_samples_per_prompt"]
    for name in COUNTS:  # scripts set 0 for models that they do not use
        _require(v[name] >= 1 or bool(rule_of()[name].idle(v)), f"{v.spelled(name)}: must be at least 1 (got {v[name]})")
    _require(
        samples > 1 or v.traits.least_samples == 1,
        f"{v.spelled('rollout.n_samples_per_prompt')}: {v.estimator} compares responses to one prompt, so it must be above 1",
    )
    for name in ("eval.steps", "ckpt.save_steps"):
        _require(v[name] > 0 or v[name] == -1, f"{v.spelled(name)}: must be at least 1, or -1 for never (got {v[name]})")
    if v["algo.dynamic_filtering_enable"]:
        low, high = v["algo.dynamic_filtering_range"]
        _require(low < high, f"{v.spelled('algo.dynamic_filtering_range')}: the first value must be below the second (got {low} {high})")
        _require(
            v.external_reward,
            f"{v.spelled('algo.dynamic_filtering_enable')}: filtering needs {v.named('reward.remote_url')} or "
            f"{v.named('train.agent_func_path')}",
        )
        _require(samples > 1, f"{v.spelled('rollout.n_samples_per_prompt')}: filtering compares groups, so it must be above 1")
    generated = v["rollout.vllm_generate_batch_size"]
    _require(
        not generated or generated <= v["rollout.batch_size"] or v["train.async_enable"] or not v.since(SAMPLE_BUFFER_SINCE),
        f"{v.spelled('rollout.vllm_generate_batch_size')}: more than {v.named('rollout.batch_size')} needs {v.named('train.async_enable')}",
    )
    _require(not generated or generated > 0, f"{v.spelled('rollout.vllm_generate_batch_size')}: must be at least 1 (got {generated})")
    lag = asynchronous(v)["rollout.max_lag_steps"] if v["train.async_enable"] else 0
    name = "train.async_queue_size" if queue_steps(v) == lag else "rollout.vllm_generate_batch_size"
    _require(
        lag <= MAX_LAG,
        f"{v.spelled(name)}: responses would be up to {lag} steps old when they are trained, and at most {MAX_LAG} steps are possible; "
        "lower it",
    )
    response, total = v["rollout.max_new_tokens"], v["data.max_len"]
    _require(response is None or response > 0, f"{v.spelled('rollout.max_new_tokens')}: must be at least 1 (got {response})")
    _require(v[PROMPT_LIMIT] is None or v[PROMPT_LIMIT] > 0, f"{v.spelled(PROMPT_LIMIT)}: must be at least 1 (got {v[PROMPT_LIMIT]})")
    _require(
        total > (response or 1),
        f"{v.spelled('data.max_len')}: no token is left for a prompt (the response may take {response or 1} of {total})",
    )
    longest = response or total
    buffer = v["reward.overlong_buffer_len"]
    _require(
        buffer is None or buffer <= longest,
        f"{v.spelled('reward.overlong_buffer_len')}: must not exceed the longest response, {longest} tokens",
    )
    _check_template(v, notes)


def _check_template(v: Values, notes: list[str]) -> None:
    template = v["data.input_template"]
    if not template or v["data.apply_chat_template"]:
        return
    name = v.spelled("data.input_template")
    problem = template_problem(template)
    _require(not problem, f"{name}: {problem}")
    notes += template_notes(name, template)


def _check_loss(v: Values, notes: list[str]) -> None:
    dual = v["actor.dual_clip"]
    _require(dual is None or dual > 1, f"{v.spelled('actor.dual_clip')}: must be above 1 (got {dual})")
    threshold = v[THRESHOLD]
    _require(len(threshold) == 2, f"{v.spelled(THRESHOLD)}: takes HIGH or LOW HIGH (got {len(threshold)} values)")
    if v[LEVEL] != "off":
        _require(
            v[MODE] != "clip" or (v[LEVEL] == "token" and v[GATING] == "ratio"),
            f"{v.spelled(MODE)}: clip needs {v.named(LEVEL)} token and {v.named(GATING)} ratio",
        )
        _require(v[GATING] == "ratio" or threshold[0] <= 0, f"{v.spelled(THRESHOLD)}: {v[GATING]} takes an upper bound only")
    if v.has_reference:
        estimator, loss = v["algo.kl.estimator"], v["algo.kl.use_loss"]
        if loss and estimator == "k1" and not v["algo.kl.unbiased_gradient"]:
            notes.append(f"{v.spelled('algo.kl.estimator')}: as a loss k2 or k3 is recommended")
        if not loss and estimator != "k1":
            notes.append(f"{v.spelled('algo.kl.estimator')}: in the reward k1 is recommended")
        if v["algo.kl.target"]:
            notes.append(f"{v.spelled('algo.kl.target')}: OpenRLHF calls its adaptive controller unsupported")


def _check_placement(v: Values, notes: list[str]) -> None:
    _require(v.engines >= 0, f"{v.spelled('vllm.num_engines')}: must not be negative (got {v.engines})")
    width = v["vllm.tensor_parallel_size"]
    _require(
        not v["train.async_enable"] or not (v["vllm.enable_sleep"] and v["train.colocate_all"]),
        f"{v.spelled('vllm.enable_sleep')}: not with {v.named('train.async_enable')}",
    )
    _require(
        not v["train.partial_rollout_enable"] or v["train.async_enable"],
        f"{v.spelled('train.partial_rollout_enable')}: needs {v.named('train.async_enable')}",
    )
    if v["train.async_enable"] and v["train.colocate_all"]:
        notes.append(f"{v.spelled('train.colocate_all')}: with asynchronous training OpenRLHF colocates the trained models only")
    if v.has_reference and (v["train.colocate_actor_ref"] or v["train.colocate_all"]):
        _require_same_size(v, "actor", "ref", "train.colocate_all" if v["train.colocate_all"] else "train.colocate_actor_ref")
    if v["train.colocate_all"] and not v["train.async_enable"] and v.engines:
        _require(
            v.world("actor") == v.engines * width,
            f"{v.spelled('train.colocate_all')}: the actor's GPUs ({v.world('actor')}) must be {v.named('vllm.num_engines')} times "
            f"{v.named('vllm.tensor_parallel_size')} ({v.engines * width})",
        )
    if v.has_critic and v["train.colocate_critic_reward"]:
        _require_same_size(v, "critic", "reward", "train.colocate_critic_reward")
    packs = v["ds.packing_samples"] or v["train.dynamic_batch_enable"] or v["ds.ring_attn_size"] > 1
    if not v.engines:
        _require(not packs, f"{v.spelled('vllm.num_engines')}: packed samples need at least one engine")
    batches = v["rollout.n_samples_per_prompt"] * v["rollout.batch_size"] // v["rollout.micro_batch_size"]
    workers = v.world("actor") // v["ds.ring_attn_size"] // v["ds.tensor_parallel_size"]
    _require(
        batches >= workers,
        f"{v.spelled('rollout.batch_size')}: {batches} batches of {v.named('rollout.micro_batch_size')} samples are fewer than the "
        f"actor's {workers} processes ({v.named('actor.num_gpus_per_node')})",
    )


def _require_same_size(v: Values, one: str, other: str, why: str) -> None:
    for part in ("num_nodes", "num_gpus_per_node"):
        first, second = f"{one}.{part}", f"{other}.{part}"
        equal = f"{v.spelled(first)} and {v.spelled(second)} must be equal ({v[first]} and {v[second]})"
        _require(v[first] == v[second], f"{v.spelled(why)}: {equal}")
