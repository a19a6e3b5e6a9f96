"""Translate a command line into settings of a recipe, with an outcome for every flag."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.checks import check
from rlhfless_ray.compat.openrlhf.departures import departures
from rlhfless_ray.compat.openrlhf.dialect import CommandLine, instead_of, read
from rlhfless_ray.compat.openrlhf.elastic_flags import own_settings, separate
from rlhfless_ray.compat.openrlhf.flag_semantics import folder_name
from rlhfless_ray.compat.openrlhf.flag_table import ALWAYS, RULES, owned_keys
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER, newest, span_text
from rlhfless_ray.compat.openrlhf.normalise import LOGIN, Values, canonical, defaults
from rlhfless_ray.compat.openrlhf.other_versions import other_defaults, other_meanings
from rlhfless_ray.compat.openrlhf.outcomes import HINT, HONOURED, NO_EFFECT, REFUSED, CommandTranslation, Outcome
from rlhfless_ray.compat.openrlhf.rank_groups import DECIDING
from rlhfless_ray.compat.openrlhf.recipe_keys import mistake_in, names, recipe_keys
from rlhfless_ray.compat.openrlhf.rules import Rule

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

RANK = (NO_EFFECT, HINT, HONOURED, REFUSED)  # a flag that decides several names gets the last of their outcomes


@dataclass
class Translation(CommandTranslation):
    values: Values
    missing: list[Outcome] = field(default_factory=list)
    """Refused defaults."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variables of the run that must not be written into a recipe."""

    @property
    def refused(self) -> list[Outcome]:
        return [*super().refused, *self.missing]

    def recipe(self) -> Recipe:
        from rlhfless_ray.recipe import Recipe

        with self.flags_in_errors():
            return Recipe.parse(self.tree).with_named(self.own)

    def by_flag(self, error: UserError) -> UserError:
        """Return the error with the flags that set the recipe keys it names, or with the flag that could set them."""
        text = str(error).replace("prompts.path ", "prompts.paths ") if "prompts.paths" in self.settings else str(error)
        keys = [key for key in self.settings if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text)]
        if re.search(r"--resume\b", text):  # the option of `rlhfless train` for checkpoint.resume
            keys.append("checkpoint.resume")
        flags = [f"--elastic.{key}" for key in keys if key in self.own]
        for rule in RULES:
            if not rule.idle(self.values) and (set(keys) - set(self.own)) & set(rule.settings(self.values)):
                flags += self.values.spelled(rule.name).split(" and ")
        subject = re.match(r"[a-z]+\.[a-z_.]+[a-z]", text)
        if not flags and subject and subject[0] in recipe_keys():
            flags = [owned_keys().get(subject[0], f"--elastic.{subject[0]}")]
        return UserError((f"{', '.join(dict.fromkeys(flags))}: " if flags else "") + str(error))


def translate(tokens: Sequence[str], environment: Mapping[str, str] = os.environ) -> Translation:
    """Translate a command line.

    Raises:
        Unreadable: If no version accepts the line.
        UserError: If OpenRLHF's own checks reject it.
    """
    theirs, ours, version = separate(tokens)
    line = read(theirs, version)
    values = canonical(line, environment)
    notes = check(values)
    about = [*_about_dialect(line), *other_defaults(line, values), *other_meanings(line, values)]
    own = own_settings(ours, recipe_keys(), owned_keys())
    translation = Translation(values, line=line, own=own, notes=[*about, *notes, *departures(values, own)])
    outcomes = {rule.name: _apply_rule(rule, values, translation) for rule in RULES}
    for flag, decided in values.given.items():
        translation.flags.append(_combined(flag, [outcomes.get(name) or Outcome(flag, HONOURED) for name in decided]))
    translation.missing = [
        Outcome(values.spelled(name), REFUSED, outcome.why)
        for name, outcome in outcomes.items()
        if outcome.status == REFUSED and name not in values.set_by
    ]
    translation.settings |= ALWAYS | translation.own
    translation.settings.setdefault("run.name", _run_name(values))
    _keep_secrets(translation)
    return translation


def _apply_rule(rule: Rule[Values], v: Values, translation: Translation) -> Outcome:
    """Add the settings of one newest name to `translation` and return its outcome."""
    reading = rule.reason(v)
    idle = rule.idle(v)
    if idle:
        return Outcome(rule.name, NO_EFFECT, f"without effect in OpenRLHF too: {idle}")
    if rule.kind in ("absent", "error"):
        if v[rule.name] == defaults(v.version, {})[rule.name]:
            return Outcome(rule.name, NO_EFFECT, "the default")
        return Outcome(rule.name, REFUSED, reading)
    if rule.kind == "noop":
        return Outcome(rule.name, NO_EFFECT, reading)
    settings = rule.settings(v)
    if rule.kind == "maybe" and settings and (own := sorted(DECIDING & translation.own.keys())):
        settings, reading = {}, f"{reading} (--elastic.{own[0]} decides here how ranks divide the work)"
    if rule.kind == "cond" and reading:
        return Outcome(rule.name, REFUSED, reading)
    wrong = [mistake for key, value in settings.items() if (mistake := mistake_in(key, value))]
    if wrong:
        return Outcome(rule.name, REFUSED, ", ".join(wrong))
    translation.settings |= settings
    if rule.kind == "hint" or (rule.kind == "maybe" and not settings):
        return Outcome(rule.name, HINT, reading)
    return Outcome(rule.name, HONOURED, names(settings))


def _combined(flag: str, outcomes: list[Outcome]) -> Outcome:
    """Combine the outcomes of the newest names that one flag decides, such as both `max_norm` for --max_norm."""
    if not outcomes:
        return Outcome(flag, NO_EFFECT, "without effect in OpenRLHF too, which does not read it")
    status = max((outcome.status for outcome in outcomes), key=RANK.index)
    whys = dict.fromkeys(outcome.why for outcome in outcomes if outcome.status == status and outcome.why)
    return Outcome(flag, status, "; ".join(whys))


def _about_dialect(line: CommandLine) -> list[str]:
    notes = []
    for spec in line.foreign:
        instead = instead_of(spec.flag)
        notes.append(
            f"{spec.flag}: read as in OpenRLHF {span_text(spec.since, spec.until)}"
            + (f"; {newest()} calls it {instead}" if instead and instead != spec.flag else "")
        )
    return notes


def _run_name(v: Values) -> str:
    """Return the run folder's name: the Weights & Biases run name if the command gives one, else the launcher's name."""
    if "logger.wandb.run_name" not in v.set_by:
        return LAUNCHER
    return folder_name(v["logger.wandb.run_name"]) or LAUNCHER


def _keep_secrets(translation: Translation) -> None:
    key = translation.values[LOGIN]
    if key and re.fullmatch(r"[\w-]{32,}", key):  # other values, such as `True`, only turn logging on
        translation.secrets["WANDB_API_KEY"] = key
