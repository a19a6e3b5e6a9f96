"""Rewards over HTTP: POST {"query": […], "prompts": […], "labels": […]} → {"rewards": […], "scores": […], "extra_logs": {…}}.

This is the JSON of OpenRLHF's clients and servers. Versions 0.8.0 to 0.8.2 answer `rewards` alone. A bare list is accepted too.
"""

from __future__ import annotations

import json
import math
import time
import urllib.parse
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.reward.openrlhf_reward import BadReturn, Query, query_of, scores_of
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.types import Sample

if TYPE_CHECKING:
    import ssl

MAX_CONCURRENT = 32  # concurrent requests of one process
MAX_TRIES = 5  # per request while the server answers others, as in OpenRLHF
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0  # pause after a server's failure, doubled with every further one
RETRY_STATUS = (408, 425, 429, 502, 503, 504)  # a server or proxy that is temporarily unavailable
SHOWN_CHARS = 200


@dataclass(frozen=True)
class HttpSource(Source):
    """Reward servers, used in turn, with up to `batch_samples` queries per request.

    `deadline_s`: the run ends when no server has answered for this long.
    """

    urls: tuple[str, ...]
    label_column: str
    deadline_s: float
    batch_samples: int = 1

    @classmethod
    def load(cls, urls: list[str], label_column: str, deadline_s: float, batch_samples: int) -> HttpSource:
        """Check the addresses. Raises UserError for one that is not an HTTP URL."""
        for url in urls:
            if not _is_address(url):
                raise UserError(f"reward.url: `{url}` is not an HTTP address; write one such as http://127.0.0.1:5000/get_reward")
        return cls(tuple(urls), label_column, deadline_s, batch_samples)

    def item(self, key: int, sample: Sample, decode: Decode) -> Query:
        return query_of(key, sample, decode, self.label_column)

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return HttpWorker(self, timeout_s)


class _Unavailable(Exception):
    """The server is unavailable or overloaded: retry, preferably on another one."""


class _Refused(Exception):
    """The server answered with something other than rewards. `final`: a retry would change nothing."""

    def __init__(self, message: str, final: bool) -> None:
        super().__init__(message)
        self.final = final


class Server:
    """A server's address and its recent failures."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failures = 0  # in a row
        self.failed_s = -math.inf  # time of the last failure
        self.retry_at_s = 0.0
        self.last_error = ""

    def record_failure(self, message: str, sent_s: float) -> None:
        """Count a failed request that was sent at `sent_s`.

        A request sent before the last failure belongs to the same outage and is not counted again.
        """
        self.last_error = message
        if sent_s <= self.failed_s:
            return
        self.failures += 1
        self.failed_s = time.monotonic()
        self.retry_at_s = self.failed_s + min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(self.failures - 1, 16))

    def record_answer(self) -> None:
        self.failures, self.retry_at_s = 0, 0.0


@dataclass(eq=False)
class _Batch:
    queries: list[Query]
    tries: int = 0
    first_failure_s: float = math.inf  # when it failed first
    retry_at_s: float = 0.0
    sent_s: float = 0.0


@cache
def _tls_context() -> ssl.SSLContext:
    """Return what all clients of a process verify servers with. Reading the certificates takes 40 ms."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


class HttpWorker(Worker):
    def __init__(self, source: HttpSource, timeout_s: float) -> None:
        import httpx  # not at the top: drivers of every run load this module

        self.source, self.timeout_s = source, timeout_s
        # Reward servers are inside the cluster: ignore the environment's proxies, as OpenRLHF's client does since 0.9.1. FastAPI
        # redirects for a trailing slash.
        self.client = httpx.Client(verify=_tls_context(), trust_env=False, follow_redirects=True, timeout=timeout_s)
        self.servers = deque(Server(url) for url in source.urls)
        self.failing_since_s: float | None = None  # start of the current outage of all servers
        self.last_answer_s = 0.0
        self.retries: dict[int, _Batch] = {}  # key → the query that failed alone or in its batch, for the next calls too

    def score(self, items: list[Query], budget_s: float = math.inf) -> list[Score]:
        """Return the scores of the queries that were answered, in any order.

        Starts requests for `budget_s` and waits up to `timeout_s` for the last ones. Requests that no server answers are
        retried with exponential backoff. A query that is refused, or unanswered after `MAX_TRIES` while others are answered,
        gets a Score with an error. Raises RunError, naming the servers, if none has answered for `deadline_s`.
        """
        end = time.monotonic() + budget_s
        size = self.source.batch_samples
        waiting = deque(batch for query in items if (batch := self.retries.get(query[0])) and batch.queries == [query])
        retried = {batch.queries[0][0] for batch in waiting}
        others = [query for query in items if query[0] not in retried]
        waiting.extend(_Batch(others[i : i + size]) for i in range(0, len(others), size))
        scores: list[Score] = []
        running: dict[Future[list[Score]], tuple[Server, _Batch]] = {}
        with ThreadPoolExecutor(MAX_CONCURRENT, "reward-http") as threads:
            while running or (waiting and time.monotonic() < end):
                while (
                    len(running) < MAX_CONCURRENT
                    and time.monotonic() < end
                    and (batch := _next_due(waiting))
                    and (server := self._next_server())
                ):
                    waiting.remove(batch)
                    batch.sent_s = time.monotonic()
                    running[threads.submit(self._post, server.url, batch.queries)] = server, batch
                backoff_s = self._backoff_s(waiting)
                if not running:
                    time.sleep(min(backoff_s, max(0.0, end - time.monotonic())))
                    continue
                done, _ = wait(running, timeout=max(0.05, backoff_s) if waiting else None, return_when=FIRST_COMPLETED)
                for future in done:
                    server, batch = running.pop(future)
                    scores += self._handle_response(server, batch, future, waiting)
        if not waiting:  # the time until the next request belongs to no outage
            self.failing_since_s = None
        return scores

    def _backoff_s(self, waiting: deque[_Batch]) -> float:
        """Return the seconds until a server and a batch may be tried again."""
        servers = min(server.retry_at_s for server in self.servers)
        return max(0.0, servers - time.monotonic(), min((batch.retry_at_s for batch in waiting), default=0.0) - time.monotonic())

    def _next_server(self) -> Server | None:
        now = time.monotonic()
        for _ in range(len(self.servers)):
            self.servers.rotate(-1)
            if self.servers[-1].retry_at_s <= now:
                return self.servers[-1]
        return None

    def _handle_response(self, server: Server, batch: _Batch, future: Future[list[Score]], waiting: deque[_Batch]) -> list[Score]:
        now, error = time.monotonic(), future.exception()
        if isinstance(error, _Unavailable):
            server.record_failure(str(error), batch.sent_s)
            self.failing_since_s = self.failing_since_s or now
            self._check_deadline(now)
        else:
            server.record_answer()
            self.failing_since_s, self.last_answer_s = None, now
        if not isinstance(error, (_Unavailable, _Refused)):
            for query in batch.queries:
                self.retries.pop(query[0], None)
            return future.result()
        alone = [batch]
        if len(batch.queries) > 1:  # to find the query at fault
            alone = [_Batch([query]) for query in batch.queries]
        else:
            batch.tries += 1
            batch.first_failure_s = min(batch.first_failure_s, now)
            key, refused = batch.queries[0][0], isinstance(error, _Refused)
            final = isinstance(error, _Refused) and error.final
            if final or (batch.tries >= MAX_TRIES and (refused or self.last_answer_s > batch.first_failure_s)):
                self.retries.pop(key, None)
                again = "" if final else f", tried {batch.tries} times"
                return [Score(key, None, f"{server.url}: {error}{again}")]
            if refused:
                batch.retry_at_s = now + min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** (batch.tries - 1))
        self.retries |= {one.queries[0][0]: one for one in alone}
        waiting.extend(alone)
        return []

    def _check_deadline(self, now: float) -> None:
        if self.failing_since_s is not None and now - self.failing_since_s > self.source.deadline_s:
            failures = "; ".join(
                f"{server.url}: {server.last_error or 'not asked'}" for server in sorted(self.servers, key=lambda s: s.url)
            )
            raise RunError(
                f"reward.url: no server has answered for {self.source.deadline_s:g} s ({failures}); restart one and continue the "
                "run with --resume"
            )

    def _post(self, url: str, batch: list[Query]) -> list[Score]:
        import httpx

        keys, queries, prompts, labels = (list(part) for part in zip(*batch, strict=True))
        try:
            body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        except TypeError as error:
            raise _Refused(f"the label cannot be written as JSON: {error}", True) from None
        try:
            response = self.client.post(url, content=body, headers={"Content-Type": "application/json"})
        except httpx.TimeoutException:
            raise _Unavailable(f"no answer in reward.timeout_s = {self.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _Unavailable(str(error) or type(error).__name__) from None
        if not response.is_success:
            excerpt = " ".join(response.text[:SHOWN_CHARS].split())
            words = f"HTTP {response.status_code} {response.reason_phrase}" + (f": {excerpt}" if excerpt else "")
            if response.status_code in RETRY_STATUS:
                raise _Unavailable(words)
            raise _Refused(words, response.status_code < 500)
        try:
            return scores_of(response.json(), keys, url)
        except ValueError:
            raise _Refused(f"answered with invalid JSON: {response.content[:SHOWN_CHARS]!r}", True) from None
        except BadReturn as error:
            raise _Refused(f"answered with {error}", True) from None


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        (parts.hostname or "").encode("idna")
        rest = url.strip()[len(parts.scheme) + 3 + len(parts.netloc) :]  # path and query: other characters must be percent-encoded
        writable = rest.isascii() and rest.isprintable() and not any(character.isspace() for character in url.strip())
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and writable
    except ValueError:  # an invalid port or host name
        return False


def _next_due(waiting: deque[_Batch]) -> _Batch | None:
    now = time.monotonic()
    return next((batch for batch in waiting if batch.retry_at_s <= now), None)
