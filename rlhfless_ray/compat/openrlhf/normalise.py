"""Convert flags of any dialect to the names of the newest version (without dashes), with the dialect's defaults.

Two of them exist in no version. `data.prompt_max_len` is the prompt limit of versions before 0.9.8 (None: no separate limit).
`ds.param_dtype` may be `checkpoint`, the dtype of the stored weights: before 0.9.2 that was the meaning of a missing --bf16.
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
from rlhfless_ray.common.json_types import JsonObject
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
SAMPLE_BUFFER_SINCE = "0.10.0"  # samples beyond a rollout are kept for asynchronous training
BEST_CHECKPOINT_SINCE, QUEUE_FLAG_SINCE, ONE_LENGTH_SINCE = "0.9.9", "0.9.1", "0.9.8"


@dataclass
class Values:
    """Values of a command line by newest name without dashes."""

    version: str
    value: JsonObject
    set_by: dict[str, list[str]] = field(default_factory=dict)
    """Newest name → full names of the command line's flags that decide it. Names at their default are missing."""
    given: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag of the command line → the newest names that it decides; none for a flag without effect in every version."""

    def __getitem__(self, name: str) -> Any:
        return self.value[name]

    def named(self, name: str) -> str:
        """Return the flag for a newest name, as in the command line or else as in its dialect."""
        if name in self.set_by:
            return " and ".join(self.set_by[name])
        return next((flag for flag in flags_of(self.version) if name in targets(flag)), f"--{name}")

    def spelled(self, name: str) -> str:
        """Return `named`, and mark a default as one."""
        return self.named(name) + ("" if name in self.set_by else f" (default {shown(self.value[name])})")

    def since(self, version: str) -> bool:
        """Return whether the dialect is this version or a newer one."""
        return place(self.version) >= place(version)

    def world(self, model: str) -> int:
        """Return the number of GPUs of `actor`, `critic`, `ref` or `reward`."""
        return self[f"{model}.num_nodes"] * self[f"{model}.num_gpus_per_node"]

    def ranks(self, model: str) -> int:
        """Return the maximum number of the model's processes. A default of 8 GPUs does not mean more than the actor has."""
        world = self.world(model)
        is_set = model == "actor" or {f"{model}.num_nodes", f"{model}.num_gpus_per_node"} & self.set_by.keys()
        return world if is_set else min(world, self.world("actor"))

    def slots(self, model: str) -> str:
        """Return the maximum number of the model's processes as words."""
        return f"{self.ranks(model)} slot{'s' * (self.ranks(model) > 1)}"

    @property
    def estimator(self) -> str:
        return self["algo.advantage.estimator"]

    @property
    def traits(self) -> Estimator:
        """Properties of the estimator, the same here and in OpenRLHF. `flag_semantics` has the differences between versions."""
        return ESTIMATORS.get(self.estimator, Estimator())

    @property
    def engines(self) -> int:
        return self["vllm.num_engines"] or 0

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened. Those of rloo were up to 0.8.4."""
        return self.traits.whitens or (self.estimator == "rloo" and not self.since("0.8.5"))

    @property
    def evaluates(self) -> bool:
        return bool(self["eval.dataset"]) and self["eval.steps"] > 0

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


def shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@cache
def targets(flag: str) -> tuple[str, ...]:
    """Return the newest names that a flag of any version decides."""
    if flag in TARGETS:
        return TARGETS[flag]
    if flag in flags_of(newest()):
        return (flag[2:],)
    return tuple(name[2:] for name in renamed(flag))


def canonical(line: CommandLine, environment: Mapping[str, str] = os.environ) -> Values:
    """Return the values of a command line. Raises UserError if two spellings of one setting disagree."""
    values = Values(line.version, defaults(line.version, environment))
    for flag, given_value in line.given.items():
        values.given[flag] = targets(flag)
        if flag in TARGETS:
            continue
        for name in targets(flag):
            try:
                value = _typed(name, given_value)
            except ValueError:
                raise UserError(f"{flag}: expected numbers, got {shown(given_value)}") from None
            _set(values, name, value, flag)
    given = line.given
    if "--flash_attn" in given:
        _set(values, "ds.attn_implementation", "flash_attention_2", "--flash_attn")
    if "--bf16" in given:
        _set(values, "ds.param_dtype", "bf16", "--bf16")
    _lengths(values, line)
    _correction(values, line)
    if values["logger.wandb.run_name"] == STAMPED:
        values.value["logger.wandb.run_name"] = f"ppo_{datetime.now():%m%dT%H:%M}"
    return values


def defaults(version: str, environment: Mapping[str, str] = os.environ) -> JsonObject:
    """Return every newest name's default in a dialect. Names that the dialect lacks get the value that was fixed there."""
    value = dict(_defaults(version))
    if place(version) < place(QUEUE_FLAG_SINCE) and environment.get("OPENRLHF_ASYNC_QUEUE_SIZE", "").isdigit():
        value["train.async_queue_size"] = int(environment["OPENRLHF_ASYNC_QUEUE_SIZE"])
    return value


@cache
def _defaults(version: str) -> JsonObject:
    """Return the defaults that no environment changes."""
    value: JsonObject = {PROMPT_LIMIT: None}
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
    return value


def _typed(name: str, value: Any) -> Any:
    """Convert a value to the newest version's type: a single threshold is an upper bound, and 0.8.1 has numbers as text."""
    kind = TYPES[history(f"--{name}")[-1].type]
    if name == THRESHOLD and not isinstance(value, list):
        value = [value]
    if kind is not None and value is not None:
        value = [kind(one) for one in value] if isinstance(value, list) else kind(value)
    if name == THRESHOLD and len(value) == 1:
        value = [0.0, *value]
    return value


def _set(values: Values, name: str, value: object, flag: str) -> None:
    flags = values.set_by.setdefault(name, [])
    if flags and values.value[name] != value:
        both = "" if name == LOGIN else f" ({shown(values.value[name])} and {shown(value)})"
        raise UserError(f"{flags[0]} and {flag}: two spellings of one setting disagree{both}; give one")
    values.value[name] = value
    if flag not in flags:
        flags.append(flag)


def _lengths(values: Values, line: CommandLine) -> None:
    """Apply the two limits of versions before 0.9.8, for prompt and response. Their sum is the default of --max_len."""
    given = line.given
    if "--generate_max_len" in given:
        _set(values, "rollout.max_new_tokens", given["--generate_max_len"], "--generate_max_len")
    if "--prompt_max_len" in given:
        _set(values, PROMPT_LIMIT, given["--prompt_max_len"], "--prompt_max_len")
    prompt, response = values[PROMPT_LIMIT], values["rollout.max_new_tokens"]
    if "data.max_len" in values.set_by or prompt is None or response is None:
        return
    flags: list[str] = [flag for flag in ("--prompt_max_len", "--generate_max_len") if flag in given]
    values.value["data.max_len"] = prompt + response
    if flags:
        values.set_by["data.max_len"] = flags


def _correction(values: Values, line: CommandLine) -> None:
    """Convert the switch and kind of 0.8.9 to 0.11.1 to level and mode. Gating was always the ratio."""
    given = line.given
    switch = next((flag for flag in ENABLE if flag in given), None)
    if switch is None:  # a kind alone turns nothing on
        values.given |= {flag: (MODE,) for flag in (*KIND, "--use_icepop") if flag in given}
        return
    kind_flag = next((flag for flag in (*KIND, "--use_icepop") if flag in given), None)
    kind = "icepop" if kind_flag == "--use_icepop" else given.get(kind_flag, "tis") if kind_flag else "tis"
    level, mode = CORRECTION[kind]
    for flag in filter(None, (switch, kind_flag)):
        _set(values, LEVEL, level, flag)
        _set(values, MODE, mode, flag)
