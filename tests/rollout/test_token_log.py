"""A response is complete in whatever pieces it is reported, and messages say what is wrong with a report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.engine.token_deltas import CUT, ENDS, GOES_ON, LENGTH, STOP, TokenDeltas
from rlhfless_ray.rollout.token_log import NO_ENGINE, TokenLog
from rlhfless_ray.types import Completion, Request


def asked(count: int) -> list[Request]:
    return [Request(key, (1, 2, 3), 5, 64, 1.0) for key in range(count)]


def report(version: int, *news: tuple[int, int, list[int], int]) -> TokenDeltas:
    """news: (key, start, tokens, end); a token's log-probability is its tenth, negative."""
    tokens = [token for _, _, part, _ in news for token in part]
    rows = [(key, start, len(part), end) for key, start, part, end in news]
    return TokenDeltas.of(version, rows, tokens, -np.array(tokens, np.float32) / 10)


def begun(count: int) -> TokenLog:
    token_log = TokenLog(asked(count))
    token_log.assign(np.arange(count), 0)
    return token_log


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_a_response_does_not_depend_on_how_it_was_reported(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = range(rng.integers(1, 7))
    whole = {key: rng.integers(0, 50, rng.integers(1, 20)).tolist() for key in keys}
    token_log = begun(len(keys))
    at, engine, versions = dict.fromkeys(keys, 0), 0, {key: list[int]() for key in keys}
    while token_log.missing:
        version, news = int(rng.integers(1, 4)), []
        for key in [key for key in rng.permutation(keys).tolist() if at[key] <= len(whole[key]) and rng.random() < 0.6]:
            upto = int(rng.integers(at[key], len(whole[key]) + 1))
            over = upto == len(whole[key])
            end = int(rng.choice([STOP, LENGTH] if over else [GOES_ON, CUT]))
            news.append((key, at[key], whole[key][at[key] : upto], end))
            versions[key] += [version] * (upto - at[key])
            at[key] = upto + over
        ended, cut = token_log.accept(engine, "e", report(version, *news))
        assert ended.tolist() == [key for key, *_, end in news if end in (STOP, LENGTH)]
        assert cut.tolist() == [key for key, *_, end in news if end == CUT]
        assert all(token_log.owner[i] == NO_ENGINE for i in cut)
        if rng.random() < 0.5:  # to another engine, all of them
            engine += 1
            token_log.assign(np.flatnonzero(~token_log.finished), engine)
        else:
            token_log.assign(cut, engine)
    for key in keys:
        done = token_log.completions[key]
        assert done.token_ids.tolist() == whole[key] and done.token_ids.dtype == np.int32
        np.testing.assert_array_equal(done.logprobs, -np.array(whole[key], np.float32) / 10)
        assert [v for v, tokens in done.versions for _ in range(tokens)] == versions[key]
        assert all(a[0] != b[0] for a, b in zip(done.versions, done.versions[1:], strict=False))
        assert done.finish_reason in ENDS[1:3]


def test_a_reassigned_request_keeps_its_settings_and_tokens() -> None:
    token_log = begun(2)
    token_log.accept(0, "e", report(1, (1, 0, [7, 8], GOES_ON)))
    token_log.accept(0, "e", report(1, (1, 2, [6], CUT)))
    assert token_log.assign(np.array([0, 1]), 3) == [
        Request(0, (1, 2, 3), 5, 64, 1.0),
        Request(1, (1, 2, 3), 5, 64, 1.0, generated=(7, 8, 6)),
    ]
    assert token_log.owed(3).tolist() == [0, 1] and token_log.owed(0).tolist() == []


@pytest.mark.parametrize(
    ("engine", "reported", "message"),
    [
        (0, (0, 3, [1], GOES_ON), "rollout-7 reports request 0 from token 3, but 2 are recorded: tokens are missing"),
        (0, (0, 1, [1], GOES_ON), "rollout-7 reports request 0 from token 1, but 2 are recorded: tokens are repeated"),
        (1, (0, 2, [1], GOES_ON), "rollout-7 reports request 0, which is not assigned to it"),
        (0, (5, 0, [1], GOES_ON), "rollout-7 reports request 5, which is not assigned to it"),
        (0, (-1, 0, [1], GOES_ON), "rollout-7 reports request -1, which is not assigned to it"),
        (0, (1, 1, [1], GOES_ON), "rollout-7 reports request 1, which is not assigned to it"),
    ],
)
def test_reports_that_do_not_fit_are_rejected(engine: int, reported: tuple, message: str) -> None:
    token_log = begun(2)
    token_log.accept(0, "e", report(1, (0, 0, [7, 8], GOES_ON), (1, 0, [1], STOP)))
    with pytest.raises(RunError, match=message):
        token_log.accept(engine, "rollout-7", report(1, reported))
    assert token_log.length.tolist() == [2, 1] and token_log.missing == 1


def test_repeated_requests_and_missing_log_probabilities_are_rejected() -> None:
    token_log = begun(1)
    with pytest.raises(RunError, match="one request twice"):
        token_log.accept(0, "e", report(1, (0, 0, [1], GOES_ON), (0, 0, [1], GOES_ON)))
    with pytest.raises(RunError, match="reports 2 tokens with 2 ids and 1 log-prob"):
        token_log.accept(0, "e", TokenDeltas.of(1, [(0, 0, 2, GOES_ON)], [1, 2], np.zeros(1)))
    with pytest.raises(ValueError, match="must count from 0"):
        TokenLog(asked(2)[::-1])


def test_a_completion_of_one_version_derives_its_versions() -> None:
    assert Completion(0, np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", 4).versions == ((4, 3),)


def test_adding_requests_one_by_one_equals_creating_the_log_with_all() -> None:
    one_by_one, at_once = begun(1), begun(57)
    for key, request in enumerate(asked(56), 1):
        assert one_by_one.add(request) == key
    one_by_one.assign(np.arange(1, 57), 0)
    for token_log in (one_by_one, at_once):
        token_log.accept(0, "e", report(1, (0, 0, [7], STOP), (37, 0, [7, 8], GOES_ON), (56, 0, [9], CUT)))
        assert token_log.request(37) == replace(asked(38)[37], generated=(7, 8)) and token_log.missing == 56
    for name in ("length", "finished", "owner", "prompt"):
        np.testing.assert_array_equal(getattr(one_by_one, name), getattr(at_once, name))


def test_adding_requests_copies_at_most_twice_their_number() -> None:
    """Turns of agents come one by one, many thousands a step."""
    token_log, copied, turns = TokenLog([]), 0, 5000
    for request in asked(turns):
        before = token_log.length.base
        token_log.add(request)
        if token_log.length.base is not before:
            copied += len(token_log.length) - 1
    assert copied < 2 * turns and len(token_log.length) == turns
