"""Command lines of OpenRLHF's launchers other than PPO's: their parsers in every version, and the outcome of each flag."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.elastic_flags import own_value
from rlhfless_ray.compat.openrlhf.flag_semantics import shares_of
from rlhfless_ray.compat.openrlhf.flags import all_flags, flags_of, nearest_spec, versions
from rlhfless_ray.compat.openrlhf.outcomes import HINT, HONOURED, NO_EFFECT, REFUSED, CommandTranslation, block, recipe_lines
from rlhfless_ray.compat.openrlhf.parsers import FlagParser, Given, Refused
from rlhfless_ray.recipe.mistakes import known_keys

Values = dict[str, Any]  # by the newest names
Kind = Literal["exact", "hint", "noop", "maybe", "absent"]  # absent: every value but the default is refused


@dataclass(frozen=True)
class FlagRule:
    """Meaning of one flag.

    `make`: value and all values → settings; None: the first of `keys` gets the value. `refuses`: why a value is refused, or "".
    `hints`: why a value sets nothing and is a hint, or "".
    """

    name: str
    kind: Kind
    keys: tuple[str, ...] = ()
    make: Callable[[Any, Values], dict[str, Any]] | None = None
    refuses: Callable[[Any, Values], str] = lambda x, v: ""
    reading: str = ""
    hints: Callable[[Any, Values], str] = lambda x, v: ""
    reads: Callable[[Values], bool] = lambda v: True  # whether OpenRLHF's code reads the flag with these values

    def settings(self, v: Values) -> dict[str, Any]:
        if self.kind not in ("exact", "maybe") or self.name not in v or self.hints(v[self.name], v):
            return {}
        return self.make(v[self.name], v) if self.make is not None else {self.keys[0]: v[self.name]}

    def outcome(self, value: Any, v: Values) -> tuple[str, str]:
        """Return the outcome of a value (HONOURED, HINT, NO_EFFECT or REFUSED), and the reason."""
        why = self.refuses(value, v)
        if why:
            return REFUSED, why
        if self.kind == "maybe" and (hint := self.hints(value, v)):
            return HINT, hint
        if self.kind == "exact" and not self.settings(v):
            return NO_EFFECT, "without effect in OpenRLHF too, beside the other flags"
        if self.kind in ("exact", "maybe"):
            return HONOURED, ", ".join(f"`{key}`" for key in self.keys)
        return (HINT if self.kind == "hint" else NO_EFFECT), self.reading


def row(name: str, kind: Kind, keys: str = "", make: Any = None, *, refuses: Any = None, reading: str = "", hints: Any = None) -> FlagRule:
    nothing = lambda x, v: ""  # noqa: E731
    return FlagRule(name, kind, tuple(keys.split()), make, refuses or nothing, reading, hints or nothing)


def only(value: Any, sentence: str) -> Callable[[Any, Values], str]:
    """Refuse every value but this one."""
    return lambda x, v: "" if x == value else sentence


def required(sentence: str) -> Callable[[Any, Values], str]:
    """Refuse an empty value."""
    return lambda x, v: "" if x else sentence


def shares_for(sets: str) -> Callable[[str | None, Values], str]:
    """Refuse text that is not a number for each data set that the flag `sets` names."""

    def refuses(x: str | None, v: Values) -> str:
        found, count = shares_of(x), len((v[sets] or "").split(","))
        if found is None:
            return "expected numbers separated by commas"
        return "" if not found or len(found) == count else f"{len(found)} probabilities for {count} data sets"

    return refuses


@dataclass
class LauncherTranslation(CommandTranslation):
    """A command line as settings."""

    launcher: str
    version: str
    owners: dict[str, str] = field(default_factory=dict)
    """Recipe key → the flag that decides it, as the dialect spells it."""
    own: dict[str, Any] = field(default_factory=dict)
    """Recipe key → its value by --elastic.SECTION.FIELD."""

    def check(self) -> None:
        """Print notes for the user before the start. Raises UserError if the command cannot run."""
        if wrong := self.refusal() or self.problem():
            raise wrong
        print(f"[rlhfless] command line of {self.launcher}, OpenRLHF {self.version}", flush=True)
        for note in [*(f"{flag} read as: {why}" for flag, _, why in self.with_status(HINT)), *self.notes]:
            print(f"[rlhfless] {note}", flush=True)

    def by_flag(self, error: UserError) -> UserError:
        named = [flag for key, flag in self.owners.items() if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.[a-z])", str(error))]
        return UserError((f"{', '.join(dict.fromkeys(named))}: " if named else "") + str(error))

    def set_own(self, ours: list[tuple[str, str | None]], model: type[BaseModel] | None) -> None:
        """Add the settings of --elastic.SECTION.FIELD.

        `model`: the class of the recipe; None: there is none. Raises UserError for another key, and for one that a flag decides.
        """
        keys = known_keys(model) if model is not None else ()
        for flag, text in ours:
            key = flag.removeprefix("--elastic.")
            if key not in keys:
                raise UserError(f"{flag}: {self.launcher} has no such setting")
            if key in self.owners:
                raise UserError(f"{flag}: OpenRLHF's {self.owners[key]} sets this; use that flag")
            self.settings[key] = self.own[key] = own_value(flag, text, key, model)

    def as_data(self) -> dict[str, Any]:
        """Return the explanation as JSON types."""
        return {"dialect": self.version, "flags": [outcome._asdict() for outcome in self.flags], "notes": self.notes, "recipe": self.tree}

    def explanation(self) -> str:
        """Describe the dialect, the outcomes of all flags, and the recipe, as `rlhfless explain` prints them."""
        honoured = self.with_status(HONOURED)

        def reasons(status: str) -> list[str]:
            return [f"{outcome.flag}: {outcome.why}" for outcome in self.with_status(status)]

        lines = [
            f"dialect     {self.launcher} of OpenRLHF {self.version}",
            f"honoured    {len(honoured)} of {len(self.flags)} flags: {' '.join(outcome.flag for outcome in honoured) or 'none'}",
            *block("hints", reasons(HINT)),
            *block("no effect", reasons(NO_EFFECT)),
            *block("notes", self.notes),
            *block("refused", reasons(REFUSED)),
            *recipe_lines(self.tree, bool(self.refused)),
        ]
        return "\n".join(lines)


# ---------------------------------------------------------------- versions


def defaults(launcher: str, version: str) -> Values:
    """Return {flag without dashes: its default} in a version."""
    return {flag[2:]: spec.default for flag, spec in flags_of(version, launcher).items()}


def versions_of(launcher: str) -> list[str]:
    """Return the versions that have a launcher, oldest first."""
    return [version for version in versions() if flags_of(version, launcher)]


@cache
def _parser(launcher: str, version: str) -> FlagParser:
    return FlagParser(launcher, flags_of(version, launcher).values())


def _parser_of_all(launcher: str, version: str) -> FlagParser:
    """Return a parser of the flags of all versions, each as the version nearest to `version` defines it."""
    return FlagParser(launcher, [nearest_spec(flag, version, launcher) for flag in all_flags(launcher)], allow_abbrev=False)


def accepts(launcher: str, version: str, tokens: Sequence[str]) -> bool:
    """Return whether a version accepts the line."""
    try:
        _parser(launcher, version).read(tokens)
    except Refused:
        return False
    return True


def read(launcher: str, tokens: Sequence[str], wanted: str | None) -> tuple[str, Given]:
    """Return the newest version that accepts the line (or the wanted one), and its flags.

    If no version accepts it, the one that knows most of the flags does, with flags of the others. An abbreviation that is ambiguous
    in the newest version that has all the flags is refused, because it may mean another flag in an older one. Raises UserError.
    """
    having = versions_of(launcher)
    if wanted and wanted not in having:
        raise UserError(f"--elastic.dialect: {launcher} is in OpenRLHF {having[0]} to {having[-1]}, not in {wanted}")
    names = [token.partition("=")[0] for token in tokens if token.startswith("--")]
    refused: list[tuple[int, str, str]] = []
    for version in [wanted] if wanted else reversed(having):
        flags = flags_of(version, launcher)
        try:
            return version, _parser(launcher, version).read(tokens)
        except Refused as error:
            message = str(error)
        if message.startswith("ambiguous") and all(any(flag.startswith(name) for flag in flags) for name in names):
            instead = "write the full name, or name the version with --elastic.dialect VERSION"
            raise UserError(f"{launcher}: {message}; {instead} (read as OpenRLHF {version})")
        refused.append((sum(name in flags for name in names), version, message))
    known, version, message = max(refused, key=lambda one: one[0])
    if known and not wanted:
        with suppress(Refused):
            return version, _parser_of_all(launcher, version).read(tokens)
    known_flags = list(flags_of(version, launcher))
    unknown = [name for name in names if name in message and not any(flag.startswith(name) for flag in known_flags)]
    nearest = [(name, difflib.get_close_matches(name, known_flags, n=1, cutoff=0.75)) for name in unknown]
    hints = "".join(f"; did you mean {found[0]} instead of {name}?" for name, found in nearest if found)
    raise UserError(f"{launcher}: {message} (read as OpenRLHF {version}){hints}")
