"""List a recipe's keys, and describe a mistake in one sentence."""

from __future__ import annotations

import difflib
import re
import typing

from pydantic import BaseModel, ValidationError

WITH_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")  # a URL that messages and logs must not show


def describe_mistake(model: type[BaseModel], error: ValidationError) -> str:
    """Describe the first mistake of a validation error in one sentence, with its key and value."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    dotted = ".".join(path)
    if not path and first["type"] == "model_type":
        return f"expected a mapping of keys such as `{next(iter(model.model_fields))}`, not {type(first['input']).__name__}"
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
    shown = "" if isinstance(given, (dict, BaseModel)) or (isinstance(given, str) and WITH_PASSWORD.search(given)) else f" (got {given!r})"
    if first["type"] == "string_type" and isinstance(given, bool | int | float | None):
        shown += "; write a text in quotes"
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
