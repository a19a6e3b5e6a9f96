"""The numbers of a rollout's engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhfless_ray.rollout.engine_calls import MOST_REPORTS, EngineCall, EngineCalls


class Compared:
    """An instance that counts how often it is compared with another one."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return self is other


def test_numbers_of_engines_are_found_without_a_search() -> None:
    """The driver asks for numbers in every turn of an episode and after every report."""
    engines: list[Any] = [Compared() for _ in range(50)]
    calls = EngineCalls(SimpleNamespace(working=engines), None, 1.0)  # type: ignore[arg-type]
    for _ in range(2):
        assert [calls.number(engine) for engine in engines] == list(range(50))
    assert calls.number(engines[7]) == 7 and [id(engine) for engine in calls.engines] == [id(engine) for engine in engines]
    assert Compared.count == 0


def test_an_engine_that_still_starts_takes_no_requests_from_others() -> None:
    """A request that was moved to it would wait until its process had started, while its old engine could go on with it."""
    engines = [SimpleNamespace(started=started, loading=None) for started in (True, False, True)]  # the last one has no call
    calls = EngineCalls(SimpleNamespace(working=engines), None, 1.0)  # type: ignore[arg-type]
    for generator, engine in (("first", engines[0]), ("second", engines[1])):
        calls.running[generator] = EngineCall(engine, calls.number(engine), 1, {0}, 0.0)  # type: ignore[arg-type]
    assert calls.available() == calls.available_or_starting() == [0, 2] and calls.available_or_starting(but=0) == [2]
    calls.pool.working = engines[:2]  # type: ignore[misc]
    assert calls.available_or_starting(but=0) == [1], "rather than none"
    calls.pool.working = engines  # type: ignore[misc]
    engines[1].started = True
    assert calls.available() == [0, 1, 2]


def test_many_engines_report_less_often() -> None:
    """A report costs the driver the same however many tokens it contains."""
    asked: list[float] = []

    class Actor:
        def options(self, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda epoch, requests, interval_s, threads: asked.append(interval_s) or epoch)

    token_log: Any = SimpleNamespace(assign=lambda keys, number: [])
    for count in (8, 512):
        engines: list[Any] = [SimpleNamespace(actor=SimpleNamespace(rollout=Actor()), leases=[]) for _ in range(count)]
        calls = EngineCalls(SimpleNamespace(working=engines), token_log, 0.25, lambda number, requests: {})  # type: ignore[arg-type]
        calls.send(calls.number(engines[0]), np.array([0]))
    assert asked == [0.25, 512 / MOST_REPORTS] and asked[1] > 1
