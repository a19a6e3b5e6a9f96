"""Command lines of OpenRLHF's launchers other than PPO's: their parsers in every version, and the outcome of each flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.dialect import CommandLine, Unreadable, read
from rlhfless_ray.compat.openrlhf.elastic_flags import own_settings
from rlhfless_ray.compat.openrlhf.flag_semantics import NOT_HERE, Settings, shares_of
from rlhfless_ray.compat.openrlhf.flags import flags_of, nearest_spec
from rlhfless_ray.compat.openrlhf.outcomes import HINT, HONOURED, NO_EFFECT, REFUSED, CommandTranslation, Outcome
from rlhfless_ray.compat.openrlhf.recipe_keys import names
from rlhfless_ray.compat.openrlhf.rules import Rule
from rlhfless_ray.recipe.mistakes import known_keys

Values = JsonObject  # by the newest names
row = Rule[Values]

PLAIN_ATTENTION = "kernels of attention are torch's own, and change no result"
NO_HUB = f"the ModelScope hub {NOT_HERE}"
NOT_QUANTISED = "quantising weights when they are loaded has no counterpart here"


def text(x: str | None, v: Values) -> str:
    """Return a text that is empty without a value."""
    return x or ""


def required(sentence: str) -> Callable[[object, Values], str]:
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

    owners: dict[str, str] = field(default_factory=dict)
    """Recipe key → the flag that decides it, as the dialect spells it."""

    def by_flag(self, error: UserError) -> UserError:
        named = [flag for key, flag in self.owners.items() if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.[a-z])", str(error))]
        return UserError((f"{', '.join(dict.fromkeys(named))}: " if named else "") + str(error))

    def apply(self, rule: Rule[Values], flag: str, v: Values, is_given: bool) -> None:
        """Add the settings of one flag, as the dialect spells it, and its outcome if the line has it or its default is refused."""
        value, idle = v[rule.name], rule.idle(v)
        settings = {} if idle else rule.settings(v)
        self.settings |= {key: x for key, x in settings.items() if x is not None}
        if not idle and (rule.kind == "exact" or (rule.kind == "maybe" and settings)):
            self.owners |= dict.fromkeys(rule.keys, flag)
        refusal = "" if idle else rule.refuses(value, v)
        if rule.kind == "absent" and not idle and value != nearest_spec(flag, self.version, self.launcher).default:
            refusal = rule.reason(v)
        if refusal:
            self.flags.append(Outcome(flag, REFUSED, refusal))
        elif is_given:
            self.flags.append(Outcome(flag, *_outcome(rule, settings, idle, v)))

    def set_own(self, ours: list[tuple[str, str | None]], model: type[BaseModel] | None) -> None:
        """Add the settings of --elastic.SECTION.FIELD.

        `model`: the class of the recipe; None: there is none. Raises UserError for another key, and for one that a flag decides.
        """
        self.own = own_settings(ours, known_keys(model) if model is not None else [], self.owners, model)
        self.settings |= self.own


def _outcome(rule: Rule[Values], settings: Settings, idle: str, v: Values) -> tuple[str, str]:
    """Return the outcome of a value that is not refused (HONOURED, HINT or NO_EFFECT), and the reason."""
    if idle or rule.kind in ("noop", "absent"):
        return NO_EFFECT, idle or ("the default" if rule.kind == "absent" else rule.reason(v))
    if settings:
        return HONOURED, names(rule.keys)
    return (NO_EFFECT, "without effect in OpenRLHF too, beside the other flags") if rule.kind == "exact" else (HINT, rule.reason(v))


def defaults(launcher: str, version: str) -> Values:
    """Return {flag without dashes: its default} in a version."""
    return {flag[2:]: spec.default for flag, spec in flags_of(version, launcher).items()}


def read_line(launcher: str, tokens: Sequence[str], wanted: str | None) -> CommandLine:
    """Return the command line of a launcher, see `dialect`. Raises UserError."""
    try:
        return read(tokens, wanted, launcher)
    except Unreadable as error:
        raise UserError(f"{launcher} of OpenRLHF {error.version}: {error}") from None
