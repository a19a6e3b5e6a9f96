"""What every backend of `Engine` does. A new backend is done when it passes this file, see docs/backends.md."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import LONGEST, Backend, answer, requests, word
from tiny_policy import VOCABULARY

from rlhfless_ray.engine.control_queue import ControlQueue, EngineCommand
from rlhfless_ray.engine.token_deltas import CUT, ENDS, GOES_ON, LENGTH, STOP, TokenDeltas
from rlhfless_ray.types import Completion, Request

pytestmark = pytest.mark.engine
LOGPROB_ATOL = 1e-3  # nats, between an engine and transformers, in float32
LOST_S = 60.0  # within which a lost process is named


@pytest.fixture(scope="module")
def computing(backend: Backend) -> Backend:
    if not backend.computes:
        pytest.skip("a replayed engine computes no policy")
    return backend


def opened() -> ControlQueue:
    queue = ControlQueue()
    queue.open(1)
    return queue


def ends_of(reports: Iterable[TokenDeltas]) -> dict[int, str]:
    """{key: how it ended} of the requests that have ended."""
    return {
        key: ENDS[end] for report in reports for key, end in zip(report.keys.tolist(), report.ends.tolist(), strict=True) if end != GOES_ON
    }


def tokens_of(reports: Iterable[TokenDeltas], key: int) -> list[tuple[int, float, int]]:
    """(token, log-probability, version) of a request. Checks that no token is missing or reported twice."""
    found: list[tuple[int, float, int]] = []
    start = None
    for report in reports:
        for place in np.flatnonzero(report.keys == key):
            begin, end = report.bounds[place], report.bounds[place + 1]
            start = int(report.starts[place]) if start is None else start
            assert report.starts[place] == start + len(found)
            pairs = zip(report.token_ids[begin:end].tolist(), report.logprobs[begin:end].tolist(), strict=True)
            found += [(token, logprob, report.version) for token, logprob in pairs]
    return found


# ---- streams ----------------------------------------------------------------------------------------------------


def test_an_engine_without_weights_generates_nothing(backend: Backend) -> None:
    assert backend.engine.version is None
    with pytest.raises(RuntimeError, match="no weights"):
        next(backend.engine.generate(requests(1)))


def test_reports_make_up_each_response_once(backend: Backend) -> None:
    version, asked = backend.put(), requests()
    reports = list(backend.engine.generate(asked, 0.0))
    assert len(reports) > 5 and {report.version for report in reports} == {version}
    every = [pair for report in reports for pair in zip(report.keys.tolist(), report.ends.tolist(), strict=True)]
    ended = Counter(key for key, end in every if end != GOES_ON)
    assert ended == Counter(range(len(asked)))
    for one in asked:
        found = tokens_of(reports, one.key)
        assert 0 < len(found) <= one.max_tokens
        assert all(logprob <= 0 for _, logprob, _ in found)
        assert (len(found) == one.max_tokens) == (ends_of(reports)[one.key] == "length")


def test_without_an_interval_tokens_are_reported_at_the_end(backend: Backend) -> None:
    backend.put()
    assert len(list(backend.engine.generate(requests()))) == 1


def test_the_end_of_an_awaited_request_is_reported_at_once(backend: Backend) -> None:
    backend.put()
    asked = [replace(one, awaited=one.key == 3, max_tokens=10 if one.key == 3 else LONGEST) for one in requests()]
    first, *others = backend.engine.generate(asked)
    assert ends_of([first]) == {3: "length"} and ends_of(others).keys() == set(range(8)) - {3}


def test_a_call_that_is_abandoned_drops_its_requests(backend: Backend) -> None:
    backend.put()
    at_work = backend.engine.generate(requests(), 0.0)
    next(at_work)
    with pytest.raises(RuntimeError, match="running requests"):
        backend.engine.park()
    at_work.close()
    assert answer(backend.engine, requests(2)).keys() == {0, 1}


def test_a_key_that_is_running_is_refused(backend: Backend) -> None:
    backend.put()
    one = requests(1)[0]
    with pytest.raises(RuntimeError, match="request 0 is running"):
        list(backend.engine.generate([one, one]))
    assert answer(backend.engine, [one])[0].token_ids.size, "the engine goes on"


# ---- commands ---------------------------------------------------------------------------------------------------


def test_a_cut_request_continues_where_it_was(backend: Backend) -> None:
    backend.put()
    queue, asked, reports = opened(), requests(), []
    for report in backend.engine.generate(asked, 0.0, queue):
        reports.append(report)
        if len(reports) == 3:
            assert queue.put(1, EngineCommand(cut=(0, 5, 99)))
    ends = ends_of(reports)
    assert {key for key, end in ends.items() if end == "cut"} == {0, 5} and len(ends) == 8
    assert not queue.put(1, EngineCommand(cut=(1,))), "the call is over"
    before = [token for token, *_ in tokens_of(reports, 0)]
    assert 0 < len(before) < LONGEST
    later = list(backend.engine.generate([replace(asked[0], generated=tuple(before))], 0.0))
    assert later[0].starts[0] == len(before)
    after = tokens_of(later, 0)
    assert ends_of(later).keys() == {0} and len(before) + len(after) <= LONGEST
    assert (len(before) + len(after) == LONGEST) == (ends_of(later)[0] == "length")


def test_an_added_request_is_reported_with_its_first_token(backend: Backend) -> None:
    backend.put()
    queue, (first, second) = opened(), requests(2)
    reports = []
    for report in backend.engine.generate([replace(first, max_tokens=8, awaited=True)], float("inf"), queue):
        reports.append(report)
        if len(reports) == 1:
            assert queue.put(1, EngineCommand(add=(second,), what="take over 1 sequence"))
    assert ends_of(reports).keys() == {0, 1}
    early = next(report for report in reports if 1 in report.keys)
    assert 1 <= early.counts[0] <= 3 and early.ends[0] == GOES_ON
    assert [span.what for span in backend.engine.take_stats().spans] == ["take over 1 sequence"]


def test_steps_are_recorded_until_they_are_taken(backend: Backend) -> None:
    backend.put()
    backend.engine.take_stats()
    began_s = time.time()
    generated = sum(len(one.token_ids) for one in answer(backend.engine, requests()).values())
    stats = backend.engine.take_stats()
    assert max(step.running for step in stats.steps) == 8
    assert sum(step.running for step in stats.steps) == generated
    assert all(step.seconds >= 0 and step.new_tokens >= step.running for step in stats.steps)
    assert began_s <= stats.until_s <= time.time()
    assert not backend.engine.take_stats().steps


# ---- weights ----------------------------------------------------------------------------------------------------


def test_running_requests_continue_under_new_weights(backend: Backend) -> None:
    old, asked = backend.put("A"), requests()
    reports = []
    at_work = backend.engine.generate(asked, 0.0)
    for report in at_work:
        reports.append(report)
        if len(reports) == 6:
            new = backend.put("B")
    assert [report.version for report in reports[:6]] == [old] * 6 and {report.version for report in reports[6:]} == {new}
    for one in asked:
        found = tokens_of(reports, one.key)
        by_version = [version for *_, version in found]
        assert by_version == sorted(by_version)
        if backend.computes:
            held = by_version.count(old)
            expected = switched_logprobs(backend, one, [token for token, *_ in found], held)
            np.testing.assert_allclose([logprob for _, logprob, _ in found], expected, atol=LOGPROB_ATOL)


def switched_logprobs(backend: Backend, request: Request, tokens: list[int], old: int) -> np.ndarray:
    """Log-probabilities of the tokens, of which policy A drew the first `old` and policy B the others. B reads A's KV if it was kept."""
    ids, prompt = torch.tensor([[*request.token_ids, *tokens]]), len(request.token_ids)
    begun = prompt + old
    with torch.no_grad():
        before = backend.model("A")(ids[:, : begun - 1], use_cache=True)
        if backend.keeps_kv:
            after = backend.model("B")(ids[:, begun - 1 :], past_key_values=before.past_key_values).logits[0]
        else:
            after = backend.model("B")(ids).logits[0, begun - 1 :]
    every = torch.log_softmax(torch.cat([before.logits[0], after])[prompt - 1 : -1].float(), -1)
    return every.gather(1, ids[0, prompt:, None]).squeeze(1).numpy()


def test_other_weights_never_read_the_kv_of_earlier_ones(computing: Backend) -> None:
    asked = requests()
    computing.put("A")
    answer(computing.engine, asked)
    computing.put("B")
    check_logprobs(computing, "B", asked, answer(computing.engine, asked))


def test_weights_that_lack_a_tensor_are_refused_by_its_name(backend: Backend) -> None:
    weights = dict(backend.weights["A"])
    lacking = sorted(weights)[-1]
    del weights[lacking]
    backend.put()
    with pytest.raises(ValueError, match=rf"version 77777 lacks 1 of the engine's weights, {lacking} first"):
        backend.engine.load(77777, weights)
    assert backend.engine.version is None
    backend.put()
    assert answer(backend.engine, requests(1))


def test_a_parked_engine_wakes_with_other_weights(backend: Backend) -> None:
    backend.put("A")
    answer(backend.engine, requests())
    held_mb = backend.engine.memory_mb()
    assert backend.engine.park() == 0.0, "on CPU nothing stays on a device"
    assert backend.engine.version is None
    if backend.computes:
        assert backend.engine.memory_mb() < held_mb
    with pytest.raises(RuntimeError, match="no weights"):
        next(backend.engine.generate(requests(1)))
    version = backend.put("B")
    asked = requests()
    found = answer(backend.engine, asked)
    assert {one.version for one in found.values()} == {version}
    if backend.computes:
        check_logprobs(backend, "B", asked, found)


# ---- the distribution -------------------------------------------------------------------------------------------


def expected_logprobs(backend: Backend, name: str, request: Request, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of the tokens under transformers, with the request's temperature, top-k and top-p."""
    ids, prompt = torch.tensor([[*request.token_ids, *tokens.tolist()]]), len(request.token_ids)
    with torch.no_grad():
        logits = backend.model(name)(ids).logits[0, prompt - 1 : -1].double() / (request.temperature or 1.0)
    for row in logits:
        if request.top_k and request.temperature:
            row[row < row.topk(request.top_k).values[-1]] = -torch.inf
        if request.top_p < 1 and request.temperature:
            order = row.argsort(descending=True)
            before = torch.softmax(row, -1)[order].cumsum(-1).roll(1)
            before[0] = 0
            row[order[before >= request.top_p]] = -torch.inf
    return torch.log_softmax(logits, -1).gather(1, ids[0, prompt:, None]).squeeze(1).numpy()


def check_logprobs(backend: Backend, name: str, asked: list[Request], found: dict[int, Completion]) -> None:
    for one in asked:
        done = found[one.key]
        np.testing.assert_allclose(done.logprobs, expected_logprobs(backend, name, one, done.token_ids), atol=LOGPROB_ATOL)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.7, "temperature": 1.3}, {"temperature": 0.0}], ids=str
)
def test_logprobs_are_those_of_the_sampling_distribution(computing: Backend, changes: dict[str, float]) -> None:
    computing.put()
    asked = requests(**changes)
    check_logprobs(computing, "A", asked, answer(computing.engine, asked))


def test_requests_in_one_batch_are_sampled_as_each_asks(computing: Backend) -> None:
    computing.put()
    kinds = [{}, {"temperature": 0.5}, {"top_k": 3}, {"temperature": 0.0}]
    asked = [replace(one, **kinds[one.key % 4]) for one in requests()]
    check_logprobs(computing, "A", asked, answer(computing.engine, asked))


def test_greedy_tokens_are_the_likeliest(computing: Backend) -> None:
    """So all backends give the same greedy tokens."""
    computing.put()
    asked = requests(temperature=0.0)
    for key, done in answer(computing.engine, asked).items():
        ids = torch.tensor([asked[key].token_ids])
        whole = computing.model("A").generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LONGEST)
        np.testing.assert_array_equal(done.token_ids, whole[0, ids.shape[1] :].numpy())


@pytest.mark.parametrize("continued", [False, True], ids=["first token", "first token after a cut"])
def test_samples_follow_the_policy(computing: Backend, continued: bool) -> None:
    """Tokens over many seeds, against the policy's probabilities."""
    from scipy.stats import chisquare

    computing.put()
    prompt, generated, count = (5, 9, 17), (7, 2) if continued else (), 1500
    asked = [Request(i, prompt, 10_000 + i, len(generated) + 1, 1.0, generated) for i in range(count)]
    reports = list(computing.engine.generate(asked))
    seen = np.bincount([tokens_of(reports, i)[0][0] for i in range(count)], minlength=VOCABULARY)
    with torch.no_grad():
        logits = computing.model("A")(torch.tensor([[*prompt, *generated]])).logits[0, -1]
    expected = torch.softmax(logits.double(), -1).numpy() * count
    bins = np.array_split(np.argsort(expected), 20)
    assert min(expected[b].sum() for b in bins) > 5
    assert chisquare([seen[b].sum() for b in bins], [expected[b].sum() for b in bins]).pvalue > 1e-3


def test_the_noise_after_a_cut_is_not_that_of_the_beginning(computing: Backend) -> None:
    """A policy with the same distribution at each place would otherwise repeat its tokens: here top-k 2 leaves a coin to toss."""
    computing.put()
    repeats = 0
    for seed in range(40):
        first, second = (
            tokens_of(list(computing.engine.generate([replace(requests(1)[0], seed=seed, top_k=2, max_tokens=8, generated=before)])), 0)
            for before in ((), (5, 9, 17))
        )
        heads = [[logprob > np.log(0.5) for _, logprob, _ in found[:4]] for found in (first, second)]
        repeats += heads[0] == heads[1]
    assert repeats < 12, "chance repeats four tosses in 1 of 16"


# ---- ends -------------------------------------------------------------------------------------------------------


def test_stop_tokens_end_a_response_and_belong_to_it(computing: Backend) -> None:
    computing.put()
    asked = requests(temperature=0.0)
    plain = answer(computing.engine, asked)
    stops = {key: int(done.token_ids[12]) for key, done in plain.items()}
    found = answer(computing.engine, [replace(one, stop_token_ids=(stops[one.key],)) for one in asked])
    for key, done in found.items():
        first = plain[key].token_ids.tolist().index(stops[key])
        assert done.finish_reason == "stop" and done.token_ids.tolist() == plain[key].token_ids[: first + 1].tolist()


@pytest.mark.parametrize("interval_s", [0.0, float("inf")])
def test_the_token_that_completes_a_stop_word_is_the_last(computing: Backend, interval_s: float) -> None:
    """The word begins before a cut, and no token after it is reported, although vLLM may have drawn some."""
    computing.put()
    asked = requests(temperature=0.0)
    plain = {key: done.token_ids.tolist() for key, done in answer(computing.engine, asked).items()}
    words = {key: word(*tokens[9:12]) for key, tokens in plain.items()}
    continued = [replace(one, stop=(words[one.key],), generated=tuple(plain[one.key][:10])) for one in asked]
    reports = list(computing.engine.generate(continued, interval_s))
    for one in asked:
        found = [token for token, *_ in tokens_of(reports, one.key)]
        text = word(*plain[one.key])
        assert found == plain[one.key][10 : 10 + len(found)]
        assert ends_of(reports)[one.key] == "stop" and 10 + len(found) == max(11, text.index(words[one.key], 8) + 3)


def test_nothing_ends_a_response_before_its_minimum(computing: Backend) -> None:
    computing.put()
    everything = tuple(range(2, VOCABULARY))
    asked = [replace(one, stop_token_ids=everything[: 30 + one.key], min_tokens=6 + one.key) for one in requests()]
    for key, done in answer(computing.engine, asked).items():
        assert 6 + key < len(done.token_ids) <= LONGEST or done.token_ids[-1] in asked[key].stop_token_ids
        assert not set(done.token_ids[: 6 + key].tolist()) & set(asked[key].stop_token_ids)


def test_the_ends_have_their_numbers() -> None:
    assert [ENDS[number] for number in (GOES_ON, STOP, LENGTH, CUT)] == ["", "stop", "length", "cut"]


# ---- failures ---------------------------------------------------------------------------------------------------


def test_a_lost_process_is_named(backend: Backend) -> None:
    """The last test: it ends the engine. In an actor, the callback ends the process, and the pool replaces it."""
    if not backend.processes:
        pytest.skip("this engine has no process of its own")
    backend.put()
    at_work = backend.engine.generate(requests(), 0.0)
    next(at_work)
    assert not backend.lost
    backend.processes[-1].kill()
    began_s = time.monotonic()
    while not backend.lost and time.monotonic() - began_s < LOST_S:
        time.sleep(0.05)
    assert len(backend.lost) == 1 and "a process of vLLM has ended" in backend.lost[0]
