"""Which version a command line is written in, and mixtures of versions.

A version that accepts the whole line is its dialect: the one that knows most of the flags by their full names and, of
those, the newest. Where none accepts it, the version that knows most of the flags is the base; flags of other versions
keep the definition nearest to it.

Of the versions that know every flag, abbreviated or not, the full names choose one, and its parser reads the abbreviations. What it
calls ambiguous is refused with the candidates, also where an older version has a single flag that begins so.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.flags import (
    LAUNCHER,
    Spec,
    all_flags,
    flags_of,
    history,
    nearest_spec,
    newest,
    other_launchers,
    place,
    renamed,
    span_text,
    spec_at,
    versions,
)
from rlhfless_ray.compat.openrlhf.parsers import Given, Refused, parse, parser_of

MOST_READINGS = 64  # of a line with several ambiguous abbreviations


class Unreadable(UserError):
    """A command line that no version reads: `version` is the one it is nearest to, the text says why and what to write."""

    def __init__(self, message: str, version: str) -> None:
        super().__init__(message)
        self.version = version


@dataclass
class CommandLine:
    """A command line, read."""

    version: str
    """The dialect: its defaults hold."""
    given: Given
    accepted_by: list[str] = field(default_factory=list)
    """Every version that accepts the whole line, oldest first; empty for a mixture."""
    foreign: list[Spec] = field(default_factory=list)
    """Flags that the dialect does not have, or not in this form, as the version nearest to it defines them."""

    @property
    def mixed(self) -> bool:
        return bool(self.foreign)


def read(tokens: Sequence[str], version: str | None = None) -> CommandLine:
    """Read a command line; with `version`, as that version and no other. Raises Unreadable."""
    if version is not None:
        return _strictly(tokens, version)
    names = _option_names(tokens)
    readers = [v for v in versions() if _reads(v, tokens, names)]
    if not readers:
        return _mixture(tokens, names)
    best = max(readers, key=lambda v: (sum(name in flags_of(v) for name in names), place(v)))
    for name in names:
        if len(_resolve(name, best)) > 1:
            raise Unreadable(_ambiguous(name, readers), best)
    accepted = {v: parse(parser_of(v), tokens) for v in readers if all(len(_resolve(name, v)) == 1 for name in names)}
    return CommandLine(best, accepted[best], [v for v in accepted if accepted[v] == accepted[best]])


def _reads(version: str, tokens: Sequence[str], names: list[str]) -> bool:
    """Whether a version's parser accepts the line with some full name in place of each ambiguous abbreviation."""
    if not all(_resolve(name, version) for name in names):  # spares building parsers that cannot accept it
        return False
    places = [(index, name, _one_of_each_form(name, version)) for index, name, _ in _options(tokens) if name != "--help"]
    for flags in itertools.islice(itertools.product(*(candidates for *_, candidates in places)), MOST_READINGS):
        line = list(tokens)
        for (index, name, _), flag in zip(places, flags, strict=True):
            line[index] = flag + line[index][len(name) :]
        try:
            parse(parser_of(version), line)
        except Refused:
            continue
        return True
    return False


def _one_of_each_form(name: str, version: str) -> list[str]:
    """Of the flags that a name stands for and whose values are read alike, the first."""
    forms: dict[tuple[object, ...], str] = {}
    for flag in _resolve(name, version):
        forms.setdefault(_form(flags_of(version)[flag]), flag)
    return list(forms.values())


def _form(spec: Spec) -> tuple[object, ...]:
    """How a parser reads the values of a flag."""
    return spec.type, spec.action, spec.choices, spec.nargs


def _meaning(flags: Sequence[str]) -> tuple[str, ...] | None:
    """The newest names that a single flag decides; None where there is not exactly one flag. One that has no newest name means itself."""
    return (renamed(flags[0]) or (flags[0],)) if len(flags) == 1 else None


def _ambiguous(name: str, within: Sequence[str]) -> str:
    """What to say of an abbreviation of several flags."""
    which = _candidates(name, within)
    return f"ambiguous option: {name} could match {which}; write the full name, or name the version with --elastic.dialect VERSION"


def _candidates(name: str, within: Sequence[str]) -> str:
    """The flags of these versions (oldest first) that a name abbreviates, each with the versions that have it."""
    found: dict[str, list[str]] = {}
    for version in within:
        for flag in _resolve(name, version):
            found.setdefault(flag, []).append(version)
    return ", ".join(f"{flag} ({span_text(having[0], having[-1])})" for flag, having in found.items())


def _strictly(tokens: Sequence[str], version: str) -> CommandLine:
    if version not in versions():
        raise Unreadable(f"--elastic.dialect: {version} is none of the versions {', '.join(versions())}", newest())
    try:
        return CommandLine(version, parse(parser_of(version), tokens), [version])
    except Refused as refused:
        unknown = [name for name in _option_names(tokens) if not _resolve(name, version)]
        raise Unreadable(_with_advice(str(refused), unknown), version) from None


def _mixture(tokens: Sequence[str], names: list[str]) -> CommandLine:
    def known_by(version: str) -> tuple[int, int, int]:
        exact = sum(name in flags_of(version) for name in names)
        return exact, sum(bool(_resolve(name, version)) for name in names), place(version)

    base = max(versions(), key=known_by)
    known = flags_of(base)
    rewritten, unknown = list(tokens), []
    resolved: dict[str, None] = {}
    for index, name, equals in _options(tokens):
        flag = name if history(name) else _in_mixture(name, base)
        if not flag:
            unknown.append(name)
            continue
        rewritten[index] = flag + (tokens[index][len(name) :] if equals else "")
        resolved[flag] = None
    if unknown:
        raise Unreadable(_with_advice(f"unrecognized arguments: {' '.join(unknown)}", unknown), base)
    first = None
    for choice in _definitions(list(resolved), base):
        foreign = tuple(spec for spec in choice if known.get(spec.flag) != spec)
        try:
            return CommandLine(base, parse(parser_of(base, foreign), rewritten), [], list(foreign))
        except Refused as refused:
            first = first or refused
    raise Unreadable(str(first), base)


def _definitions(given: list[str], base: str) -> Iterator[tuple[Spec, ...]]:
    """A definition for each flag given; the nearest to `base` first. Only those that read values differently are tried:
    a threshold was one value, then two, then either."""
    choices = []
    for flag in given:
        by_reading: dict[tuple[object, ...], Spec] = {}
        nearest = spec_at(flag, base) or nearest_spec(flag, base)
        assert nearest is not None
        for spec in (nearest, *reversed(history(flag))):
            by_reading.setdefault(_form(spec), spec)
        choices.append(list(by_reading.values()))
    return itertools.product(*choices)


def _in_mixture(name: str, base: str) -> str:
    """The full name of an abbreviation in a line that no version reads: what the base's parser makes of it. Empty: no version has a flag
    that begins so. Raises Unreadable where the base has none or several, or where another version's parser would read another."""
    found = [flags for version in versions() if (flags := _resolve(name, version))]
    if not found:
        return ""
    here = _resolve(name, base)
    if not here:
        raise Unreadable(
            f"unrecognized arguments: {name} abbreviates no flag of OpenRLHF {base}, which most of the line is written for; it could match "
            f"{_candidates(name, versions())}; write the full name",
            base,
        )
    if any(_meaning(flags) != _meaning(here) or len(flags) > 1 for flags in found):
        raise Unreadable(_ambiguous(name, versions()), base)
    return here[0]


def _options(tokens: Sequence[str]) -> list[tuple[int, str, bool]]:
    """(index, name, whether a value follows an equals sign) of every token that argparse would take for an option."""
    found = []
    for index, token in enumerate(tokens):
        if token == "--":
            break
        if token.startswith("--"):
            name, equals, _ = token.partition("=")
            if " " not in name:
                found.append((index, name, bool(equals)))
    return found


def _option_names(tokens: Sequence[str]) -> list[str]:
    return [name for _, name, _ in _options(tokens) if name != "--help"]


@cache
def _resolve(name: str, version: str) -> tuple[str, ...]:
    """What a version's argparse takes a name for: itself, or all flags that it abbreviates."""
    if name in flags_of(version):
        return (name,)
    return tuple(flag for flag in flags_of(version) if flag.startswith(name))


# ---------------------------------------------------------------- what to write instead


def _with_advice(message: str, flags: list[str]) -> str:
    return "\n".join([message, *(advice(flag) for flag in dict.fromkeys(flags))])


@cache
def advice(flag: str) -> str:
    """One sentence on a flag that is not accepted: who had it, and what to write instead."""
    spans = history(flag)
    if spans:
        had = f"{flag}: OpenRLHF {span_text(spans[0].since, spans[-1].until)} had it"
        instead = instead_of(flag)
        return f"{had}; write {instead} instead" if instead else f"{had}, without effect; leave it out"
    elsewhere = other_launchers(flag)
    if elsewhere:
        where = ", ".join(f"{launcher} ({span_text(since, until)})" for launcher, since, until in elsewhere)
        return f"{flag}: no flag of {LAUNCHER} in any version from {versions()[0]} on, but one of {where}"
    return f"{flag}: no version of OpenRLHF from {versions()[0]} to {newest()} has it" + _nearest_text(flag)


def _nearest_text(flag: str) -> str:
    words = set(flag.strip("-").replace(".", "_").split("_"))

    def shared(name: str) -> float:  # the same words in another order are nearer than similar letters
        own = set(name.strip("-").replace(".", "_").split("_"))
        return len(words & own) / len(words | own) + difflib.SequenceMatcher(None, flag, name).ratio()

    name = max(all_flags(), key=lambda candidate: (shared(candidate), place(history(candidate)[-1].until)))
    if shared(name) < 0.9:
        return ""
    spans = history(name)
    instead = "" if spans[-1].until == newest() else instead_of(name)
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


def instead_of(flag: str) -> str:
    """The newest version's way to say what a flag says; empty: nothing, it had no effect. A current flag is its own."""
    if flag in flags_of(newest()):
        return flag
    return REPLACED.get(flag) or " and ".join(renamed(flag))
