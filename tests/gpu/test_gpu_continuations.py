"""Responses that are cut and go on, on the device: in the same engine, in another, with KV pages, and after an engine was parked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu.hosts import HostedEngine
from tests.gpu.lanes import FLOAT32, SETTINGS, assert_alike, check_family, compare, spread_policy, weights_of
from tests.learn.tiny_policy import in_pairs

pytestmark = pytest.mark.gpu

LONG = replace(SETTINGS, max_model_len=320, max_running=64, end_token_id=None)
PARKED = ("falcon", "gemma3", "granite")  # slopes of attention, a scaled embedding, multipliers: what no checkpoint has
engines: dict[str, HostedEngine] = {}


def begin(hosts: Any, items: list[Any]) -> None:
    paged = replace(LONG, prefix_kv=True)
    engines["plain"] = HostedEngine(hosts.get("EngineTools", "plain"), "continuations", spread_policy(), LONG)
    for name in ("maker", "user"):
        engines[name] = HostedEngine(hosts.get("EngineTools", name), name, spread_policy(), paged, True, True)
    families = [family for family in PARKED if any(f"[{family}]" in item.name for item in items)]
    for family in families:
        hosts.get("EngineTools", f"parked {family}")
    if families:
        hosts.get("LearnerTools", "parked learners")


def whole(asked: list[Any], version: int) -> dict[int, Any]:
    """Return what an engine answers that is not disturbed. All engines get the version."""
    for engine in engines.values():
        engine.ask("load", version, weights_of(spread_policy()))
    return engines["plain"].ask("answer", asked)  # type: ignore[no-any-return]


def test_a_cut_response_goes_on(hosts: Any, record: Callable[..., None]) -> None:
    asked = in_pairs(seed=1)
    wanted = whole(asked, 1)
    going = [replace(one, generated=tuple(wanted[one.key].token_ids[: len(wanted[one.key].token_ids) // 2].tolist())) for one in asked]
    rest = engines["plain"].ask("call", "answer", going)
    joined = {
        one.key: tuple(
            np.concatenate([first[: len(one.generated)], second])
            for first, second in zip((wanted[one.key].token_ids, wanted[one.key].logprobs), rest[one.key], strict=True)
        )
        for one in going
    }
    found = compare(joined, wanted)
    record(**found)
    assert_alike(found)


def test_a_parked_engine_answers_as_before(hosts: Any, record: Callable[..., None]) -> None:
    asked = in_pairs(seed=2)
    wanted, engine = whole(asked, 2), engines["user"]
    engine.ask("park")
    engine.ask("load", 3, weights_of(spread_policy(1)))
    other = engine.ask("answer", asked)
    report = engine.ask("park")
    engine.ask("load", 4, weights_of(spread_policy()))
    found = compare(engine.ask("answer", asked), wanted)
    record(**found, parked_mb=report["memory_mb"], other=compare(other, wanted))
    assert_alike(found)
    assert compare(other, wanted)["equal"] < len(asked)


@pytest.mark.parametrize("family", PARKED)
def test_a_parked_engine_keeps_what_no_checkpoint_has(hosts: Any, record: Callable[..., None], family: str) -> None:
    found = check_family(
        hosts.get("EngineTools", f"parked {family}"), hosts.get("LearnerTools", "parked learners"), family, family, "float32", parks=True
    )
    record(**found)
    assert max(found["largest"]) < FLOAT32
    assert_alike(found["after_parking"])


@pytest.mark.parametrize("cut_after", [1, 7, 15])
def test_a_cut_response_goes_on_in_another_engine_with_its_pages(hosts: Any, record: Callable[..., None], cut_after: int) -> None:
    """The other engine computes nothing but the tokens that it draws."""
    asked, version = in_pairs(seed=3 + cut_after), 10 + cut_after
    wanted, maker, user = whole(asked, version), engines["maker"], engines["user"]
    first = maker.ask("call", "answer", asked, cut_after)
    going = [one for one in asked if len(first[one.key][0]) < len(wanted[one.key].token_ids)]
    bundle = maker.ask("call", "kept", version, [one.key for one in asked])
    rest = [replace(one, generated=tuple(first[one.key][0].tolist())) for one in going]
    user.ask("call", "forget")
    user.ask("call", "put", version, [(*one.token_ids, *one.generated) for one in rest], bundle)
    before = user.ask("call", "counts")
    second = user.ask("call", "answer", rest)
    after = user.ask("call", "counts")
    joined = {key: tuple(np.concatenate([a, b]) for a, b in zip(first[key], second[key], strict=True)) for key in second}
    found = compare(joined, {key: wanted[key] for key in joined})
    beside = after["computed_tokens"] - before.get("computed_tokens", 0) - sum(len(second[one.key][0]) for one in going)
    record(**found, pages=len(bundle.addresses), loaded=after.get("loaded", 0) - before.get("loaded", 0), computed_beside=beside)
    assert_alike(found)
    assert after["loaded"] > before.get("loaded", 0) and beside == 0


def test_prompts_are_not_computed_whose_pages_another_engine_has(hosts: Any, record: Callable[..., None]) -> None:
    asked, version = in_pairs(seed=8), 40
    wanted, maker, user = whole(asked, version), engines["maker"], engines["user"]
    maker.ask("call", "answer", asked, 1)
    bundle = maker.ask("call", "kept", version, [one.key for one in asked])
    user.ask("call", "forget")
    user.ask("call", "put", version, [one.token_ids for one in asked], bundle)
    before = user.ask("call", "counts")
    found = compare(user.ask("answer", asked), wanted)
    after = user.ask("call", "counts")
    drawn = sum(len(one.token_ids) for one in wanted.values())
    beside = after["computed_tokens"] - before.get("computed_tokens", 0) - drawn
    record(**found, computed_beside=beside, prompt_tokens=sum(len(one.token_ids) for one in asked))
    assert_alike(found)
    assert after["loaded"] > before.get("loaded", 0) and beside < 0.5 * sum(len(one.token_ids) for one in asked)
