"""Notes before a run on what other versions that accept the command would do otherwise."""

from __future__ import annotations

from dataclasses import replace

from rlhfless_ray.compat.openrlhf.dialect import CommandLine
from rlhfless_ray.compat.openrlhf.flag_semantics import Settings
from rlhfless_ray.compat.openrlhf.flag_table import RULES, rule_of
from rlhfless_ray.compat.openrlhf.flags import span_text
from rlhfless_ray.compat.openrlhf.normalise import STAMPED, Values, defaults, shown


def other_defaults(line: CommandLine, v: Values) -> list[str]:
    """Return a note on the defaults of other versions that accept the command too, if they would change the recipe."""
    differing: dict[tuple[str, str], list[str]] = {}
    own_defaults = defaults(line.version, {})  # not `v.value`, into which the launcher fills some values
    for version in line.accepted_by:
        for name, value in defaults(version, {}).items():
            if value in (own_defaults[name], STAMPED) or name in v.set_by:
                continue
            rule = rule_of().get(name)
            if rule is None or rule.kind not in ("exact", "cond") or rule.idle(v):
                continue
            if rule.settings(v) != rule.settings(replace(v, value={**v.value, name: value})):
                differing.setdefault((name, shown(value)), []).append(version)
    if not differing:
        return []
    parts = [f"{v.named(name)} {text or 'empty'} ({span_text(where[0], where[-1])})" for (name, text), where in differing.items()]
    return [f"other versions accept this command too, with other defaults: {', '.join(parts)}; choose one with --elastic.dialect VERSION"]


def other_meanings(line: CommandLine, v: Values) -> list[str]:
    """Return notes on flags that mean something else in other versions that accept the line."""
    differing: dict[tuple[str, str], list[str]] = {}
    here = [(rule, rule.settings(v)) for rule in RULES if rule.kind in ("exact", "cond") and not rule.idle(v)]
    for version in line.accepted_by:
        there = replace(v, version=version)
        for rule, settings in here:
            if (other := rule.settings(there)) != settings and (changed := _changed(settings, other)):
                differing.setdefault((v.spelled(rule.name), changed), []).append(version)
    return [
        f"{flag}: OpenRLHF {span_text(where[0], where[-1])} accepts this command too and means {changed}; choose that with "
        "--elastic.dialect VERSION"
        for (flag, changed), where in differing.items()
    ]


def _changed(here: Settings, there: Settings) -> str:
    keys = [key for key in {**here, **there} if (key in here, here.get(key)) != (key in there, there.get(key))]
    return ", ".join(f"{key} {there[key]}" if key in there else f"no {key}" for key in keys)
