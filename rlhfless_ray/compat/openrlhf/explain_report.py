"""What `rlhfless explain` says, and the tables of docs/openrlhf.md (`python -m …explain_report` writes them)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rlhfless_ray.compat.openrlhf.flag_table import KINDS, RULES
from rlhfless_ray.compat.openrlhf.flags import all_flags, flags_of, history, newest, span_text, versions
from rlhfless_ray.compat.openrlhf.memory import memory_lines, needs_of
from rlhfless_ray.compat.openrlhf.normalise import targets
from rlhfless_ray.compat.openrlhf.recipe_keys import NEEDED, Installed
from rlhfless_ray.compat.openrlhf.resources import slots_of
from rlhfless_ray.compat.openrlhf.translate import HINT, HONOURED, NO_EFFECT, Outcome, Translation, supported_today


def explanation(found: Translation) -> str:
    """Dialect, slots, what is honoured, reinterpreted, without effect or refused, and the recipe."""
    slots = slots_of(found)
    lines = [
        f"dialect     {dialect(found)}",
        f"slots       at least {slots.at_least}, at most {slots.at_most} at once (OpenRLHF would hold {slots.openrlhf_gpus} GPUs for the "
        "whole run)",
        f"honoured    {len(found.with_status(HONOURED))} of {len(found.flags)} flags: "
        + (" ".join(outcome.flag for outcome in found.with_status(HONOURED)) or "none"),
    ]
    lines += _block("memory", memory_lines(found))
    lines += _block("hints", [f"{_said(found, outcome.flag)}: {outcome.why}" for outcome in found.with_status(HINT)])
    idle = found.with_status(NO_EFFECT)
    if idle:
        lines.append(f"no effect   {' '.join(outcome.flag for outcome in idle)}")
    if found.own:
        lines.append("our own     " + ", ".join(f"{key} = {value}" for key, value in found.own.items()))
    lines += _block("notes", found.notes)
    lines += _block("refused", [f"{flags}: {why}" for flags, why in _grouped(found.refused)])
    lines.append("recipe" + (" (what can be honoured of it)" if found.refused else ""))
    lines += ["  " + line for line in yaml.safe_dump(found.tree, sort_keys=False, allow_unicode=True).splitlines()]
    return "\n".join(lines)


def summary(found: Translation) -> list[str]:
    """What a run says of its command line before it starts: a few lines, no flag by flag noise."""
    lines = [f"command line of OpenRLHF {dialect(found)}"]
    lines += [f"{flags} read as: {why}" for flags, why in _grouped(found.with_status(HINT))]
    idle = found.with_status(NO_EFFECT)
    if idle:
        lines.append(f"no effect here: {' '.join(outcome.flag for outcome in idle)}")
    return lines + found.notes


def dialect(found: Translation) -> str:
    line = found.line
    if line.mixed:
        return f"{line.version}, mixed with flags of other versions: {' '.join(spec.flag for spec in line.foreign)}"
    others = [version for version in line.accepted_by if version != line.version]
    return line.version + (f" ({_ranges(others)} accept it too)" if others else "")


def as_data(found: Translation) -> dict[str, Any]:
    """The explanation for a program: JSON types only."""
    slots = slots_of(found)
    return {
        "dialect": found.line.version,
        "accepted_by": found.line.accepted_by,
        "mixed": [spec.flag for spec in found.line.foreign],
        "runs": not found.refused,
        "slots": {"at_least": slots.at_least, "at_most": slots.at_most, "openrlhf_gpus": slots.openrlhf_gpus},
        "memory": [{"function": need.who, "bytes": need.bytes} for need in needs_of(found)],
        "flags": [{"flag": o.flag, "status": o.status, "why": o.why} for o in found.flags],
        "refused": [{"flag": o.flag, "why": o.why} for o in found.refused],
        "notes": found.notes,
        "recipe": found.tree,
    }


def _said(found: Translation, flag: str) -> str:
    value = found.line.given.values.get(flag)
    if value is True:
        return flag
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _grouped(outcomes: Iterable[Outcome]) -> list[tuple[str, str]]:
    """Flags with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_reason.setdefault(outcome.why, []).append(outcome.flag)
    return [(" ".join(flags), why) for why, flags in by_reason.items()]


def _block(title: str, entries: list[str]) -> list[str]:
    return [f"{title:<12}{entry}" if not index else f"{'':<12}{entry}" for index, entry in enumerate(entries)]


def _ranges(some: list[str]) -> str:
    """Versions in a row as one range."""
    known, parts, start = versions(), [], 0
    for index in range(1, len(some) + 1):
        if index == len(some) or known.index(some[index]) != known.index(some[index - 1]) + 1:
            parts.append(span_text(some[start], some[index - 1]))
            start = index
    return ", ".join(parts)


# ---------------------------------------------------------------- docs/openrlhf.md

BEGIN, END = "<!-- generated by python -m rlhfless_ray.compat.openrlhf.explain_report -->", "<!-- end of what is generated -->"
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "openrlhf.md"


def flag_table() -> str:
    """Every flag of the newest version: its older names, what becomes of it, the recipe keys it decides."""
    older: dict[str, list[str]] = {}
    for flag in all_flags():
        for name in targets(flag):
            if f"--{name}" != flag:
                spans = history(flag)
                older.setdefault(name, []).append(f"`{flag}` {spans[0].since}–{spans[-1].until}")
    here = classes()
    lines = [f"| flag of {newest()} | older names | here | recipe |", "|---|---|---|---|"]
    lines += [
        f"| `--{rule.name}` | {', '.join(older.get(rule.name, []))} | {here[rule.name]} | {', '.join(f'`{key}`' for key in rule.keys)} |"
        for rule in RULES
    ]
    gone = [flag for flag in all_flags() if not targets(flag)]
    lines += ["", f"Without effect in OpenRLHF too, and here: {', '.join(f'`{flag}`' for flag in gone)}."]
    counts = Counter(here.values())
    lines += ["", f"{len(RULES)} flags: " + ", ".join(f"{count} {text}" for text, count in counts.most_common()) + "."]
    return "\n".join(lines)


def classes() -> dict[str, str]:
    """Newest name → its flag's class, or that the recipe cannot say yet what it asks for beyond its default."""
    lacking = supported_today()
    return {rule.name: "not supported yet" if rule.kind in ("exact", "cond") and lacking[rule.name] else KINDS[rule.kind] for rule in RULES}


def document(text: str) -> str:
    """The page with its generated part made anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{flag_table()}\n\n{END}{tail}"


def flags_today() -> str:
    """Every flag with its class and whether the installed recipe has all it needs."""
    lacking = supported_today()
    width = max(len(flag) for flag in flags_of(newest()))
    return "\n".join(
        f"--{rule.name:<{width}}  {KINDS[rule.kind]:<27}"
        + (f"  needs {lacking[rule.name]}" if lacking[rule.name] and rule.kind in ("exact", "cond") else "")
        for rule in RULES
    )


def missing_keys() -> str:
    """The recipe keys that full coverage needs and the installed recipe lacks, as a table."""
    installed = Installed()
    rows = [key for key in NEEDED if not installed.knows(key.name)]
    return "\n".join(f"{key.name:<36} {key.type:<28} {key.default!r:<22} {key.meaning}" for key in rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--missing"]:
        print(missing_keys())
    else:
        DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
