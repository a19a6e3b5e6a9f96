"""Recipe keys of each flag of the newest version, one row per flag in the launcher's order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf import idle_flags as idle
from rlhfless_ray.compat.openrlhf.flag_semantics import ALL, NOT_HERE
from rlhfless_ray.compat.openrlhf.normalise import GATING, LEVEL, MODE, THRESHOLD, Values
from rlhfless_ray.compat.openrlhf.rank_groups import divides, not_divided, not_sliced, slices
from rlhfless_ray.compat.openrlhf.rules import Rule

row = Rule[Values]

CLIP = "algorithm.clip_low algorithm.clip_high"
ASYNCHRONOUS = "rollout.max_lag_steps rollout.partial rollout.ahead rollout.oversample"
CORRECTION_KEYS = " ".join(
    [
        "algorithm.importance_cap",
        *(f"algorithm.loss.correction_{part}" for part in ("level", "mode", "gating", "low", "high")),
        "algorithm.loss.ratio_to",
        "algorithm.uncorrected_lag",
    ]
)
SHARED = "functions pass slots to each other here, so models need not share a GPU"
PULLED = "engines pull weights by version and checksum, so no collective is set up"
PARKED = "a process without work gives its device back in any case"
SCORES = "scoring passes of the learner use its own budget"
FILLED = "micro-batches are always filled by tokens"
IMAGES = "prompts with images are read by recipes only, with prompts.image_column and `<image>` where each goes"


def clip(x: object, v: Values) -> JsonObject:
    low, high = v["actor.eps_clip_low_high"] or (v["actor.eps_clip"],) * 2
    return {"algorithm.clip_low": low, "algorithm.clip_high": high}


def of_values(key: str) -> m.Make:
    """Return a function that sets a key of the reward model and the critic, as far as there are any."""
    return lambda x, v: ({} if v.external_reward else {f"reward.{key}": x}) | ({f"critic.{key}": x} if v.has_critic else {})


def lag(x: object, v: Values) -> JsonObject:
    return m.asynchronous(v)


def _size_rows(model: str, section: str, idle: Callable[[Values], str], reading: Callable[[Values], str]) -> list[Rule[Values]]:
    return [
        row(
            f"{model}.{part}",
            "hint",
            f"{section}.ranks",
            when=lambda x, v: model != "ref" or not v["ds.lora.rank"],
            value=lambda x, v: v.ranks(model),
            idle=idle,
            reading=reading,
        )
        for part in ("num_nodes", "num_gpus_per_node")
    ]


def _ranks_of_learner(v: Values) -> str:
    ranks = v.world("actor")
    return f"{ranks} rank{'s' * (ranks > 1)} of the learner at most; results do not depend on their number"


def _slots_of_reference(v: Values) -> str:
    if v["ds.lora.rank"]:
        return "with LoRA the reference model is the policy without its adapters, in the learner"
    return f"the reference model takes {v.slots('ref')} at most"


def _width(v: Values) -> str:
    devices = v["vllm.tensor_parallel_size"]
    if devices == 1:
        return "an engine takes one slot"
    return f"an engine takes {devices} GPUs of one node, and one slot where slots are CPU cores"


def _attention(v: Values) -> str:
    return f"the model's attention kernel, equal to {v['ds.attn_implementation']} up to rounding"


def _engines(v: Values) -> str:
    if not v.engines:
        return "OpenRLHF needs a number of engines; here the plan of each step decides"
    return f"{v.engines} engine{'s' * (v.engines > 1)} at most; the plan of each step decides how many there are"


def _optimizer_rows(model: str, section: str) -> list[Rule[Values]]:
    trains = model == "actor"

    def unused(v: Values) -> str:
        return "" if trains else idle.no_critic(v)

    def no_muon(v: Values) -> str:
        return unused(v) or ("" if v[f"{model}.optim"] == "muon" else f"the {model}'s optimizer is adam")

    def no_warmup(v: Values) -> str:
        return unused(v) or ("a constant rate has no warm-up" if v[f"{model}.lr_scheduler"] == "constant" else "")

    def no_floor(v: Values) -> str:
        return unused(v) or ("" if v[f"{model}.lr_scheduler"] == "cosine_with_min_lr" else "only cosine_with_min_lr has a floor")

    def decay(x: float, v: Values) -> JsonObject:
        return {f"{section}.weight_decay": x} | ({"learner.decay_all": False} if x and trains else {})

    scheduled = f"{section}.schedule {section}.warmup_share {section}.min_rate_share" + " learner.warmup_steps" * trains
    schedule = m.schedule(model, section)
    return [
        row(f"{model}.optim", "cond", f"{section}.optimizer", idle=unused),
        *[row(f"{model}.muon.{name}", "absent", idle=no_muon, reading=f"Muon {NOT_HERE}") for name in ("lr", "momentum")],
        *[row(f"{model}.muon.{name}", "noop", reading="OpenRLHF does not use it") for name in ("ns_steps", "nesterov", "no_nesterov")],
        row(f"{model}.adam.lr", "exact", f"{section}.learning_rate", idle=unused),
        row(f"{model}.adam.betas", "exact", f"{section}.betas", idle=unused),
        row(f"{model}.adam.eps", "exact", f"{section}.adam_eps", idle=unused),
        row(f"{model}.adam.weight_decay", "exact", f"{section}.weight_decay" + " learner.decay_all" * trains, decay, idle=unused),
        row(f"{model}.lr_scheduler", "exact", scheduled, schedule, idle=unused),
        row(f"{model}.lr_warmup_ratio", "exact", scheduled, schedule, idle=no_warmup),
        row(f"{model}.min_lr_ratio", "exact", scheduled, schedule, idle=no_floor),
        row(f"{model}.max_norm", "exact", f"{section}.grad_clip", idle=unused),
    ]


RULES: tuple[Rule[Values], ...] = (
    # resources
    *_size_rows("ref", "reference", idle.no_reference, _slots_of_reference),
    *_size_rows("reward", "reward", idle.no_reward_model, lambda v: f"the reward model takes {v.slots('reward')} at most"),
    *_size_rows("actor", "learner", lambda v: "", _ranks_of_learner),
    *_size_rows("critic", "critic", idle.no_critic, lambda v: f"the critic takes {v.slots('critic')} at most"),
    *[row(f"train.{name}", "hint", reading=SHARED) for name in ("colocate_actor_ref", "colocate_critic_reward", "colocate_all")],
    row("vllm.num_engines", "hint", "rollout.max_actors", when=lambda x, v: x, reading=_engines),
    row("vllm.tensor_parallel_size", "hint", "rollout.tensor_parallel", reading=_width),
    row("vllm.sync_backend", "hint", reading=PULLED),
    row("vllm.sync_with_ray", "noop", reading=PULLED),
    row("vllm.enable_prefix_caching", "hint", reading="always on, salted with the weight version"),
    row("vllm.enforce_eager", "noop", reading="engines choose the mode themselves"),
    row("vllm.enable_sleep", "hint", reading=PARKED),
    row("vllm.gpu_memory_utilization", "hint", "rollout.gpu_memory_share", reading="share of a GPU's memory that one engine takes"),
    # importance correction
    row(LEVEL, "exact", CORRECTION_KEYS, m.correction),
    row(MODE, "exact", CORRECTION_KEYS, m.correction, idle=idle.no_correction),
    row(GATING, "exact", CORRECTION_KEYS, m.correction, idle=idle.no_correction),
    row(THRESHOLD, "exact", CORRECTION_KEYS, m.correction, idle=idle.no_correction),
    # staleness
    row("train.async_enable", "cond", ASYNCHRONOUS, lag, when=lambda x, v: x),
    row("train.async_queue_size", "cond", ASYNCHRONOUS, lag, idle=idle.unless("train.async_enable", "training is synchronous")),
    row("train.partial_rollout_enable", "cond", ASYNCHRONOUS, lag, when=lambda x, v: x),
    # evaluation, checkpoints, logs
    row(
        "eval.steps",
        "exact",
        "evaluate.every_steps evaluate.prompts",
        lambda x, v: {"evaluate.every_steps": x} if v.evaluates else {"evaluate.prompts": 0},
        idle=idle.no_set,
    ),
    row("ckpt.save_steps", "exact", "checkpoint.every_steps", when=lambda x, v: x > 0),
    row("logger.logging_steps", "exact", "watch.every_steps"),
    row("ckpt.path", "exact", "checkpoint.path", idle=idle.no_checkpoints),
    row("ckpt.save_hf", "exact", "checkpoint.save_hf", idle=idle.no_checkpoints),
    row("ckpt.disable_ds", "exact", "checkpoint.resumable", value=lambda x, v: not x, idle=idle.no_checkpoints),
    row("ckpt.max_num", "exact", "checkpoint.keep", idle=idle.no_limited_checkpoints),
    row("ckpt.max_mem", "exact", "checkpoint.max_gib", value=lambda x, v: x if x < ALL else inf, idle=idle.no_limited_checkpoints),
    row("ckpt.load_enable", "exact", "checkpoint.resume"),
    row(
        "ckpt.best_metric_key", "exact", "checkpoint.best_metric", value=lambda x, v: x if v.evaluates else "none", idle=idle.no_evaluation
    ),
    row("ds.use_universal_ckpt", "noop", reading="a checkpoint holds weights by name and is read with any number of ranks"),
    row("local_rank", "noop", reading="Ray assigns ranks"),
    # the learner's memory and speed
    row("ds.zero_stage", "hint", "learner.zero_stage", m.zero_stage, reading=m.zero_stage_here),
    row("actor.gradient_checkpointing_enable", "exact", "learner.gradient_checkpointing"),
    row("ds.deepcompile", "noop", reading="speed only"),
    row("ds.param_dtype", "cond", "policy.dtype", m.param_dtype, reading=m.unknown_dtype),
    row("train.enable_ema", "exact", "ema.beta", value=lambda x, v: v["train.ema_beta"] if x else None),
    row("train.ema_beta", "exact", "ema.beta", idle=idle.unless("train.enable_ema", "no average is kept")),
    row("ds.zpg", "noop", reading="speed only"),
    row("ds.adam_offload", "hint", "learner.optimizer_offload", reading=m.OFFLOADED),
    row("ds.attn_implementation", "hint", reading=_attention),
    row("ds.experts_implementation", "absent", reading=f"another implementation of experts {NOT_HERE}"),
    row("ds.use_liger_kernel", "noop", reading="speed and memory only"),
    row("ds.grad_accum_dtype", "noop", reading="gradients are accumulated in float32"),
    row("ds.overlap_comm", "noop", reading="speed only"),
    row("actor.gradient_checkpointing_reentrant", "noop", reading="speed and memory only"),
    row("data.disable_fast_tokenizer", "noop", reading="transformers 5 has one tokenizer class for each model"),
    row("data.dataloader_num_workers", "noop", reading="prompts are tokenized before the run"),
    row("ds.enable_sleep", "hint", reading=PARKED),
    row("ds.tensor_parallel_size", "maybe", "learner.tensor_parallel critic.tensor_parallel", divides, reading=not_divided),
    row("ds.packing_samples", "noop", reading=FILLED),
    row("train.dynamic_batch_enable", "hint", reading=FILLED),
    row("rollout.max_tokens_per_gpu", "hint", reading=SCORES),
    row(
        "train.max_tokens_per_gpu",
        "hint",
        "learner.micro_batch_tokens",
        idle=idle.unless("train.dynamic_batch_enable", "micro-batches are counted in samples"),
        reading=m.BUDGET,
    ),
    row(
        "ds.load_in_4bit",
        "error",
        reading="engines cannot load bitsandbytes, which this flag uses; leave it out, or "
        "give a checkpoint in the 4 bits of compressed-tensors as the model",
    ),
    # adapters
    row("ds.lora.rank", "cond", "lora.rank"),
    row("ds.lora.alpha", "cond", "lora.alpha", idle=idle.no_lora),
    row("ds.lora.target_modules", "cond", "lora.target_modules", value=lambda x, v: [x] if isinstance(x, str) else x, idle=idle.no_lora),
    row("ds.lora.dropout", "cond", "lora.dropout", idle=idle.no_lora),
    # steps and batches
    row("ckpt.output_dir", "exact", "save.path"),
    row("train.num_episodes", "exact", "run.episodes"),
    row("rollout.batch_size", "exact", "prompts.batch_prompts"),
    row("rollout.vllm_generate_batch_size", "cond", ASYNCHRONOUS, m.generate_batch, idle=m.no_generate_batch, reading=m.no_sample_buffer),
    row("rollout.micro_batch_size", "hint", reading=SCORES),
    row("train.max_epochs", "exact", "algorithm.epochs"),
    row("data.max_len", "exact", "prompts.max_prompt_tokens rollout.max_tokens rollout.max_total_tokens", m.lengths),
    row("rollout.max_new_tokens", "exact", "rollout.max_tokens rollout.max_total_tokens prompts.max_prompt_tokens", m.lengths),
    row("data.max_samples", "exact", "prompts.max_rows", value=lambda x, v: x if x < ALL else None),
    # the loss
    row("actor.eps_clip", "exact", CLIP, clip, idle=idle.when("actor.eps_clip_low_high", "eps_clip_low_high overrides it")),
    row("actor.eps_clip_low_high", "exact", CLIP, clip),
    row("actor.dual_clip", "exact", "algorithm.loss.dual_clip"),
    row("critic.value_clip", "exact", "critic.value_clip", idle=idle.no_critic),
    row("algo.advantage.lambd", "exact", "algorithm.advantage.lambd", idle=idle.no_critic),
    row("algo.advantage.gamma", "exact", "algorithm.advantage.gamma", idle=idle.no_discount),
    row(
        "train.micro_batch_size",
        "hint",
        "learner.micro_batch_tokens",
        value=lambda x, v: x * v["data.max_len"],
        idle=idle.when("train.dynamic_batch_enable", "micro-batches are counted in tokens"),
        reading=m.BUDGET,
    ),
    row("train.batch_size", "exact", "algorithm.updates_per_step algorithm.batch_samples algorithm.remainder", m.optimizer_steps),
    row("reward.normalize_enable", "exact", "reward.normalize critic.normalize", of_values("normalize"), idle=idle.no_value_model),
    row("rollout.top_p", "exact", "rollout.top_p"),
    row("rollout.temperature", "exact", "rollout.temperature"),
    row("train.seed", "exact", "run.seed"),
    row("train.full_determinism_enable", "exact", "run.deterministic"),
    row("critic.freezing_steps", "exact", "critic.freeze_policy_steps", m.frozen_steps),
    row("rollout.n_samples_per_prompt", "exact", "rollout.samples_per_prompt"),
    row("critic.save_value_network", "exact", "critic.save", idle=idle.no_critic),
    row("algo.kl.target", "exact", "algorithm.kl.target", idle=idle.no_reference),
    row("algo.kl.horizon", "exact", "algorithm.kl.horizon", idle=idle.no_kl_target),
    row("algo.kl.init_coef", "exact", "algorithm.kl.coefficient"),
    row("actor.policy_loss_type", "exact", "algorithm.loss.kind"),
    row("actor.loss_agg_mode", "exact", "algorithm.loss_mean algorithm.regularization_mean", m.loss_mean),
    row("algo.kl.estimator", "exact", "algorithm.kl.estimator algorithm.kl.limit", m.kl_estimator, idle=idle.no_reference),
    row("algo.kl.unbiased_gradient", "exact", "algorithm.kl.unbiased_gradient", idle=idle.no_reference),
    row("actor.aux_loss_coef", "exact", "algorithm.loss.router_aux"),
    row("actor.entropy_coef", "exact", "algorithm.loss.entropy_coefficient"),
    row("reward.clip_range", "exact", "reward.clip_range"),
    *_optimizer_rows("actor", "learner"),
    *_optimizer_rows("critic", "critic"),
    row("algo.advantage.estimator", "exact", "algorithm.advantage.estimator algorithm.advantage.whiten", m.estimator),
    row("algo.kl.use_loss", "exact", "algorithm.kl.place", value=lambda x, v: "loss" if x else "reward", idle=idle.no_reference),
    row("algo.advantage.no_std_norm", "exact", "algorithm.advantage.normalize_std", value=lambda x, v: not x, idle=idle.no_whitening),
    # rewards
    row(
        "reward.overlong_buffer_len",
        "exact",
        "reward.overlong_buffer_tokens reward.overlong_limit_tokens reward.overlong_feedback",
        m.overlong,
    ),
    row("reward.overlong_penalty_factor", "exact", "reward.overlong_penalty", idle=idle.no_overlong_buffer),
    row("reward.stop_properly_penalty_coef", "exact", "reward.stop_properly_penalty"),
    row("ds.ring_attn_size", "maybe", "learner.sequence_parallel critic.sequence_parallel", slices, reading=not_sliced),
    row("ds.ring_attn_head_stride", "noop", reading="speed only"),
    # models
    row("actor.model_name_or_path", "exact", "policy.path"),
    row("reward.model_name_or_path", "exact", "reward.model_path", idle=idle.no_reward_model),
    row(
        "reward.remote_url",
        "exact",
        "reward.function reward.contract reward.url",
        m.reward_source,
        idle=idle.when("train.agent_func_path", "the agent supplies the rewards"),
    ),
    row("critic.model_name_or_path", "exact", "critic.path", idle=idle.no_critic),
    row("ds.value_head_prefix", "exact", "critic.value_head reward.value_head", of_values("value_head"), idle=idle.no_value_head),
    row("ref.offload", "hint", idle=idle.no_reference, reading=PARKED),
    row("reward.offload", "hint", idle=idle.no_reward_model, reading=PARKED),
    row("train.agent_func_path", "exact", "agent.path agent.max_tokens", m.agent),
    # data
    row("data.prompt_dataset", "exact", "prompts.path prompts.paths", m.dataset("prompts")),
    row("data.prompt_probs", "exact", "prompts.probabilities", m.probabilities("prompts")),
    row("data.prompt_split", "exact", "prompts.split"),
    row(
        "eval.dataset",
        "exact",
        "evaluate.path evaluate.prompts evaluate.greedy",
        lambda x, v: {"evaluate.path": x, "evaluate.greedy": False} if v.evaluates else {"evaluate.prompts": 0},
        idle=idle.off_for_set,
    ),
    row("eval.split", "exact", "evaluate.split", idle=idle.no_evaluation),
    row("eval.temperature", "exact", "evaluate.temperature", idle=idle.no_evaluation),
    row("eval.n_samples_per_prompt", "exact", "evaluate.samples_per_prompt", idle=idle.no_evaluation),
    row("data.input_key", "exact", "prompts.prompt_column"),
    row("data.label_key", "exact", "prompts.answer_column", value=lambda x, v: x or ""),
    row(
        "data.input_template",
        "exact",
        "prompts.input_template",
        value=lambda x, v: x if x and "{}" in x and not v["data.apply_chat_template"] else None,
        idle=idle.when("data.apply_chat_template", "the chat template takes its place"),
    ),
    row("data.apply_chat_template", "exact", "prompts.template", value=lambda x, v: "chat" if x else "none"),
    # sinks
    row("logger.wandb.key", "exact", "watch.wandb", value=lambda x, v: "online" if x else "off"),
    *[
        row(f"logger.wandb.{name}", "exact", key, idle=idle.no_wandb)
        for name, key in [("org", "watch.wandb_entity"), ("group", "watch.wandb_group"), ("project", "watch.wandb_project")]
    ],
    row("logger.wandb.run_name", "exact", "watch.run_name", idle=idle.no_run_name),  # and the run folder's name, if the command gives one
    # filtering
    row(
        "algo.dynamic_filtering_enable",
        "exact",
        "algorithm.filter_range",
        value=lambda x, v: v["algo.dynamic_filtering_range"] if x else None,
    ),
    row(
        "algo.dynamic_filtering_range",
        "exact",
        "algorithm.filter_range",
        idle=idle.unless("algo.dynamic_filtering_enable", "groups are not filtered"),
    ),
    # images
    row("data.image_key", "error", reading=IMAGES),
    row("data.max_images_per_prompt", "error", reading=IMAGES),
    row(
        "actor.freeze_visual_encoder",
        "error",
        reading="recipes only train models with a vision tower; theirs is frozen unless learner.train_vision",
    ),
    row("logger.tensorboard_dir", "exact", "watch.tensorboard watch.tensorboard_path", m.tensorboard),
    row("use_ms", "absent", reading=f"ModelScope {NOT_HERE}"),
)

ALWAYS: JsonObject = {
    "watch.metric_names": "openrlhf",
    "prompts.add_bos": False,
    "prompts.tools_column": "",
    "prompts.image_column": "",  # --image_key is refused
    "reward.timeout_s": 180.0,  # of OpenRLHF's HTTP client; its reward functions have no limit
    "rollout.min_tokens": 1,  # as in OpenRLHF's SamplingParams in every version
}
"""Settings that no flag decides: what OpenRLHF always does, and its metric names."""


@cache
def rule_of() -> dict[str, Rule[Values]]:
    return {rule.name: rule for rule in RULES}


def owned_keys() -> dict[str, str]:
    """Return {recipe key: the flag that decides it}. Hints decide nothing, so --elastic.* may set their keys."""
    return {key: f"--{rule.name}" for rule in RULES if rule.kind in ("exact", "cond") for key in rule.keys}
