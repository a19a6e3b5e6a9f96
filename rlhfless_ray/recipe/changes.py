"""What a resume changes in a recipe, and whether that changes what is learned or counted.

A key that `UNLEARNED` does not name changes what is learned, so new keys are refused at a resume until somebody has decided otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.recipe_file import RecipeFile
from rlhfless_ray.recipe.section import Section

UNLEARNED: Mapping[str, Collection[str] | None] = {
    "run": {"name", "root", "steps", "epochs", "episodes", "deterministic", "sigterm_s", "min_ranks", "max_restarts"},
    "evaluate": {"every_steps", "each_epoch"},
    "rollout": {
        *("engine", "agreement", "min_actors", "max_actors", "nodes", "pools"),
        *("tensor_parallel", "max_running", "kv_cache_mb", "gpu_memory_share"),
        *("speculation", "drafter", "drafter_train", "drafter_hidden_size", "drafter_layers", "drafter_learning_rate"),
        *("block_size", "prefix_kv", "stream_interval_s", "migrate", "migrate_tau", "deadline_s", "silence_s"),
    },
    "reward": {
        *("ranks", "tensor_parallel", "nodes", "micro_batch_tokens", "batch_samples", "workers"),
        *("timeout_s", "deadline_s", "max_failed_share"),
    },
    "agent": {"timeout_s", "processes", "programs"},
    "learner": {
        *("ranks", "tensor_parallel", "sequence_parallel", "nodes", "max_slots_per_rank", "zero_stage", "optimizer_offload", "pack_rows"),
        *("micro_batch_tokens", "share_prompts", "overlap", "gradient_checkpointing", "max_skipped_updates", "deadline_s"),
    },
    "critic": {"ranks", "tensor_parallel", "sequence_parallel", "nodes", "save"},
    "reference": {"ranks", "tensor_parallel", "nodes"},
    "lora": {"publish"},
    "functions": None,
    "objective": None,
    "plan": None,
    "price": None,
    "cluster": None,
    "checkpoint": None,
    "save": None,
    "watch": None,
}
"""Section → its keys that change nothing that is learned or counted, or None for all of them. Both kinds of recipe are meant.

`run.steps` and its like belong to them although they stretch a schedule of the learning rate: see `Changes.said`."""
TO_ROUNDING = {
    *(f"learner.{key}" for key in ("ranks", "tensor_parallel", "sequence_parallel", "max_slots_per_rank", "zero_stage")),
    *(f"learner.{key}" for key in ("optimizer_offload", "micro_batch_tokens", "share_prompts", "gradient_checkpointing")),
    *(f"critic.{key}" for key in ("ranks", "tensor_parallel", "sequence_parallel")),
    *("reference.ranks", "reference.tensor_parallel", "reward.tensor_parallel", "rollout.tensor_parallel"),
}
"""Keys of UNLEARNED that change what is learned by rounding, so that `run.exact` keeps them."""
LENGTHS = ("run.steps", "run.epochs", "run.episodes")
MAX_VALUE_CHARS = 80  # of a value in a message


@dataclass(frozen=True)
class SettingChange:
    """A key that differs. `text`: its old and new value."""

    key: str
    text: str
    is_learned: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass(frozen=True)
class Changes:
    """What differs from the recipe of a checkpoint."""

    found: Sequence[SettingChange] = ()
    schedule: str = "constant"  # of the learning rate, now

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def learned(self) -> list[SettingChange]:
        return [change for change in self.found if change.is_learned]

    def check(self, folder: Path, step: int, *, accepted: bool) -> None:
        """Raise UserError for changes of what is learned or counted, unless they are accepted."""
        if self.learned and not accepted:
            raise UserError(
                f"--resume: {folder} was trained with other settings up to step {step}, so one curve would show two experiments: "
                f"{_joined(self.learned)}; set them back, start a new run without --resume, or go on with --resume-changed"
            )

    def said(self, step: int) -> list[str]:
        """Return messages for the user about what a resume after `step` changes."""
        others = [change for change in self.found if not change.is_learned]
        messages = [f"changed after step {step}, accepted with --resume-changed: {_joined(self.learned)}"] if self.learned else []
        if others:
            messages.append(f"changed after step {step}, with no effect on what is learned: {_joined(others)}")
        if self.schedule != "constant" and any(change.key in LENGTHS for change in others):
            messages[-1] += f" (the learning rate's schedule `{self.schedule}` now ends at the new last step)"
        return messages


def changes(
    before: Mapping[str, object],
    now: RecipeFile,
    contents_before: Mapping[str, str] | None = None,
    contents: Mapping[str, str] | None = None,
) -> Changes:
    """Compare a recipe with that of a checkpoint.

    Args:
        before: The earlier recipe's tree. Keys that it lacks, of an earlier version, had their defaults.
        now: The recipe of the resume, after a run has decided settings that are `auto`.
        contents_before, contents: Key → checksum of what the key names: a file's text, or rows.
    """
    old, new = contents_before or {}, contents or {}
    found = []
    kept = TO_ROUNDING if _value(before, "run.exact", False) else ()
    for key, default, value in _settings(now):
        was, differs = _value(before, key, default), False
        if was != value:
            counts = is_learned(key) or key in kept
            if value == "auto" and not counts:  # the run decides it again
                continue
            moved = key in new and new[key] == old.get(key) and _named(was) == _named(value)
            found.append(SettingChange(key, f"{_shown(was)} → {_shown(value)}", counts and not moved))
            differs = not moved
        if not differs and key in new and key in old and new[key] != old[key]:
            found.append(SettingChange(key, f"{_shown(value)} has other content now", True))
    return Changes(found, str(getattr(getattr(now, "learner", None), "schedule", "constant")))


def is_learned(key: str) -> bool:
    """Return whether a key changes what is learned or counted."""
    section, _, name = key.partition(".")
    keys = UNLEARNED.get(section, ())
    return keys is not None and name not in keys


def keys_of(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting of a kind of recipe."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _settings(section: Section, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield the dotted key, the default and the value of every setting, as JSON reads them."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", _plain(default), _plain(value)


def _value(tree: Mapping[str, object], key: str, default: object) -> object:
    """Return the value of a dotted key in a recipe's tree."""
    at: object = tree
    for name in key.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return default
        at = at[name]
    return _plain(at)


def _plain(value: object) -> object:
    return json.loads(json.dumps(value, default=str))


def _named(value: object) -> str:
    """Return the function that a value such as `folder/file.py:function` names."""
    return value.rpartition(":")[2] if isinstance(value, str) and ".py:" in value else ""


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
    return f"`{text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + '…'}`"


def _joined(found: Sequence[SettingChange]) -> str:
    return "; ".join(map(str, found))
