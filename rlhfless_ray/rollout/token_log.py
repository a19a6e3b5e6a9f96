"""What has been said so far: every request's tokens, log-probabilities and versions, each position once, and who goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.rollout.growable_array import GrowableArray
from rlhfless_ray.rollout.token_deltas import CUT, ENDS, GOES_ON, TokenDeltas
from rlhfless_ray.types import Completion, Request

NOBODY = -1


class TokenLog:
    """Requests by their index 0 … n-1, engines by number.

    length (n,): tokens so far; finished (n,); owner (n,): the engine that goes on with it or has finished it, -1 for nobody.
    What reached the transcript survives the engine it came from.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        keys = np.array([request.key for request in requests], np.int64)
        order = np.argsort(keys, kind="stable")
        columns = {
            "length": np.zeros(len(requests), np.int64),
            "finished": np.zeros(len(requests), bool),
            "owner": np.full(len(requests), NOBODY),
            "order": order,
            "keys": keys[order],
            "prompt": np.array([len(request.token_ids) for request in requests], np.int64),
        }
        self._columns = {name: GrowableArray(values) for name, values in columns.items()}
        self._look()
        self.completions: dict[int, Completion] = {}
        self._pieces: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in requests]
        self._versions: list[list[tuple[int, int]]] = [[] for _ in requests]
        if (np.diff(self._keys) == 0).any():
            raise ValueError("two requests have the same key")

    def add(self, request: Request) -> int:
        """One request more; its index. Its key must be above all others."""
        if len(self.requests) and request.key <= self._keys[-1]:
            raise ValueError(f"request {request.key} comes after request {self._keys[-1]}")
        i = len(self.requests)
        self.requests.append(request)
        first = {"length": 0, "finished": False, "owner": NOBODY, "prompt": len(request.token_ids), "order": i, "keys": request.key}
        for name, value in first.items():
            self._columns[name].append(value)
        self._look()
        self._pieces.append([])
        self._versions.append([])
        return i

    def _look(self) -> None:
        of = {name: column.values for name, column in self._columns.items()}
        self.length, self.finished, self.owner, self.prompt = of["length"], of["finished"], of["owner"], of["prompt"]
        self._order, self._keys = of["order"], of["keys"]

    @property
    def missing(self) -> int:
        return len(self.requests) - len(self.completions)

    def completion(self, i: int) -> Completion:
        """Of a request that has ended."""
        return self.completions[self.requests[i].key]

    def owed(self, engine: int) -> np.ndarray:
        """Indices of the requests that the engine has not ended."""
        return np.flatnonzero((self.owner == engine) & ~self.finished)

    def give(self, indices: np.ndarray, engine: int) -> list[Request]:
        """The requests, from where they stand, to be sent to the engine, from which alone more is taken from now on."""
        self.owner[indices] = engine
        return [self.request(i) for i in indices.tolist()]

    def request(self, i: int) -> Request:
        """The request as it goes on: with the tokens so far, and all else as it was."""
        if not self.length[i]:
            return self.requests[i]
        return replace(self.requests[i], generated=tuple(self._joined(i)[0].tolist()))

    def accept(self, engine: int, name: str, progress: TokenDeltas) -> tuple[np.ndarray, np.ndarray]:
        """Write down what an engine (`name` in messages) said; indices of the requests it ended and of those it was made to cut,
        which are nobody's from now on.

        Raises RunError when a request is not the engine's, or when tokens are missing or come twice: never is a token guessed.
        """
        at = np.minimum(np.searchsorted(self._keys, progress.keys), len(self._keys) - 1)
        indices = self._order[at]
        self._check(engine, name, progress, indices, self._keys[at])
        bounds = progress.bounds
        for i, begin, end in zip(indices.tolist(), bounds, bounds[1:], strict=False):
            if end > begin:
                self._pieces[i].append((progress.token_ids[begin:end], progress.logprobs[begin:end]))
                self._span(i, progress.version, end - begin)
        self.length[indices] += progress.counts
        cut = indices[progress.ends == CUT]
        self.owner[cut] = NOBODY
        ended = (progress.ends != GOES_ON) & (progress.ends != CUT)
        for i, end in zip(indices[ended].tolist(), progress.ends[ended].tolist(), strict=True):
            self._complete(i, ENDS[end], progress.version)
        return indices[ended], cut

    def _check(self, engine: int, name: str, progress: TokenDeltas, indices: np.ndarray, found: np.ndarray) -> None:
        wrong = (found != progress.keys) | (self.owner[indices] != engine) | self.finished[indices]
        if wrong.any():
            key = int(progress.keys[wrong][0])
            raise RunError(f"rollout engine {name} tells of request {key}, which is not one of those it has")
        if len(set(progress.keys.tolist())) < len(progress):
            raise RunError(f"rollout engine {name} tells of one request twice at once")
        apart = progress.starts != self.length[indices]
        if apart.any():
            first = int(np.flatnonzero(apart)[0])
            begin, have = int(progress.starts[first]), int(self.length[indices[first]])
            what = "tokens are missing" if begin > have else "tokens came twice"
            raise RunError(
                f"rollout engine {name} tells request {int(progress.keys[first])} from token {begin} on, but {have} are there: {what}"
            )
        if not len(progress.token_ids) == len(progress.logprobs) == int(progress.counts.sum()):
            raise RunError(
                f"rollout engine {name} tells of {int(progress.counts.sum())} tokens with {len(progress.token_ids)} ids and "
                f"{len(progress.logprobs)} log-probabilities"
            )

    def _span(self, i: int, version: int, tokens: int) -> None:
        spans = self._versions[i]
        if spans and spans[-1][0] == version:
            spans[-1] = version, spans[-1][1] + tokens
        else:
            spans.append((version, tokens))

    def _joined(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities so far, copied: what they came in can go."""
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
