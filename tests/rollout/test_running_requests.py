"""What an engine reports, from what its sampler drew: every token once, with the log-probability that counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.engine.running_requests import RunningRequests
from rlhfless_ray.engine.token_deltas import CUT, GOES_ON, STOP
from rlhfless_ray.types import Request


class SampledTokens:
    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.drawn: list[tuple[int, int, float]] = []

    def draw(self, number: int, token: int | None) -> None:
        """None: drawn and dropped, as in a chunked prefill."""
        output = self.outputs.setdefault(number, [])
        self.drawn.append((number, len(output), -1000.0 if token is None else -float(token)))
        if token is not None:
            output.append(token)

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, self.drawn = np.array(self.drawn).reshape(-1, 3), []
        return rows[:, 0].astype(int), rows[:, 1].astype(int), rows[:, 2].astype(np.float32)

    def forget(self, key: int) -> None:
        del self.outputs[key]


def request(key: int, generated: tuple[int, ...] = ()) -> Request:
    return Request(key, (1,), 0, 99, 1.0, generated)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32))
def test_every_token_is_reported_exactly_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    draws = SampledTokens()
    live = RunningRequests(draws)
    reported: dict[int, list[tuple[int, float]]] = {}
    truth: dict[int, list[int]] = {}
    for _ in range(60):
        what, keys = rng.random(), sorted(live.number)
        if what < 0.2:
            key = int(rng.integers(100))
            if key not in live.number:
                before = tuple(truth.setdefault(key, []))
                draws.outputs[live.add(request(key, before))] = []
                reported.setdefault(key, [])
        elif what < 0.75 and keys:
            for key in rng.permutation(keys).tolist():
                number = live.number[key]
                if live.rows[number].ended is None:
                    if rng.random() < 0.3:
                        draws.draw(number, None)
                        if rng.random() < 0.5:
                            continue
                    token = int(rng.integers(50))
                    draws.draw(number, token)
                    truth[key].append(token)
        elif what < 0.85 and keys:
            live.cut([int(rng.choice(keys)), 12345])
        else:
            progress = live.take_deltas(3)
            bounds = progress.bounds
            for key, start, begin, end in zip(progress.keys.tolist(), progress.starts.tolist(), bounds, bounds[1:], strict=False):
                assert start == len(reported[key])
                reported[key] += zip(progress.token_ids[begin:end].tolist(), progress.logprobs[begin:end].tolist(), strict=True)
            assert all(key not in live.number for key in progress.keys[progress.ends != GOES_ON].tolist())
    live.cut(live.number)
    last = live.take_deltas(3)
    for key, begin, end in zip(last.keys.tolist(), last.bounds, last.bounds[1:], strict=False):
        reported[key] += zip(last.token_ids[begin:end].tolist(), last.logprobs[begin:end].tolist(), strict=True)
    assert reported == {key: [(token, -float(token)) for token in tokens] for key, tokens in truth.items()}
    assert len(live) == 0 and draws.outputs == {}


def test_ends_are_reported_with_their_reason() -> None:
    draws = SampledTokens()
    live = RunningRequests(draws)
    first, second, third = (live.add(request(key)) for key in (7, 8, 9))
    for number in (first, second, third):
        draws.draw(number, 5)
    live.end(first, [5], STOP)
    assert live.cut([7, 8]) == [first, second] and live.decoding == 1  # 7 had ended by itself
    assert dict(zip(*(a.tolist() for a in (live.take_deltas(1).keys, np.array([STOP, CUT, GOES_ON]))), strict=True)) == {7: 1, 8: 3, 9: 0}
    assert live.find_begun({second, third}) == {second, third} and sorted(live.number) == [9]


def test_mismatched_tokens_and_log_probabilities_name_the_request() -> None:
    draws = SampledTokens()
    live = RunningRequests(draws)
    number = live.add(request(7))
    with pytest.raises(RuntimeError, match="request 7 is running"):
        live.add(request(7))
    draws.outputs[number] = [4]
    with pytest.raises(RuntimeError, match="request 7: the sampler kept no log-probability"):
        live.take_deltas(1)
    draws.outputs[number] = [4, 4]
    draws.drawn = [(number, 0, -1.0), (number, 1, -1.0)]
    with pytest.raises(RuntimeError, match="request 7: vLLM drew a token again"):
        live.take_deltas(1)
