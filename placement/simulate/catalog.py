"""Devices, models, phase times, length distributions and settings that ship as data files, and those of the user."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from placement.roofline import Device, Model

DATA = Path(__file__).resolve().parent.parent / "data"


@cache
def read(name: str) -> dict[str, Any]:
    """A data file as a tree. PyYAML is needed for this alone, so importing the planner does not load it."""
    import yaml

    return yaml.safe_load((DATA / f"{name}.yaml").read_text())


def values(tree: dict[str, Any]) -> dict[str, Any]:
    """{name: [value, source]} without the sources."""
    return {name: entry[0] if isinstance(entry, list) and entry else entry for name, entry in tree.items()}


def number(value: Any) -> Any:
    """`value`, as a number where it is one written as YAML 1.1 takes for text (2e12 instead of 2.0e+12)."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def choose(kind: str, name: str, known: list[str]) -> str:
    """`name`, as it is spelt among `known` (case aside). Raises ValueError naming the nearest."""
    spelt = {k.lower(): k for k in known}
    if str(name).lower() in spelt:
        return spelt[str(name).lower()]
    near = difflib.get_close_matches(str(name).lower(), list(spelt), n=1, cutoff=0.4)
    hint = f"did you mean `{spelt[near[0]]}`?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"unknown {kind} `{name}`; {hint}")


def _mapping(path: Path) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no device can be read there ({type(error).__name__})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: the fields of a device are needed (`memory_bytes_per_s: …`, or `like: H100`)")
    return tree


def device(entry: str | dict[str, Any]) -> Device:
    """A device by name, by a mapping of its fields (`like: H100` takes the others from there), or by the path of a YAML file
    with these.

    Raises ValueError for an unknown name or field, an unreadable file, or a figure that is not a positive number.
    """
    tables = read("devices")
    if isinstance(entry, str) and entry.endswith((".yaml", ".yml")):
        entry = _mapping(Path(entry))
    if not isinstance(entry, dict):
        name = choose("device", entry, list(tables))
        return Device(name, **values(tables[name]))
    known = [f.name for f in fields(Device)]
    base: dict[str, Any] = {}
    given = values(entry)
    if "like" in given:
        like = choose("device", given.pop("like"), list(tables))
        base = {"name": like, **values(tables[like])}
    for key, value in given.items():
        choose("field of a device", key, known)
        value = given[key] = number(value) if key != "name" else value
        if key != "name" and (not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf):
            raise ValueError(f"device: `{key}` must be a positive, finite number, not {value!r}")
    if not isinstance(given.get("name", ""), str):
        raise ValueError(f"device: `name` must be a word, not {given['name']!r}")
    if given.get("decode_efficiency", 1) > 1:
        raise ValueError(f"device: `decode_efficiency` is a share of the bandwidth, at most 1, not {given['decode_efficiency']!r}")
    whole = {"name": "custom", **base, **given}
    missing = [f.name for f in fields(Device) if f.name not in whole and f.default is MISSING]
    if missing:
        raise ValueError(f"device {whole['name']}: `{missing[0]}` is missing; give it, or `like: <a known device>`")
    return Device(**whole)


def model(entry: str | dict[str, Any]) -> Model:
    """A model by shipped name, by the path of a Hugging Face config.json (or its folder), or by its fields.

    Raises ValueError for an unknown name, an unreadable file, or a field that is missing.
    """
    if isinstance(entry, dict):
        return Model.of(str(entry.get("name", "custom")), entry)
    path = Path(str(entry))
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or "/" in str(entry):
        try:
            tree = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON (line {error.lineno})") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: no configuration of a model can be read there ({type(error).__name__})") from None
        if not isinstance(tree, dict):
            raise ValueError(f"{path}: not a Hugging Face configuration of a model (a JSON object with `hidden_size` and others)")
        return Model.of(path.parent.name or path.stem, tree)
    known = sorted(p.stem for p in (DATA / "models").glob("*.json"))
    name = choose("model", entry, known)
    return Model.of(name, json.loads((DATA / "models" / f"{name}.json").read_text()))
