"""Flags of OpenRLHF's launchers in each version: names, types, defaults, choices and arity."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from rlhfless_ray.common.json_types import JsonObject

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
    """`store`, or for a switch `store_true`, `store_false`, or `boolean` if there is --no-<flag> too."""
    dest: str = ""
    choices: tuple[str, ...] | None = None
    nargs: int | str | None = None
    const: str | None = None
    """Value of a flag without one, if `nargs` is `?`."""

    @property
    def takes_value(self) -> bool:
        return self.action == "store"


@cache
def read_data(name: str) -> JsonObject:
    """Return the content of a JSON file of the folder data/."""
    return json.loads(resources.files(__package__).joinpath("data", f"{name}.json").read_text(encoding="utf-8"))


def versions() -> list[str]:
    """Return all versions, oldest first."""
    return read_data(LAUNCHER)["versions"]


def newest() -> str:
    return versions()[-1]


@cache
def versions_of(launcher: str) -> list[str]:
    """Return the versions that have a launcher, oldest first."""
    return [version for version in versions() if flags_of(version, launcher)]


@cache
def place(version: str) -> int:
    """Return the number of older versions."""
    return versions().index(version)


@cache
def history(flag: str, launcher: str = LAUNCHER) -> tuple[Spec, ...]:
    """Return every definition of a launcher's flag, oldest first; none if no version from 0.8.0 on has it."""
    return tuple(make_spec(flag, **span) for span in _spans(launcher).get(flag, ()))


def _spans(launcher: str) -> dict[str, list[JsonObject]]:
    return read_data(LAUNCHER)["flags"] if launcher == LAUNCHER else read_data("supervised")["launchers"][launcher]


def make_spec(flag: str, *, since: str, until: str, **entry: Any) -> Spec:
    """Return a flag's definition from an entry of a data file."""
    action = entry.get("action", "store")
    default = entry.get("default")
    if action != "store":
        default = action == "store_false"
    if entry.get("type") == "float" and default == "inf":
        default = float("inf")
    choices = tuple(entry["choices"]) if "choices" in entry else None
    dest, nargs = entry.get("dest", flag[2:]), entry.get("nargs")
    return Spec(flag, since, until, entry.get("type"), default, action, dest, choices, nargs, entry.get("const"))


@cache
def flags_of(version: str, launcher: str = LAUNCHER) -> dict[str, Spec]:
    """Return a launcher's flags in one version, none if the version lacks the launcher."""
    nearest = {flag: nearest_spec(flag, version, launcher) for flag in all_flags(launcher)}
    return {flag: spec for flag, spec in nearest.items() if place(spec.since) <= place(version) <= place(spec.until)}


def nearest_spec(flag: str, version: str, launcher: str = LAUNCHER) -> Spec:
    """Return a known flag's definition in `version`, or else the nearest one, the newer of two."""

    def distance(spec: Spec) -> tuple[int, int]:
        if place(spec.until) < place(version):
            return place(version) - place(spec.until), -place(spec.since)
        return max(0, place(spec.since) - place(version)), -place(spec.since)

    return min(history(flag, launcher), key=distance)


def all_flags(launcher: str = LAUNCHER) -> list[str]:
    """Return a launcher's flags in all versions."""
    return list(_spans(launcher))


def renamed(flag: str, launcher: str = LAUNCHER) -> tuple[str, ...]:
    """Return the newest names of an older flag; none for a flag that was removed."""
    if launcher == LAUNCHER:
        return tuple(read_data(LAUNCHER)["dotted"].get(flag, ()))
    name = read_data("supervised")["renamed"].get(flag[2:])
    return (f"--{name}",) if name else ()


def launchers_having(flag: str) -> list[tuple[str, str, str]]:
    """Return (launcher, first version, last version) of launchers that have a flag of this name, train_ppo_ray first."""
    launchers_with_flag = [(LAUNCHER, spans[0].since, spans[-1].until)] if (spans := history(flag)) else []
    for launcher, by_span in read_data("other_launchers")["launchers"].items():
        for span, names in by_span.items():
            if flag in names:
                since, until = span.split()
                launchers_with_flag.append((launcher, since, until))
    return launchers_with_flag


def launchers() -> list[str]:
    """Return the launcher modules of openrlhf.cli in all versions."""
    return [LAUNCHER, *read_data("other_launchers")["launchers"]]


def span_text(since: str, until: str) -> str:
    return since if since == until else f"{since} to {until}"
