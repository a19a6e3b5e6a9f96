"""Serve a reward model over HTTP with the JSON of `http_reward.py`. It reads text, so its tokenizer may differ from the policy's."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.learn.packing import padded
from rlhfless_ray.reward.reward_model import find_head
from rlhfless_ray.reward.scalar_model import ScalarModel
from rlhfless_ray.weights.load_policy import load_tokenizer
from rlhfless_ray.weights.model_folder import read_folder, without_weights

PATH = "/get_reward"
MICRO_BATCH_TOKENS = 16384


class TextScorer:
    """Score texts. `batch_size`: texts per forward pass; None: as many as a budget of tokens allows."""

    def __init__(
        self,
        folder: Path,
        head: str,
        dtype: str,
        device: str,
        *,
        normalize: bool = False,
        max_tokens: int = 2048,
        batch_size: int | None = None,
        trust_remote_code: bool = False,
        setting: str = "--reward.model_name_or_path",
    ) -> None:
        """Load the model. Raises UserError, which names `setting`, if the folder is not a reward model."""
        files = read_folder(folder, setting)
        self.head = find_head(files, head, normalize, setting)
        self.tokenizer = load_tokenizer(without_weights(files), trust_remote_code, setting)
        self.model = ScalarModel.load(folder, self.head.name, dtype, trust_remote_code)
        self.model.move(device)
        self.max_tokens, self.batch_size = max_tokens, batch_size
        self._lock = threading.Lock()

    def rewards(self, texts: list[str]) -> list[float]:
        """Return rewards in the order of the texts. As in OpenRLHF, text beyond `max_tokens` is dropped, with a warning."""
        encoded = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if cut := sum(len(ids) > self.max_tokens for ids in encoded):
            print(f"{cut} of {len(texts)} texts are longer than {self.max_tokens} tokens and were truncated", file=sys.stderr)
        tokens = [np.asarray(ids[: self.max_tokens], np.int64) for ids in encoded]
        if any(len(ids) == 0 for ids in tokens):
            raise ValueError("cannot score an empty text")
        return self.rewards_of(tokens)

    def rewards_of(self, tokens: list[np.ndarray]) -> list[float]:
        """Return the rewards of sequences of token ids."""
        rewards = np.zeros(len(tokens))
        with self._lock:
            for batch in self._batches([len(ids) for ids in tokens]):
                rewards[batch] = (self.model.values([tokens[i] for i in batch]) - self.head.mean) / self.head.deviation
        return rewards.tolist()

    def _batches(self, lengths: list[int]) -> list[np.ndarray]:
        if self.batch_size is None:
            return padded(np.array(lengths, np.int64), MICRO_BATCH_TOKENS)[0]
        return [np.arange(i, min(i + self.batch_size, len(lengths))) for i in range(0, len(lengths), self.batch_size)]


def create_server(scorer: TextScorer, host: str, port: int) -> ThreadingHTTPServer:
    """Bind a server, which does not serve yet. Raises UserError if the address is not available."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.partition("?")[0].rstrip("/") != PATH:
                return self._answer(404, {"error": f"unknown path; use {PATH}"})
            try:
                queries = _queries(body)
                rewards = scorer.rewards(queries)
            except ValueError as error:
                return self._answer(400, {"error": str(error)})
            except Exception as error:  # reported to the client; the server keeps running
                self._answer(500, {"error": f"{type(error).__name__}: {error}"})
                raise
            self._answer(200, {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})

        def _answer(self, status: int, value: JsonObject) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}") from None
    server.daemon_threads = True
    return server


def _queries(body: bytes) -> list[str]:
    try:
        queries = json.loads(body)["query"]
    except (ValueError, KeyError, TypeError):
        raise ValueError('expected JSON such as {"query": ["prompt and response", …]}') from None
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries) or not queries:
        raise ValueError("`query` must be a list of texts")
    return queries
