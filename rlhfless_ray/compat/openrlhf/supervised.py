"""Translate command lines of OpenRLHF's train_sft, train_rm and train_dpo into recipes of supervised stages."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.elastic_flags import separate
from rlhfless_ray.compat.openrlhf.parsers import FlagParser, Refused
from rlhfless_ray.compat.openrlhf.recipe_keys import nested
from rlhfless_ray.compat.openrlhf.supervised_table import ALL_ROWS, ALWAYS, OLDER_NAMES, RM, RULES, SFT, TASKS, SupervisedRule
from rlhfless_ray.recipe.reading import known_keys
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

HONOURED, HINT, NO_EFFECT, REFUSED = "honoured", "hint", "no effect", "refused"
CONVERTERS: dict[str | None, Any] = {"int": int, "float": float, None: None}


@dataclass
class SupervisedTranslation:
    """A command line as a recipe. `outcomes`: (flag as it was given, what became of it, why)."""

    launcher: str
    version: str
    settings: dict[str, Any]
    resumes: bool
    outcomes: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    """Recipe key → the flag that decides it, as the dialect spells it."""

    @property
    def tree(self) -> dict[str, Any]:
        return nested({"task": TASKS[self.launcher], **self.settings})

    def refusal(self) -> UserError | None:
        """Return an error that names every refused flag, or None if the command can run."""
        refused = [f"{flag}: {why}" for flag, status, why in self.outcomes if status == REFUSED]
        return UserError("; ".join(refused)) if refused else None

    def recipe(self) -> SupervisedRecipe:
        """Return the recipe. Raises UserError, which names the flag of an invalid value."""
        try:
            return SupervisedRecipe.parse(self.tree)
        except UserError as error:
            raise self.by_flag(error) from None

    def by_flag(self, error: UserError) -> UserError:
        """Return the error with the flags that decide the keys it names."""
        named = [flag for key, flag in self.owners.items() if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", str(error))]
        return UserError((f"{', '.join(dict.fromkeys(named))}: " if named else "") + str(error))

    def explanation(self) -> str:
        """Describe the dialect, the outcomes of all flags, and the recipe, as `rlhfless explain` prints them."""
        given = {
            status: [(flag, why) for flag, found, why in self.outcomes if found == status]
            for status in (HONOURED, HINT, NO_EFFECT, REFUSED)
        }
        lines = [
            f"dialect     {self.launcher} of OpenRLHF {self.version}",
            f"honoured    {len(given[HONOURED])} of {len(self.outcomes)} flags: {' '.join(flag for flag, _ in given[HONOURED]) or 'none'}",
            *_block("hints", [f"{flag}: {why}" for flag, why in given[HINT]]),
            *_block("no effect", [f"{flag}: {why}" for flag, why in given[NO_EFFECT]]),
            *_block("notes", self.notes),
            *_block("refused", [f"{flag}: {why}" for flag, why in given[REFUSED]]),
            "recipe" + (" (without the refused flags)" if given[REFUSED] else ""),
        ]
        lines += ["  " + line for line in yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True).splitlines()]
        return "\n".join(lines)


def translate_supervised(
    launcher: str, tokens: Sequence[str], environment: Mapping[str, str] = os.environ, ranks: int = 1
) -> SupervisedTranslation:
    """Translate a command line.

    Args:
        launcher: train_sft, train_rm or train_dpo.
        tokens: Its flags.
        environment: WORLD_SIZE, which torchrun and deepspeed set, is the number of ranks.
        ranks: Number of ranks without it.

    Raises:
        UserError: If no version accepts the line.
    """
    theirs, ours, wanted = separate(tokens)
    version, given = _read(launcher, theirs, wanted)
    values = _defaults(launcher, version)
    spelled = {name: f"--{flag}" for flag in _flags(launcher, version) for name in [_newest(flag)]}
    values |= {_newest(flag[2:]): value for flag, value in given.items()}
    ranks = int(environment.get("WORLD_SIZE", ranks))
    settings: dict[str, Any] = {**ALWAYS, "learner.ranks": ranks, "run.name": launcher}
    if "min_lr_ratio" not in values:  # the launchers' own floor before it was a flag
        settings["learner.min_rate_share"] = 0.1
    found = SupervisedTranslation(launcher, version, settings, bool(values.get("ckpt.load_enable")))
    rules = {rule.name: rule for rule in RULES}
    for name, value in values.items():
        rule = rules[name]
        settings |= {key: x for key, x in rule.settings(values).items() if x is not None or key == "data.max_rows"}
        found.owners |= {key: spelled[name] for key in rule.keys if rule.kind == "exact"}
        why = rule.refuses(value, values)
        if why and spelled[name] not in given:
            found.outcomes.append((spelled[name], REFUSED, why))
    for flag, value in given.items():
        found.outcomes.append((flag, *_outcome(rules[_newest(flag[2:])], value, values)))
    settings |= _own(ours, found)
    found.notes = _notes(launcher, values)
    if "watch.run_name" in settings:
        settings["run.name"] = re.sub(r"[^\w.-]+", "-", str(settings["watch.run_name"])).strip("-.") or launcher
    return found


def _outcome(rule: SupervisedRule, value: Any, values: dict[str, Any]) -> tuple[str, str]:
    why = rule.refuses(value, values)
    if why:
        return REFUSED, why
    if rule.kind == "exact":
        return HONOURED, ", ".join(f"`{key}`" for key in rule.keys)
    return (HINT if rule.kind == "hint" else NO_EFFECT), rule.reading


def _notes(launcher: str, v: dict[str, Any]) -> list[str]:
    notes = []
    if launcher == SFT:
        notes.append("the loss is the mean over all tokens of a batch; OpenRLHF's is a mean of the means of its micro-batches")
    if not v["eval.dataset"]:
        notes.append("no evaluation: OpenRLHF evaluates on the first hundredth of the training rows then")
    if v["data.max_samples"] >= ALL_ROWS:
        notes.append("all rows are used")
    if launcher == RM and not v["data.prompt_key"]:
        notes.append("pairs are whole texts, so a prompt that both begin with is computed twice")
    return notes


def _own(ours: list[tuple[str, str | None]], found: SupervisedTranslation) -> dict[str, Any]:
    """Return {recipe key: value} of --elastic.SECTION.FIELD. Raises UserError for what is unknown, and what a flag decides."""
    keys, settings = known_keys(SupervisedRecipe), {}
    for flag, text in ours:
        key = flag.removeprefix("--elastic.")
        if key not in keys:
            raise UserError(f"{flag}: no such setting of a supervised stage")
        if key in found.owners:
            raise UserError(f"{flag}: OpenRLHF's {found.owners[key]} sets this; use that flag")
        settings[key] = True if text is None else yaml.safe_load(text)
    return settings


# ---------------------------------------------------------------- versions


@cache
def _data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("data", "supervised.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _flags(launcher: str, version: str) -> dict[str, dict[str, Any]]:
    """Return {flag without dashes: its definition} of a launcher in a version."""
    data = _data()
    place = data["versions"].index
    return {
        flag[2:]: span
        for flag, spans in data["launchers"][launcher].items()
        for span in spans
        if place(span["since"]) <= place(version) <= place(span["until"])
    }


def _newest(flag: str) -> str:
    return OLDER_NAMES.get(flag, flag)


def _defaults(launcher: str, version: str) -> dict[str, Any]:
    found = {}
    for flag, spec in _flags(launcher, version).items():
        action = spec.get("action", "store")
        found[_newest(flag)] = spec.get("default") if action == "store" else action == "store_false"
    return found


def _read(launcher: str, tokens: Sequence[str], wanted: str | None) -> tuple[str, dict[str, Any]]:
    """Return the newest version that accepts the line (or the wanted one), and {flag: value}. Raises UserError."""
    versions = [wanted] if wanted else list(reversed(_data()["versions"]))
    if wanted and wanted not in _data()["versions"]:
        raise UserError(f"--elastic.dialect: {wanted} is none of the versions {', '.join(_data()['versions'])}")
    refused: list[tuple[int, str, str]] = []
    for version in versions:
        parser = FlagParser(prog=f"{launcher}.py", argument_default=argparse.SUPPRESS, add_help=False)
        for flag, spec in _flags(launcher, version).items():
            if spec.get("action", "store") == "store":
                parser.add_argument(
                    f"--{flag}", dest=flag, type=CONVERTERS[spec.get("type")], nargs=spec.get("nargs"), choices=spec.get("choices")
                )
            else:
                parser.add_argument(f"--{flag}", dest=flag, action=spec["action"])
        try:
            found = parser.parse_args(list(tokens))
        except Refused as error:
            known = sum(token.partition("=")[0][2:] in _flags(launcher, version) for token in tokens if token.startswith("--"))
            refused.append((known, version, str(error)))
            continue
        return version, {f"--{flag}": value for flag, value in vars(found).items()}
    _, version, message = max(refused, key=lambda one: one[0])
    raise UserError(f"{launcher}: {message} (read as OpenRLHF {version})")


def _block(title: str, entries: list[str]) -> list[str]:
    return [f"{title if not index else '':<12}{entry}" for index, entry in enumerate(entries)]
