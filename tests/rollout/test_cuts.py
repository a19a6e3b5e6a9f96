"""Requests that are cut and go on, on real engines: what comes out is what an uncut one gives, token for token.

Engines in float32. Log-probabilities are compared to 1e-4 (`assert_same`): a context that was computed in one piece and the same one
token by token differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from asking import BLOCK, FILES, VERSIONS, answer, assert_same, requests, weights_of

from rlhfless_ray.engine.control_queue import ControlQueue, EngineCommand
from rlhfless_ray.engine.stop_strings import StopStrings
from rlhfless_ray.engine.token_deltas import CUT
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import Completion, Request

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engines(new_engine: Callable[..., Any]) -> list[Any]:
    """Three that have nothing in common but the policy: sequences at once, block size, room in the cache, drafts."""
    made = [
        new_engine(FILES["A"]),
        new_engine(FILES["A"], max_running=20, block_size=2 * BLOCK, kv_cache_mb=1, speculation="on"),
        new_engine(FILES["A"], max_running=3, speculation="auto"),
    ]
    version = next(VERSIONS)
    for engine in made:
        engine.load(version, weights_of(FILES["A"]))
    return made


@pytest.fixture(scope="module")
def whole(engines: list[Any]) -> Callable[[list[Request]], dict[int, Completion]]:
    return lambda asked: answer(engines[0], asked)


class Relay:
    """Engines side by side in this process, one step each in turn, and a transcript that refuses gaps and repetitions."""

    def __init__(self, engines: list[Any], asked: list[Request]) -> None:
        self.engines = engines
        self.token_log = TokenLog(asked)
        self.control_queue = [ControlQueue() for _ in engines]
        self.calls: list[Iterator[Any] | None] = [None for _ in engines]
        self.epoch = self.cuts = self.steps = 0
        self.aim: dict[int, int] = {}
        self.at: set[int] = set()  # response positions of cuts

    def send(self, indices: list[int], engine: int) -> None:
        if not indices:
            return
        asked = self.token_log.assign(np.array(indices), engine)
        if self.calls[engine] is not None and self.control_queue[engine].put(self.epoch, EngineCommand(add=tuple(asked))):
            return
        self.control_queue[engine].open(self.epoch)
        self.calls[engine] = self.engines[engine].generate(asked, 0.0, self.control_queue[engine])

    def cut(self, i: int, target: int) -> None:
        source = int(self.token_log.owner[i])
        if self.control_queue[source].put(self.epoch, EngineCommand(cut=(i,))):
            self.aim[i] = target

    def turn(self) -> None:
        for number, call in enumerate(self.calls):
            progress = next(call, None) if call is not None else None
            if progress is None:
                self.calls[number] = None
                continue
            self.steps += 1
            ended, cut = self.token_log.accept(number, str(number), progress)
            assert progress.keys[progress.ends == CUT].tolist() == cut.tolist()
            for i in ended.tolist():
                self.aim.pop(i, None)
            for i in cut.tolist():
                self.cuts += 1
                self.at.add(int(self.token_log.length[i]))
                self.send([i], self.aim.pop(i))

    def run(self, decide: Callable[[], None]) -> dict[int, Completion]:
        while self.token_log.missing:
            decide()
            self.turn()
            assert self.steps < 20_000
        return self.token_log.completions


@pytest.mark.parametrize(
    ("count", "temperature"),
    [(1, 0.0), (2, 1.0), (3, 1.0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1.0), (2, 0.0), (3, 0.0)))],
)
def test_random_cuts_change_no_response(engines: list[Any], whole: Callable[..., Any], count: int, temperature: float) -> None:
    asked = requests(temperature=temperature, seed=20 + count)
    wanted = whole(asked)
    rng = np.random.default_rng(count)
    relay = Relay(engines[:count], asked)
    for engine, part in enumerate(np.array_split(np.arange(len(asked)), count)):
        relay.send(part.tolist(), engine)

    def decide() -> None:
        for i in np.flatnonzero(~relay.token_log.finished & (rng.random(len(asked)) < 0.08)).tolist():
            if i not in relay.aim and relay.token_log.owner[i] >= 0:
                relay.cut(i, int(rng.integers(count)))

    assert_same(relay.run(decide), wanted)
    assert relay.cuts > 30 and 0 in relay.at


def test_every_position_can_be_cut(engines: list[Any], whole: Callable[..., Any]) -> None:
    """One request that is not ended by itself, cut before every one of its tokens, the first and the last included."""
    asked = requests(96, seed=31)
    long = replace(next(r for r in asked if whole([r])[r.key].finish_reason == "length"), key=0)
    relay = Relay(engines[:2], [long])
    relay.send([0], 0)

    def decide() -> None:
        if not relay.aim and relay.token_log.owner[0] >= 0:
            relay.cut(0, 1 - int(relay.token_log.owner[0]))

    fresh = relay.run(decide)
    assert_same(fresh, whole([long]))
    assert {0, 1, long.max_tokens - 1} <= relay.at and relay.cuts >= long.max_tokens - 1


class Spelled:
    """A tokenizer: a token is spelled as its number in brackets."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(f"<{token}>" for token in token_ids)


def bent(name: str, tokens: list[int]) -> dict[str, Any]:
    """One setting of a request whose response would be `tokens` without it, which ends or changes that response."""
    a, b, c = tokens[20:23]
    return {
        "max_tokens": {"max_tokens": 23},
        "stop": {"stop": ("nowhere", f"{a % 10}><{b}><{str(c)[0]}")},  # from within one token to within another
        "stop_token_ids": {"stop_token_ids": (next(token for token in tokens[15:] if token not in tokens[:15]),)},
        "temperature": {"temperature": 0.7},
        "top_p": {"top_p": 0.8},
        "top_k": {"top_k": 3},
        "min_tokens": {"min_tokens": 15, "stop_token_ids": (tokens[3],), "stop": (f"<{tokens[1]}>",)},
    }[name]


@pytest.mark.parametrize("name", ["max_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_tokens"])
def test_settings_that_end_or_change_a_response_survive_cuts(
    engines: list[Any], whole: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Cut before each token: a stop word is also cut within, with its first token or its first two reported by another engine."""
    for engine in engines[:2]:
        monkeypatch.setattr(engine, "stop_strings", StopStrings(Spelled))
    plain = next(r for r in requests(96, seed=31) if whole([r])[r.key].finish_reason == "length")
    before = whole([plain])[plain.key].token_ids.tolist()
    asked = replace(plain, key=0, **bent(name, before))
    wanted = whole([asked])
    after = wanted[asked.key]
    ends = {"max_tokens": "length", "stop": "stop", "stop_token_ids": "stop"}.get(name, after.finish_reason)
    assert after.finish_reason == ends and after.token_ids.tolist() != before, "the setting does something"
    if name in ("max_tokens", "stop", "stop_token_ids"):
        assert 15 < len(after.token_ids) < len(before)
    if name == "min_tokens":
        early = whole([replace(asked, min_tokens=0)])[asked.key]
        assert len(after.token_ids) >= 15 > len(early.token_ids) and asked.stop_token_ids[0] not in after.token_ids[:15]
    relay = Relay(engines[:2], [asked])
    relay.send([0], 0)

    def decide() -> None:
        if not relay.aim and relay.token_log.owner[0] >= 0:
            relay.cut(0, 1 - int(relay.token_log.owner[0]))

    assert_same(relay.run(decide), wanted)
    assert set(range(len(after.token_ids))) <= relay.at


def test_every_setting_of_a_request_has_a_cut_test() -> None:
    """A field that is added needs a case above, or must not be one: what counts tokens or looks back at them would begin anew."""
    not_settings = {"key", "token_ids", "seed", "generated", "awaited", "cache_version", "id"}
    not_settings |= {"pictures"}  # of the prompt: tests/engine/test_engine_images.py cuts responses to them
    assert {f.name for f in fields(Request)} - not_settings == {
        "max_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_p",
        "top_k",
        "min_tokens",
    }


def test_a_preempted_continuation_keeps_its_position(
    engines: list[Any], whole: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM preempts by computing everything again: prompt, the tokens from before the cut, and those since."""
    asked = [replace(r, key=i, max_tokens=120) for i, r in enumerate(r for r in requests(96, seed=40) if len(r.token_ids) > 2 * BLOCK)]
    wanted = whole(asked)
    going = [replace(r, generated=tuple(wanted[r.key].token_ids[: len(wanted[r.key].token_ids) // 3].tolist())) for r in asked]
    small = engines[1]
    scheduler = small.engine.engine_core.engine_core.scheduler
    thrown_out: list[Any] = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda r, *a, **k: (thrown_out.append(r), preempt(r, *a, **k)))
    token_log = TokenLog(asked)
    for request in going:  # as if an earlier engine had reported the first third
        token_log.length[request.key] = len(request.generated)
        before = len(request.generated)
        token_log._whole[request.key] = wanted[request.key].token_ids[:before], wanted[request.key].logprobs[:before]
    token_log.owner[:] = 0
    for progress in small.generate(going, 0.0):
        token_log.accept(0, "small", progress)
    assert_same(token_log.completions, wanted)
    assert len(thrown_out) >= 3 and any(len(r.output_token_ids) > 0 for r in thrown_out)


def test_commands_for_another_call_are_ignored(engines: list[Any], whole: Callable[..., Any]) -> None:
    asked = requests(6, seed=50)
    control_queue = ControlQueue()
    assert not control_queue.put(1, EngineCommand(cut=(0,)))
    control_queue.open(2)
    assert not control_queue.put(1, EngineCommand(cut=(0,))) and control_queue.put(
        2, EngineCommand(cut=(99,))
    )  # a key that is not here: nothing happens
    token_log = TokenLog(asked)
    token_log.assign(np.arange(len(asked)), 0)
    for progress in engines[0].generate(asked, 0.0, control_queue):
        token_log.accept(0, "engine", progress)
    assert_same(token_log.completions, whole(asked))
    assert not control_queue.put(2, EngineCommand(cut=(0,)))  # the call is over
    assert control_queue.take() == []


def test_the_first_token_of_an_added_request_is_reported_at_once(engines: list[Any]) -> None:
    """The driver that moved it waits; nothing else is reported before its time."""
    first, second = requests(2, seed=60)
    control_queue = ControlQueue()
    control_queue.open(1)
    call = engines[0].generate([replace(first, max_tokens=200)], 3600.0, control_queue)
    control_queue.put(1, EngineCommand(cut=(12345,)))
    assert next(call).keys.tolist() == []  # an order to cut is answered at once, whatever there is
    control_queue.put(1, EngineCommand(add=(second,)))
    report = next(call)
    assert dict(zip(report.keys.tolist(), report.counts.tolist(), strict=True))[second.key] == 1
    with pytest.raises(RuntimeError, match=f"request {second.key} is running"):
        control_queue.put(1, EngineCommand(add=(second,)))
        next(call)
    assert not engines[0].live and not engines[0].engine.has_unfinished_requests()


def test_the_time_of_a_command_is_separate_from_work() -> None:
    from rlhfless_ray.engine.engine_actor import fill_between
    from rlhfless_ray.types import Span

    move = Span("transfer", "move 3 sequences to rollout-2", 4.0, 4.5)
    assert fill_between([move], "generate", 3.0, 6.0) == [Span("work", "generate", 3.0, 4.0), move, Span("work", "generate", 4.5, 6.0)]


def test_returned_log_probabilities_are_not_kept(sampling: Any) -> None:
    """Nothing that was handed out is looked at again."""
    import torch

    sampler = sampling.KeyedSampler(None)
    for step in range(50):
        sampler.records.append((np.arange(8), np.full(8, step), torch.zeros(8)))
        assert len(sampler.take()[0]) == 8 and sampler.records == []
