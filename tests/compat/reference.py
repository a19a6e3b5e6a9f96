"""OpenRLHF's parsers, made straight from the facts with plain argparse: what ours are compared with."""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from hypothesis import strategies as st

import rlhfless_ray.compat.openrlhf

FACTS = json.loads((Path(rlhfless_ray.compat.openrlhf.__file__).parent / "data" / "train_ppo_ray.json").read_text())
VERSIONS: list[str] = FACTS["versions"]
TYPES = {None: None, "int": int, "float": float}


@cache
def definitions(version: str) -> dict[str, dict[str, Any]]:
    found = {}
    for flag, spans in FACTS["flags"].items():
        for span in spans:
            if VERSIONS.index(span["since"]) <= VERSIONS.index(version) <= VERSIONS.index(span["until"]):
                found[flag] = span
    return found


class Refused(Exception):
    """What argparse exits with code 2 for."""


class ReferenceParser(argparse.ArgumentParser):
    """Raise what argparse would print, without the usage before it: to format that costs more than to read a line."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


@cache
def reference_parser(version: str) -> argparse.ArgumentParser:
    parser = ReferenceParser(prog="train_ppo_ray.py")
    for flag, span in definitions(version).items():
        if span.get("action"):
            parser.add_argument(flag, action=span["action"], dest=span.get("dest", flag[2:]))
        else:
            parser.add_argument(
                flag, type=TYPES[span.get("type")], default=span.get("default"), choices=span.get("choices"), nargs=span.get("nargs")
            )
    return parser


def reference_parse(version: str, tokens: list[str]) -> dict[str, Any] | str:
    """What that version's namespace holds, or the sentence it exits with."""
    try:
        return vars(reference_parser(version).parse_args(tokens))
    except Refused as refused:
        return str(refused)


def values_of(span: dict[str, Any]) -> st.SearchStrategy[list[str]]:
    """Words that follow a flag."""
    if span.get("action"):
        return st.just([])
    if span.get("choices"):
        one = st.sampled_from(span["choices"])
    elif span.get("type") == "int":
        one = st.integers(-3, 5000).map(str)
    elif span.get("type") == "float":
        one = st.floats(-20, 20, allow_nan=False).map(lambda x: f"{x:.3f}")
    else:
        one = st.text("abz/._{}", min_size=1, max_size=8)
    if span.get("nargs") == 2:
        return st.lists(one, min_size=2, max_size=2)
    if span.get("nargs") in ("+", "*"):
        return st.lists(one, min_size=1, max_size=3)
    return one.map(lambda word: [word])


@st.composite
def lines(draw: st.DrawFn, version: str | None = None, most: int = 8) -> tuple[str, list[str]]:
    """A version and a command line that is written for it: any flags, in any order, repeated, abbreviated, with `=`."""
    version = version or draw(st.sampled_from(VERSIONS))
    known = definitions(version)
    tokens: list[str] = []
    for flag in draw(st.lists(st.sampled_from(sorted(known)), max_size=most)):
        span = known[flag]
        words = draw(values_of(span))
        name = flag[: len(flag) - draw(st.integers(0, 3))] if draw(st.booleans()) else flag
        if len(words) == 1 and draw(st.booleans()):
            tokens.append(f"{name}={words[0]}")
        else:
            tokens += [name, *words]
    return version, tokens
