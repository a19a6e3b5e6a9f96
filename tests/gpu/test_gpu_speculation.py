"""Engines that draft say on the device what engines say that do not, eager and with CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu.hosts import HostedEngine
from tests.gpu.lanes import SETTINGS, assert_alike, compare, spread_policy, weights_of
from tests.learn.tiny_policy import in_pairs

pytestmark = pytest.mark.gpu

LONG = replace(SETTINGS, max_model_len=320, max_running=64, end_token_id=None)
engines: dict[str, HostedEngine] = {}


def begin(hosts: Any, items: list[Any]) -> None:
    """Build engines: with the model compiled and CUDA graphs as runs have them, which takes longer, and eager ones."""
    names = " ".join(item.name for item in items)
    for kind in ("off", "on"):
        settings = replace(LONG, speculation=kind)
        if "graphs" in names:
            engines[f"graphs {kind}"] = HostedEngine(
                hosts.get("EngineTools", f"graphs {kind}"), kind, spread_policy(), settings, False, True
            )
        engines[f"eager {kind}"] = HostedEngine(hosts.get("EngineTools", "plain"), kind, spread_policy(), settings)
    if "drafter" in names:
        engines["eager twin"] = HostedEngine(
            hosts.get("EngineTools", "twin"), "twin", spread_policy(), settings, True, True, spread_policy()
        )


def drafted(way: str, kind: str, temperature: float, version: int, record: Callable[..., None]) -> dict[str, int]:
    """Ask twice: the second time the drafts come from the first responses, which other seeds repeat in part only."""
    counts = {"drafted": 0, "accepted": 0}
    for name in ("off", kind):
        engines[f"{way} {name}"].ask("load", version, weights_of(spread_policy()))
    for seed in (0, 5):
        asked = [replace(one, seed=one.seed + seed, top_p=0.95 if one.key % 4 else 1.0) for one in in_pairs(temperature=temperature)]
        off, on = (engines[f"{way} {name}"].ask("steps", asked) for name in ("off", kind))
        found = compare(on.pop("done"), off.pop("done"))
        record(build_s=engines[f"{way} {kind}"].build_s, **found, off=off, on=on)
        assert_alike(found)
        assert not off["drafted"] and on["steps"] <= off["steps"]
        counts = {name: counts[name] + on[name] for name in counts}
    return counts


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_drafts_change_only_the_number_of_steps(hosts: Any, record: Callable[..., None], way: str, temperature: float) -> None:
    counts = drafted(way, "on", temperature, 1 + int(10 * temperature), record)
    assert counts["accepted"] > (100 if temperature == 0 else 0)


def test_a_drafter_with_the_policys_weights_draws_the_policys_tokens(hosts: Any, record: Callable[..., None]) -> None:
    """Also after it was parked."""
    counts = drafted("eager", "twin", 0.7, 20, record)
    engines["eager twin"].ask("park")
    again = drafted("eager", "twin", 0.7, 21, record)
    counts = {name: counts[name] + again[name] for name in counts}
    assert counts["drafted"] > 100 and counts["accepted"] > 0.6 * counts["drafted"]  # the rest is from text


def test_graphs_give_the_tokens_of_an_eager_engine_and_survive_parking(hosts: Any, record: Callable[..., None]) -> None:
    """Graphs have the addresses of weights and KV, which parking gives back."""
    asked, weights = in_pairs(temperature=1.0, seed=3), weights_of(spread_policy())
    engines["eager off"].ask("load", 30, weights)
    wanted = engines["eager off"].ask("answer", asked)
    for name in ("graphs off", "graphs on"):
        engines[name].ask("load", 30, weights)
        before = engines[name].ask("answer", asked)
        engines[name].ask("park")
        engines[name].ask("load", 31, weights)
        after = engines[name].ask("answer", asked)
        found = {"eager": compare(before, wanted), "after_parking": compare(after, before)}
        record(engine=name, **found)
        for one in found.values():
            assert_alike(one)
