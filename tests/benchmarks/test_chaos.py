"""What the chaos run strikes and how it judges, without a run."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import benchmarks.chaos as chaos
from benchmarks.common.fault_injection import KINDS, PAGE_KINDS, Chaos


def nothing_wrong(faults: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"faults": faults, "wrong": {"samples lost": 0, "versions with other weights": 0}, "left": {"actors": 0}, **more}


def test_every_kind_comes_often_enough() -> None:
    volume = Counter(chaos.shuffled(105, tuple(KINDS), seed=0))
    real = Counter(chaos.shuffled(24, chaos.REAL_KINDS, seed=0))
    assert set(volume) == set(KINDS) and min(volume.values()) >= chaos.LEAST and volume.total() == 105
    assert set(real) == set(chaos.REAL_KINDS) and all(real[kind] >= chaos.LEAST for kind in PAGE_KINDS) and real.total() == 24
    options = Namespace(quick=False, faults=105, drivers=5, real=24)
    steps = chaos.real_steps(24)
    found = {
        "replayed": nothing_wrong(dict(volume)),
        "drivers": nothing_wrong({"driver killed": 5}),
        "real": nothing_wrong(dict(real), compared={"versions": steps}),
    }
    assert all(target.met for target in chaos.reached(options, found))
    for part, what, name in (("replayed", "wrong", "samples lost"), ("drivers", "left", "actors"), ("real", "faults", "engine hung")):
        worse = {**found, part: {**found[part], what: {**found[part][what], name: 1}}}
        assert all(target.met for target in chaos.reached(options, worse)) == (what == "faults")
    assert not all(target.met for target in chaos.reached(options, {**found, "real": {"failed": "the run ended"}}))


def test_a_strike_that_finds_nothing_lets_the_others_pass() -> None:
    never, always = (("moment",), lambda *_: False), (("moment",), lambda *_: True)
    found = Chaos(["always", "always", "never"], None, seed=0, table={"never": never, "always": always})
    for step in range(1, 20):
        for _ in range(3):
            session = SimpleNamespace(step=SimpleNamespace(number=step))
            found(SimpleNamespace(parts=SimpleNamespace(session=session)), "moment")  # type: ignore[arg-type]
    assert [kind for _, kind, _ in found.done] == ["always", "always"] and found.kinds == ["never"]
    assert len({step for step, _, _ in found.done}) == 2 and min(step for step, _, _ in found.done) > 1


def test_a_part_that_fails_is_told_with_its_reason() -> None:
    def part(faults: int, say: Any) -> dict[str, Any]:
        raise RuntimeError(f"{faults} were too many")

    said: list[str] = []
    found = chaos.tried(partial(part, 3), said.append)
    assert found["failed"] == "RuntimeError: 3 were too many" and said == [f"failed: {found['failed']}"]
