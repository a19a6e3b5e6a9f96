"""Recipe settings on an OpenRLHF command line: --elastic.* and --prefix.*, which no version of OpenRLHF uses.

`--elastic.FIELD` sets a field of the recipe's `functions` or `objective`, and `--elastic.SECTION.FIELD` one of any
section. `--prefix.FIELD` sets `rollout.prefix_FIELD`. Values are YAML; a switch needs none. A field that a flag of OpenRLHF
decides is refused with the name of that flag.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from pydantic import BaseModel

SHORT = ("functions", "objective")
DIALECT = "--elastic.dialect"
RESUME, PREVIOUS, CHANGED = "--elastic.resume", "previous", "changed"  # how OpenRLHF's flag continues a run; no recipe keeps it


def separate(tokens: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]], str | None]:
    """Return OpenRLHF's tokens, own settings as (flag, text or None for a switch), and the requested dialect or None."""
    theirs, ours = take_options(tokens, lambda flag: flag.startswith(("--elastic.", "--prefix.")))
    version = None
    for flag, value in ours:
        if flag == DIALECT:
            if value is None:
                raise UserError(f"{DIALECT}: name a version, for example {DIALECT} 0.9.10")
            version = value
        if flag == RESUME and value not in (PREVIOUS, CHANGED):
            raise UserError(f"{RESUME}: expected `{PREVIOUS}` or `{CHANGED}`, not `{value or ''}`")
    return theirs, [one for one in ours if one[0] not in (DIALECT, RESUME)], version


def resume_options(tokens: Sequence[str]) -> tuple[bool, bool]:
    """Return whether a run continues from the checkpoint before the newest, and whether it does so with a changed recipe."""
    values = {value for _, value in take_options(tokens, lambda flag: flag == RESUME)[1]}
    return PREVIOUS in values, CHANGED in values


def take_options(tokens: Sequence[str], is_taken: Callable[[str], bool]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the tokens without some options, and these with their values: the text after `=`, or the next token unless it is an option.

    What follows `--` is left alone.
    """
    kept: list[str] = []
    taken: list[tuple[str, str | None]] = []
    rest = list(tokens)
    while rest and rest[0] != "--":
        token = rest.pop(0)
        flag, equals, text = token.partition("=")
        if not is_taken(flag):
            kept.append(token)
        elif equals:
            taken.append((flag, text))
        else:
            taken.append((flag, rest.pop(0) if rest and not rest[0].startswith("--") else None))
    return kept + rest, taken


def own_settings(
    ours: list[tuple[str, str | None]], keys: list[str], owned: dict[str, str], model: type[BaseModel] | None = None
) -> JsonObject:
    """Return {recipe key: value}. Raises UserError for an unknown key, and for one that a flag of OpenRLHF decides.

    Args:
        keys: all keys of the recipe.
        owned: keys that a flag of OpenRLHF decides, with that flag.
        model: the class of the recipe; `Recipe` if it is left out.
    """
    settings: JsonObject = {}
    for flag, text in ours:
        key = _find_key(flag, keys)
        if key is None:
            raise UserError(_describe_unknown(flag, keys))
        if key in owned:
            raise UserError(f"{flag}: OpenRLHF's {owned[key]} sets this; use that flag")
        settings[key] = own_value(flag, text, key, model)
    return settings


def own_value(flag: str, text: str | None, key: str, model: type[BaseModel] | None = None) -> object:
    """Return the value of an own setting, read as on `rlhfless train`'s command line. Raises UserError for text that is not valid YAML.

    `model`: the class of the recipe that has the key; `Recipe` if it is left out.
    """
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.reading import read_value

    try:
        return True if text is None else read_value(model or Recipe, key, text)
    except yaml.YAMLError:
        raise UserError(f"{flag}: `{text}` is not valid YAML") from None


def _find_key(flag: str, keys: list[str]) -> str | None:
    prefix, _, name = flag[2:].partition(".")
    if prefix == "prefix":
        candidates = [f"rollout.prefix_{name}"]
    elif "." in name:
        candidates = [name]
    else:
        candidates = [f"{section}.{name}" for section in SHORT]
    return next((key for key in candidates if key in keys), None)


def _describe_unknown(flag: str, keys: list[str]) -> str:
    if flag.startswith("--prefix."):
        offered = [key.replace("rollout.prefix_", "--prefix.") for key in keys if key.startswith("rollout.prefix_")]
    else:
        offered = [f"--elastic.{key.partition('.')[2]}" for key in keys if key.startswith(tuple(f"{s}." for s in SHORT))]
        offered += [f"--elastic.{key}" for key in keys if "." in key]
    nearest = difflib.get_close_matches(flag, offered, n=1, cutoff=0.5)
    return f"{flag}: no such setting" + (f"; did you mean {nearest[0]}?" if nearest else "")
