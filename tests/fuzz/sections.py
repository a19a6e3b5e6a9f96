"""Recipe sections for the references: they remember what was read, and `options_of` lists what there is to draw."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

READ: set[str] = set()  # keys of recipes that references have read, such as `algorithm.loss.kind`


class Read:
    """A section whose keys are attributes. Reading one adds its path to READ."""

    def __init__(self, section: BaseModel, path: str) -> None:
        self._section, self._path = section, path

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._section, name), f"{self._path}.{name}"
        if isinstance(value, BaseModel):
            return Read(value, path)
        READ.add(path)
        return value


def of_kind(value: str, known: dict[str, Any]) -> Any:
    """Return what belongs to a key's literal value. A value that the reference does not know is an error."""
    if value not in known:
        raise AssertionError(f"the reference does not know the value {value!r}; it knows {sorted(known)}")
    return known[value]


def options_of(section: type[BaseModel], path: str) -> set[tuple[str, object]]:
    """Return every option of a section and of those inside it: (key, value).

    Literals have one option for each value, and booleans two. Numbers and the like have "default" and "other". None is an option of its
    own.
    """
    found: set[tuple[str, object]] = set()
    for name, field in section.model_fields.items():
        key = f"{path}.{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= options_of(field.annotation, key)
            continue
        literals = _literals(field.annotation)
        found |= {(key, value) for value in literals}
        if not literals or type(None) in _alternatives(field.annotation):
            found.add((key, None) if field.default is None else (key, "default"))
        if not literals:
            found.add((key, "other"))
    return found


def options_in(section: BaseModel, path: str) -> set[tuple[str, object]]:
    """Return the options of `options_of` that a section has chosen."""
    found: set[tuple[str, object]] = set()
    for name, field in type(section).model_fields.items():
        key, value = f"{path}.{name}", getattr(section, name)
        if isinstance(value, BaseModel):
            found |= options_in(value, key)
        elif value is None or _literals(field.annotation):
            found.add((key, value))
        else:
            found.add((key, "default" if field.default is not PydanticUndefined and value == field.default else "other"))
    return found


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _literals(annotation: Any) -> set[object]:
    """Return the values of an annotation's literals, and of bool."""
    found: set[object] = set()
    for one in _alternatives(annotation):
        if one is bool:
            found |= {True, False}
        elif get_origin(one) is Literal:
            found |= set(get_args(one))
    return found
