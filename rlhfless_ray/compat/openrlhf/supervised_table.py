"""Meaning of the supervised launchers' flags in a recipe: one row per flag of the newest version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf.flag_semantics import NOT_HERE
from rlhfless_ray.compat.openrlhf.flags import read_data
from rlhfless_ray.compat.openrlhf.launcher_flags import FlagRule, Values, only, required, row, shares_for
from rlhfless_ray.compat.openrlhf.rank_groups import (
    DECIDING,
    DIVIDED,
    MATRICES,
    SLICED_INSTEAD,
    why_not_divided,
    why_not_sliced,
    with_reason,
)

SFT, RM, DPO, KTO, KD, PRM = "train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm"
TASKS = {SFT: "sft", RM: "rm", DPO: "dpo", KTO: "kto", KD: "kd", PRM: "prm"}


def _dtype(x: Any, v: Values) -> dict[str, Any]:
    return m.switched_dtype(x, v["model.model_name_or_path"])


def _zero_stage(x: int, v: Values) -> dict[str, Any]:
    needs_one = v["ds.adam_offload"] or _dtype(v["ds.param_dtype"], v)["policy.dtype"] == "bfloat16"
    return {"learner.zero_stage": max(1, x) if needs_one else x}


def _template(x: str | None, v: Values) -> dict[str, Any]:
    replaced = (
        v["data.apply_chat_template"] or v.get("model.pretrain_mode_enable") or not (v.get("data.input_key") or v.get("data.prompt_key"))
    )
    return {} if replaced or "{}" not in (x or "") else {"data.input_template": x}


def _responses(x: str | None, v: Values) -> dict[str, Any]:
    return {"data.response_column": "" if v.get("model.pretrain_mode_enable") else x or ""}


def _turns(x: bool, v: Values) -> dict[str, Any]:
    return {"data.train_on": "assistant"} if x and not v["model.pretrain_mode_enable"] else {}


def _checkpoints(x: int, v: Values) -> dict[str, Any]:
    """Return the interval of checkpoints. With --ckpt.disable_ds alone OpenRLHF writes nothing at them."""
    writes = v.get("ckpt.save_hf") or not v.get("ckpt.disable_ds")
    return {"checkpoint.every_steps": max(0, x) if writes else 0}


def _models(x: bool, v: Values) -> dict[str, Any]:
    return {"checkpoint.save_hf": True} if x and v["ckpt.save_steps"] > 0 else {}


def _models_only(x: bool, v: Values) -> dict[str, Any]:
    if not x or v["ckpt.save_steps"] <= 0:
        return {}
    return {"checkpoint.resumable": False} if v.get("ckpt.save_hf") else {"checkpoint.every_steps": 0}


def _targets(x: Any, v: Values) -> dict[str, Any]:
    return m.target_modules(x, v) if v["ds.lora.rank"] else {}


def _where(name: str, key: str) -> Callable[[Any, Values], dict[str, Any]]:
    """Return a function that gives a key the flag's value if another flag is on."""
    return lambda x, v: {key: x} if v[name] else {}


def _where_schedule(key: str, counts: Callable[[str | None], bool]) -> Callable[[Any, Values], dict[str, Any]]:
    return lambda x, v: {key: x} if counts(v["lr_scheduler"]) else {}


def _evaluations(x: int, v: Values) -> dict[str, Any]:
    return {"evaluate.each_epoch": True} if x == -1 else {"evaluate.every_steps": x}


def _other_reference(x: str | None, v: Values) -> dict[str, Any]:
    return {"reference.path": "" if x in (None, v["model.model_name_or_path"]) else x}


def _not_sliced(x: int, v: Values) -> str:
    """Return why ranks do not share sequences, or an empty string if they do."""
    if x > 1 and not (why := _why_not_sliced(x, v)):
        return ""
    return f"{with_reason(DIVIDED, why if x > 1 else '')}. A run whose longest row does not fit a rank ends before Ray starts"


def _why_not_sliced(x: int, v: Values) -> str:
    dropout = v["ds.lora.dropout"] if v["ds.lora.rank"] else 0
    models = [v["model.model_name_or_path"], *filter(None, [v.get("ref.model_name_or_path")])]
    return next(filter(None, [_decided(v), *(why_not_sliced(x, v[RANKS], dropout, folder) for folder in models)]), "")


def _not_divided(x: int, v: Values) -> str:
    """Return why ranks do not share copies of the model, or an empty string if they do."""
    if x > 1 and not (why := _why_not_divided(x, v)):
        return ""
    return with_reason(MATRICES, why if x > 1 else "")


def _why_not_divided(x: int, v: Values) -> str:
    slices = v.get("ds.ring_attn_size") or 1
    if slices > 1 and not _why_not_sliced(slices, v):
        return SLICED_INSTEAD
    models = [v["model.model_name_or_path"], *filter(None, [v.get("teacher_model")])]
    whys = (why_not_divided(x, v[RANKS], v["ds.zero_stage"], folder) for folder in models)
    return next(filter(None, [_decided(v), *whys]), "")


def _decided(v: Values) -> str:
    """Return which of the command's own settings decides how ranks divide the work, or an empty string."""
    keys = {*DECIDING} - {"learner.ranks"}  # programs that start ranks become this one (`command._ranks`)
    return next((f"{flag} decides here how ranks divide the work" for flag in v[OWN] if flag.removeprefix("--elastic.") in keys), "")


RANKS, OWN = "ranks", "own"  # stand beside the flags' values: number of ranks, and flags --elastic.SECTION.KEY
WANDB = "logger.wandb.key"
PLAIN_ATTENTION = "kernels of attention are torch's own, and change no result"

RULES: tuple[FlagRule, ...] = (
    # checkpoints and evaluation
    row("ckpt.output_dir", "exact", "save.path"),
    row("ckpt.save_steps", "exact", "checkpoint.every_steps", _checkpoints),
    row(
        "ckpt.path",
        "exact",
        "checkpoint.path",
        lambda x, v: {"checkpoint.path": x} if v["ckpt.save_steps"] > 0 or v["ckpt.load_enable"] else {},
    ),
    row("ckpt.max_num", "exact", "checkpoint.keep"),
    row("ckpt.max_mem", "hint", reading="checkpoints are limited by their number"),
    row("ckpt.save_hf", "exact", "checkpoint.save_hf", _models),
    row("ckpt.disable_ds", "exact", "checkpoint.resumable", _models_only),
    row("ckpt.load_enable", "hint", reading="continue the newest run of this name with a checkpoint there, if any"),
    row("ds.use_universal_ckpt", "noop", reading="every checkpoint is read at any number of ranks"),
    row("eval.steps", "exact", "evaluate.every_steps evaluate.each_epoch", _evaluations),
    row("eval.dataset", "exact", "evaluate.path", m.text("evaluate.path")),
    row("eval.split", "exact", "evaluate.split", _where("eval.dataset", "evaluate.split")),
    # batches
    row("train.batch_size", "exact", "data.batch_rows"),
    row("train.micro_batch_size", "hint", reading=m.BUDGET),
    row("train.max_epochs", "exact", "run.epochs"),
    row("train.seed", "exact", "run.seed"),
    row("train.full_determinism_enable", "exact", "run.deterministic"),
    row("local_rank", "noop", reading="Ray Train numbers the ranks"),
    # model
    row("model.model_name_or_path", "exact", "policy.path", m.text("policy.path"), refuses=required("name the model to train")),
    row("ds.param_dtype", "exact", "policy.dtype", _dtype),
    row("ds.zero_stage", "exact", "learner.zero_stage", _zero_stage),
    row("ds.adam_offload", "exact", "learner.optimizer_offload"),
    row(
        "model.gradient_checkpointing_enable",
        "exact",
        "learner.gradient_checkpointing",
        lambda x, v: {"learner.gradient_checkpointing": bool(x)},
    ),
    row("model.gradient_checkpointing_reentrant", "noop", reading="it changes no result"),
    row("model.aux_loss_coef", "absent", refuses=only(0, "the router's auxiliary loss " + NOT_HERE), reading="the default"),
    row(
        "ds.load_in_4bit",
        "absent",
        refuses=only(False, "quantising weights when they are loaded has no counterpart here"),
        reading="the default",
    ),
    row("ds.lora.rank", "exact", "lora.rank"),
    row("ds.lora.alpha", "exact", "lora.alpha", _where("ds.lora.rank", "lora.alpha")),
    row("ds.lora.dropout", "exact", "lora.dropout", _where("ds.lora.rank", "lora.dropout")),
    row("ds.lora.target_modules", "exact", "lora.target_modules", _targets),
    row("ds.value_head_prefix", "exact", "loss.value_head"),
    *[
        row(name, "noop", reading=reading)
        for name, reading in [
            ("ds.zpg", "it changes no result"),
            ("ds.deepcompile", "it changes no result"),
            ("ds.attn_implementation", PLAIN_ATTENTION),
            ("ds.experts_implementation", "it changes no result"),
            ("ds.use_liger_kernel", PLAIN_ATTENTION),
            ("ds.grad_accum_dtype", "gradients add up in float32"),
            ("ds.overlap_comm", "it changes no result"),
            ("ds.packing_samples", "it changes no result; batches are cut with little padding"),
            ("data.disable_fast_tokenizer", "tokenizers give the same tokens"),
            ("data.dataloader_num_workers", "rows are tokenized before the start"),
            ("model.compute_fp32_loss_enable", "rewards and losses are float32"),
            ("ref.offload", "the reference's log-probabilities are computed once, before the first step"),
        ]
    ],
    row("ds.tensor_parallel_size", "maybe", "learner.tensor_parallel", hints=_not_divided),
    row(
        "ds.ring_attn_size",
        "maybe",
        "learner.sequence_parallel",
        refuses=lambda x, v: "OpenRLHF requires --packing_samples with it; add it" if x > 1 and not v["ds.packing_samples"] else "",
        hints=_not_sliced,
    ),
    row("ds.ring_attn_head_stride", "hint", reading=DIVIDED),
    # optimizer
    row("optim", "absent", refuses=only("adam", "the optimizer muon " + NOT_HERE), reading="the default"),
    *[
        row(f"muon.{name}", "noop", reading="only muon has it, and the optimizer is adam")
        for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")
    ],
    row("adam.lr", "exact", "learner.learning_rate"),
    row("adam.betas", "exact", "learner.betas"),
    row("adam.eps", "exact", "learner.adam_eps"),
    row("adam.weight_decay", "exact", "learner.weight_decay"),
    row("lr_scheduler", "exact", "learner.schedule"),
    row("lr_warmup_ratio", "exact", "learner.warmup_share", _where_schedule("learner.warmup_share", lambda name: name != "constant")),
    row(
        "min_lr_ratio",
        "exact",
        "learner.min_rate_share",
        _where_schedule("learner.min_rate_share", lambda name: name == "cosine_with_min_lr"),
    ),
    row("max_norm", "exact", "learner.grad_clip"),
    # loss
    row("model.pretrain_mode_enable", "exact", "data.train_on", lambda x, v: {"data.train_on": "all"} if x else {}),
    row("model.loss_type", "exact", "loss.kind", lambda x, v: {"loss.kind": "sigmoid" if x == "sigmoid" else "logexp"}),
    row("model.margin_loss_enable", "exact", "data.margin_column", lambda x, v: {"data.margin_column": "margin" if x else ""}),
    row("model.beta", "exact", "loss.beta"),
    row("model.ipo_enable", "exact", "loss.kind", lambda x, v: {"loss.kind": "ipo" if x else "sigmoid"}),
    row(
        "model.label_smoothing", "exact", "loss.label_smoothing", lambda x, v: {} if v["model.ipo_enable"] else {"loss.label_smoothing": x}
    ),
    row("model.nll_loss_coef", "exact", "loss.nll_coefficient"),
    row("ref.model_name_or_path", "exact", "reference.path", _other_reference),
    row("desirable_loss_weight", "exact", "loss.desirable_weight"),
    row("undesirable_loss_weight", "exact", "loss.undesirable_weight"),
    row("teacher_model", "exact", "teacher.path", m.text("teacher.path"), refuses=required("name the teacher")),
    row("kd_coef", "exact", "loss.teacher_weight"),
    row("teacher_offload", "hint", reading="the teacher stays on the ranks' devices"),
    # data
    row("placeholder_token", "exact", "data.placeholder_token", refuses=required("name the token that ends each step")),
    row("reward_tokens", "exact", "data.reward_tokens"),
    row("label_key", "exact", "data.label_column"),
    row("data.dataset", "exact", "data.path data.paths", m.dataset("data"), refuses=required("name the data set")),
    row("data.dataset_probs", "exact", "data.probabilities", m.probabilities("data"), refuses=shares_for("data.dataset")),
    row("data.dataset_split", "exact", "data.split"),
    row("data.max_samples", "exact", "data.max_rows", lambda x, v: {"data.max_rows": int(x)}),
    row("data.multiturn", "exact", "data.train_on", _turns),
    row("data.input_key", "exact", "data.prompt_column"),
    row("data.output_key", "exact", "data.response_column", _responses),
    row("data.prompt_key", "exact", "data.prompt_column", m.text("data.prompt_column")),
    row("data.chosen_key", "exact", "data.chosen_column"),
    row("data.rejected_key", "exact", "data.rejected_column"),
    row("data.input_template", "exact", "data.input_template", _template),
    row(
        "data.apply_chat_template",
        "exact",
        "data.template",
        lambda x, v: {"data.template": "chat"} if x and not v.get("model.pretrain_mode_enable") else {},
    ),
    row(
        "data.tokenizer_chat_template",
        "exact",
        "data.chat_template",
        lambda x, v: {"data.chat_template": x} if x and v["data.apply_chat_template"] else {},
    ),
    row("data.max_len", "exact", "data.max_tokens"),
    # sinks
    row("logger.logging_steps", "exact", "watch.every_steps"),
    row(WANDB, "exact", "watch.wandb", m.wandb),
    row("logger.wandb.org", "exact", "watch.wandb_entity", _where(WANDB, "watch.wandb_entity")),
    row("logger.wandb.group", "exact", "watch.wandb_group", _where(WANDB, "watch.wandb_group")),
    row("logger.wandb.project", "exact", "watch.wandb_project", _where(WANDB, "watch.wandb_project")),
    row("logger.wandb.run_name", "exact", "watch.run_name", lambda x, v: {} if "<prefix>" in x else {"watch.run_name": x}),
    row("logger.tensorboard_dir", "exact", "watch.tensorboard watch.tensorboard_path", m.tensorboard),
    row("use_ms", "absent", refuses=only(False, "the ModelScope hub has no counterpart here yet"), reading="the default"),
)

ALWAYS: dict[str, Any] = {
    "data.contract": "openrlhf",
    "data.overlong": "leave_out",
    "data.remainder": "carry",
    "data.add_bos": False,
    "data.tools_column": "",
    "learner.decay_all": False,
    "run.min_ranks": 1,
    "watch.metric_names": "openrlhf",
}
"""Settings that no flag decides: what these launchers always do."""

OLDER_NAMES: dict[str, str] = read_data("supervised")["renamed"]
