"""The record of a rollout: every request's tokens, log-probabilities and versions, and the engine that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.engine.token_deltas import CUT, ENDS, GOES_ON, TokenDeltas
from rlhfless_ray.types import UNFINISHED, Completion, Request

NO_ENGINE = -1
NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32)
OUTLIVES = 1.1  # a response longer than its forecast is expected to reach this multiple of its present length


class TokenLog:
    """Requests by key 0 … n-1, engines by number. The record survives the loss of engines.

    `length` (n,): tokens so far. `finished` (n,): bool. `owner` (n,): the engine that continues or has finished the request, or
    NO_ENGINE. `prompt` (n,): tokens of the prompts. `expected` (n,): forecast tokens of the responses.
    """

    def __init__(
        self,
        requests: list[Request],
        before: Mapping[int, Completion] = MappingProxyType({}),
        keeps_kv: bool = False,
        expected: np.ndarray | None = None,
    ) -> None:
        """Create the record.

        Args:
            before: completions of earlier rollouts by the keys of some of the requests, finished or not.
            keeps_kv: whether a response keeps the KV of the weights under which it began.
            expected: (n,) forecast tokens of the responses. None: 0.
        """
        if [request.key for request in requests] != list(range(len(requests))):
            raise ValueError("the keys of the requests must count from 0")
        self.requests, self.keeps_kv = requests, keeps_kv
        length, finished, owner = np.zeros(len(requests), np.int64), np.zeros(len(requests), bool), np.full(len(requests), NO_ENGINE)
        prompt = np.array([len(request.token_ids) for request in requests], np.int64)
        forecast = np.zeros(len(requests)) if expected is None else np.array(expected, float)
        self._buffers = [length, finished, owner, prompt, forecast]  # each doubles when it is full
        self._update_views()
        self.completions: dict[int, Completion] = {}
        self._whole: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # tokens and log-probabilities of unfinished requests, without pieces
        self._pieces: list[list[tuple[TokenDeltas, int, int]]] = [[] for _ in requests]  # reports since, and where they have its tokens
        self._versions: list[list[tuple[int, int]]] = [[] for _ in requests]
        for i, completion in before.items():
            self._restore(i, completion)

    def _restore(self, i: int, completion: Completion) -> None:
        self.length[i] = len(completion.token_ids)
        if completion.finish_reason != UNFINISHED:
            self.finished[i], self.completions[i] = True, completion
        elif len(completion.token_ids):
            self._whole[i], self._versions[i] = (completion.token_ids, completion.logprobs), list(completion.versions)

    def add(self, request: Request, expected: float = 0.0) -> int:
        """Add a request with its forecast tokens under the next key, and return that key."""
        i = len(self.requests)
        self.requests.append(replace(request, key=i))
        if i == len(self._buffers[0]):
            self._buffers = [np.concatenate([buffer, np.empty(max(16, i), buffer.dtype)]) for buffer in self._buffers]
        for buffer, value in zip(self._buffers, (0, False, NO_ENGINE, len(request.token_ids), expected), strict=True):
            buffer[i] = value
        self._update_views()
        self._pieces.append([])
        self._versions.append([])
        return i

    def _update_views(self) -> None:
        self.length, self.finished, self.owner, self.prompt, self.expected = (buffer[: len(self.requests)] for buffer in self._buffers)

    @property
    def missing(self) -> int:
        return len(self.requests) - len(self.completions)

    def left(self) -> np.ndarray:
        """Return (n,) the tokens that each request is expected to still get, 0 for finished ones."""
        return np.where(self.finished, 0.0, np.maximum(self.expected, OUTLIVES * self.length) - self.length)

    def unfinished(self, version: int) -> list[Completion]:
        """Return the unfinished requests with their tokens so far. `version`: weight version for those without tokens."""
        completions = []
        for i in np.flatnonzero(~self.finished).tolist():
            whole, versions = self._joined(i), tuple(self._versions[i])
            completions.append(Completion(i, *whole, UNFINISHED, versions[-1][0] if versions else version, versions))
        return completions

    def owed(self, engine: int) -> np.ndarray:
        """Return the keys of the engine's unfinished requests."""
        return np.flatnonzero((self.owner == engine) & ~self.finished)

    def assign(self, keys: np.ndarray, engine: int) -> list[Request]:
        """Assign requests to an engine, and return them with their tokens so far. From then on only its tokens are accepted."""
        self.owner[keys] = engine
        return [self.request(i) for i in keys.tolist()]

    def request(self, i: int) -> Request:
        """Return the request with its tokens so far."""
        if not self.length[i]:
            return self.requests[i]
        tokens = self._joined(i)[0]
        began_under = self._versions[i][0][0] if self.keeps_kv else None
        return replace(self.requests[i], generated=tuple(tokens.tolist()), cache_version=began_under)

    def accept(self, engine: int, name: str, deltas: TokenDeltas) -> tuple[np.ndarray, np.ndarray]:
        """Record an engine's deltas. `name`: the engine's name in messages.

        Returns the keys of the requests that it finished, and of those that it cut, which have no engine now. Raises RunError
        if a request is not assigned to the engine, or if tokens are missing or repeated.
        """
        self._check(engine, name, deltas)
        keys, bounds = deltas.keys, deltas.bounds
        for i, begin, end in zip(keys.tolist(), bounds, bounds[1:], strict=False):
            if end > begin:
                self._pieces[i].append((deltas, begin, end))
        self.length[keys] += deltas.counts
        cut = keys[deltas.ends == CUT]
        self.owner[cut] = NO_ENGINE
        ended = (deltas.ends != GOES_ON) & (deltas.ends != CUT)
        for i, end in zip(keys[ended].tolist(), deltas.ends[ended].tolist(), strict=True):
            self._complete(i, ENDS[end], deltas.version, deltas.experts.get(i))
        return keys[ended], cut

    def _check(self, engine: int, name: str, deltas: TokenDeltas) -> None:
        known = (deltas.keys >= 0) & (deltas.keys < len(self.requests))
        keys = deltas.keys[known]
        known[known] = (self.owner[keys] == engine) & ~self.finished[keys]
        if not known.all():
            key = int(deltas.keys[~known][0])
            raise RunError(f"rollout engine {name} reports request {key}, which is not assigned to it")
        if len(set(deltas.keys.tolist())) < len(deltas):
            raise RunError(f"rollout engine {name} reports one request twice in one message")
        apart = deltas.starts != self.length[deltas.keys]
        if apart.any():
            first = int(np.flatnonzero(apart)[0])
            key, begin = int(deltas.keys[first]), int(deltas.starts[first])
            have = int(self.length[key])
            what = "tokens are missing" if begin > have else "tokens are repeated"
            raise RunError(f"rollout engine {name} reports request {key} from token {begin}, but {have} are recorded: {what}")
        if not len(deltas.token_ids) == len(deltas.logprobs) == int(deltas.counts.sum()):
            raise RunError(
                f"rollout engine {name} reports {int(deltas.counts.sum())} tokens with {len(deltas.token_ids)} ids and "
                f"{len(deltas.logprobs)} log-probabilities"
            )

    def _span(self, i: int, version: int, tokens: int) -> None:
        spans = self._versions[i]
        if spans and spans[-1][0] == version:
            spans[-1] = version, spans[-1][1] + tokens
        else:
            spans.append((version, tokens))

    def tokens(self, i: int) -> np.ndarray:
        """Return a response's tokens so far."""
        return self.completions[i].token_ids if self.finished[i] else self._joined(i)[0]

    def _joined(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities so far, copied so that the messages they came in can be freed."""
        whole, pieces = self._whole.get(i, NOTHING), self._pieces[i]
        if pieces:
            for deltas, begin, end in pieces:
                self._span(i, deltas.version, end - begin)
            tokens = [whole[0], *(deltas.token_ids[begin:end] for deltas, begin, end in pieces)]
            logprobs = [whole[1], *(deltas.logprobs[begin:end] for deltas, begin, end in pieces)]
            whole = self._whole[i] = np.concatenate(tokens), np.concatenate(logprobs)
            self._pieces[i] = []
        return whole

    def _complete(self, i: int, reason: str, version: int, experts: np.ndarray | None) -> None:
        tokens, logprobs = self._joined(i)
        self.completions[i] = Completion(i, tokens, logprobs, reason, version, tuple(self._versions[i]), experts=experts)
        self.finished[i] = True
        self._whole.pop(i, None)
