"""Meaning of the flags of batch_inference and interactive_chat. Their names did not change while OpenRLHF had these launchers."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf.launcher_flags import FlagRule, Kind, Values, only, required, row, shares_for
from rlhfless_ray.compat.openrlhf.supervised_table import PLAIN_ATTENTION

BATCH, CHAT = "batch_inference", "interactive_chat"
LAUNCHERS = (BATCH, CHAT)
VLLM, HF, REWARD = "generate_vllm", "generate", "rm"
GENERATES = (VLLM, HF)
PROCESSORS = ("rs", "csft", "iter_dpo")


def _flag(
    name: str, kind: Kind, keys: str = "", make: Any = None, *, of: tuple[str, ...] = (), refuses: Any = None, reading: str = ""
) -> FlagRule:
    """Return a row. `of`: values of --eval_task whose code reads the flag; (): all."""
    rule = row(name, kind, keys, make, refuses=refuses, reading=reading)
    return rule if not of else replace(rule, reads=lambda v: v["eval_task"] in of)


def _dtype(x: Any, v: Values) -> dict[str, Any]:
    return m.switched_dtype(x, v["pretrain"])


def _rows(x: int | None, v: Values) -> dict[str, Any]:
    number, size = v["iter"], v["rollout_batch_size"]
    return {} if number is None else {"batch_inference.rows": [number * size, (number + 1) * size]}


def _suffix(x: bool | str, v: Values) -> dict[str, Any]:
    return {"batch_inference.prompt_suffix": v["csft_prompt"].strip() + " "} if v["enable_csft"] else {}


def _width(x: Any, v: Values) -> dict[str, Any]:
    return {"rollout.tensor_parallel": x} if isinstance(x, int) else {}


NO_HUB = only(False, "the ModelScope hub " + m.NOT_HERE)
SAME_TOKENS = "tokenizers give the same tokens"

_COMMON: tuple[FlagRule, ...] = (
    _flag("pretrain", "exact", "policy.path", m.text("policy.path"), refuses=required("name the model")),
    _flag("attn_implementation", "noop", reading=PLAIN_ATTENTION),
    _flag("flash_attn", "noop", reading=PLAIN_ATTENTION),
    _flag("disable_fast_tokenizer", "noop", reading=SAME_TOKENS),
    _flag("use_ms", "absent", refuses=NO_HUB, reading="the default"),
)

BATCH_RULES: tuple[FlagRule, ...] = (
    _flag(
        "eval_task",
        "exact",
        "batch_inference.task",
        refuses=lambda x, v: "" if x in (*GENERATES, REWARD) else "choose generate_vllm, generate or rm",
    ),
    *_COMMON,
    *[_flag(name, "exact", "policy.dtype", _dtype, of=(HF, REWARD)) for name in ("bf16", "param_dtype")],
    _flag("zero_stage", "noop", reading="nothing is trained"),
    _flag("local_rank", "noop", reading="there are no ranks"),
    _flag("micro_batch_size", "noop", reading="batches are cut to fit the memory, which changes no result"),
    _flag("seed", "exact", "run.seed"),
    _flag("full_determinism", "noop", reading="it decides how gradients add up, and nothing is trained here"),
    _flag(
        "dataset",
        "exact",
        "prompts.path prompts.paths",
        lambda x, v: m.dataset("prompts")(x or "", v),
        refuses=required("name the data set"),
    ),
    _flag("dataset_probs", "exact", "prompts.probabilities", m.probabilities("prompts"), refuses=shares_for("dataset")),
    _flag("input_key", "exact", "prompts.prompt_column"),
    _flag("apply_chat_template", "exact", "prompts.template", lambda x, v: {"prompts.template": "chat"} if x else {}),
    _flag(
        "input_template",
        "exact",
        "prompts.input_template",
        lambda x, v: {"prompts.input_template": x} if x and "{}" in x and not v["apply_chat_template"] else {},
    ),
    _flag(
        "max_samples",
        "exact",
        "prompts.max_rows",
        lambda x, v: {"prompts.max_rows": int(x) if x < m.ALL else None},
        refuses=lambda x, v: "" if x >= 1 else "must be at least 1",
    ),
    _flag("output_path", "exact", "batch_inference.output", refuses=required("name the file to write")),
    # generation
    _flag("prompt_max_len", "exact", "prompts.max_prompt_tokens", of=GENERATES),
    _flag("max_new_tokens", "exact", "rollout.max_tokens", of=GENERATES),
    _flag("temperature", "exact", "rollout.temperature", of=GENERATES),
    _flag("greedy_sampling", "exact", "rollout.temperature", lambda x, v: {"rollout.temperature": 0.0} if x else {}, of=(HF,)),
    _flag("top_p", "exact", "rollout.top_p", of=GENERATES),
    _flag(
        "repetition_penalty",
        "absent",
        refuses=only(1.0, "penalties of repeated tokens have no counterpart here yet"),
        of=GENERATES,
        reading="the default",
    ),
    _flag("best_of_n", "exact", "rollout.samples_per_prompt", of=GENERATES),
    _flag("tp_size", "exact", "rollout.tensor_parallel", _width, of=(VLLM,)),
    _flag("max_num_seqs", "exact", "rollout.max_running", of=(VLLM,)),
    _flag("enable_prefix_caching", "noop", of=(VLLM,), reading="engines always reuse common prefixes, which changes no result"),
    _flag("iter", "exact", "batch_inference.rows", _rows, of=GENERATES, refuses=lambda x, v: "" if (x or 0) >= 0 else "count from 0"),
    _flag(
        "rollout_batch_size",
        "exact",
        "batch_inference.rows",
        _rows,
        of=GENERATES,
        refuses=lambda x, v: "" if x >= 1 or v["iter"] is None else "must be at least 1",
    ),
    _flag("enable_csft", "exact", "batch_inference.prompt_suffix", _suffix, of=GENERATES),
    _flag("csft_prompt", "exact", "batch_inference.prompt_suffix", _suffix, of=GENERATES),
    # rewards
    _flag("output_key", "exact", "batch_inference.response_column", of=(REWARD,)),
    _flag("max_len", "exact", "batch_inference.max_tokens", of=(REWARD,)),
    _flag("value_head_prefix", "exact", "batch_inference.value_head", of=(REWARD,)),
    _flag(
        "post_processor",
        "exact",
        "batch_inference.processor",
        lambda x, v: {} if x in (None, "null") else {"batch_inference.processor": x},
        of=(REWARD,),
        refuses=lambda x, v: "" if x in (None, "null", *PROCESSORS) else f"choose {', '.join(PROCESSORS)}",
    ),
    _flag("normalize_reward", "exact", "batch_inference.normalize", of=(REWARD,)),
    _flag(
        "reward_template",
        "exact",
        "batch_inference.reward_template",
        of=(REWARD,),
        refuses=lambda x, v: "" if x is None or ("{input}" in x and "{reward}" in x) else "it needs {input} and {reward}",
    ),
)

CHAT_RULES: tuple[FlagRule, ...] = (
    *_COMMON,
    *[_flag(name, "exact", "policy.dtype", _dtype) for name in ("bf16", "param_dtype")],
    _flag(
        "load_in_4bit",
        "absent",
        refuses=only(False, "quantising weights when they are loaded has no counterpart here"),
        reading="the default",
    ),
    _flag("max_len", "exact", "chat.max_len", refuses=lambda x, v: "" if x >= 1 else "must be at least 1"),
    _flag("greedy_sampling", "exact", "chat.greedy_sampling"),
    _flag("top_p", "exact", "chat.top_p", refuses=lambda x, v: "" if 0 < x <= 1 else "must be above 0 and at most 1"),
    _flag(
        "temperature",
        "exact",
        "chat.temperature",
        refuses=lambda x, v: "" if v["greedy_sampling"] or 0 < x < inf else "must be a number above 0; --greedy_sampling is without",
    ),
    _flag("repetition_penalty", "exact", "chat.repetition_penalty", refuses=lambda x, v: "" if 0 < x < inf else "must be a number above 0"),
    _flag(
        "input_template",
        "exact",
        "chat.input_template",
        lambda x, v: {"chat.input_template": x if x and "{}" in x else "{}"},
        refuses=lambda x, v: m.template_problem(x),
    ),
    *[_flag(name, "exact", f"chat.{name}") for name in ("apply_chat_template", "ta_prompt", "enable_csft", "csft_prompt")],
)
