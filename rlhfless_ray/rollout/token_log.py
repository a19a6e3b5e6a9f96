"""The record of a rollout: every request's tokens, log-probabilities and versions, and the engine that continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.rollout.growable_array import GrowableArray
from rlhfless_ray.rollout.token_deltas import CUT, ENDS, GOES_ON, TokenDeltas
from rlhfless_ray.types import UNFINISHED, Completion, Request

NO_ENGINE = -1


class TokenLog:
    """Requests by index 0 … n-1, engines by number. The record survives the loss of engines.

    `length` (n,): tokens so far. `finished` (n,): bool. `owner` (n,): the engine that continues or has finished the request, or
    NO_ENGINE.
    """

    def __init__(self, requests: list[Request], before: Sequence[Completion] = (), keeps_kv: bool = False) -> None:
        """Create the record.

        Args:
            before: completions of earlier rollouts for some of the requests, finished or not.
            keeps_kv: whether a response keeps the KV of the weights under which it began.
        """
        self.requests, self.keeps_kv = requests, keeps_kv
        keys = np.array([request.key for request in requests], np.int64)
        order = np.argsort(keys, kind="stable")
        columns = {
            "length": np.zeros(len(requests), np.int64),
            "finished": np.zeros(len(requests), bool),
            "owner": np.full(len(requests), NO_ENGINE),
            "order": order,
            "keys": keys[order],
            "prompt": np.array([len(request.token_ids) for request in requests], np.int64),
        }
        self._columns = {name: GrowableArray(values) for name, values in columns.items()}
        self._update_views()
        self.completions: dict[int, Completion] = {}
        self._pieces: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in requests]
        self._versions: list[list[tuple[int, int]]] = [[] for _ in requests]
        if (np.diff(self._keys) == 0).any():
            raise ValueError("two requests have the same key")
        for completion in before:
            self._restore(completion)

    def _restore(self, completion: Completion) -> None:
        i = int(self._order[np.searchsorted(self._keys, completion.key)])
        self.length[i] = len(completion.token_ids)
        if completion.finish_reason != UNFINISHED:
            self.finished[i], self.completions[completion.key] = True, completion
        elif len(completion.token_ids):
            self._pieces[i], self._versions[i] = [(completion.token_ids, completion.logprobs)], list(completion.versions)

    def add(self, request: Request) -> int:
        """Add a request and return its index. Raises ValueError unless its key is above all others."""
        if len(self.requests) and request.key <= self._keys[-1]:
            raise ValueError(f"request {request.key} comes after request {self._keys[-1]}")
        i = len(self.requests)
        self.requests.append(request)
        first = {"length": 0, "finished": False, "owner": NO_ENGINE, "prompt": len(request.token_ids), "order": i, "keys": request.key}
        for name, value in first.items():
            self._columns[name].append(value)
        self._update_views()
        self._pieces.append([])
        self._versions.append([])
        return i

    def _update_views(self) -> None:
        columns = {name: column.values for name, column in self._columns.items()}
        self.length, self.finished, self.owner, self.prompt = columns["length"], columns["finished"], columns["owner"], columns["prompt"]
        self._order, self._keys = columns["order"], columns["keys"]

    @property
    def missing(self) -> int:
        return len(self.requests) - len(self.completions)

    def completion(self, i: int) -> Completion:
        """Return the completion of a finished request."""
        return self.completions[self.requests[i].key]

    def unfinished(self, version: int) -> list[Completion]:
        """Return the unfinished requests with their tokens so far. `version`: weight version for those without tokens."""
        completions = []
        for i in np.flatnonzero(~self.finished).tolist():
            versions = tuple(self._versions[i])
            completions.append(
                Completion(self.requests[i].key, *self._joined(i), UNFINISHED, versions[-1][0] if versions else version, versions)
            )
        return completions

    def owed(self, engine: int) -> np.ndarray:
        """Return the indices of the engine's unfinished requests."""
        return np.flatnonzero((self.owner == engine) & ~self.finished)

    def assign(self, indices: np.ndarray, engine: int) -> list[Request]:
        """Assign requests to an engine, and return them with their tokens so far. From then on only its tokens are accepted."""
        self.owner[indices] = engine
        return [self.request(i) for i in indices.tolist()]

    def request(self, i: int) -> Request:
        """Return the request with its tokens so far."""
        if not self.length[i]:
            return self.requests[i]
        began_under = self._versions[i][0][0] if self.keeps_kv else None
        return replace(self.requests[i], generated=tuple(self._joined(i)[0].tolist()), cache_version=began_under)

    def accept(self, engine: int, name: str, deltas: TokenDeltas) -> tuple[np.ndarray, np.ndarray]:
        """Record an engine's deltas. `name`: the engine's name in messages.

        Returns the indices of the requests that it finished, and of those that it cut, which have no engine now. Raises RunError
        if a request is not assigned to the engine, or if tokens are missing or repeated.
        """
        indices = self.indices(deltas.keys)
        self._check(engine, name, deltas, indices)
        bounds = deltas.bounds
        for i, begin, end in zip(indices.tolist(), bounds, bounds[1:], strict=False):
            if end > begin:
                self._pieces[i].append((deltas.token_ids[begin:end], deltas.logprobs[begin:end]))
                self._span(i, deltas.version, end - begin)
        self.length[indices] += deltas.counts
        cut = indices[deltas.ends == CUT]
        self.owner[cut] = NO_ENGINE
        ended = (deltas.ends != GOES_ON) & (deltas.ends != CUT)
        for i, end in zip(indices[ended].tolist(), deltas.ends[ended].tolist(), strict=True):
            self._complete(i, ENDS[end], deltas.version)
        return indices[ended], cut

    def indices(self, keys: np.ndarray) -> np.ndarray:
        """Return the indices of requests with these keys, and any index for an unknown key."""
        return self._order[np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)]

    def _check(self, engine: int, name: str, deltas: TokenDeltas, indices: np.ndarray) -> None:
        keys = np.array([self.requests[i].key for i in indices.tolist()], np.int64)
        wrong = (keys != deltas.keys) | (self.owner[indices] != engine) | self.finished[indices]
        if wrong.any():
            key = int(deltas.keys[wrong][0])
            raise RunError(f"rollout engine {name} reports request {key}, which is not assigned to it")
        if len(set(deltas.keys.tolist())) < len(deltas):
            raise RunError(f"rollout engine {name} reports one request twice in one message")
        apart = deltas.starts != self.length[indices]
        if apart.any():
            first = int(np.flatnonzero(apart)[0])
            begin, have = int(deltas.starts[first]), int(self.length[indices[first]])
            what = "tokens are missing" if begin > have else "tokens are repeated"
            raise RunError(
                f"rollout engine {name} reports request {int(deltas.keys[first])} from token {begin}, but {have} are recorded: {what}"
            )
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
        return self.completion(i).token_ids if self.finished[i] else self._joined(i)[0]

    def _joined(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities so far, copied so that the messages they came in can be freed."""
        pieces = self._pieces[i]
        if not pieces:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        tokens, logprobs = zip(*pieces, strict=True)
        whole = np.concatenate(tokens), np.concatenate(logprobs)
        self._pieces[i] = [whole]
        return whole

    def _complete(self, i: int, reason: str, version: int) -> None:
        tokens, logprobs = self._joined(i)
        key = self.requests[i].key
        self.completions[key] = Completion(key, tokens, logprobs, reason, version, tuple(self._versions[i]))
        self.finished[i] = True
        self._pieces[i] = []
