"""Rewards over HTTP, against servers in threads that fail in every way."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.reward import http_reward as module
from rlhfless_ray.reward.http_reward import HttpSource, HttpWorker
from tests.conftest import ROOT, environment

Answer = Callable[[dict[str, Any], int], Any]  # body, number of the request → what to answer: JSON, (status, text) or None: hang up


class Standing:
    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        lock = threading.Lock()
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    bodies.append(body)
                    number = len(bodies) - 1
                given = answer(body, number)
                if given is None:
                    self.connection.close()
                    return
                status, text = given if isinstance(given, tuple) else (200, json.dumps(given))
                try:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(text.encode())
                except OSError:
                    pass  # the client has given it up

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@contextmanager
def standing(*answers: Answer) -> Iterator[list[Standing]]:
    servers = [Standing(answer) for answer in answers]
    try:
        yield servers
    finally:
        for one in servers:
            one.server.shutdown()
            one.server.server_close()


def lengths(body: dict[str, Any], number: int) -> Any:
    rewards = [float(len(query)) for query in body["query"]]
    return {"rewards": rewards, "scores": [r / 10 for r in rewards], "extra_logs": {"dummy_scores": rewards}}


def nowhere() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/get_reward"


def worker(*urls: str, deadline_s: float = 20.0, timeout_s: float = 5.0, batch_samples: int = 1) -> HttpWorker:
    return HttpSource.load(list(urls), "answer", deadline_s, batch_samples).worker(timeout_s)  # type: ignore[return-value]


def items(*queries: str) -> list[Any]:
    return [(i, query, f"prompt {i}", i) for i, query in enumerate(queries)]


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF_S", 0.05)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the worker's clock is ahead of the machine's."""
    ahead = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep))
    return ahead


def all_of(made: HttpWorker, asked: list[Any], budget_s: float = 10.0) -> dict[int, Any]:
    return {score.key: score for score in made.score(asked, budget_s)}


def test_the_json_both_ways_and_rotation() -> None:
    with standing(lengths, lengths) as servers:
        scores = all_of(worker(servers[0].url, servers[1].url), items("a", "bb", "ccc", "dddd"))
    assert {key: (s.reward, s.score, s.extra_logs) for key, s in scores.items()} == {
        i: (n, n / 10, {"dummy_scores": n}) for i, n in enumerate([1.0, 2.0, 3.0, 4.0])
    }
    assert [len(one.bodies) for one in servers] == [2, 2]
    assert sorted(json.dumps(body) for one in servers for body in one.bodies) == [
        json.dumps({"query": [q], "prompts": [f"prompt {i}"], "labels": [i]}) for i, q in enumerate(["a", "bb", "ccc", "dddd"])
    ]


@pytest.mark.parametrize("form", [lambda r: {"rewards": r}, lambda r: r, lambda r: {"rewards": [[x] for x in r]}])
def test_the_answers_of_older_servers(form: Callable[[list[float]], Any]) -> None:
    with standing(lambda body, _: form([float(len(q)) for q in body["query"]])) as (one,):
        scores = all_of(worker(one.url, batch_samples=3), items("a", "bb", "ccc", "dddd"))
        assert sorted(len(body["query"]) for body in one.bodies) == [1, 3]
    assert [scores[i].reward for i in range(4)] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("trouble", [(503, "loading"), None, (429, ""), (500, "flaky")])
def test_a_server_that_comes_back_costs_nothing_but_time(trouble: Any) -> None:
    with standing(lambda body, n: trouble if n < 4 else lengths(body, n)) as (one,):
        made = worker(one.url)
        scores = all_of(made, items("a", "bb"))
    assert (scores[0].reward, scores[1].reward) == (1.0, 2.0) and len(one.bodies) == 6 and not made.retries


def test_a_dead_server_among_living_ones_is_left_alone(clock: list[float]) -> None:
    dead = nowhere()
    with standing(lengths) as (one,):
        made = worker(dead, one.url, deadline_s=60.0)
        scores = all_of(made, items(*"abcdefgh"))
        assert len(scores) == 8 and all(s.reward == 1.0 for s in scores.values())
        clock[0] += 61.0
        assert len(all_of(made, items(*"ab"))) == 2, "somebody answers: its deadline does not count"


def test_many_requests_that_fail_together_are_one_failure() -> None:
    made = worker(nowhere())
    made.score(items(*map(str, range(module.MAX_CONCURRENT))), 0.02)
    assert made.servers[0].failures == 1, "each would double the rest, and a hiccup cost as much as an outage"


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirected_post_stays_one(status: int) -> None:
    """As FastAPI answers for a slash too many, and OpenRLHF's client follows."""
    with standing(lengths) as (one,):

        class Elsewhere(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Location", one.url)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        first = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
        threading.Thread(target=first.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            score = worker(f"http://127.0.0.1:{first.server_port}/get_reward/").score(items("abc"), 5.0)[0]
        finally:
            first.shutdown()
            first.server_close()
    assert score.reward == 3.0 and one.bodies == [{"query": ["abc"], "prompts": ["prompt 0"], "labels": [0]}]


def test_when_nobody_answers_the_run_ends_after_the_deadline_with_their_names(clock: list[float]) -> None:
    def overloaded(body: dict[str, Any], number: int) -> Any:
        clock[0] += 30.0 if number else 0.0
        return 503, "out of memory"

    dead = nowhere()
    with standing(overloaded) as (one,), pytest.raises(RunError) as caught:
        worker(dead, one.url, deadline_s=60.0).score(items("a"))
    words = str(caught.value)
    assert f"{dead}: [Errno 111] Connection refused" in words and f"{one.url}: HTTP 503 Service Unavailable: out of memory" in words
    assert "no server has answered for 60 s" in words and len(one.bodies) >= 3


def test_time_without_a_request_is_no_outage(clock: list[float]) -> None:
    """The server fails a step's last query, which is given up, and then the first request of the next step."""
    failures = ["late"]

    def answer(body: dict[str, Any], number: int) -> Any:
        (query,) = body["query"]
        if query == "bad" or (query in failures and not failures.remove(query)):
            return 503, ""
        time.sleep(0.2 * (query == "slow"))  # it is answered after the first failure of the other
        return lengths(body, number)

    with standing(answer) as (server,):
        made = worker(server.url)
        scores = all_of(made, items("bad", "slow"))
        assert scores[0].error is not None and scores[1].reward == 4.0
        clock[0] += 100.0
        assert all_of(made, items("late"))[0].reward == 4.0


def test_it_answers_at_intervals_while_it_waits_and_still_ends(clock: list[float]) -> None:
    made = worker(nowhere(), deadline_s=60.0)
    for _ in range(3):
        assert made.score(items("a"), 0.1) == []
    clock[0] += 61.0
    with pytest.raises(RunError, match="no server has answered"):
        for _ in range(1000):
            made.score(items("a"), 0.05)


def test_a_slow_answer_is_asked_for_elsewhere() -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        time.sleep(3)
        return {"rewards": [-1.0]}

    with standing(slow, lengths) as servers:
        made = worker(servers[0].url, servers[1].url, timeout_s=0.3)
        assert all_of(made, items("a"))[0].reward == 1.0
        made.servers[0].record_answer(), made.servers[1].record_answer()
        assert all_of(made, items("a"))[0].reward == 1.0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((400, "no such prompt"), "HTTP 400 Bad Request: no such prompt"),
        ((500, "cannot read it"), "HTTP 500 Internal Server Error: cannot read it, tried 5 times"),
        ((200, "<html>"), "answered with invalid JSON: b'<html>'"),
        ({"reward": [1.0]}, "answered with a dict with the key `reward`: write `rewards`"),
        ({"rewards": [1.0, 2.0]}, "answered with 2 values in `rewards` for 1 query"),
        ({"rewards": ["x"]}, None),
        (None, None),
    ],
)
@pytest.mark.parametrize("batch_samples", [1, 4])
def test_the_sample_that_a_server_cannot_score_is_named(given: Any, error: str | None, batch_samples: int) -> None:
    def answer(body: dict[str, Any], number: int) -> Any:
        return given if "bad" in body["query"] else lengths(body, number)

    with standing(answer) as (one,):
        made = worker(one.url, batch_samples=batch_samples)
        asked, scores = items("a", "bad", "ccc"), {}
        end = time.monotonic() + 90
        while len(scores) < 3 and time.monotonic() < end:
            # what others still ask for is answered meanwhile: the server lives, the sample is at fault
            scores |= all_of(made, [item for item in asked if item[0] not in scores], 0.5)
            all_of(made, [(100, "alive", "", "")], 0.5)
    assert (scores[0].reward, scores[2].reward, scores[1].reward) == (1.0, 3.0, None)
    assert scores[1].error.startswith(one.url)
    if error is not None:
        assert scores[1].error == f"{one.url}: {error}"
    assert not made.retries


def test_a_batch_that_is_refused_after_the_calls_time_is_taken_apart_in_the_next() -> None:
    def slow(body: dict[str, Any], number: int) -> Any:
        time.sleep(0.1)
        return (400, "no such prompt") if "bad" in body["query"] else lengths(body, number)

    with standing(slow) as (one,):
        made, scores = worker(one.url, batch_samples=4), {}
        end = time.monotonic() + 90
        while len(scores) < 3 and time.monotonic() < end:
            scores |= all_of(made, [item for item in items("a", "bad", "ccc") if item[0] not in scores], 0.05)
    assert {key: score.reward for key, score in scores.items()} == {0: 1.0, 1: None, 2: 3.0} and not made.retries


def test_labels_must_fit_into_json() -> None:
    with standing(lengths) as (one,):
        score = worker(one.url).score([(0, "q", "p", {1, 2})], 5.0)[0]
    assert "the label cannot be written as JSON" in score.error


def test_the_environments_proxy_is_not_asked() -> None:
    code = """
from rlhfless_ray.reward.http_reward import HttpSource
print(HttpSource.load([URL], "", 5.0, 1).worker(5.0).score([(0, "abc", "", "")], 5.0)[0].reward)
"""
    with standing(lengths) as (one,):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("URL", repr(one.url))],
            cwd=ROOT,
            env={**environment(), "http_proxy": nowhere()},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.stdout == "3.0\n", done.stderr


NO_ADDRESSES = [
    "127.0.0.1:5000/get_reward",
    "rewards.txt",
    "ftp://host/x",
    "http:///x",
    "",
    "http://host/a b",
    "http://host/ü",
    "http://a..b/x",
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"is not an HTTP address; write one such as"):
        HttpSource.load(["http://127.0.0.1:1/get_reward", url], "", 1.0, 1)
