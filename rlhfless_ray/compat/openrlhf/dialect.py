"""Find the version that a command line is written for, and read lines that mix versions.

The dialect of a line is a version that accepts all of it. If several do, it is the one that has the most flags by their full
names, then the newest. If none does, the version that has the most of its flags is the base. Flags of other versions then keep
the definition nearest to the base.

The dialect's parser reads abbreviations. One that is ambiguous there is refused with its candidates, even if an older version
has only one flag that begins so.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.flags import (
    LAUNCHER,
    Spec,
    all_flags,
    flags_of,
    history,
    launchers_having,
    nearest_spec,
    place,
    renamed,
    span_text,
    versions_of,
)
from rlhfless_ray.compat.openrlhf.parsers import Given, Refused, parser_of

MAX_READINGS = 64  # tried for a line with several ambiguous abbreviations


class Unreadable(UserError):
    """No version can read the command line. `version`: the nearest one, whose usage is shown."""

    def __init__(self, message: str, version: str) -> None:
        super().__init__(message)
        self.version = version


@dataclass
class CommandLine:
    """A parsed command line."""

    version: str
    """The dialect, whose defaults apply."""
    given: Given
    accepted_by: list[str] = field(default_factory=list)
    """Versions that accept the whole line, oldest first; empty for a mixture."""
    foreign: list[Spec] = field(default_factory=list)
    """Definitions of flags that the dialect lacks or defines otherwise, each from the version nearest to it."""

    @property
    def mixed(self) -> bool:
        return bool(self.foreign)


def read(tokens: Sequence[str], version: str | None = None, launcher: str = LAUNCHER) -> CommandLine:
    """Parse a command line. `version`: accept this version only. Raises Unreadable."""
    if version is not None:
        return _strictly(tokens, version, launcher)
    names = _option_names(tokens)
    readers = {v: given for v in versions_of(launcher) if (given := _reading(v, tokens, names, launcher)) is not None}
    if not readers:
        return _mixture(tokens, names, launcher)
    best = max(readers, key=lambda v: (sum(name in flags_of(v, launcher) for name in names), place(v)))
    for name in names:
        if len(_resolve(name, best, launcher)) > 1:
            raise Unreadable(_ambiguous(name, [*readers], launcher), best)
    accepted = {v: given for v, given in readers.items() if all(len(_resolve(name, v, launcher)) == 1 for name in names)}
    return CommandLine(best, accepted[best], [v for v in accepted if accepted[v] == accepted[best]])


def _reading(version: str, tokens: Sequence[str], names: list[str], launcher: str) -> Given | None:
    """Return the line as a version reads it with some full name for each ambiguous abbreviation, or None."""
    if not all(_resolve(name, version, launcher) for name in names):  # avoids building parsers that cannot accept the line
        return None
    places = [(index, name, _one_of_each_form(name, version, launcher)) for index, name, _ in _options(tokens) if name != "--help"]
    for flags in itertools.islice(itertools.product(*(candidates for *_, candidates in places)), MAX_READINGS):
        line = list(tokens)
        for (index, name, _), flag in zip(places, flags, strict=True):
            line[index] = flag + line[index][len(name) :]
        with suppress(Refused):
            return parser_of(version, launcher=launcher).read(line)
    return None


def _one_of_each_form(name: str, version: str, launcher: str) -> list[str]:
    """Return the first of each group of flags that a name stands for and whose values are parsed alike."""
    forms: dict[tuple[object, ...], str] = {}
    for flag in _resolve(name, version, launcher):
        forms.setdefault(_form(flags_of(version, launcher)[flag]), flag)
    return list(forms.values())


def _form(spec: Spec) -> tuple[object, ...]:
    """Return the properties that determine how a parser reads the flag's values."""
    return spec.type, spec.action, spec.choices, spec.nargs


def _meaning(flags: Sequence[str], launcher: str) -> tuple[str, ...] | None:
    """Return the newest names of a single flag, or its own name if there are none. None unless there is exactly one flag."""
    return (renamed(flags[0], launcher) or (flags[0],)) if len(flags) == 1 else None


def _ambiguous(name: str, within: Sequence[str], launcher: str) -> str:
    """Return the error message for an abbreviation of several flags."""
    which = _candidates(name, within, launcher)
    return f"ambiguous option: {name} could match {which}; write the full name, or name the version with --elastic.dialect VERSION"


def _candidates(name: str, within: Sequence[str], launcher: str) -> str:
    """List the flags that a name abbreviates in these versions (oldest first), each with its versions."""
    having_it: dict[str, list[str]] = {}
    for version in within:
        for flag in _resolve(name, version, launcher):
            having_it.setdefault(flag, []).append(version)
    return ", ".join(f"{flag} ({span_text(having[0], having[-1])})" for flag, having in having_it.items())


def _strictly(tokens: Sequence[str], version: str, launcher: str) -> CommandLine:
    having = versions_of(launcher)
    if version not in having:
        raise Unreadable(f"--elastic.dialect: {version} is none of the versions {', '.join(having)}", having[-1])
    try:
        return CommandLine(version, parser_of(version, launcher=launcher).read(tokens), [version])
    except Refused as refused:
        unknown = [name for name in _option_names(tokens) if not _resolve(name, version, launcher)]
        raise Unreadable(_with_advice(str(refused), unknown, launcher), version) from None


def _mixture(tokens: Sequence[str], names: list[str], launcher: str) -> CommandLine:
    def known_by(version: str) -> tuple[int, int, int]:
        exact = sum(name in flags_of(version, launcher) for name in names)
        return exact, sum(bool(_resolve(name, version, launcher)) for name in names), place(version)

    base = max(versions_of(launcher), key=known_by)
    known = flags_of(base, launcher)
    rewritten, unknown = list(tokens), []
    resolved: dict[str, None] = {}
    for index, name, equals in _options(tokens):
        flag = name if history(name, launcher) else _in_mixture(name, base, launcher)
        if not flag:
            unknown.append(name)
            continue
        rewritten[index] = flag + (tokens[index][len(name) :] if equals else "")
        resolved[flag] = None
    if unknown:
        raise Unreadable(_with_advice(f"unrecognized arguments: {' '.join(unknown)}", unknown, launcher), base)
    first = None
    for choice in _definitions(list(resolved), base, launcher):
        foreign = tuple(spec for spec in choice if known.get(spec.flag) != spec)
        try:
            return CommandLine(base, parser_of(base, foreign, launcher).read(rewritten), [], list(foreign))
        except Refused as refused:
            first = first or refused
    raise Unreadable(str(first), base)


def _definitions(given: list[str], base: str, launcher: str) -> Iterator[tuple[Spec, ...]]:
    """Yield combinations of definitions of the given flags, those nearest to `base` first.

    Definitions that parse values alike count once. They differ for a threshold, which was one value, then two, then either.
    """
    choices = []
    for flag in given:
        by_reading: dict[tuple[object, ...], Spec] = {}
        for spec in (nearest_spec(flag, base, launcher), *reversed(history(flag, launcher))):
            by_reading.setdefault(_form(spec), spec)
        choices.append(list(by_reading.values()))
    return itertools.product(*choices)


def _in_mixture(name: str, base: str, launcher: str) -> str:
    """Return the full name of an abbreviation in a line that no version accepts, or an empty string if no flag begins so.

    Raises Unreadable unless the base version has exactly one such flag and every other version means the same by it.
    """
    readings = [flags for version in versions_of(launcher) if (flags := _resolve(name, version, launcher))]
    if not readings:
        return ""
    here = _resolve(name, base, launcher)
    if not here:
        raise Unreadable(
            f"unrecognized arguments: {name} abbreviates no flag of OpenRLHF {base}, which most of the line is written for; it could match "
            f"{_candidates(name, versions_of(launcher), launcher)}; write the full name",
            base,
        )
    if any(_meaning(flags, launcher) != _meaning(here, launcher) or len(flags) > 1 for flags in readings):
        raise Unreadable(_ambiguous(name, versions_of(launcher), launcher), base)
    return here[0]


def _options(tokens: Sequence[str]) -> list[tuple[int, str, bool]]:
    """Return (index, name, whether a value follows an equals sign) of the tokens that argparse takes for options."""
    options = []
    for index, token in enumerate(tokens):
        if token == "--":
            break
        if token.startswith("--"):
            name, equals, _ = token.partition("=")
            if " " not in name:
                options.append((index, name, bool(equals)))
    return options


def _option_names(tokens: Sequence[str]) -> list[str]:
    return [name for _, name, _ in _options(tokens) if name != "--help"]


@cache
def _resolve(name: str, version: str, launcher: str) -> tuple[str, ...]:
    """Return the flag of this name in a version, or else all flags that it abbreviates."""
    if name in flags_of(version, launcher):
        return (name,)
    return tuple(flag for flag in flags_of(version, launcher) if flag.startswith(name))


# ---------------------------------------------------------------- what to write instead


def _with_advice(message: str, flags: list[str], launcher: str) -> str:
    return "\n".join([message, *(advice(flag, launcher) for flag in dict.fromkeys(flags))])


@cache
def advice(flag: str, launcher: str = LAUNCHER) -> str:
    """Return a sentence on a flag that is not accepted: which versions had it, and what to write instead."""
    spans, newest_version = history(flag, launcher), versions_of(launcher)[-1]
    if spans:
        had = f"{flag}: exists in OpenRLHF {span_text(spans[0].since, spans[-1].until)} only"
        if flag in flags_of(newest_version, launcher):
            return f"{had}; leave --elastic.dialect out to mix flags of several versions"
        instead = instead_of(flag, launcher)
        return f"{had}; write {instead} instead" if instead else f"{had}, without effect; leave it out"
    elsewhere = [f"{other} ({span_text(since, until)})" for other, since, until in launchers_having(flag) if other != launcher]
    if elsewhere:
        found = f"no flag of {launcher} in any version from {versions_of(launcher)[0]} on, but one of {', '.join(elsewhere)}"
    else:
        found = f"no version of OpenRLHF from {versions_of(launcher)[0]} to {newest_version} has it"
    return f"{flag}: {found}{_nearest_text(flag, launcher)}"


def _nearest_text(flag: str, launcher: str) -> str:
    words = set(flag.strip("-").replace(".", "_").split("_"))

    def shared(name: str) -> float:  # the same words in another order count more than similar letters
        others = set(name.strip("-").replace(".", "_").split("_"))
        return len(words & others) / len(words | others) + difflib.SequenceMatcher(None, flag, name).ratio()

    name = max(all_flags(launcher), key=lambda candidate: (shared(candidate), place(history(candidate, launcher)[-1].until)))
    if shared(name) < 0.9:
        return ""
    spans = history(name, launcher)
    instead = "" if spans[-1].until == versions_of(launcher)[-1] else instead_of(name, launcher)
    return f"; did you mean {name} ({span_text(spans[0].since, spans[-1].until)}" + (f", today {instead})?" if instead else ")?")


REPLACED = {
    "--flash_attn": "--ds.attn_implementation flash_attention_2",
    "--bf16": "--ds.param_dtype bf16",
    "--prompt_max_len": "--data.max_len (prompt and response together)",
    "--generate_max_len": "--rollout.max_new_tokens",
    "--use_icepop": "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode mask",
    "--enable_vllm_is_correction": "--algo.advantage.is_correction_level token",
    "--algo.advantage.is_correction_enable": "--algo.advantage.is_correction_level token",
    "--vllm_is_correction_type": "--algo.advantage.is_correction_level and --algo.advantage.is_correction_mode",
    "--algo.advantage.is_correction_type": "--algo.advantage.is_correction_level and --algo.advantage.is_correction_mode",
}


def instead_of(flag: str, launcher: str = LAUNCHER) -> str:
    """Return what to write for a flag in the newest version, or an empty string if it had no effect."""
    if flag in flags_of(versions_of(launcher)[-1], launcher):
        return flag
    return (REPLACED.get(flag, "") if launcher == LAUNCHER else "") or " and ".join(renamed(flag, launcher))
