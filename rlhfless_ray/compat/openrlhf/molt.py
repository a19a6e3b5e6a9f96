"""Read command lines of Molt's train_rl_ray, whose flags are mostly those of OpenRLHF 0.11.2.

They are rewritten as a command line of 0.11.2, with Molt's defaults. Molt's own flags become equivalent flags or settings, become
resource hints, or are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.command import MOLT
from rlhfless_ray.compat.openrlhf.elastic_flags import DIALECT, separate
from rlhfless_ray.compat.openrlhf.flag_semantics import NOT_HERE
from rlhfless_ray.compat.openrlhf.flags import Spec, flags_of, make_spec, newest, read_data
from rlhfless_ray.compat.openrlhf.outcomes import HINT, HONOURED, NO_EFFECT, REFUSED, Outcome
from rlhfless_ray.compat.openrlhf.parsers import FlagParser, Refused
from rlhfless_ray.compat.openrlhf.translate import Translation, translate

DISTILLS = "on_policy_distill"

RENAMED = {
    "--algo.advantage.lam": "--algo.advantage.lambd",
    "--actor.loss_mode": "--actor.policy_loss_type",
    "--train.agent_path": "--train.agent_func_path",
    "--fsdp.param_dtype": "--ds.param_dtype",
    "--train.colocate_fsdp_models": "--train.colocate_actor_ref",
}
ESTIMATORS = {"grpo": "group_norm"}  # Molt's name → OpenRLHF's
DEFAULTS = {
    "--actor.lr_scheduler": ["constant"],
    "--critic.lr_scheduler": ["constant"],
    "--critic.value_clip": ["0.2"],
    "--algo.advantage.estimator": ["reinforce"],
    "--algo.kl.init_coef": ["0"],
}
"""Molt's defaults that differ from those of OpenRLHF 0.11.2."""

SHARDED = "divides state or work between GPUs, which changes no result; ranks divide the batch and ZeRO the state here"
ENGINE = "it changes no result of an engine"
ENGINES_OWN = (
    *("async_scheduling", "attention_backend", "block_size", "disable_custom_all_reduce", "distributed_executor_backend"),
    *("enable_chunked_prefill", "gdn_prefill_backend", "mamba_ssm_cache_dtype", "max_num_batched_tokens", "mm_encoder_attn_backend"),
)
HINTS = {
    **dict.fromkeys(("--fsdp.tp_size", "--fsdp.cp_size", "--fsdp.ep_size", "--fsdp.pp_size", "--fsdp.sequence_parallel"), SHARDED),
    **dict.fromkeys(
        ("--vllm.pipeline_parallel_size", "--vllm.data_parallel_size", "--vllm.decode_context_parallel_size"),
        "the planner decides how many engines there are",
    ),
    "--vllm.enable_expert_parallel": SHARDED,
    "--rollout.num_runners": "engines take requests as they have room",
    "--eval.batch_size": "all prompts are evaluated at once",
}
IDLE = {
    "--fsdp.attn_implementation": "kernels of attention are torch's own, and change no result",
    "--fsdp.packing_samples": "batches are cut with little padding",
    "--ckpt.dcp_max_num": "checkpoints are limited by --ckpt.max_num",
    "--eval.eval_at_start": "a run is evaluated before its first step anyway",
    "--train.check_weight_update_equal": "published weights are compared by checksum anyway",
    "--vllm.router_policy": "requests go to the engine that has room",
    **{f"--vllm.{name}": ENGINE for name in ENGINES_OWN},
    "--actor.muon.weight_decay": "the optimizer is adam",
    "--critic.muon.weight_decay": "the optimizer is adam",
}
REFUSES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "--actor.freeze_moe_router": (bool, "freezing of routers " + NOT_HERE),
    "--critic.freeze_moe_router": (bool, "freezing of routers " + NOT_HERE),
    "--actor.freezing_steps": (lambda x: x > 0, "a policy frozen at first " + NOT_HERE),
    "--critic.max_epochs": (lambda x: x is not None, "a number of epochs for the critic alone " + NOT_HERE),
    "--data.tools_key": (bool, "a column of tools " + NOT_HERE),
    "--ckpt.disable_final_save": (bool, "the final model is always written; leave it out"),
    "--ckpt.warm_resume_rollouts": (bool, "going on with the responses of before a stop " + NOT_HERE),
    "--eval.eval_only": (bool, "nothing would be trained; use `rlhfless evaluate`"),
    "--eval.max_new_tokens": (lambda x: x is not None, "a limit of its own " + NOT_HERE),
    "--eval.top_p": (lambda x: x is not None, "a value of its own " + NOT_HERE),
    "--train.force_on_policy": (bool, "one update for each rollout; set --train.batch_size to all samples of a rollout instead"),
    "--train.rollout_dump_dir": (bool, "samples are in the run folder's samples/; leave it out"),
    "--train.rollout_replay_dir": (bool, "replayed rollouts have no counterpart here yet"),
    "--train.routing_replay": (bool, "replay of routers' choices is not available with agents"),
    "--vllm.mtp_num_speculative_tokens": (lambda x: x > 0, "drafts from a model have no counterpart here yet"),
    "--vllm.dtype": (lambda x: x not in ("bfloat16", "auto"), "engines take the learner's type"),
}
MOLTS_OWN = {"--actor.loss_mode": "cispo", "--algo.advantage.is_correction_level": "geo", "--algo.advantage.is_correction_mode": "trunc"}
"""Values that OpenRLHF's flags of the same meaning do not have."""
SETTING = {
    "--algo.advantage.no_whiten": "algorithm.advantage.whiten",
    "--ref.model_name_or_path": "reference.path",
    "--fsdp.offload": "learner.optimizer_offload",
    "--actor.gradient_checkpoint": "learner.gradient_checkpointing",
    "--train.force_sync_mode": "rollout.max_lag_steps",
}
"""Flags of Molt's own that set a key, or a flag of OpenRLHF that does."""


@cache
def flags() -> dict[str, Spec]:
    """Return the flags of Molt's launcher."""
    return {flag: make_spec(flag, since=newest(), until=newest(), **entry) for flag, entry in read_data("molt")["flags"].items()}


@cache
def _parser() -> FlagParser:
    return FlagParser(MOLT, flags().values())


def translate_molt(tokens: Sequence[str], environment: Mapping[str, str] = os.environ) -> Translation:
    """Translate a command line of Molt's train_rl_ray. Raises UserError if Molt would not accept it."""
    theirs, ours, wanted = separate(tokens)
    if wanted is not None:
        raise UserError(f"{DIALECT}: Molt has one dialect; leave it out")
    try:
        given = _parser().read(theirs)
    except Refused as error:
        raise UserError(f"{MOLT}: {error} (read as Molt)") from None
    if not given.get("--train.agent_path"):
        raise UserError("--train.agent_path: name the agent's file, which gives the rewards")
    if given.get("--algo.advantage.estimator") == DISTILLS and not given.get("--ref.model_name_or_path"):
        raise UserError(f"--ref.model_name_or_path: {DISTILLS} needs a teacher; name its folder")
    refused = [Outcome(flag, REFUSED, f"{value} {NOT_HERE}") for flag, value in MOLTS_OWN.items() if given.get(flag) == value]
    if given.get("--train.partial_rollout_enable") and not _runs_ahead(given):
        raise UserError(
            "--train.partial_rollout_enable: it overlaps rollouts and updates, which needs importance weights here; set "
            "--algo.advantage.is_correction_level, and leave --train.force_sync_mode out"
        )
    own_tokens = [token for flag, text in ours for token in ((flag,) if text is None else (flag, text))]
    readable = {flag: value for flag, value in given.items() if flag not in {one.flag for one in refused}}
    translation = translate([*_as_openrlhf(readable), *own_tokens, DIALECT, newest()], environment)
    outcomes = [outcome for flag, value in given.items() if (outcome := _outcome(flag, value)) is not None]
    back = {new: old for old, new in RENAMED.items()}
    kept = [one._replace(flag=back.get(one.flag, one.flag)) for one in translation.flags if back.get(one.flag, one.flag) in given]
    translation.flags = [*kept, *outcomes, *refused]
    translation.settings |= _settings(given)
    translation.notes.insert(0, f"a command line of Molt, read as OpenRLHF {newest()} with Molt's defaults")
    translation.line.given |= given
    if not given.get("--train.force_sync_mode") and not _runs_ahead(given):
        translation.notes.append("rollouts and updates take turns: to overlap them as Molt does, set --algo.advantage.is_correction_level")
    if "--actor.adam.lr" not in given:
        translation.notes.append("--actor.adam.lr: Molt's default is not known here; it is OpenRLHF's 1e-6")
    return translation


def _as_openrlhf(given: JsonObject) -> list[str]:
    """Return the equivalent command line of OpenRLHF 0.11.2, without the parts that only recipe settings express."""
    known = flags_of(newest())
    line: dict[str, list[str]] = {flag: list(values) for flag, values in DEFAULTS.items()}
    for flag, value in given.items():
        name = RENAMED.get(flag, flag)
        if name not in known or flag in ("--actor.gradient_checkpoint",):
            continue
        if isinstance(value, bool):
            if value:
                line[name] = []
        elif value is not None:
            line[name] = [str(x) for x in (value if isinstance(value, list) else [value])]
    estimator = line["--algo.advantage.estimator"][0]
    line["--algo.advantage.estimator"] = ["reinforce" if estimator == DISTILLS else ESTIMATORS.get(estimator, estimator)]
    if given.get("--actor.gradient_checkpoint", "full") not in ("none", "off", "false"):
        line["--actor.gradient_checkpointing_enable"] = []
    if given.get("--fsdp.offload", "none") != "none":
        line["--ds.adam_offload"] = []
    if _runs_ahead(given):
        line["--train.async_enable"] = []
    if given.get("--eval.dataset"):
        line.setdefault("--eval.temperature", line.get("--rollout.temperature", ["1.0"]))
        line.setdefault("--eval.n_samples_per_prompt", line.get("--rollout.n_samples_per_prompt", ["1"]))
    return [token for flag, values in line.items() for token in (flag, *values)]


def _runs_ahead(given: JsonObject) -> bool:
    """Return whether rollouts overlap training, as in Molt by default. Here that needs importance weights."""
    return not given.get("--train.force_sync_mode") and given.get("--algo.advantage.is_correction_level", "off") != "off"


def _settings(given: JsonObject) -> JsonObject:
    """Return recipe keys that no flag of OpenRLHF sets."""
    settings: JsonObject = {}
    if given.get("--algo.advantage.no_whiten"):
        settings["algorithm.advantage.whiten"] = False
    reference = given.get("--ref.model_name_or_path")
    distills = given.get("--algo.advantage.estimator") == DISTILLS
    if reference and (distills or reference != given.get("--actor.model_name_or_path")):
        settings["reference.path"] = reference
    if distills:
        settings |= {
            "algorithm.advantage.estimator": DISTILLS,
            "algorithm.kl.coefficient": given.get("--algo.kl.init_coef", 1.0),
            "algorithm.kl.place": "reward",
            "algorithm.kl.estimator": "k1",
        }
    return settings


def _outcome(flag: str, value: object) -> Outcome | None:
    """Return the outcome of one of Molt's own flags, or None for a flag that OpenRLHF has too."""
    if flag in REFUSES:
        refuses, why = REFUSES[flag]
        return Outcome(flag, REFUSED, why) if refuses(value) else Outcome(flag, NO_EFFECT, "the default")
    if flag in SETTING:
        return Outcome(flag, HONOURED, f"`{SETTING[flag]}`")
    if flag in HINTS:
        return Outcome(flag, HINT, HINTS[flag])
    return Outcome(flag, NO_EFFECT, IDLE[flag]) if flag in IDLE else None
