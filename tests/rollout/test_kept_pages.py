"""Which contexts keep their KV pages at the end of a rollout, and what is counted in the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.rollout.kept_pages import STORE_SHARE, KeptPages
from rlhfless_ray.rollout.token_log import TokenLog
from rlhfless_ray.types import UNFINISHED, Completion, Request, SampleId

pytestmark = pytest.mark.pure
COUNT, BLOCK, PAGE = 2, 32, 1000


class Actor:
    """An engine's process that notes the tickets that it is asked for."""

    def __init__(self) -> None:
        self.hand_over, self.asked = self, list[int]()

    def options(self, concurrency_group: str) -> Actor:
        assert concurrency_group == "pages", "a call in another group would wait for the rollout to end"
        return self

    def remote(self, ticket: int) -> Any:
        self.asked.append(ticket)
        return f"pages {ticket}"


def rollout_of(log: TokenLog) -> Any:
    return SimpleNamespace(token_log=log)


def log_of(lengths: list[int], version: int = 3) -> TokenLog:
    """Requests with prompts of one block, and responses of these lengths that engine 0 continues."""
    requests = [Request(key, (1,) * BLOCK, 100 + key, 999, 1.0, id=SampleId(key // COUNT, 1, key % COUNT)) for key in range(len(lengths))]
    before = {k: Completion(k, np.ones(n, np.int32), np.zeros(n, np.float32), UNFINISHED, version) for k, n in enumerate(lengths)}
    log = TokenLog(requests, before, keeps_kv=True)
    log.assign(np.arange(len(lengths)), 0)
    return log


def test_a_continued_response_keeps_the_cache_version_it_began_with() -> None:
    log = log_of([5, 0])
    assert [log.request(i).cache_version for i in (0, 1)] == [3, None], "without a token it begins under the newest weights"
    assert TokenLog(log.requests, {0: log.unfinished(9)[0]}).request(0).cache_version is None


def test_the_longest_contexts_keep_their_pages() -> None:
    log = log_of([10, 20, 100, 40, 30, 5])  # groups need 2, 5 and 2 blocks of each response
    room = COUNT * PAGE * 7 / STORE_SHARE
    kept = KeptPages(COUNT, BLOCK, PAGE, room)
    kept.begin(rollout_of(log))
    cuts = kept.cuts(0, np.arange(6))
    tickets = {i: ticket for ticket, indices in cuts.items() for i in indices}
    assert tickets[2] == tickets[3] != 0, "a group's pages share the prompt's"
    assert sorted(bool(tickets[i]) for i in (0, 4)) == [False, True]
    assert kept.cuts(0, np.arange(6)) == cuts, "a cut that is sent again asks for the same pages"


def test_pages_are_fetched_once_and_reach_the_next_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[Any]] = []
    monkeypatch.setattr("rlhfless_ray.rollout.kept_pages.ray.wait", lambda refs, **_: waits.append(refs))
    log, kept, actor = log_of([10, 20, 0, 30]), KeptPages(COUNT, BLOCK, PAGE, 10**9), Actor()
    kept.begin(rollout_of(log))
    kept.cuts(0, np.arange(4))
    kept.fetch(0, actor, np.array([0, 1]))
    kept.fetch(0, actor, np.array([2, 3]))
    kept.fetch(0, actor, np.array([], int))
    assert len(actor.asked) == 2, "one transfer for each group of an engine"
    kept.end()
    assert len(waits[0]) == 2

    def pages_of(*keys: int) -> tuple[Any, ...]:
        return kept.attach(0, [log.request(i) for i in keys]).get("pages", ())

    pages = [pages_of(i) for i in range(4)]
    assert pages[0] == pages[1] != pages[3] and pages[2] == (), "a response without a token has no pages"
    assert len(pages_of(0, 1, 2, 3)) == 2
    kept.begin(rollout_of(log))
    kept.end()
    assert not kept.pages_of, "pages are dropped after the rollout that could use them"


def test_only_the_first_computation_of_a_context_counts() -> None:
    kept = KeptPages(COUNT, BLOCK, PAGE, 10**9)
    kept.begin(rollout_of(log_of([10, 20])))
    kept.observe({0: 1, 1: 52, 7: 4})  # 7 did not continue
    kept.observe({0: 40})
    assert (kept.take_tokens(), kept.take_tokens()) == (BLOCK + 10 - 1, 0)
