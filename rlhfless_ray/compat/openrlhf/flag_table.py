"""Recipe keys of each flag of the newest version, one row per flag in the launcher's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from rlhfless_ray.compat.openrlhf import flag_semantics as m
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
    _row("train.async_enable", "exact", ASYNCHRONOUS, lambda x, v: m.asynchronous(v) if x else {}),
    _row(
        "train.async_queue_size",
        "cond",
        ASYNCHRONOUS,
        lambda x, v: m.asynchronous(v),
        idle=lambda v: "" if v["train.async_enable"] else "training is synchronous",
    ),
    _row("train.partial_rollout_enable", "exact", ASYNCHRONOUS, lambda x, v: m.asynchronous(v) if x else {}),
    # evaluation, checkpoints, logs
    _row(
        "eval.steps",
        "exact",
        "evaluate.every_steps evaluate.prompts",
        lambda x, v: {"evaluate.prompts": 0} if m.no_evaluation(v) else {"evaluate.every_steps": x},
        idle=lambda v: "" if v["eval.dataset"] else "there is no evaluation data set",
    ),
    _row("ckpt.save_steps", "exact", "checkpoint.every_steps", lambda x, v: {"checkpoint.every_steps": x} if x > 0 else {}),
    _row("logger.logging_steps", "exact", "watch.every_steps"),
    _row("ckpt.path", "exact", "checkpoint.path", idle=m.no_checkpoints),
    _row("ckpt.save_hf", "exact", "checkpoint.save_hf", idle=m.no_checkpoints),
    _row("ckpt.disable_ds", "exact", "checkpoint.resumable", lambda x, v: {"checkpoint.resumable": not x}, idle=m.no_checkpoints),
    _row("ckpt.max_num", "exact", "checkpoint.keep", idle=m.no_limited_checkpoints),
    _row(
        "ckpt.max_mem",
        "exact",
        "checkpoint.max_gib",
        lambda x, v: {"checkpoint.max_gib": x if x < 1e8 else float("inf")},
        idle=m.no_limited_checkpoints,
    ),
    _row("ckpt.load_enable", "exact", "checkpoint.resume"),
    _row(
        "ckpt.best_metric_key",
        "exact",
        "checkpoint.best_metric",
        lambda x, v: {"checkpoint.best_metric": m.best_metric(v)},
        idle=m.no_evaluation,
    ),
    _row("ds.use_universal_ckpt", "noop", reading="a checkpoint holds weights by name and is read with any number of ranks"),
    _row("local_rank", "noop", reading="Ray assigns ranks"),
    # the learner's memory and speed
    _row(
        "ds.zero_stage",
        "hint",
        "learner.zero_stage",
        m.zero_stage,
        reading=lambda v: f"ZeRO stage {m.zero_stage(v['ds.zero_stage'], v)['learner.zero_stage']}",
    ),
    _row("actor.gradient_checkpointing_enable", "exact", "learner.gradient_checkpointing"),
    _row("ds.deepcompile", "noop", reading="speed only"),
    _row("ds.param_dtype", "cond", "policy.dtype", m.param_dtype, reading=m.unknown_dtype),
    _row("train.enable_ema", "exact", "ema.beta", lambda x, v: {"ema.beta": v["train.ema_beta"] if x else None}),
    _row("train.ema_beta", "exact", "ema.beta", idle=lambda v: "" if v["train.enable_ema"] else "no average is kept"),
    _row("ds.zpg", "noop", reading="speed only"),
    _row(
        "ds.adam_offload",
        "hint",
        "learner.optimizer_offload",
        reading="moments and float32 weights of policy and critic stay in host memory, where torch's AdamW updates them",
    ),
    _row(
        "ds.attn_implementation",
        "hint",
        reading=lambda v: f"the model's attention kernel, equal to {v['ds.attn_implementation']} up to rounding",
    ),
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
        idle=lambda v: "" if v["train.dynamic_batch_enable"] else "micro-batches are counted in samples",
        reading=m.BUDGET,
    ),
    _row("ds.load_in_4bit", "error", reading="4-bit base weights are outside what this runtime trains; leave it out"),
    # adapters
    _row("ds.lora.rank", "cond", "lora.rank"),
    _row("ds.lora.alpha", "cond", "lora.alpha", idle=m.no_lora),
    _row(
        "ds.lora.target_modules",
        "cond",
        "lora.target_modules",
        lambda x, v: {"lora.target_modules": [x] if isinstance(x, str) else x},
        idle=m.no_lora,
    ),
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
    _row("data.max_samples", "exact", "prompts.max_rows", lambda x, v: {"prompts.max_rows": x if x < m.ALL_ROWS else None}),
    # the loss
    _row(
        "actor.eps_clip",
        "exact",
        "algorithm.clip_low algorithm.clip_high",
        m.clip,
        idle=lambda v: "eps_clip_low_high overrides it" if v["actor.eps_clip_low_high"] else "",
    ),
    _row("actor.eps_clip_low_high", "exact", "algorithm.clip_low algorithm.clip_high", m.clip),
    _row("actor.dual_clip", "exact", "algorithm.loss.dual_clip"),
    _row("critic.value_clip", "exact", "critic.value_clip", idle=m.no_critic),
    _row("algo.advantage.lambd", "exact", "algorithm.advantage.lambd", idle=m.no_critic),
    _row(
        "algo.advantage.gamma",
        "exact",
        "algorithm.advantage.gamma",
        idle=lambda v: "" if v.traits.discounts else f"{v.estimator} does not discount",
    ),
    _row(
        "train.micro_batch_size",
        "hint",
        "learner.micro_batch_tokens",
        m.micro_batch,
        idle=lambda v: "micro-batches are counted in tokens" if v["train.dynamic_batch_enable"] else "",
        reading=m.BUDGET,
    ),
    _row("train.batch_size", "exact", "algorithm.updates_per_step algorithm.batch_samples algorithm.remainder", m.optimizer_steps),
    _row(
        "reward.normalize_enable",
        "exact",
        "reward.normalize critic.normalize",
        m.normalized,
        idle=lambda v: "" if v.has_critic else m.no_reward_model(v),
    ),
    _row("rollout.top_p", "exact", "rollout.top_p"),
    _row("rollout.temperature", "exact", "rollout.temperature"),
    _row("train.seed", "exact", "run.seed"),
    _row("train.full_determinism_enable", "exact", "run.deterministic"),
    _row("critic.freezing_steps", "exact", "critic.freeze_policy_steps", m.frozen_steps),
    _row("rollout.n_samples_per_prompt", "exact", "rollout.samples_per_prompt"),
    _row("critic.save_value_network", "exact", "critic.save", idle=m.no_critic),
    _row("algo.kl.target", "exact", "algorithm.kl.target", idle=m.no_reference),
    _row(
        "algo.kl.horizon",
        "exact",
        "algorithm.kl.horizon",
        idle=lambda v: m.no_reference(v) or ("" if v["algo.kl.target"] else "no KL target"),
    ),
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
    _row(
        "algo.kl.use_loss",
        "exact",
        "algorithm.kl.place",
        lambda x, v: {"algorithm.kl.place": "loss" if x else "reward"},
        idle=m.no_reference,
    ),
    _row(
        "algo.advantage.no_std_norm",
        "exact",
        "algorithm.advantage.normalize_std",
        lambda x, v: {"algorithm.advantage.normalize_std": not x},
        idle=lambda v: "" if m.whitened(v) else f"{v.estimator} is not whitened",
    ),
    # rewards
    _row(
        "reward.overlong_buffer_len",
        "exact",
        "reward.overlong_buffer_tokens reward.overlong_limit_tokens reward.overlong_feedback",
        m.overlong,
    ),
    _row(
        "reward.overlong_penalty_factor",
        "exact",
        "reward.overlong_penalty",
        idle=lambda v: "no overlong buffer is set" if v["reward.overlong_buffer_len"] is None else "",
    ),
    _row("reward.stop_properly_penalty_coef", "exact", "reward.stop_properly_penalty"),
    _row("ds.ring_attn_size", "maybe", "learner.sequence_parallel critic.sequence_parallel", slices, reading=not_sliced),
    _row("ds.ring_attn_head_stride", "noop", reading="speed only"),
    # models
    _row("actor.model_name_or_path", "exact", "policy.path"),
    _row("reward.model_name_or_path", "exact", "reward.model_path", idle=m.no_reward_model),
    _row(
        "reward.remote_url",
        "exact",
        "reward.function reward.contract reward.url",
        m.reward_source,
        idle=lambda v: "the agent supplies the rewards" if v["train.agent_func_path"] else "",
    ),
    _row("critic.model_name_or_path", "exact", "critic.path", idle=m.no_critic),
    _row(
        "ds.value_head_prefix",
        "exact",
        "critic.value_head reward.value_head",
        lambda x, v: ({"critic.value_head": x} if v.has_critic else {}) | ({} if v.external_reward else {"reward.value_head": x}),
        idle=lambda v: "" if v.has_critic or not v.external_reward else "there is neither critic nor reward model",
    ),
    _row("ref.offload", "hint", idle=m.no_reference, reading=m.PARKED),
    _row("reward.offload", "hint", idle=m.no_reward_model, reading=m.PARKED),
    _row("train.agent_func_path", "exact", "agent.path agent.max_tokens", m.agent),
    # data
    _row("data.prompt_dataset", "exact", "prompts.path prompts.paths", m.dataset("prompts")),
    _row("data.prompt_probs", "exact", "prompts.probabilities", m.probabilities("prompts")),
    _row("data.prompt_split", "exact", "prompts.split"),
    _row(
        "eval.dataset",
        "exact",
        "evaluate.path evaluate.prompts evaluate.greedy",
        m.evaluation_set,
        idle=lambda v: m.no_evaluation(v) if v["eval.dataset"] else "",
    ),
    _row("eval.split", "exact", "evaluate.split", idle=m.no_evaluation),
    _row("eval.temperature", "exact", "evaluate.temperature", idle=m.no_evaluation),
    _row("eval.n_samples_per_prompt", "exact", "evaluate.samples_per_prompt", idle=m.no_evaluation),
    _row("data.input_key", "exact", "prompts.prompt_column"),
    _row("data.label_key", "exact", "prompts.answer_column", lambda x, v: {"prompts.answer_column": x or ""}),
    _row(
        "data.input_template",
        "exact",
        "prompts.input_template",
        m.input_template,
        idle=lambda v: "the chat template takes its place" if v["data.apply_chat_template"] else "",
    ),
    _row("data.apply_chat_template", "exact", "prompts.template", m.template),
    # sinks
    _row("logger.wandb.key", "exact", "watch.wandb", m.wandb),
    *[
        _row(f"logger.wandb.{name}", "exact", key, idle=lambda v: "" if v["logger.wandb.key"] else "Weights & Biases is off")
        for name, key in [("org", "watch.wandb_entity"), ("group", "watch.wandb_group"), ("project", "watch.wandb_project")]
    ],
    _row(
        "logger.wandb.run_name",
        "exact",
        "watch.run_name",  # and the run folder's name, if the command gives one
        idle=lambda v: (
            ""
            if v["logger.wandb.key"] or v["logger.tensorboard_dir"] or "logger.wandb.run_name" in v.set_by
            else "Weights & Biases and TensorBoard are off"
        ),
    ),
    # filtering
    _row(
        "algo.dynamic_filtering_enable",
        "exact",
        "algorithm.filter_range",
        lambda x, v: {"algorithm.filter_range": v["algo.dynamic_filtering_range"] if x else None},
    ),
    _row(
        "algo.dynamic_filtering_range",
        "exact",
        "algorithm.filter_range",
        idle=lambda v: "" if v["algo.dynamic_filtering_enable"] else "groups are not filtered",
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
