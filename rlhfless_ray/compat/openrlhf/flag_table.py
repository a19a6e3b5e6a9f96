"""Recipe keys of each flag of the newest version, one row per flag in the launcher's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, Literal

from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf.flag_semantics import inverse, unless, when
from rlhfless_ray.compat.openrlhf.normalise import GATING, LEVEL, MODE, THRESHOLD, Values
from rlhfless_ray.compat.openrlhf.rank_groups import divides, not_divided, not_sliced, slices

Kind = Literal["exact", "hint", "noop", "cond", "maybe", "absent", "error"]
KINDS: dict[Kind, str] = {
    "exact": "honoured exactly",
    "hint": "resource hint",
    "noop": "no effect here",
    "cond": "honoured or refused by name",
    "maybe": "honoured, or a hint",
    "absent": "not supported yet",
    "error": "refused",
}


@dataclass(frozen=True)
class Rule:
    name: str
    """The newest version's flag without its dashes."""
    kind: Kind
    keys: tuple[str, ...] = ()
    """Recipe keys that it may set."""
    make: Callable[[Any, Values], dict[str, Any]] | None = None
    """Converts the value to settings. None: the first key gets the value."""
    idle: Callable[[Values], str] = lambda v: ""
    """Returns why the flag has no effect on a command line in OpenRLHF, or an empty string if it has one."""
    reading: Callable[[Values], str] | None = None
    """Returns how a hint is read, why a flag has no effect here, or why a value is refused."""

    def settings(self, v: Values) -> dict[str, Any]:
        if self.make is not None:
            return self.make(v[self.name], v)
        return {self.keys[0]: v[self.name]} if self.keys else {}


def _row(name: str, kind: Kind, keys: str = "", make: Any = None, *, idle: Any = None, reading: Any = None) -> Rule:
    reading_of = (lambda v: reading) if isinstance(reading, str) else reading
    return Rule(name, kind, tuple(keys.split()), make, idle or (lambda v: ""), reading_of)


ASYNC, DYNAMIC, CHAT = "train.async_enable", "train.dynamic_batch_enable", "data.apply_chat_template"
CLIP, NORMALIZE = "algorithm.clip_low algorithm.clip_high", "algorithm.advantage.normalize_std"
REWARDS = "reward.function reward.contract reward.url"
OVERLONG = "reward.overlong_buffer_tokens reward.overlong_limit_tokens reward.overlong_feedback"
PULLED = "engines pull weights by version and checksum, so no collective is set up"
ASYNCHRONOUS = "rollout.max_lag_steps rollout.partial rollout.ahead rollout.oversample"
CORRECTION_KEYS = " ".join(
    [
        "algorithm.importance_cap",
        *(f"algorithm.loss.correction_{part}" for part in ("level", "mode", "gating", "low", "high")),
        "algorithm.loss.ratio_to",
        "algorithm.uncorrected_lag",
    ]
)


def _optimizer_rows(model: str, section: str) -> list[Rule]:
    def unused(v: Values) -> str:
        return m.unused(model, v)

    def key(name: str) -> str:
        return f"{section}.{name}"

    def no_warmup(v: Values) -> str:
        return unused(v) or ("a constant rate has no warm-up" if v[f"{model}.lr_scheduler"] == "constant" else "")

    def no_floor(v: Values) -> str:
        return unused(v) or ("" if v[f"{model}.lr_scheduler"] == "cosine_with_min_lr" else "only cosine_with_min_lr has a floor")

    schedule = " ".join(map(key, ("schedule", "warmup_share", "min_rate_share"))) + (" learner.warmup_steps" if model == "actor" else "")
    placeholder = "OpenRLHF does not use it"
    return [
        _row(f"{model}.optim", "cond", key("optimizer"), idle=unused),
        *[_row(f"{model}.muon.{name}", "absent", idle=m.no_muon(model), reading=f"Muon {m.NOT_HERE}") for name in ("lr", "momentum")],
        *[_row(f"{model}.muon.{name}", "noop", reading=placeholder) for name in ("ns_steps", "nesterov", "no_nesterov")],
        _row(f"{model}.adam.lr", "exact", key("learning_rate"), idle=unused),
        _row(f"{model}.adam.betas", "exact", key("betas"), idle=unused),
        _row(f"{model}.adam.eps", "exact", key("adam_eps"), idle=unused),
        _row(
            f"{model}.adam.weight_decay",
            "exact",
            key("weight_decay") + (" learner.decay_all" if model == "actor" else ""),
            m.decay(section),
            idle=unused,
        ),
        _row(f"{model}.lr_scheduler", "exact", schedule, m.schedule(model, section), idle=unused),
        _row(f"{model}.lr_warmup_ratio", "exact", schedule, m.schedule(model, section), idle=no_warmup),
        _row(f"{model}.min_lr_ratio", "exact", schedule, m.schedule(model, section), idle=no_floor),
        _row(f"{model}.max_norm", "exact", key("grad_clip"), idle=unused),
    ]


RULES: tuple[Rule, ...] = (
    # resources
    *[
        _row(f"{model}.{part}", "hint", f"{section}.ranks", m.size(model, section), idle=idle, reading=m.takes(model, what))
        for model, section, idle, what in [
            ("ref", "reference", m.no_reference, "the reference model"),
            ("reward", "reward", m.no_reward_model, "the reward model"),
            ("actor", "learner", None, "the learner"),
            ("critic", "critic", m.no_critic, "the critic"),
        ]
        for part in ("num_nodes", "num_gpus_per_node")
    ],
    *[_row(f"train.{name}", "hint", reading=m.SHARED) for name in ("colocate_actor_ref", "colocate_critic_reward", "colocate_all")],
    _row("vllm.num_engines", "hint", "rollout.max_actors", lambda x, v: {"rollout.max_actors": x} if x else {}, reading=m.engines),
    _row("vllm.tensor_parallel_size", "hint", "rollout.tensor_parallel", reading=m.width),
    _row("vllm.sync_backend", "hint", reading=PULLED),
    _row("vllm.sync_with_ray", "noop", reading=PULLED),
    _row("vllm.enable_prefix_caching", "hint", reading="always on, salted with the weight version"),
    _row("vllm.enforce_eager", "noop", reading="engines choose the mode themselves"),
    _row("vllm.enable_sleep", "hint", reading=m.PARKED),
    _row("vllm.gpu_memory_utilization", "hint", "rollout.gpu_memory_share", reading="share of a GPU's memory that one engine takes"),
    # importance correction
    _row(LEVEL, "exact", CORRECTION_KEYS, m.correction),
    _row(MODE, "exact", CORRECTION_KEYS, m.correction, idle=m.no_correction),
    _row(GATING, "exact", CORRECTION_KEYS, m.correction, idle=m.no_correction),
    _row(THRESHOLD, "exact", CORRECTION_KEYS, m.correction, idle=m.no_correction),
    # staleness
    _row("train.async_enable", "cond", ASYNCHRONOUS, lambda x, v: m.asynchronous(v) if x else {}),
    _row("train.async_queue_size", "cond", ASYNCHRONOUS, lambda x, v: m.asynchronous(v), idle=unless(ASYNC, "training is synchronous")),
    _row("train.partial_rollout_enable", "cond", ASYNCHRONOUS, lambda x, v: m.asynchronous(v) if x else {}),
    # evaluation, checkpoints, logs
    _row("eval.steps", "exact", "evaluate.every_steps evaluate.prompts", m.evaluation_steps, idle=unless("eval.dataset", m.NO_SET)),
    _row("ckpt.save_steps", "exact", "checkpoint.every_steps", lambda x, v: {"checkpoint.every_steps": x} if x > 0 else {}),
    _row("logger.logging_steps", "exact", "watch.every_steps"),
    _row("ckpt.path", "exact", "checkpoint.path", idle=m.no_checkpoints),
    _row("ckpt.save_hf", "exact", "checkpoint.save_hf", idle=m.no_checkpoints),
    _row("ckpt.disable_ds", "exact", "checkpoint.resumable", inverse("checkpoint.resumable"), idle=m.no_checkpoints),
    _row("ckpt.max_num", "exact", "checkpoint.keep", idle=m.no_limited_checkpoints),
    _row("ckpt.max_mem", "exact", "checkpoint.max_gib", m.limit("checkpoint.max_gib", inf), idle=m.no_limited_checkpoints),
    _row("ckpt.load_enable", "exact", "checkpoint.resume"),
    _row("ckpt.best_metric_key", "exact", "checkpoint.best_metric", m.best_checkpoint, idle=m.no_evaluation),
    _row("ds.use_universal_ckpt", "noop", reading="a checkpoint holds weights by name and is read with any number of ranks"),
    _row("local_rank", "noop", reading="Ray assigns ranks"),
    # the learner's memory and speed
    _row("ds.zero_stage", "hint", "learner.zero_stage", m.zero_stage, reading=m.zero_stage_here),
    _row("actor.gradient_checkpointing_enable", "exact", "learner.gradient_checkpointing"),
    _row("ds.deepcompile", "noop", reading="speed only"),
    _row("ds.param_dtype", "cond", "policy.dtype", m.param_dtype, reading=m.unknown_dtype),
    _row("train.enable_ema", "exact", "ema.beta", lambda x, v: {"ema.beta": v["train.ema_beta"] if x else None}),
    _row("train.ema_beta", "exact", "ema.beta", idle=unless("train.enable_ema", "no average is kept")),
    _row("ds.zpg", "noop", reading="speed only"),
    _row("ds.adam_offload", "hint", "learner.optimizer_offload", reading=m.OFFLOADED),
    _row("ds.attn_implementation", "hint", reading=m.attention),
    _row("ds.experts_implementation", "absent", reading=f"another implementation of experts {m.NOT_HERE}"),
    _row("ds.use_liger_kernel", "noop", reading="speed and memory only"),
    _row("ds.grad_accum_dtype", "noop", reading="gradients are accumulated in float32"),
    _row("ds.overlap_comm", "noop", reading="speed only"),
    _row("actor.gradient_checkpointing_reentrant", "noop", reading="speed and memory only"),
    _row("data.disable_fast_tokenizer", "noop", reading="transformers 5 has one tokenizer class for each model"),
    _row("data.dataloader_num_workers", "noop", reading="prompts are tokenized before the run"),
    _row("ds.enable_sleep", "hint", reading=m.PARKED),
    _row("ds.tensor_parallel_size", "maybe", "learner.tensor_parallel critic.tensor_parallel", divides, reading=not_divided),
    _row("ds.packing_samples", "noop", reading="micro-batches are always filled by tokens"),
    _row("train.dynamic_batch_enable", "hint", reading="micro-batches are always filled by tokens"),
    _row("rollout.max_tokens_per_gpu", "hint", reading="scoring passes of the learner use its own budget"),
    _row(
        "train.max_tokens_per_gpu",
        "hint",
        "learner.micro_batch_tokens",
        idle=unless(DYNAMIC, "micro-batches are counted in samples"),
        reading=m.BUDGET,
    ),
    _row(
        "ds.load_in_4bit",
        "error",
        reading="engines cannot load bitsandbytes, which this flag uses; leave it out, or "
        "give a checkpoint in the 4 bits of compressed-tensors as the model",
    ),
    # adapters
    _row("ds.lora.rank", "cond", "lora.rank"),
    _row("ds.lora.alpha", "cond", "lora.alpha", idle=m.no_lora),
    _row("ds.lora.target_modules", "cond", "lora.target_modules", m.target_modules, idle=m.no_lora),
    _row("ds.lora.dropout", "cond", "lora.dropout", idle=m.no_lora),
    # steps and batches
    _row("ckpt.output_dir", "exact", "save.path"),
    _row("train.num_episodes", "exact", "run.episodes"),
    _row("rollout.batch_size", "exact", "prompts.batch_prompts"),
    _row("rollout.vllm_generate_batch_size", "cond", ASYNCHRONOUS, m.generate_batch, idle=m.no_generate_batch, reading=m.no_sample_buffer),
    _row("rollout.micro_batch_size", "hint", reading="scoring passes of the learner use its own budget"),
    _row("train.max_epochs", "exact", "algorithm.epochs"),
    _row("data.max_len", "exact", "prompts.max_prompt_tokens rollout.max_tokens rollout.max_total_tokens", m.lengths),
    _row("rollout.max_new_tokens", "exact", "rollout.max_tokens rollout.max_total_tokens prompts.max_prompt_tokens", m.lengths),
    _row("data.max_samples", "exact", "prompts.max_rows", m.limit("prompts.max_rows", None)),
    # the loss
    _row("actor.eps_clip", "exact", CLIP, m.clip, idle=when("actor.eps_clip_low_high", "eps_clip_low_high overrides it")),
    _row("actor.eps_clip_low_high", "exact", CLIP, m.clip),
    _row("actor.dual_clip", "exact", "algorithm.loss.dual_clip"),
    _row("critic.value_clip", "exact", "critic.value_clip", idle=m.no_critic),
    _row("algo.advantage.lambd", "exact", "algorithm.advantage.lambd", idle=m.no_critic),
    _row("algo.advantage.gamma", "exact", "algorithm.advantage.gamma", idle=m.no_discount),
    _row(
        "train.micro_batch_size",
        "hint",
        "learner.micro_batch_tokens",
        m.micro_batch,
        idle=when(DYNAMIC, "micro-batches are counted in tokens"),
        reading=m.BUDGET,
    ),
    _row("train.batch_size", "exact", "algorithm.updates_per_step algorithm.batch_samples algorithm.remainder", m.optimizer_steps),
    _row("reward.normalize_enable", "exact", "reward.normalize critic.normalize", m.normalized, idle=m.no_value_model),
    _row("rollout.top_p", "exact", "rollout.top_p"),
    _row("rollout.temperature", "exact", "rollout.temperature"),
    _row("train.seed", "exact", "run.seed"),
    _row("train.full_determinism_enable", "exact", "run.deterministic"),
    _row("critic.freezing_steps", "exact", "critic.freeze_policy_steps", m.frozen_steps),
    _row("rollout.n_samples_per_prompt", "exact", "rollout.samples_per_prompt"),
    _row("critic.save_value_network", "exact", "critic.save", idle=m.no_critic),
    _row("algo.kl.target", "exact", "algorithm.kl.target", idle=m.no_reference),
    _row("algo.kl.horizon", "exact", "algorithm.kl.horizon", idle=m.no_kl_target),
    _row("algo.kl.init_coef", "exact", "algorithm.kl.coefficient"),
    _row("actor.policy_loss_type", "exact", "algorithm.loss.kind"),
    _row("actor.loss_agg_mode", "exact", "algorithm.loss_mean algorithm.regularization_mean", m.loss_mean),
    _row("algo.kl.estimator", "exact", "algorithm.kl.estimator algorithm.kl.limit", m.kl_estimator, idle=m.no_reference),
    _row("algo.kl.unbiased_gradient", "exact", "algorithm.kl.unbiased_gradient", idle=m.no_reference),
    _row("actor.aux_loss_coef", "exact", "algorithm.loss.router_aux"),
    _row("actor.entropy_coef", "exact", "algorithm.loss.entropy_coefficient"),
    _row("reward.clip_range", "exact", "reward.clip_range"),
    *_optimizer_rows("actor", "learner"),
    *_optimizer_rows("critic", "critic"),
    _row("algo.advantage.estimator", "exact", "algorithm.advantage.estimator algorithm.advantage.whiten", m.estimator),
    _row("algo.kl.use_loss", "exact", "algorithm.kl.place", m.kl_place, idle=m.no_reference),
    _row("algo.advantage.no_std_norm", "exact", NORMALIZE, inverse(NORMALIZE), idle=m.not_whitened),
    # rewards
    _row("reward.overlong_buffer_len", "exact", OVERLONG, m.overlong),
    _row("reward.overlong_penalty_factor", "exact", "reward.overlong_penalty", idle=m.no_overlong_buffer),
    _row("reward.stop_properly_penalty_coef", "exact", "reward.stop_properly_penalty"),
    _row("ds.ring_attn_size", "maybe", "learner.sequence_parallel critic.sequence_parallel", slices, reading=not_sliced),
    _row("ds.ring_attn_head_stride", "noop", reading="speed only"),
    # models
    _row("actor.model_name_or_path", "exact", "policy.path"),
    _row("reward.model_name_or_path", "exact", "reward.model_path", idle=m.no_reward_model),
    _row("reward.remote_url", "exact", REWARDS, m.reward_source, idle=when("train.agent_func_path", "the agent supplies the rewards")),
    _row("critic.model_name_or_path", "exact", "critic.path", idle=m.no_critic),
    _row("ds.value_head_prefix", "exact", "critic.value_head reward.value_head", m.value_head, idle=m.no_value_head),
    _row("ref.offload", "hint", idle=m.no_reference, reading=m.PARKED),
    _row("reward.offload", "hint", idle=m.no_reward_model, reading=m.PARKED),
    _row("train.agent_func_path", "exact", "agent.path agent.max_tokens", m.agent),
    # data
    _row("data.prompt_dataset", "exact", "prompts.path prompts.paths", m.dataset("prompts")),
    _row("data.prompt_probs", "exact", "prompts.probabilities", m.probabilities("prompts")),
    _row("data.prompt_split", "exact", "prompts.split"),
    _row("eval.dataset", "exact", "evaluate.path evaluate.prompts evaluate.greedy", m.evaluation_set, idle=m.no_evaluation_of_set),
    _row("eval.split", "exact", "evaluate.split", idle=m.no_evaluation),
    _row("eval.temperature", "exact", "evaluate.temperature", idle=m.no_evaluation),
    _row("eval.n_samples_per_prompt", "exact", "evaluate.samples_per_prompt", idle=m.no_evaluation),
    _row("data.input_key", "exact", "prompts.prompt_column"),
    _row("data.label_key", "exact", "prompts.answer_column", m.text("prompts.answer_column")),
    _row("data.input_template", "exact", "prompts.input_template", m.input_template, idle=when(CHAT, "the chat template takes its place")),
    _row("data.apply_chat_template", "exact", "prompts.template", m.template),
    # sinks
    _row("logger.wandb.key", "exact", "watch.wandb", m.wandb),
    *[
        _row(f"logger.wandb.{name}", "exact", key, idle=unless("logger.wandb.key", "Weights & Biases is off"))
        for name, key in [("org", "watch.wandb_entity"), ("group", "watch.wandb_group"), ("project", "watch.wandb_project")]
    ],
    _row("logger.wandb.run_name", "exact", "watch.run_name", idle=m.no_run_name),  # and the run folder's name, if the command gives one
    # filtering
    _row("algo.dynamic_filtering_enable", "exact", "algorithm.filter_range", m.filter_range),
    _row(
        "algo.dynamic_filtering_range",
        "exact",
        "algorithm.filter_range",
        idle=unless("algo.dynamic_filtering_enable", "groups are not filtered"),
    ),
    # images
    _row("data.image_key", "error", reading="prompts with images are outside what this runtime trains"),
    _row("data.max_images_per_prompt", "error", reading="prompts with images are outside what this runtime trains"),
    _row("actor.freeze_visual_encoder", "error", reading="models with a vision tower are outside what this runtime trains"),
    _row("logger.tensorboard_dir", "exact", "watch.tensorboard watch.tensorboard_path", m.tensorboard),
    _row("use_ms", "absent", reading=f"ModelScope {m.NOT_HERE}"),
)

ALWAYS: dict[str, Any] = {
    "watch.metric_names": "openrlhf",
    "prompts.add_bos": False,
    "prompts.tools_column": "",
    "reward.timeout_s": 180.0,  # of OpenRLHF's HTTP client; its reward functions have no limit
    "rollout.min_tokens": 1,  # as in OpenRLHF's SamplingParams in every version
}
"""Settings that no flag decides: what OpenRLHF always does, and its metric names."""


@cache
def rule_of() -> dict[str, Rule]:
    return {rule.name: rule for rule in RULES}


def owned_keys() -> dict[str, str]:
    """Return {recipe key: the flag that decides it}. Hints decide nothing, so --elastic.* may set their keys."""
    return {key: f"--{rule.name}" for rule in RULES if rule.kind in ("exact", "cond") for key in rule.keys}
