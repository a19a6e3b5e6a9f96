"""A setting: cluster, models, algorithm and workload of one simulated run, from a name, a mapping or a YAML file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from placement.catalog import catalog
from placement.plain_data import JsonObject
from placement.speed.model_sizes import QUANTIZATIONS, Model
from placement.speed.roofline import Device, check_width, possible_widths

CHOICES = {"algorithm": ("grpo", "ppo"), "quantization": QUANTIZATIONS}  # keys that take one of these names
MAX_LAG = 8  # steps: more only fill the pipeline for longer
MAX_COUNT = 10_000_000  # of devices, responses or updates: more only cost memory and hours


@dataclass(frozen=True)
class Setting:
    """Everything that a run needs.

    lengths: names a distribution of placement/catalog/data/lengths.yaml, or a mapping (`like` one, with some fields
    changed). trace: a file or a run folder that replaces it; trace_column names its lengths. tensor_parallel: devices
    of one engine; "auto": every policy takes the width that its own forecasts find best. updates: optimizer updates per
    rollout. whiten: advantages are normalised over the whole batch (PPO as in VERL), so that the policy's gradients
    need all responses. reward_model: scores on devices; None: rewards are computed on CPUs and take no device time.
    dedup_prefill: a prompt shared by a group is computed once. prefer: 0 cheapest … 1 fastest. max_lag_steps: the most
    updates between the version that drew a trained token and the learner's; 0: synchronous steps. partial: responses may
    outlive a step, and go on under new weights within that bound. acceptance: probability that a drafted token is accepted, for
    every policy; 0: nothing is drafted. placement/catalog/data/acceptance.yaml has figures by workload. quantization: every policy's
    engines hold linear layers in 8 bits, as with the recipe's `rollout.quantization`.

    For sensitivity analyses: start_scale and migrate_scale multiply start-up and migration times, learn_scale the
    learning FLOPs. cold: released devices lose their processes, so every lease of an elastic policy is a cold start.
    """

    name: str
    device: Device
    model: Model
    nodes: int
    devices_per_node: int
    algorithm: str
    prompts: int
    samples: int
    lengths: str | JsonObject = "gsm8k"
    trace: Path | None = None
    trace_column: str | None = None
    tensor_parallel: int | str = 1
    updates: int = 1
    steps_per_epoch: int = 3
    epochs: int = 3
    prompt_limit: int = 1024
    response_limit: int = 2048
    prefer: float = 0.5
    max_lag_steps: int = 0
    partial: bool = False
    acceptance: float = 0.0
    quantization: str = "off"
    whiten: bool = True
    reward_model: Model | None = None
    dedup_prefill: bool = True
    start_scale: float = 1.0
    migrate_scale: float = 1.0
    learn_scale: float = 1.0
    cold: bool = False
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @cached_property
    def engine_model(self) -> Model:
        """The model as engines hold it."""
        return replace(self.model, quantization=self.quantization)

    @property
    def widths(self) -> list[int]:
        """Possible numbers of devices of one engine: the one that is set, or all that share the heads and divide a node."""
        if isinstance(self.tensor_parallel, int):
            return [self.tensor_parallel]
        return [w for w in possible_widths(self.model, self.devices_per_node) if self.devices_per_node % w == 0]

    def but(self, **changes: Any) -> Setting:
        """Return the setting with some fields changed. Raises ValueError as `parse` does."""
        changed = replace(self, **{**changes, **_match_choices(changes)})
        check(changed)
        return changed


def names() -> list[str]:
    """Return the names of the shipped settings."""
    return list(catalog.read("settings")["settings"])


def named(name: str, width: int | str = 1) -> Setting:
    """Return a shipped setting. Raises ValueError naming the nearest for an unknown name.

    width: `tensor_parallel` of a setting that does not say it.
    """
    tree = catalog.read("settings")["settings"]
    known = catalog.match_name("setting", name, list(tree))
    return parse({"name": known, **tree[known]}, width=width)


def load(path: Path, width: int | str = 1) -> Setting:
    """Load a setting from a YAML file. Raises ValueError with one sentence for any mistake.

    The keys are those of placement/catalog/data/settings.yaml, plus `trace` (relative to the file), `like` (a shipped
    setting to start from), and `device` and `model` as names or mappings. width: as for `named`.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"{path}: no such file; write a setting in YAML, or name one that ships with --setting (`--setting list`)")
    try:
        tree = yaml.safe_load(path.read_text())
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        raise ValueError(f"{path}: not valid YAML" + (f" (line {line + 1})" if line is not None else "")) from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected a mapping of settings such as `device: L40S`")
    tree.setdefault("name", path.stem)
    return parse(tree, path.parent, width)


def parse(tree: JsonObject, folder: Path = Path(), width: int | str = 1) -> Setting:
    """Build a setting from a mapping. Raises ValueError naming a key that is unknown (with the nearest), missing or out of range."""
    shipped = catalog.read("settings")
    merged = dict(shipped["defaults"])
    tree = dict(tree)
    if "like" in tree:
        like = catalog.match_name("setting", tree.pop("like"), list(shipped["settings"]))
        merged.update(shipped["settings"][like])
    merged.update(tree)
    fields = list(Setting.__dataclass_fields__)
    if {"policy", "rollout"} & merged.keys():
        raise ValueError(f"setting {merged.get('name', '')}: these are sections of a training recipe; write device, nodes and others")
    for key in merged:
        if key in ("objective", "deadline_s", "budget"):
            raise ValueError(f"`{key}`: steps are simulated at a `prefer` from 0 to 1; for a deadline or a budget use `rlhfless plan`")
        if key not in fields:
            catalog.match_name("key", key, fields)
    for key in ("device", "model", "nodes", "devices_per_node", "prompts", "samples", "algorithm"):
        if key not in merged:
            raise ValueError(f"setting {merged.get('name', '')}: `{key}` is missing")
    merged["device"], merged["model"] = catalog.device(merged["device"]), catalog.model(merged["model"])
    if merged.get("reward_model") is not None:
        merged["reward_model"] = catalog.model(merged["reward_model"])
    if merged.get("trace") is not None:
        merged["trace"] = folder / str(merged["trace"])
    merged["phases"] = {**catalog.values(catalog.read("phases")), **_phases(merged.get("phases") or {})}
    if merged.get("quantization") is False:  # YAML reads `off` so
        merged["quantization"] = "off"
    merged.update(_match_choices(merged))
    merged.setdefault("name", "unnamed")
    merged.setdefault("tensor_parallel", width)
    setting = Setting(**merged)
    check(setting)
    return setting


def _match_choices(given: JsonObject) -> dict[str, str]:
    """Return the values of keys that take a name, as `CHOICES` spells them. Raises ValueError for an unknown one."""
    return {key: catalog.match_name(key, given[key], list(known)) for key, known in CHOICES.items() if key in given}


def _phases(given: JsonObject) -> dict[str, float]:
    if not isinstance(given, dict):
        raise ValueError(f"`phases` must be a mapping such as {{warm_start_s: 3.0}}, not {given!r}")
    known = list(catalog.read("phases"))
    return {catalog.match_name("phase parameter", key, known): catalog.number(value) for key, value in catalog.values(given).items()}


def check(s: Setting) -> None:
    """Raise ValueError with one sentence for a number out of range or a combination that cannot run."""
    for key in ("nodes", "devices_per_node"):
        value = getattr(s, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{key}` must be at least 1, not {value!r}: a cluster without devices runs nothing")
    for key in ("prompts", "samples", "tensor_parallel", "updates", "steps_per_epoch", "epochs", "prompt_limit", "response_limit"):
        value = getattr(s, key)
        if key == "tensor_parallel" and value == "auto":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{key}` must be a whole number of at least 1, not {value!r}")
    for what, count in (
        ("devices", s.devices),
        ("responses", s.prompts * s.samples * s.steps_per_epoch * s.epochs),
        ("updates", s.updates),
    ):
        if count > MAX_COUNT:
            raise ValueError(f"{count:,} {what}: more than {MAX_COUNT:,} are not simulated")
    for key in ("start_scale", "migrate_scale", "learn_scale"):
        value = getattr(s, key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"`{key}` must be finite and not negative, not {value!r}")
    for key in ("partial", "whiten", "dedup_prefill", "cold"):
        if not isinstance(getattr(s, key), bool):
            raise ValueError(f"`{key}` must be true or false, not {getattr(s, key)!r}")
    if not isinstance(s.lengths, (str, dict)):
        raise ValueError(f"`lengths` must name a distribution or change one (like: gsm8k, …), not {s.lengths!r}")
    if s.trace_column is not None and (s.trace is None or not isinstance(s.trace_column, str)):
        raise ValueError(f"`trace_column` names the column of lengths in `trace`, not {s.trace_column!r}")
    for key, value in s.phases.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"`phases.{key}` must be a positive, finite number, not {value!r}")
    if not isinstance(s.prefer, (int, float)) or isinstance(s.prefer, bool) or not 0 <= s.prefer <= 1:
        raise ValueError(f"`prefer` must lie in 0 … 1 (0 cheapest, 1 fastest), not {s.prefer!r}")
    if not isinstance(s.acceptance, (int, float)) or isinstance(s.acceptance, bool) or not 0 <= s.acceptance < 1:
        raise ValueError(f"`acceptance` must be at least 0 (nothing is drafted) and below 1, not {s.acceptance!r}")
    lag = s.max_lag_steps
    if not isinstance(lag, int) or isinstance(lag, bool) or not 0 <= lag <= MAX_LAG:
        raise ValueError(f"`max_lag_steps` must be a whole number from 0 to {MAX_LAG}, not {lag!r}")
    if lag > 1 and not s.partial:
        raise ValueError(f"`max_lag_steps`: responses that end within their step are at most 1 step old, not {lag}; set `partial` to true")
    if lag == 0 and s.partial:
        raise ValueError("`partial`: a response that outlives a step is trained one step late; set `max_lag_steps` to 1 or more")
    for width in s.widths:
        if s.devices_per_node % width:
            raise ValueError(f"`tensor_parallel`: {width} does not divide the {s.devices_per_node} devices of a node")
        check_width(s.model, width)
    if s.algorithm == "grpo" and s.samples < 2:
        raise ValueError("`samples`: GRPO compares the responses of one prompt, so it needs at least 2")
