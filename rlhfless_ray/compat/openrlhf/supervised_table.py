"""Meaning of the supervised launchers' flags in a recipe: one row per flag of the newest version."""

from __future__ import annotations

from collections.abc import Callable

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf.flag_semantics import NOT_HERE, Settings
from rlhfless_ray.compat.openrlhf.flags import read_data
from rlhfless_ray.compat.openrlhf.launcher_flags import NO_HUB, NOT_QUANTISED, PLAIN_ATTENTION, Values, required, row, shares_for, text
from rlhfless_ray.compat.openrlhf.rank_groups import (
    DECIDING,
    DIVIDED,
    MATRICES,
    SLICED_INSTEAD,
    why_not_divided,
    why_not_sliced,
    with_reason,
)
from rlhfless_ray.compat.openrlhf.rules import Rule

SFT, RM, DPO, KTO, KD, PRM = "train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm"
TASKS = {SFT: "sft", RM: "rm", DPO: "dpo", KTO: "kto", KD: "kd", PRM: "prm"}
PRETRAINS = "model.pretrain_mode_enable"
RANKS, OWN = "ranks", "own"  # stand beside the flags' values: number of ranks, and flags --elastic.SECTION.KEY


def dtype(x: object, v: Values) -> Settings:
    return m.switched_dtype(x, v["model.model_name_or_path"])


def zero_stage(x: int, v: Values) -> int:
    needs_one = v["ds.adam_offload"] or dtype(v["ds.param_dtype"], v)["policy.dtype"] == "bfloat16"
    return max(1, x) if needs_one else x


def uses_input_template(x: str | None, v: Values) -> bool:
    replaced = v["data.apply_chat_template"] or v.get(PRETRAINS) or not (v.get("data.input_key") or v.get("data.prompt_key"))
    return not replaced and "{}" in (x or "")


def checkpoint_steps(x: int, v: Values) -> int:
    """Return the interval of checkpoints. With --ckpt.disable_ds alone OpenRLHF writes nothing at them."""
    return max(0, x) if v.get("ckpt.save_hf") or not v.get("ckpt.disable_ds") else 0


def models_only(x: bool, v: Values) -> Settings:
    return {"checkpoint.resumable": False} if v.get("ckpt.save_hf") else {"checkpoint.every_steps": 0}


def evaluations(x: int, v: Values) -> Settings:
    return {"evaluate.each_epoch": True} if x == -1 else {"evaluate.every_steps": x}


def other_reference(x: str | None, v: Values) -> str:
    return "" if x in (None, v["model.model_name_or_path"]) else str(x)


def beside(name: str) -> Callable[[object, Values], bool]:
    """Return whether another flag is on."""
    return lambda x, v: bool(v[name])


def not_sliced(v: Values) -> str:
    """Return why ranks do not share sequences, or an empty string if they do."""
    x = v["ds.ring_attn_size"]
    if x > 1 and not (why := _why_not_sliced(x, v)):
        return ""
    return f"{with_reason(DIVIDED, why if x > 1 else '')}. A run whose longest row does not fit a rank ends before Ray starts"


def _why_not_sliced(x: int, v: Values) -> str:
    dropout = v["ds.lora.dropout"] if v["ds.lora.rank"] else 0
    models = [v["model.model_name_or_path"], *filter(None, [v.get("ref.model_name_or_path")])]
    return next(filter(None, [_decided(v), *(why_not_sliced(x, v[RANKS], dropout, folder) for folder in models)]), "")


def not_divided(v: Values) -> str:
    """Return why ranks do not share copies of the model, or an empty string if they do."""
    x = v["ds.tensor_parallel_size"]
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


SAME = "it changes no result"
NO_MUON = "only muon has it, and the optimizer is adam"
WANDB = "logger.wandb.key"

RULES: tuple[Rule[Values], ...] = (
    # checkpoints and evaluation
    row("ckpt.output_dir", "exact", "save.path"),
    row("ckpt.save_steps", "exact", "checkpoint.every_steps", value=checkpoint_steps),
    row("ckpt.path", "exact", "checkpoint.path", when=lambda x, v: v["ckpt.save_steps"] > 0 or v["ckpt.load_enable"]),
    row("ckpt.max_num", "exact", "checkpoint.keep"),
    row("ckpt.max_mem", "hint", reading="checkpoints are limited by their number"),
    row("ckpt.save_hf", "exact", "checkpoint.save_hf", when=lambda x, v: x and v["ckpt.save_steps"] > 0),
    row("ckpt.disable_ds", "exact", "checkpoint.resumable", models_only, when=lambda x, v: x and v["ckpt.save_steps"] > 0),
    row("ckpt.load_enable", "hint", reading="continue the newest run of this name with a checkpoint there, if any"),
    row("ds.use_universal_ckpt", "noop", reading="every checkpoint is read at any number of ranks"),
    row("eval.steps", "exact", "evaluate.every_steps evaluate.each_epoch", evaluations),
    row("eval.dataset", "exact", "evaluate.path", value=text),
    row("eval.split", "exact", "evaluate.split", when=beside("eval.dataset")),
    # batches
    row("train.batch_size", "exact", "data.batch_rows"),
    row("train.micro_batch_size", "hint", reading=m.BUDGET),
    row("train.max_epochs", "exact", "run.epochs"),
    row("train.seed", "exact", "run.seed"),
    row("train.full_determinism_enable", "exact", "run.deterministic"),
    row("local_rank", "noop", reading="Ray Train numbers the ranks"),
    # model
    row("model.model_name_or_path", "exact", "policy.path", value=text, refuses=required("name the model to train")),
    row("ds.param_dtype", "exact", "policy.dtype", dtype),
    row("ds.zero_stage", "exact", "learner.zero_stage", value=zero_stage),
    row("ds.adam_offload", "exact", "learner.optimizer_offload"),
    row("model.gradient_checkpointing_enable", "exact", "learner.gradient_checkpointing", value=lambda x, v: bool(x)),
    row("model.gradient_checkpointing_reentrant", "noop", reading=SAME),
    row("model.aux_loss_coef", "absent", reading=f"the router's auxiliary loss {NOT_HERE}"),
    row("ds.load_in_4bit", "absent", reading=NOT_QUANTISED),
    row("ds.lora.rank", "exact", "lora.rank"),
    row("ds.lora.alpha", "exact", "lora.alpha", when=beside("ds.lora.rank")),
    row("ds.lora.dropout", "exact", "lora.dropout", when=beside("ds.lora.rank")),
    row(
        "ds.lora.target_modules",
        "exact",
        "lora.target_modules",
        when=beside("ds.lora.rank"),
        value=lambda x, v: [x] if isinstance(x, str) else x,
    ),
    row("ds.value_head_prefix", "exact", "loss.value_head"),
    row("ds.zpg", "noop", reading=SAME),
    row("ds.deepcompile", "noop", reading=SAME),
    row("ds.attn_implementation", "noop", reading=PLAIN_ATTENTION),
    row("ds.experts_implementation", "noop", reading=SAME),
    row("ds.use_liger_kernel", "noop", reading=PLAIN_ATTENTION),
    row("ds.grad_accum_dtype", "noop", reading="gradients add up in float32"),
    row("ds.overlap_comm", "noop", reading=SAME),
    row("ds.packing_samples", "noop", reading="it changes no result; batches are cut with little padding"),
    row("data.disable_fast_tokenizer", "noop", reading="tokenizers give the same tokens"),
    row("data.dataloader_num_workers", "noop", reading="rows are tokenized before the start"),
    row("model.compute_fp32_loss_enable", "noop", reading="rewards and losses are float32"),
    row("ref.offload", "noop", reading="the reference's log-probabilities are computed once, before the first step"),
    row("ds.tensor_parallel_size", "maybe", "learner.tensor_parallel", when=lambda x, v: not not_divided(v), reading=not_divided),
    row(
        "ds.ring_attn_size",
        "maybe",
        "learner.sequence_parallel",
        when=lambda x, v: not not_sliced(v),
        refuses=lambda x, v: "OpenRLHF requires --packing_samples with it; add it" if x > 1 and not v["ds.packing_samples"] else "",
        reading=not_sliced,
    ),
    row("ds.ring_attn_head_stride", "hint", reading=DIVIDED),
    # optimizer
    row("optim", "absent", reading=f"the optimizer muon {NOT_HERE}"),
    *[row(f"muon.{name}", "noop", reading=NO_MUON) for name in ("lr", "momentum", "ns_steps", "nesterov", "no_nesterov")],
    row("adam.lr", "exact", "learner.learning_rate"),
    row("adam.betas", "exact", "learner.betas"),
    row("adam.eps", "exact", "learner.adam_eps"),
    row("adam.weight_decay", "exact", "learner.weight_decay"),
    row("lr_scheduler", "exact", "learner.schedule"),
    row("lr_warmup_ratio", "exact", "learner.warmup_share", when=lambda x, v: v["lr_scheduler"] != "constant"),
    row("min_lr_ratio", "exact", "learner.min_rate_share", when=lambda x, v: v["lr_scheduler"] == "cosine_with_min_lr"),
    row("max_norm", "exact", "learner.grad_clip"),
    # loss
    row(PRETRAINS, "exact", "data.train_on", when=lambda x, v: x, value=lambda x, v: "all"),
    row("model.loss_type", "exact", "loss.kind", value=lambda x, v: "sigmoid" if x == "sigmoid" else "logexp"),
    row("model.margin_loss_enable", "exact", "data.margin_column", value=lambda x, v: "margin" if x else ""),
    row("model.beta", "exact", "loss.beta"),
    row("model.ipo_enable", "exact", "loss.kind", value=lambda x, v: "ipo" if x else "sigmoid"),
    row("model.label_smoothing", "exact", "loss.label_smoothing", when=lambda x, v: not v["model.ipo_enable"]),
    row("model.nll_loss_coef", "exact", "loss.nll_coefficient"),
    row("ref.model_name_or_path", "exact", "reference.path", value=other_reference),
    row("desirable_loss_weight", "exact", "loss.desirable_weight"),
    row("undesirable_loss_weight", "exact", "loss.undesirable_weight"),
    row("teacher_model", "exact", "teacher.path", value=text, refuses=required("name the teacher")),
    row("kd_coef", "exact", "loss.teacher_weight"),
    row("teacher_offload", "hint", reading="the teacher stays on the ranks' devices"),
    # data
    row("placeholder_token", "exact", "data.placeholder_token", refuses=required("name the token that ends each step")),
    row("reward_tokens", "exact", "data.reward_tokens"),
    row("label_key", "exact", "data.label_column"),
    row("data.dataset", "exact", "data.path data.paths", m.dataset("data"), refuses=required("name the data set")),
    row("data.dataset_probs", "exact", "data.probabilities", m.probabilities("data"), refuses=shares_for("data.dataset")),
    row("data.dataset_split", "exact", "data.split"),
    row("data.max_samples", "exact", "data.max_rows", value=lambda x, v: int(x)),
    row("data.multiturn", "exact", "data.train_on", when=lambda x, v: x and not v[PRETRAINS], value=lambda x, v: "assistant"),
    row("data.input_key", "exact", "data.prompt_column"),
    row("data.output_key", "exact", "data.response_column", value=lambda x, v: "" if v.get(PRETRAINS) else x or ""),
    row("data.prompt_key", "exact", "data.prompt_column", value=text),
    row("data.chosen_key", "exact", "data.chosen_column"),
    row("data.rejected_key", "exact", "data.rejected_column"),
    row("data.input_template", "exact", "data.input_template", when=uses_input_template),
    row("data.apply_chat_template", "exact", "data.template", when=lambda x, v: x and not v.get(PRETRAINS), value=lambda x, v: "chat"),
    row("data.tokenizer_chat_template", "exact", "data.chat_template", when=lambda x, v: x and v["data.apply_chat_template"]),
    row("data.max_len", "exact", "data.max_tokens"),
    # sinks
    row("logger.logging_steps", "exact", "watch.every_steps"),
    row(WANDB, "exact", "watch.wandb", value=lambda x, v: "online" if x else "off"),
    row("logger.wandb.org", "exact", "watch.wandb_entity", when=beside(WANDB)),
    row("logger.wandb.group", "exact", "watch.wandb_group", when=beside(WANDB)),
    row("logger.wandb.project", "exact", "watch.wandb_project", when=beside(WANDB)),
    row("logger.wandb.run_name", "exact", "watch.run_name", when=lambda x, v: "<prefix>" not in x),
    row("logger.tensorboard_dir", "exact", "watch.tensorboard watch.tensorboard_path", m.tensorboard),
    row("use_ms", "absent", reading=NO_HUB),
)

ALWAYS: JsonObject = {
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
