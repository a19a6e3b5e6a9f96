"""What engines share of their drafts: each text reaches an engine once, in order, and survives a checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.drafting.acceptance import HALF_LIFE, Draft, Drafts
from rlhfless_ray.engine.control_queue import DraftNews
from rlhfless_ray.engine.token_deltas import GOES_ON, STOP, TokenDeltas
from rlhfless_ray.rollout.shared_drafts import SharedDrafts
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import EngineStep, Request

pytestmark = pytest.mark.pure


def rollout_of(log: TokenLog) -> Any:
    return SimpleNamespace(token_log=log)


class Engines:
    """The texts that each engine received."""

    def __init__(self) -> None:
        self.received: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))

    def receive(self, number: int, news: DraftNews) -> None:
        for name, tokens in news.texts:
            assert len(tokens)
            self.received[number][name] += tokens.tolist()

    def texts(self, number: int) -> list[list[int]]:
        return sorted(self.received[number].values())


def report(log: TokenLog, engine: int, index: int, tokens: list[int], end: int = GOES_ON) -> None:
    start = int(log.length[index])
    log.accept(engine, "e", TokenDeltas.of(1, [(log.requests[index].key, start, len(tokens), end)], tokens, np.zeros(len(tokens))))


def test_a_response_of_an_earlier_rollout_is_sent_and_kept_once() -> None:
    """As with partial rollouts, whose finished responses wait for the others of their group."""
    shared, engines = SharedDrafts(), Engines()
    requests = [Request(key, (1, 2), key, 50, 1.0) for key in range(2)]
    first = TokenLog(requests)
    shared.begin(rollout_of(first))
    first.assign(np.array([0, 1]), 0)
    shared.for_call(0, "engine 0", [0, 1])
    report(first, 0, 0, [5, 6], STOP)
    report(first, 0, 1, [7])
    shared.end(EngineSteps())
    again = TokenLog(requests, {one.key: one for one in [first.completions[0], *first.unfinished(1)]})
    shared.begin(rollout_of(again))
    for number in (0, 1):
        again.assign(np.array([1]), number)
        engines.receive(number, shared.for_call(number, f"engine {number}", [1]))
    assert (engines.texts(0), engines.texts(1)) == ([], [[5, 6]]), "engine 0 has written it"
    shared.end(EngineSteps())
    assert [text.tokens.tolist() for texts in shared.earlier.values() for text in texts] == [[5, 6]] and shared.total == 2


def test_tokens_are_sent_once_to_siblings_and_whole_to_later_steps() -> None:
    shared, engines = SharedDrafts(), Engines()
    requests = [Request(key, (1, 2, key // 2), key, 50, 1.0) for key in range(4)]  # two prompts, two responses to each
    log = TokenLog(requests)
    shared.begin(rollout_of(log))
    log.assign(np.array([0, 2, 3]), 0)
    log.assign(np.array([1]), 1)
    for number, indices in ((0, [0, 2, 3]), (1, [1])):
        engines.receive(number, shared.for_call(number, f"engine {number}", indices))
    assert not engines.texts(0) and not engines.texts(1)
    for tokens in ([5, 6], [7]):
        report(log, 0, 0, tokens)
        report(log, 0, 2, tokens)
        news = shared.spread([0, 2], 0)
        assert list(news) == [1], "the other group is on one engine"
        engines.receive(1, news[1])
    assert engines.texts(1) == [[5, 6, 7]]
    log.owner[2] = 1  # it moved
    engines.receive(1, shared.for_call(1, "engine 1", [2]))
    report(log, 0, 3, [9], STOP)
    for number, news in shared.spread([3], 0).items():
        engines.receive(number, news)
    assert engines.texts(1) == [[5, 6, 7], [9]]
    report(log, 1, 1, [8], STOP)
    engines.receive(0, shared.spread([1], 1)[0])
    assert engines.texts(0) == [[8]]
    report(log, 0, 0, [4], STOP)
    assert shared.spread([0], 0) == {}, "no sibling goes on"
    report(log, 1, 2, [3], STOP)
    shared.end(EngineSteps())

    resumed = SharedDrafts()
    resumed.restore(json.loads(json.dumps(shared.state())))
    for one, wanted in ((shared, [[5, 6, 7]]), (resumed, [[5, 6, 7, 4], [8]])):
        engines = Engines()
        later = TokenLog([Request(0, (1, 2, 0), 9, 50, 1.0)])
        one.begin(rollout_of(later))
        later.assign(np.array([0]), 0)
        engines.receive(0, one.for_call(0, "engine 1", [0]))
        if one is resumed:
            assert engines.texts(0) == wanted, "no engine has received it yet"
        else:
            assert engines.texts(0) == [], "it received the first response, and generated the other"
        engines.receive(0, one.for_call(0, "engine 1", [0]))
        assert engines.texts(0) == ([] if one is shared else wanted), "not a second time"
        engines.receive(1, one.for_call(1, "engine 2", [0]))
        assert engines.texts(1) == [[5, 6, 7, 4], [8]]


def test_the_least_recently_used_prompts_are_dropped_beyond_the_token_limit() -> None:
    shared = SharedDrafts(kept_tokens=25)
    for number, prompt in enumerate((1, 2, 1, 3)):
        log = TokenLog([Request(0, (prompt,), 0, 50, 1.0)])
        shared.begin(rollout_of(log))
        log.assign(np.array([0]), 0)
        shared.for_call(0, "e", [0])
        report(log, 0, 0, [number] * 10, STOP)
        shared.end(EngineSteps())
        assert shared.total == sum(len(text.tokens) for texts in shared.earlier.values() for text in texts) <= 25
    assert [[int(text.tokens[0]) for text in texts] for texts in shared.earlier.values()] == [[3]]


def test_step_times_and_acceptance_of_all_engines_reach_the_next_call() -> None:
    shared = SharedDrafts()
    shared.begin(rollout_of(TokenLog([Request(0, (1,), 0, 50, 1.0)])))
    one, other = (np.array([3, 4]), np.array([True, False])), (np.array([4]), np.array([True]))
    steps = [EngineStep(4, 4, 100, 9.0, drafted=k % 3, draft_s=0.002 * (k % 3 > 0), work_s=0.012 + 0.001 * (k % 3)) for k in range(64)]
    shared.observe([one])
    shared.observe([other])
    shared.end(EngineSteps([*steps, EngineStep(4, 90, 100, 9.0)]))  # a step with prompts shows nothing
    learned = shared.for_call(0, "e", [0]).learned
    age = 0.5 ** (65 / HALF_LIFE)  # of an engine that made 65 steps
    assert learned["cells"] == [3, 4]
    assert learned["tried"] == pytest.approx([age, 2 * age]) and learned["accepted"] == pytest.approx([age, age])
    assert learned["trials"] == 42 and sum(learned["terms"][3:]) > 0
    assert shared.learned.times.step_s(4, 100) == pytest.approx(0.012, rel=0.15), "not the time on the clock"
    acceptance = shared.learned.acceptance
    assert acceptance.survival(acceptance.tabulate(Drafts.of([Draft([1], [0.4], 0)])))[0, 0] > 0
