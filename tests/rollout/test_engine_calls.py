"""The numbers of a rollout's engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlhfless_ray.rollout.engine_calls import EngineCalls


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
