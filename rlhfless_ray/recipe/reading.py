"""Read a recipe's YAML, list its keys, and describe a mistake in one sentence."""

from __future__ import annotations

import difflib
import typing
from datetime import date
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.section import FreeWord


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reject duplicate keys, of which YAML readers would silently keep the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key.value}` occurs twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(text: str) -> Any:
    """Parse YAML without duplicate keys. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def apply_override(tree: dict[str, Any], override: str, model: type[BaseModel] | None = None) -> None:
    """Set one `section.key=value` in a recipe's tree. `model`: the recipe's, whose texts stay texts. Raises UserError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override `{override}`: expected section.key=value, for example rollout.temperature=0.7")
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        raise UserError(f"override `{override}`: the value is not valid YAML") from None
    if isinstance(value, bool | int | float | date) and model is not None and _is_text(model, key, value):
        value = text.strip()  # a name such as `off` or `2024`
    if "#" in text and (value is None or isinstance(value, str)) and not text.lstrip().startswith(("'", '"')):
        value = text.strip()  # a command line has no comments, which YAML would cut off after ` #`
    set_key(tree, key, value if text != "" else "", f"override `{override}`")


def _is_text(model: type[BaseModel], key: str, value: Any) -> bool:
    """Return whether a key takes texts only, so that YAML's boolean, number or date is one.

    A boolean is one for names only. Elsewhere, as in `watch.mlflow=off` or `save.path=off`, it is a mistake to report.
    """
    *sections, name = key.split(".")
    section = section_at(model, sections)
    info = section.model_fields.get(name) if section is not None else None
    if info is None or info.annotation is not str:
        return False
    return not isinstance(value, bool) or any(isinstance(one, FreeWord) for one in info.metadata)


def set_key(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in a recipe's tree. Raises UserError, whose message begins with `where`."""
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"{where}: `{parent}` is a value, not a section")
        node = child
    node[leaf] = value


def merge_sections(
    sections: dict[str, dict[str, Any]], tree: dict[str, Any], *, wins: bool = False, model: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Put keys into the sections of a tree. `wins`: they take precedence. A section that is a value stays, for parsing to refuse.

    `model`: the recipe's, to merge sections within sections, too. Values that are mappings, such as `rollout.nodes`, are taken whole.
    """
    merged = {**tree}
    for section, keys in sections.items():
        own = tree.get(section) or {}
        if isinstance(own, dict):
            inner = None if model is None else section_at(model, [section])
            merged[section] = _merged(own, keys, inner) if wins else _merged(keys, own, inner)
    return merged


def _merged(below: dict[str, Any], above: dict[str, Any], model: type[BaseModel] | None) -> dict[str, Any]:
    """Return the keys of both, those of the model's sections within too. The second takes precedence."""
    both = {
        key: _merged(below[key], value, inner)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict) and model is not None and (inner := section_at(model, [key]))
    }
    return {**below, **above, **both}


def describe_mistake(model: type[BaseModel], error: ValidationError) -> str:
    """Describe the first mistake of a validation error in one sentence, with its key and value."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    dotted = ".".join(path)
    if first["type"] == "extra_forbidden":
        is_section = isinstance(first.get("input"), dict)
        item, begin = _list_item(model, path)
        nearest = _nearest(item, ".".join(path[begin:]), is_section=is_section)
        known = f"; the keys are {', '.join(item.model_fields)}" if is_section and len(path) == begin + 1 else ""
        return f"unknown key `{dotted}`" + (f"; did you mean `{nearest}`?" if nearest else known)
    section = section_at(model, path)
    if section is not None and first["type"] in ("model_type", "model_attributes_type"):
        example = next(iter(section.model_fields))
        return f"`{dotted}`: expected a section with keys such as `{example}`, not a value (got {first.get('input')!r})"
    message = first["msg"].removeprefix("Value error, ")
    if not dotted or message.startswith((f"{dotted}.", f"{dotted}:")):
        return message
    given = first.get("input")
    shown = "" if isinstance(given, (dict, BaseModel)) else f" (got {given!r})"
    return f"`{dotted}`: {message[0].lower()}{message[1:]}{shown}"


def _list_item(model: type[BaseModel], path: list[str]) -> tuple[type[BaseModel], int]:
    """Return the type of the innermost list's item that a path leads into, and where in the path its own keys begin."""
    begin, item = 0, model
    for number, part in enumerate(path):
        info = item.model_fields.get(part)
        if info is not None and typing.get_origin(info.annotation) is list:
            (of,) = typing.get_args(info.annotation)
            if isinstance(of, type) and issubclass(of, BaseModel):
                begin, item = number + 2, of
    return item, begin


def section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """Return the section at a path of keys, or None."""
    for part in path:
        info = model.model_fields.get(part)
        annotation = info.annotation if info is not None else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of the recipe, sections included."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        dotted = f"{prefix}{name}"
        keys.append(dotted)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += known_keys(info.annotation, f"{dotted}.")
    return keys


def _nearest(model: type[BaseModel], dotted: str, *, is_section: bool) -> str | None:
    keys = known_keys(model)
    if is_section and "." not in dotted:
        inner = [key for key in keys if key.endswith(f".{dotted}")]  # a section of a section, such as `kl`
        return next(iter([*difflib.get_close_matches(dotted, model.model_fields, n=1, cutoff=0.6), *inner]), None)
    close = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.6)
    if close:
        return close[0]
    leaves = {key.rsplit(".", 1)[-1]: key for key in keys}
    close = difflib.get_close_matches(dotted.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.5)
    return leaves[close[0]] if close else None


def drop_without_effect(tree: dict[str, Any]) -> None:
    """Remove settings that are refused beside others because they have no effect, which older versions stored in run folders."""

    def section(parent: dict[str, Any], name: str) -> dict[str, Any]:
        found = parent.get(name)
        return found if isinstance(found, dict) else {}

    learner, reward, loss = section(tree, "learner"), section(tree, "reward"), section(section(tree, "algorithm"), "loss")
    if learner.get("schedule") != "cosine_with_min_lr":
        learner.pop("min_rate_share", None)
    if loss.get("correction_level", "off") == "off":
        for part in ("mode", "gating", "low", "high"):
            loss.pop(f"correction_{part}", None)
    for data in (section(tree, "prompts"), section(tree, "data")):
        if data.get("task"):
            data.pop("max_rows", None)
    if section(tree, "evaluate").get("prompts") == 0:
        section(tree, "checkpoint").pop("best_metric", None)
    if reward.get("overlong_buffer_tokens") is None:
        reward.pop("overlong_penalty", None)
    if not reward.get("model_path"):
        reward.pop("normalize", None)
    if not reward.get("url") and reward.get("contract") != "openrlhf":
        reward.pop("batch_samples", None)
