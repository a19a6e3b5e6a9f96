"""Rewards over HTTP: POST {"query": […], "prompts": […], "labels": […]} → {"rewards": […], "scores": […], "extra_logs": {…}}.

The JSON of OpenRLHF's clients and servers of every version: 0.8.0 to 0.8.2 answered `rewards` alone, and a bare list is taken too.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from rlhfless_ray.errors import RunError, UserError
from rlhfless_ray.reward.queries import BadReturn, Query, query_of, scores_of
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.types import Sample

AT_ONCE = 32  # requests of one process
TRIES = 5  # of one request while others are answered, as in OpenRLHF
FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0  # a server that failed is left alone for, doubled with every failure in a row
OVERLOADED = (408, 425, 429, 502, 503, 504)  # what a server, or a proxy before it, says that will be back
SHOWN_CHARACTERS = 200


class _Onward(urllib.request.HTTPRedirectHandler):
    """307 and 308 ask for the same POST elsewhere: what FastAPI answers for a slash too many. Python follows them for GET only."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if code in (307, 308):
            return urllib.request.Request(newurl, req.data, req.headers, req.origin_req_host, True)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# reward servers lie within the cluster: no proxy of the environment, as in OpenRLHF's client since 0.9.1
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Onward)


@dataclass(frozen=True)
class HttpSource(Source):
    """`urls` are taken in turn; each request carries up to `batch_samples` queries. `deadline_s`: for how long no server at all
    may answer before the run ends."""

    urls: tuple[str, ...]
    label_column: str
    deadline_s: float
    batch_samples: int = 1

    @classmethod
    def load(cls, urls: list[str], label_column: str, deadline_s: float, batch_samples: int) -> HttpSource:
        """Raises UserError for what is no HTTP address."""
        for url in urls:
            if not _is_address(url):
                raise UserError(f"reward.url: `{url}` is no HTTP address; write one such as http://127.0.0.1:5000/get_reward")
        return cls(tuple(urls), label_column, deadline_s, batch_samples)

    def item(self, key: int, sample: Sample, decode: Decode) -> Query:
        return query_of(key, sample, decode, self.label_column)

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return HttpWorker(self, timeout_s)


class _NoAnswer(Exception):
    """The server is away or overloaded: try again, elsewhere first."""


class _Refused(Exception):
    """The server answered, and not with rewards."""

    def __init__(self, words: str, final: bool) -> None:
        super().__init__(words)
        self.final = final  # asking again will change nothing


class Server:
    """An address and how it has been."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failures = 0  # in a row
        self.failed_s = -math.inf  # when it did so last
        self.rests_until_s = 0.0
        self.said = ""

    def failed(self, words: str, asked_s: float) -> None:
        """`asked_s`: when. What was under way when another request failed tells of the same outage, and is no failure of its own."""
        self.said = words
        if asked_s <= self.failed_s:
            return
        self.failures += 1
        self.failed_s = time.monotonic()
        self.rests_until_s = self.failed_s + min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(self.failures - 1, 16))

    def answered(self) -> None:
        self.failures, self.rests_until_s = 0, 0.0


@dataclass(eq=False)
class _Batch:
    queries: list[Query]
    tries: int = 0
    first_s: float = math.inf  # when it failed first
    rests_until_s: float = 0.0
    asked_s: float = 0.0


class HttpWorker(Worker):
    def __init__(self, source: HttpSource, timeout_s: float) -> None:
        self.source, self.timeout_s = source, timeout_s
        self.servers = deque(Server(url) for url in source.urls)
        self.failing_since_s: float | None = None  # no server has answered since
        self.answered_s = 0.0
        self.troubled: dict[int, tuple[Query, int, float]] = {}  # key → query, tries, when it failed first

    def score(self, items: list[Query], budget_s: float = math.inf) -> list[Score]:
        """Scores of those that were answered, in any order, asked for until `budget_s` is over and waited for up to `timeout_s`
        more. Requests that no server answers are asked again, after ever longer rests. One that is refused, or not answered
        `TRIES` times while others are, gets a Score with an error. Raises RunError, naming the servers, when none has answered
        for `deadline_s`."""
        end = time.monotonic() + budget_s
        size = self.source.batch_samples
        alone = [query for query in items if self._known(query)]
        others = [query for query in items if not self._known(query)]
        waiting = deque([self._batch([query]) for query in alone])
        waiting.extend(self._batch(others[i : i + size]) for i in range(0, len(others), size))
        scores: list[Score] = []
        running: dict[Future[list[Score]], tuple[Server, _Batch]] = {}
        with ThreadPoolExecutor(AT_ONCE, "reward-http") as threads:
            while running or (waiting and time.monotonic() < end):
                while len(running) < AT_ONCE and time.monotonic() < end and (batch := _rested(waiting)) and (server := self._next()):
                    waiting.remove(batch)
                    batch.asked_s = time.monotonic()
                    running[threads.submit(self._post, server.url, batch.queries)] = server, batch
                rest_s = self._rest_s(waiting)
                if not running:
                    time.sleep(min(rest_s, max(0.0, end - time.monotonic())))
                    continue
                done, _ = wait(running, timeout=max(0.05, rest_s) if waiting else None, return_when=FIRST_COMPLETED)
                for future in done:
                    server, batch = running.pop(future)
                    scores += self._heard(server, batch, future, waiting)
        return scores

    def _known(self, query: Query) -> bool:
        known = self.troubled.get(query[0])
        return known is not None and known[0] == query

    def _batch(self, queries: list[Query]) -> _Batch:
        if len(queries) == 1 and self._known(queries[0]):
            return _Batch(queries, *self.troubled[queries[0][0]][1:])
        return _Batch(queries)

    def _rest_s(self, waiting: deque[_Batch]) -> float:
        """Until there is a server to ask and something to ask it."""
        servers = min(server.rests_until_s for server in self.servers)
        return max(0.0, servers - time.monotonic(), min((batch.rests_until_s for batch in waiting), default=0.0) - time.monotonic())

    def _next(self) -> Server | None:
        now = time.monotonic()
        for _ in range(len(self.servers)):
            self.servers.rotate(-1)
            if self.servers[-1].rests_until_s <= now:
                return self.servers[-1]
        return None

    def _heard(self, server: Server, batch: _Batch, future: Future[list[Score]], waiting: deque[_Batch]) -> list[Score]:
        now = time.monotonic()
        words, refused, final = "", False, False
        try:
            scores = future.result()
        except _NoAnswer as error:
            words = str(error)
            server.failed(words, batch.asked_s)
            self.failing_since_s = self.failing_since_s or now
            self._check_deadline(now)
        except _Refused as error:
            words, refused, final = str(error), True, error.final
        if not words or refused:  # it lives
            server.answered()
            self.failing_since_s, self.answered_s = None, now
        if not words:
            for query in batch.queries:
                self.troubled.pop(query[0], None)
            return scores
        if len(batch.queries) > 1:  # one by one, so that the one at fault can be named
            for query in batch.queries:  # in the next call too, should this one's time be over
                self.troubled[query[0]] = query, 0, math.inf
            waiting.extend(_Batch([query]) for query in batch.queries)
            return []
        batch.tries += 1
        batch.first_s = min(batch.first_s, now)
        key = batch.queries[0][0]
        if final or (batch.tries >= TRIES and (refused or self.answered_s > batch.first_s)):
            self.troubled.pop(key, None)
            again = "" if final else f", tried {batch.tries} times"
            return [Score(key, None, f"{server.url}: {words}{again}")]
        if refused:
            batch.rests_until_s = now + min(LONGEST_REST_S, FIRST_REST_S * 2 ** (batch.tries - 1))
        self.troubled[key] = batch.queries[0], batch.tries, batch.first_s
        waiting.append(batch)
        return []

    def _check_deadline(self, now: float) -> None:
        if self.failing_since_s is not None and now - self.failing_since_s > self.source.deadline_s:
            told = "; ".join(f"{server.url}: {server.said or 'not asked'}" for server in sorted(self.servers, key=lambda s: s.url))
            raise RunError(
                f"reward.url: no server has answered for {self.source.deadline_s:g} s ({told}); start it again, and continue the "
                "run with --resume"
            )

    def _post(self, url: str, batch: list[Query]) -> list[Score]:
        keys, queries, prompts, labels = (list(part) for part in zip(*batch, strict=True))
        try:
            body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        except TypeError as error:
            raise _Refused(f"the label cannot be written as JSON: {error}", True) from None
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with DIRECT.open(request, timeout=self.timeout_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            words = f"HTTP {error.code} {error.reason}{_shown(error)}"
            if error.code in OVERLOADED:
                raise _NoAnswer(words) from None
            raise _Refused(words, error.code < 500) from None
        except TimeoutError:
            raise _NoAnswer(f"no answer in reward.timeout_s = {self.timeout_s:g} s") from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _NoAnswer(f"no answer in reward.timeout_s = {self.timeout_s:g} s") from None
            raise _NoAnswer(f"{reason or type(reason).__name__}") from None
        try:
            return scores_of(json.loads(text), keys, url)
        except ValueError:
            raise _Refused(f"answered with what is no JSON: {text[:SHOWN_CHARACTERS]!r}", True) from None
        except BadReturn as error:
            raise _Refused(f"answered with {error}", True) from None


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        (parts.hostname or "").encode("idna")
        rest = url.strip()[len(parts.scheme) + 3 + len(parts.netloc) :]  # other characters are percent-encoded there
        writable = rest.isascii() and rest.isprintable() and not any(character.isspace() for character in url.strip())
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and writable
    except ValueError:  # a port that is none, a name that is no host's
        return False


def _rested(waiting: deque[_Batch]) -> _Batch | None:
    now = time.monotonic()
    return next((batch for batch in waiting if batch.rests_until_s <= now), None)


def _shown(error: urllib.error.HTTPError) -> str:
    try:
        text = " ".join(error.read(SHOWN_CHARACTERS).decode("utf-8", "replace").split())
    except (OSError, http.client.HTTPException):  # it hangs up meanwhile
        return ""
    return f": {text}" if text else ""
