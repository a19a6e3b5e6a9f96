"""How a command line is read, for the user: before a run, and in `rlhfless explain`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import yaml

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf import molt
from rlhfless_ray.compat.openrlhf.command import MOLT
from rlhfless_ray.compat.openrlhf.flag_table import RULES, rule_of
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER, all_flags, flags_of, newest, span_text, versions
from rlhfless_ray.compat.openrlhf.inference import RULES as INFERENCE_RULES
from rlhfless_ray.compat.openrlhf.normalise import shown
from rlhfless_ray.compat.openrlhf.outcomes import HINT, HONOURED, NO_EFFECT, CommandTranslation, Outcome
from rlhfless_ray.compat.openrlhf.resources import slots_of
from rlhfless_ray.compat.openrlhf.rules import KINDS, Kind
from rlhfless_ray.compat.openrlhf.supervised_table import OLDER_NAMES
from rlhfless_ray.compat.openrlhf.supervised_table import RULES as SUPERVISED_RULES
from rlhfless_ray.compat.openrlhf.translate import Translation


def announce(translation: CommandTranslation) -> None:
    """Print in a few lines how the command line is read, before a run starts. Raises UserError if the command cannot run."""
    if wrong := translation.refusal() or translation.problem():
        raise wrong
    for line in summary(translation):
        print(f"[rlhfless] {line}", flush=True)


def summary(translation: CommandTranslation) -> list[str]:
    lines = [f"command line of {'OpenRLHF ' if translation.launcher == LAUNCHER else ''}{_dialect(translation)}"]
    lines += [f"{flags} read as: {why}" for flags, why in _grouped(translation.with_status(HINT))]
    if idle := translation.with_status(NO_EFFECT):
        lines.append(f"no effect here: {' '.join(outcome.flag for outcome in idle)}")
    return lines + translation.notes


def explanation(translation: CommandTranslation) -> str:
    """Describe the dialect, the slots if they depend on the flags, the outcomes of all flags, and the recipe."""
    honoured = [outcome.flag for outcome in translation.with_status(HONOURED)]
    lines = [f"dialect     {_dialect(translation)}"]
    if isinstance(translation, Translation):
        slots = slots_of(translation)
        lines.append(f"slots       at least {slots.at_least}, at most {slots.at_most} at once")
    lines.append(f"honoured    {len(honoured)} of {len(translation.flags)} flags: {' '.join(honoured) or 'none'}")
    hints = [(_as_given(translation, outcome.flag), outcome.why) for outcome in translation.with_status(HINT)]
    reasons = {
        "hints": hints,
        "no effect": _grouped(translation.with_status(NO_EFFECT)),
        "refused": [(flags, with_advice(why)) for flags, why in _grouped(translation.refused)],
    }
    blocks = {title: [f"{flags}: {why}" for flags, why in found] for title, found in reasons.items()}
    blocks |= {"our own": [f"{key} = {value}" for key, value in translation.own.items()], "notes": translation.notes}
    for title in ("hints", "no effect", "our own", "notes", "refused"):
        lines += [f"{title if not index else '':<12}{entry}" for index, entry in enumerate(blocks[title])]
    lines.append("recipe" + (" (without the refused flags)" if translation.refused else ""))
    text = yaml.safe_dump(translation.tree, sort_keys=False, allow_unicode=True)
    return "\n".join([*lines, *("  " + line for line in text.splitlines())])


def with_advice(why: str) -> str:
    """Return why a flag is refused, and what to do about it where the reason does not say so."""
    advice = "leave it out to run the rest here, or keep this command with OpenRLHF if its result depends on it"
    return why if re.search(r"; |must be|give |set |use ", why) else f"{why}; {advice}"


def as_data(translation: CommandTranslation) -> JsonObject:
    """Return the explanation as JSON types."""
    return {
        "dialect": translation.version,
        "accepted_by": translation.line.accepted_by,
        "mixed": [spec.flag for spec in translation.line.foreign],
        **({"slots": slots_of(translation)._asdict()} if isinstance(translation, Translation) else {}),
        "flags": [outcome._asdict() for outcome in translation.flags],
        "refused": [{"flag": o.flag, "why": with_advice(o.why)} for o in translation.refused],
        "notes": translation.notes,
        "recipe": translation.tree,
    }


def _dialect(translation: CommandTranslation) -> str:
    """Return the version, after the launcher unless it is PPO's, and what is known of other versions."""
    line = translation.line
    version = line.version if translation.launcher == LAUNCHER else f"{translation.launcher} of OpenRLHF {line.version}"
    if line.mixed:
        return f"{version}, mixed with flags of other versions: {' '.join(spec.flag for spec in line.foreign)}"
    others = [other for other in line.accepted_by if other != line.version]
    return version + (f" ({_ranges(others)} accept it too)" if others else "")


def _as_given(translation: CommandTranslation, flag: str) -> str:
    value = translation.line.given.get(flag)
    return flag if value is True else f"{flag} {shown(value)}"


def _grouped(outcomes: Iterable[Outcome]) -> list[tuple[str, str]]:
    """Group flags by reason."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_reason.setdefault(outcome.why, []).append(outcome.flag)
    return [(" ".join(flags), why) for why, flags in by_reason.items()]


def _ranges(some: list[str]) -> str:
    """Format versions, with consecutive ones as a range."""
    known, parts, start = versions(), [], 0
    for index in range(1, len(some) + 1):
        if index == len(some) or known.index(some[index]) != known.index(some[index - 1]) + 1:
            parts.append(span_text(some[start], some[index - 1]))
            start = index
    return ", ".join(parts)


# ---------------------------------------------------------------- lists of flags


def list_flags(launcher: str) -> str:
    """List every flag of a launcher, of all versions unless it is PPO's, with its class and what it sets."""
    rows = _flags_of_ppo() if launcher == LAUNCHER else _flags_of_molt() if launcher == MOLT else _flags_of_launcher(launcher)
    width = max(len(flag) for flag in flags_of(newest())) + 2 if launcher == LAUNCHER else 48
    return "\n".join(f"{flag:<{width}}  {KINDS[kind]:<27}  {what}" for flag, kind, what in rows)


def _flags_of_ppo() -> Iterator[tuple[str, Kind, str]]:
    for rule in RULES:
        yield f"--{rule.name}", rule.kind, ", ".join(rule.keys)


def _flags_of_launcher(launcher: str) -> Iterator[tuple[str, Kind, str]]:
    known = all_flags(launcher)
    for rule in INFERENCE_RULES.get(launcher, SUPERVISED_RULES):
        older = [name for name, newest in OLDER_NAMES.items() if newest == rule.name]
        if names := [f"--{name}" for name in dict.fromkeys((rule.name, *older)) if f"--{name}" in known]:
            reading = rule.reading if isinstance(rule.reading, str) else ""
            yield " ".join(names), rule.kind, reading if rule.kind in ("hint", "noop") else ", ".join(rule.keys)


def _flags_of_molt() -> Iterator[tuple[str, Kind, str]]:
    for flag in molt.flags():
        rule = rule_of().get(molt.RENAMED.get(flag, flag)[2:])
        if flag in molt.REFUSES:
            yield flag, "error", molt.REFUSES[flag][1]
        elif flag in molt.SETTING:
            yield flag, "exact", molt.SETTING[flag]
        elif flag in molt.HINTS:
            yield flag, "hint", molt.HINTS[flag]
        elif rule is None or flag in molt.IDLE:
            yield flag, "noop", molt.IDLE[flag]
        else:
            yield flag, rule.kind, ", ".join(rule.keys)
