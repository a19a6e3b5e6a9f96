"""Look up devices, models, phase times, length distributions and settings, shipped or the user's own."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from placement.plain_data import JsonObject
from placement.speed.model_sizes import Model
from placement.speed.roofline import Device

MAY_BE_0 = [f.name for f in fields(Device) if f.default == 0]
DATA = Path(__file__).resolve().parent / "data"


@cache
def read(name: str) -> JsonObject:
    """Read a shipped data file. PyYAML is imported here, so that importing the planner does not load it."""
    import yaml

    return yaml.safe_load((DATA / f"{name}.yaml").read_text())


def values(tree: JsonObject) -> JsonObject:
    """Return {name: value} from {name: [value, source]}."""
    return {name: entry[0] if isinstance(entry, list) and entry else entry for name, entry in tree.items()}


def number(value: object) -> Any:
    """Convert text that is a number to float: YAML 1.1 reads 2e12 as text. Other values pass unchanged."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def match_name(kind: str, name: str, known: list[str]) -> str:
    """Return the spelling of `name` in `known`, ignoring case. Raises ValueError naming the nearest one."""
    spelt = {k.lower(): k for k in known}
    if str(name).lower() in spelt:
        return spelt[str(name).lower()]
    near = difflib.get_close_matches(str(name).lower(), list(spelt), n=1, cutoff=0.4)
    hint = f"did you mean `{spelt[near[0]]}`?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"unknown {kind} `{name}`; {hint}")


def _mapping(path: Path) -> JsonObject:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot read a device from it ({type(error).__name__})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected the fields of a device (`memory_bytes_per_s: …`, or `like: H100`)")
    return tree


def device(entry: str | JsonObject) -> Device:
    """Return a device by name, by a mapping of its fields, or by the path of a YAML file with these fields.

    `like: H100` in the mapping takes the other fields from there. Raises ValueError for an unknown name or field, an
    unreadable file, or a figure that is not a positive number.
    """
    tables = read("devices")
    if isinstance(entry, str) and entry.endswith((".yaml", ".yml")):
        entry = _mapping(Path(entry))
    if not isinstance(entry, dict):
        name = match_name("device", entry, list(tables))
        return Device(name, **values(tables[name]))
    known = [f.name for f in fields(Device)]
    base: JsonObject = {}
    given = values(entry)
    if "like" in given:
        like = match_name("device", given.pop("like"), list(tables))
        base = {"name": like, **values(tables[like])}
    for key, value in given.items():
        match_name("field of a device", key, known)
        value = given[key] = number(value) if key != "name" else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "name" and not (is_number and (0 < value < math.inf or (value == 0 and key in MAY_BE_0))):
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


def cached_config(name: str) -> Path | None:
    """Return the config.json of `organisation/name` in the Hugging Face cache, or None if `name` is a path or not of that form.

    Raises ValueError if the cache does not have it.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(".") or name.endswith(".json") or Path(name).exists():
        return None
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    wanted = [folder / "snapshots" / main.read_text().strip() / "config.json"] if main.is_file() else []
    files = [path for path in (*wanted, *sorted(folder.glob("snapshots/*/config.json"))) if path.is_file()]
    if not files:
        raise ValueError(
            f"model {name}: not a folder here and not in {cache}; download it (`hf download {name} config.json`) or give a path"
        )
    return files[0]


@dataclass(frozen=True)
class Described:
    """A model by its Hugging Face configuration. path: the folder or the hub's name with which a recipe gets it."""

    name: str
    path: str
    config: JsonObject


@cache
def shipped_models() -> dict[str, Described]:
    """Return the models whose configurations are shipped, by name."""
    configs = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "models").glob("*.json"))}
    return {name: Described(name, config["hub"], config) for name, config in configs.items()}


def shipped_model(name: str) -> Described | None:
    """Return the shipped model of this name, or of this name on the hub, `-Instruct` or not. Sizes of both are the same."""
    base = name.removesuffix("-Instruct").lower()
    for model in shipped_models().values():
        if base in (model.name, model.path.lower()):
            return replace(model, path=name) if "/" in name else model
    return None


def described(entry: str) -> Described:
    """Return a model by the path of a Hugging Face config.json (or its folder), by its shipped name, or by its name on the hub.

    A name on the hub is one of a shipped model, or its configuration lies in the Hugging Face cache of this machine. Raises ValueError
    for an unknown name or an unreadable file.
    """
    if "/" not in entry and not Path(entry).exists() and not entry.endswith(".json"):
        return shipped_models()[match_name("model", entry, list(shipped_models()))]
    if not Path(entry).exists() and (shipped := shipped_model(entry)):
        return shipped
    path = cached_config(entry) or Path(entry)
    if path.is_dir():
        path = path / "config.json"
    try:
        tree = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON (line {error.lineno})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot read a model configuration from it ({type(error).__name__})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: not a Hugging Face model configuration (a JSON object with `hidden_size` and others)")
    if path.parent.parent.name == "snapshots":
        return Described(entry, entry, tree)
    folder = path.parent.name if path.name == "config.json" else ""
    return Described(folder or path.stem, str(path.parent) if folder else entry, tree)


def model(entry: str | JsonObject) -> Model:
    """Return a model by its fields, or by name or path, see `described`. Raises ValueError as that does, and for a missing field."""
    if isinstance(entry, dict):
        return Model.from_config(str(entry.get("name", "custom")), entry)
    found = described(str(entry))
    return Model.from_config(found.name, found.config)
