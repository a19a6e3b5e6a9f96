"""Any dialect → values in the names of the newest version (without the dashes), defaults those of the dialect.

Two names are ours: `data.prompt_max_len` is the prompt's own limit of the versions before 0.9.8 (None: it has none of its
own), and `ds.param_dtype` may be `checkpoint`, what leaving out --bf16 meant before 0.9.2: the dtype the weights are stored in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.estimators import ESTIMATORS, Estimator
from rlhfless_ray.compat.openrlhf.dialect import CommandLine
from rlhfless_ray.compat.openrlhf.flags import TYPES, flags_of, history, newest, place, renamed

LOGIN = "logger.wandb.key"  # a secret: never shown
PROMPT_LIMIT = "data.prompt_max_len"
LEVEL, MODE, GATING, THRESHOLD = (f"algo.advantage.is_correction_{part}" for part in ("level", "mode", "gating", "threshold"))
CORRECTION = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
    "mis": ("seq", "mask"),  # the name of 0.9.3 for the same
}
ENABLE = ("--enable_vllm_is_correction", "--algo.advantage.is_correction_enable")
KIND = ("--vllm_is_correction_type", "--algo.advantage.is_correction_type")
TARGETS: dict[str, tuple[str, ...]] = {
    "--flash_attn": ("ds.attn_implementation",),
    "--bf16": ("ds.param_dtype",),
    "--prompt_max_len": (PROMPT_LIMIT, "data.max_len"),
    "--generate_max_len": ("rollout.max_new_tokens", "data.max_len"),
    "--use_icepop": (LEVEL, MODE),
    **{flag: (LEVEL, MODE) for flag in (*ENABLE, *KIND)},
}
STAMPED = history("--logger.wandb.run_name")[-1].default  # a name with the time in it
SAMPLE_BUFFER_SINCE = "0.10.0"  # of samples beyond a rollout, which asynchronous training takes from
BEST_CHECKPOINT_SINCE, QUEUE_FLAG_SINCE, ONE_LENGTH_SINCE = "0.9.9", "0.9.1", "0.9.8"


@dataclass
class Values:
    """What a command line means. Indexed by newest name without dashes."""

    version: str
    value: dict[str, Any]
    said: dict[str, list[str]] = field(default_factory=dict)
    """Newest name → the flags of the command line that decide it, as they are spelled there in full. Missing: the default holds."""
    given: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Every flag of the command line → the newest names it decides; none for one that had no effect anywhere."""

    def __getitem__(self, name: str) -> Any:
        return self.value[name]

    def named(self, name: str) -> str:
        """A newest name as the command line or, if it does not say it, its dialect spells it."""
        if name in self.said:
            return " and ".join(self.said[name])
        return next((flag for flag in flags_of(self.version) if name in targets(flag)), f"--{name}")

    def spelled(self, name: str) -> str:
        """The same; a default is said to be one."""
        return self.named(name) + ("" if name in self.said else f" (default {shown(self.value[name])})")

    def since(self, version: str) -> bool:
        """Whether the dialect is this version or a newer one."""
        return place(self.version) >= place(version)

    def world(self, model: str) -> int:
        """GPUs of `actor`, `critic`, `ref` or `reward`."""
        return self[f"{model}.num_nodes"] * self[f"{model}.num_gpus_per_node"]

    def ranks(self, model: str) -> int:
        """Processes of it here, at most. Where the line does not say, the default of 8 GPUs is no wish to have more than the actor."""
        own = self.world(model)
        said = model == "actor" or {f"{model}.num_nodes", f"{model}.num_gpus_per_node"} & self.said.keys()
        return own if said else min(own, self.world("actor"))

    @property
    def estimator(self) -> str:
        return self["algo.advantage.estimator"]

    @property
    def traits(self) -> Estimator:
        """Properties of the estimator. They are the same here and in OpenRLHF; what versions differ in is in `flag_semantics`."""
        return ESTIMATORS.get(self.estimator, Estimator())

    @property
    def engines(self) -> int:
        return self["vllm.num_engines"] or 0

    @property
    def has_critic(self) -> bool:
        return self.traits.critic

    @property
    def has_reference(self) -> bool:
        return self["algo.kl.init_coef"] > 0

    @property
    def external_reward(self) -> bool:
        """Whether rewards come from a file, a URL or an agent, so that there is no reward model."""
        return bool(self["reward.remote_url"] or self["train.agent_func_path"])


def shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@cache
def targets(flag: str) -> tuple[str, ...]:
    """The newest names a flag of any version decides."""
    if flag in TARGETS:
        return TARGETS[flag]
    if flag in flags_of(newest()):
        return (flag[2:],)
    return tuple(name[2:] for name in renamed(flag))


def canonical(line: CommandLine, environment: Mapping[str, str] = os.environ) -> Values:
    """Raises UserError where two spellings of one setting disagree."""
    values = Values(line.version, defaults(line.version, environment))
    for flag in line.given.order:
        if flag == "-h":
            continue
        values.given[flag] = targets(flag)
        if flag in TARGETS:
            continue
        for name in targets(flag):
            try:
                value = _typed(name, line.given.values[flag])
            except ValueError:
                raise UserError(f"{flag}: expected numbers, got {shown(line.given.values[flag])}") from None
            _say(values, name, value, flag)
    given = line.given.values
    if "--flash_attn" in given:
        _say(values, "ds.attn_implementation", "flash_attention_2", "--flash_attn")
    if "--bf16" in given:
        _say(values, "ds.param_dtype", "bf16", "--bf16")
    _lengths(values, line)
    _correction(values, line)
    if values["logger.wandb.run_name"] == STAMPED:
        values.value["logger.wandb.run_name"] = f"ppo_{datetime.now():%m%dT%H:%M}"
    return values


def defaults(version: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Every newest name's default in a dialect; what a dialect does not know is as it was fixed there."""
    value: dict[str, Any] = {PROMPT_LIMIT: None}
    for known in (flags_of(newest()), flags_of(version)):
        for flag, spec in known.items():
            if flag not in TARGETS:
                for name in targets(flag):
                    value[name] = _typed(name, spec.default) if spec.takes_value else False
    old = flags_of(version)
    if "--flash_attn" in old:
        value["ds.attn_implementation"] = "eager"
    if "--bf16" in old:
        value["ds.param_dtype"] = "checkpoint"
    if place(version) < place(ONE_LENGTH_SINCE):
        value[PROMPT_LIMIT], value["rollout.max_new_tokens"] = old["--prompt_max_len"].default, old["--generate_max_len"].default
        value["data.max_len"] = value[PROMPT_LIMIT] + value["rollout.max_new_tokens"]
    if place(version) < place(BEST_CHECKPOINT_SINCE):
        value["ckpt.best_metric_key"] = "none"
    if place(version) < place(QUEUE_FLAG_SINCE) and environment.get("OPENRLHF_ASYNC_QUEUE_SIZE", "").isdigit():
        value["train.async_queue_size"] = int(environment["OPENRLHF_ASYNC_QUEUE_SIZE"])
    return value


def _typed(name: str, value: Any) -> Any:
    """As the newest version types it: one threshold is an upper bound, the texts of 0.8.1 are numbers, 1e8 rows are whole."""
    kind = TYPES[history(f"--{name}")[-1].type]
    if name == THRESHOLD and not isinstance(value, list):
        value = [value]
    if kind is not None and value is not None:
        value = [kind(one) for one in value] if isinstance(value, list) else kind(value)
    if name == THRESHOLD and len(value) == 1:
        value = [0.0, *value]
    return value


def _say(values: Values, name: str, value: Any, flag: str) -> None:
    said = values.said.setdefault(name, [])
    if said and values.value[name] != value:
        both = "" if name == LOGIN else f" ({shown(values.value[name])} and {shown(value)})"
        raise UserError(f"{said[0]} and {flag}: two spellings of one setting disagree{both}; give one")
    values.value[name] = value
    if flag not in said:
        said.append(flag)


def _lengths(values: Values, line: CommandLine) -> None:
    """Before 0.9.8: one limit for the prompt and one for the response, whose sum is the engine's context if --max_len is silent."""
    given = line.given.values
    if "--generate_max_len" in given:
        _say(values, "rollout.max_new_tokens", given["--generate_max_len"], "--generate_max_len")
    if "--prompt_max_len" in given:
        _say(values, PROMPT_LIMIT, given["--prompt_max_len"], "--prompt_max_len")
    prompt, response = values[PROMPT_LIMIT], values["rollout.max_new_tokens"]
    if "data.max_len" in values.said or prompt is None or response is None:
        return
    flags: list[str] = [flag for flag in ("--prompt_max_len", "--generate_max_len") if flag in given]
    values.value["data.max_len"] = prompt + response
    if flags:
        values.said["data.max_len"] = flags


def _correction(values: Values, line: CommandLine) -> None:
    """The switch and the kind of 0.8.9 to 0.11.1 → level and mode (gating is always the ratio there)."""
    given = line.given.values
    switch = next((flag for flag in ENABLE if flag in given), None)
    if switch is None:
        return
    kind_flag = next((flag for flag in (*KIND, "--use_icepop") if flag in given), None)
    kind = "icepop" if kind_flag == "--use_icepop" else given.get(kind_flag, "tis") if kind_flag else "tis"
    level, mode = CORRECTION[kind]
    for flag in filter(None, (switch, kind_flag)):
        _say(values, LEVEL, level, flag)
        _say(values, MODE, mode, flag)
