"""Flags of OpenRLHF's launchers in each version: names, types, defaults, choices and arity."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

LAUNCHER = "train_ppo_ray"
TYPES: dict[str | None, Any] = {None: None, "int": int, "float": float}


@dataclass(frozen=True)
class Spec:
    """Definition of a flag in the versions `since` to `until`."""

    flag: str
    since: str
    until: str
    type: str | None = None
    """`int`, `float`, or None for text."""
    default: Any = field(default=None, hash=False)
    action: str = "store"
    dest: str = ""
    choices: tuple[str, ...] | None = None
    nargs: int | str | None = None

    @property
    def takes_value(self) -> bool:
        return self.action == "store"


@cache
def read_data(name: str) -> dict[str, Any]:
    """Return the content of a file of the folder data/."""
    return json.loads(resources.files(__package__).joinpath("data", f"{name}.json").read_text(encoding="utf-8"))


def versions() -> list[str]:
    """Return all versions, oldest first."""
    return read_data(LAUNCHER)["versions"]


def newest() -> str:
    return versions()[-1]


@cache
def place(version: str) -> int:
    """Return the number of older versions."""
    return versions().index(version)


@cache
def history(flag: str) -> tuple[Spec, ...]:
    """Return every definition of a flag, oldest first; none if no version from 0.8.0 on has it."""
    return tuple(_spec(flag, **span) for span in read_data(LAUNCHER)["flags"].get(flag, ()))


def _spec(flag: str, *, since: str, until: str, **entry: Any) -> Spec:
    action = entry.get("action", "store")
    default = entry.get("default")
    if action != "store":
        default = action == "store_false"
    if entry.get("type") == "float" and default == "inf":
        default = float("inf")
    choices = tuple(entry["choices"]) if "choices" in entry else None
    return Spec(flag, since, until, entry.get("type"), default, action, entry.get("dest", flag[2:]), choices, entry.get("nargs"))


@cache
def flags_of(version: str) -> dict[str, Spec]:
    """Return the flags of one version."""
    specs = {}
    for flag in read_data(LAUNCHER)["flags"]:
        spec = spec_at(flag, version)
        if spec is not None:
            specs[flag] = spec
    return specs


def spec_at(flag: str, version: str) -> Spec | None:
    for spec in history(flag):
        if place(spec.since) <= place(version) <= place(spec.until):
            return spec
    return None


def nearest_spec(flag: str, version: str) -> Spec | None:
    """Return the definition nearest to `version`, the newer of two; None if no version has the flag."""

    def distance(spec: Spec) -> tuple[int, int]:
        if place(spec.until) < place(version):
            return place(version) - place(spec.until), -place(spec.since)
        return max(0, place(spec.since) - place(version)), -place(spec.since)

    return min(history(flag), key=distance, default=None)


def all_flags() -> list[str]:
    """Return the flags of all versions."""
    return list(read_data(LAUNCHER)["flags"])


def renamed(flag: str) -> tuple[str, ...]:
    """Return the names that 0.10.2 gave to an older flag; none for a flag that was removed."""
    return tuple(read_data(LAUNCHER)["dotted"].get(flag, ()))


def other_launchers(flag: str) -> list[tuple[str, str, str]]:
    """Return (launcher, first version, last version) of other launchers that have a flag of this name."""
    launchers_with_flag = []
    for launcher, spans in read_data("other_launchers")["launchers"].items():
        for span, names in spans.items():
            if flag in names:
                since, until = span.split()
                launchers_with_flag.append((launcher, since, until))
    return launchers_with_flag


def launchers() -> list[str]:
    """Return the launcher modules of openrlhf.cli in all versions."""
    return [LAUNCHER, *read_data("other_launchers")["launchers"]]


def span_text(since: str, until: str) -> str:
    return since if since == until else f"{since} to {until}"
