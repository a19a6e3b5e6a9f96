"""Meaning of the flags of batch_inference and interactive_chat. Their names did not change while OpenRLHF had these launchers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf.flag_semantics import Settings
from rlhfless_ray.compat.openrlhf.launcher_flags import NO_HUB, NOT_QUANTISED, PLAIN_ATTENTION, Values, required, row, shares_for, text
from rlhfless_ray.compat.openrlhf.rules import Rule

BATCH, CHAT = "batch_inference", "interactive_chat"
LAUNCHERS = (BATCH, CHAT)
VLLM, HF, REWARD = "generate_vllm", "generate", "rm"
GENERATES = (VLLM, HF)
PROCESSORS = ("rs", "csft", "iter_dpo")


def of(*tasks: str) -> Callable[[Values], str]:
    """Return why a flag has no effect, unless the code of one of these values of --eval_task reads it."""
    return lambda v: "" if v["eval_task"] in tasks else f"OpenRLHF's {v['eval_task']} does not read it"


def at_least_1(x: float, v: Values) -> str:
    return "" if x >= 1 else "must be at least 1"


def dtype(x: object, v: Values) -> Settings:
    return m.switched_dtype(x, v["pretrain"])


def rows(x: object, v: Values) -> Settings:
    number, size = v["iter"], v["rollout_batch_size"]
    return {} if number is None else {"batch_inference.rows": [number * size, (number + 1) * size]}


def suffix(x: object, v: Values) -> Settings:
    return {"batch_inference.prompt_suffix": v["csft_prompt"].strip() + " "} if v["enable_csft"] else {}


_generated, _rated = of(*GENERATES), of(REWARD)

_COMMON: tuple[Rule[Values], ...] = (
    row("pretrain", "exact", "policy.path", value=text, refuses=required("name the model")),
    row("attn_implementation", "noop", reading=PLAIN_ATTENTION),
    row("flash_attn", "noop", reading=PLAIN_ATTENTION),
    row("disable_fast_tokenizer", "noop", reading="tokenizers give the same tokens"),
    row("use_ms", "absent", reading=NO_HUB),
)

_BATCH: tuple[Rule[Values], ...] = (
    row(
        "eval_task",
        "exact",
        "batch_inference.task",
        refuses=lambda x, v: "" if x in (*GENERATES, REWARD) else "choose generate_vllm, generate or rm",
    ),
    *_COMMON,
    *[row(name, "exact", "policy.dtype", dtype, idle=of(HF, REWARD)) for name in ("bf16", "param_dtype")],
    row("zero_stage", "noop", reading="nothing is trained"),
    row("local_rank", "noop", reading="there are no ranks"),
    row("micro_batch_size", "noop", reading="batches are cut to fit the memory, which changes no result"),
    row("seed", "exact", "run.seed"),
    row("full_determinism", "noop", reading="it decides how gradients add up, and nothing is trained here"),
    row("dataset", "exact", "prompts.path prompts.paths", m.dataset("prompts", ""), refuses=required("name the data set")),
    row("dataset_probs", "exact", "prompts.probabilities", m.probabilities("prompts"), refuses=shares_for("dataset")),
    row("input_key", "exact", "prompts.prompt_column"),
    row("apply_chat_template", "exact", "prompts.template", when=lambda x, v: x, value=lambda x, v: "chat"),
    row("input_template", "exact", "prompts.input_template", when=lambda x, v: x and "{}" in x and not v["apply_chat_template"]),
    row("max_samples", "exact", "prompts.max_rows", value=lambda x, v: int(x) if x < m.ALL else None, refuses=at_least_1),
    row("output_path", "exact", "batch_inference.output", refuses=required("name the file to write")),
    # generation
    row("prompt_max_len", "exact", "prompts.max_prompt_tokens", idle=_generated),
    row("max_new_tokens", "exact", "rollout.max_tokens", idle=_generated),
    row("temperature", "exact", "rollout.temperature", idle=_generated),
    row("greedy_sampling", "exact", "rollout.temperature", when=lambda x, v: x, value=lambda x, v: 0.0, idle=of(HF)),
    row("top_p", "exact", "rollout.top_p", idle=_generated),
    row("repetition_penalty", "absent", idle=_generated, reading="penalties of repeated tokens have no counterpart here yet"),
    row("best_of_n", "exact", "rollout.samples_per_prompt", idle=_generated),
    row("tp_size", "exact", "rollout.tensor_parallel", when=lambda x, v: isinstance(x, int), idle=of(VLLM)),
    row("max_num_seqs", "exact", "rollout.max_running", idle=of(VLLM)),
    row("enable_prefix_caching", "noop", idle=of(VLLM), reading="engines always reuse common prefixes, which changes no result"),
    row("iter", "exact", "batch_inference.rows", rows, idle=_generated, refuses=lambda x, v: "" if (x or 0) >= 0 else "count from 0"),
    row(
        "rollout_batch_size",
        "exact",
        "batch_inference.rows",
        rows,
        idle=_generated,
        refuses=lambda x, v: "" if x >= 1 or v["iter"] is None else "must be at least 1",
    ),
    row("enable_csft", "exact", "batch_inference.prompt_suffix", suffix, idle=_generated),
    row("csft_prompt", "exact", "batch_inference.prompt_suffix", suffix, idle=_generated),
    # rewards
    row("output_key", "exact", "batch_inference.response_column", idle=_rated),
    row("max_len", "exact", "batch_inference.max_tokens", idle=_rated),
    row("value_head_prefix", "exact", "batch_inference.value_head", idle=_rated),
    row(
        "post_processor",
        "exact",
        "batch_inference.processor",
        when=lambda x, v: x not in (None, "null"),
        idle=_rated,
        refuses=lambda x, v: "" if x in (None, "null", *PROCESSORS) else f"choose {', '.join(PROCESSORS)}",
    ),
    row("normalize_reward", "exact", "batch_inference.normalize", idle=_rated),
    row(
        "reward_template",
        "exact",
        "batch_inference.reward_template",
        idle=_rated,
        refuses=lambda x, v: "" if x is None or ("{input}" in x and "{reward}" in x) else "it needs {input} and {reward}",
    ),
)

_CHAT: tuple[Rule[Values], ...] = (
    *_COMMON,
    *[row(name, "exact", "policy.dtype", dtype) for name in ("bf16", "param_dtype")],
    row("load_in_4bit", "absent", reading=NOT_QUANTISED),
    row("max_len", "exact", "chat.max_len", refuses=at_least_1),
    row("greedy_sampling", "exact", "chat.greedy_sampling"),
    row("top_p", "exact", "chat.top_p", refuses=lambda x, v: "" if 0 < x <= 1 else "must be above 0 and at most 1"),
    row(
        "temperature",
        "exact",
        "chat.temperature",
        refuses=lambda x, v: "" if v["greedy_sampling"] or 0 < x < inf else "must be a number above 0; --greedy_sampling is without",
    ),
    row("repetition_penalty", "exact", "chat.repetition_penalty", refuses=lambda x, v: "" if 0 < x < inf else "must be a number above 0"),
    row(
        "input_template",
        "exact",
        "chat.input_template",
        value=lambda x, v: x if x and "{}" in x else "{}",
        refuses=lambda x, v: m.template_problem(x),
    ),
    *[row(name, "exact", f"chat.{name}") for name in ("apply_chat_template", "ta_prompt", "enable_csft", "csft_prompt")],
)

RULES = {BATCH: _BATCH, CHAT: _CHAT}
