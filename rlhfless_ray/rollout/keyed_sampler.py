"""Sampling inside vLLM whose noise depends only on the request's seed and the position in the response.

vLLM's own generator restarts when a request is continued elsewhere, so a cut request would repeat its noise. Here every request
has a Philox stream. This generator is counter-based: number i depends only on the key and i (Salmon et al., SC 2011). The token at
position i is drawn with number i by inverting the cumulative distribution. It does not depend on the batch or the engine.

The log-probability of a token is that of the sampling distribution, with temperature and top-p. vLLM offers it only before the
temperature or after all processors, so it is kept here and fetched by request key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from rlhfless_ray.rollout.nucleus import nucleus

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate

FORCED = 1e30  # logit of the drawn token: greater than any real one, so that vLLM's greedy choice takes it
# Limit on the float64 probabilities of rows that are drawn at once. vLLM on GPU does not account for these tensors, so they must fit
# into the memory that it leaves free, for any batch and vocabulary.
CHUNK_BYTES = 1 << 27
PER_COUNT = 4  # numbers that Philox draws from one value of its counter
# One generator for all requests, set to the stream and position: creating one takes longer than the rest of the work for a request.
_philox = np.random.Philox(key=0)
_numbers = np.random.Generator(_philox)
_place: Any = _philox.state  # with an empty buffer


def draw_uniforms(seed: int, count: int, offset: int = 0) -> np.ndarray:
    """Return `count` numbers of a request's stream from number `offset`, float64 in [0, 1). `seed`: below 2**64."""
    whole, rest = divmod(offset, PER_COUNT)
    _place["state"]["key"][0], _place["state"]["counter"][0] = seed, whole
    _philox.state = _place
    return _numbers.random(rest + count)[rest:]


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, top_p: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    logits: (rows, vocabulary) float. temperature: (rows,), 0 for greedy. uniform: (rows,) float64 in [0, 1). top_p: (rows,) in
    (0, 1]; None: 1 for all. Returns tokens (rows,) int64 and their log-probabilities (rows,) float32 under the sampling
    distribution (at temperature 1 for greedy rows).
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperature), temperature).unsqueeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    if top_p is not None:
        whole = (greedy | (top_p >= 1)).unsqueeze(1)
        cut = logprobs.masked_fill(~nucleus(logprobs, top_p), -torch.inf)
        logprobs = torch.where(whole, logprobs, cut - cut.logsumexp(-1, keepdim=True))
    # float64: a float32 sum over a large vocabulary would move the edges of rare tokens
    cumulative = torch.cumsum(logprobs.double().exp(), dim=-1)
    sampled = torch.searchsorted(cumulative, (uniform * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), sampled.clamp_(max=logits.shape[1] - 1))
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def draw_in_chunks(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, top_p: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `draw` on chunks of rows whose probabilities take at most CHUNK_BYTES. Rows are independent."""
    size = max(1, CHUNK_BYTES // (8 * logits.shape[1]))
    if len(logits) <= size:
        return draw(logits, temperature, uniform, top_p)
    parts = [
        draw(logits[i : i + size], temperature[i : i + size], uniform[i : i + size], None if top_p is None else top_p[i : i + size])
        for i in range(0, len(logits), size)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


class KeyedSampler(LogitsProcessor):
    """A vLLM logits processor that draws every token itself. For vLLM all requests are greedy.

    `SamplingParams.extra_args` of a request: `key` (int, unique among the requests that the engine knows), `seed` (int),
    `temperature` (float), `top_p` (float, default 1), `offset` (tokens generated before a cut). With `min_tokens` (int) the tokens
    `ends` (list of int) cannot be drawn before that many tokens of the whole response. They are excluded before temperature and
    top_p, as by vLLM's own `min_tokens`, and log-probabilities are those of the remaining tokens.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, dict[str, Any]] = {}
        self.records: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []  # since the last `take`
        self.outputs: dict[int, list[int]] = {}  # by key: vLLM's own list of tokens, until `forget`
        self.reset_counts()

    def reset_counts(self) -> None:
        """Start an engine step: zero the counts of its sequences, computed tokens and context tokens."""
        self.running = self.new_tokens = self.context_tokens = 0

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not (sampling_params.extra_args or {}).keys() >= {"key", "seed", "temperature"}:
            raise ValueError("a request needs key, seed and temperature in SamplingParams.extra_args")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            extra = params.extra_args or {}
            offset = extra.get("offset", 0)
            self.rows[index] = {
                "key": extra["key"],
                "temperature": extra["temperature"],
                "top_p": extra.get("top_p", 1.0),
                "noise": draw_uniforms(extra["seed"], params.max_tokens or 0, offset),
                "output": output_ids,
                "open_until": extra.get("min_tokens", 0) - offset,  # positions before this one cannot end the response
                "ends": extra.get("ends", ()),
                "prompt_tokens": len(prompt_ids or ()),
                "started": False,
            }
            self.outputs[extra["key"]] = output_ids
        for a, b, direction in batch_update.moved:
            row_a, row_b = self.rows.pop(a, None), self.rows.pop(b, None)
            if row_a is not None:
                self.rows[b] = row_a
            if row_b is not None and direction.name == "SWAP":
                self.rows[a] = row_b

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows = [self.rows[i] for i in range(logits.shape[0])]
        positions = np.array([len(row["output"]) for row in rows])
        noise = torch.tensor([row["noise"][p] for row, p in zip(rows, positions, strict=True)], dtype=torch.float64)
        temperature = torch.tensor([row["temperature"] for row in rows], dtype=torch.float32)
        top_p = None
        if any(row["top_p"] < 1 for row in rows):
            top_p = torch.tensor([row["top_p"] for row in rows], dtype=torch.float64).to(self.device)
        for i in np.flatnonzero(positions < np.array([row["open_until"] for row in rows])):
            logits[i, [token for token in rows[i]["ends"] if token < logits.shape[1]]] = -torch.inf
        tokens, logprobs = draw_in_chunks(logits, temperature.to(self.device), noise.to(self.device), top_p)
        self.records.append((np.array([row["key"] for row in rows]), positions, logprobs))
        self.running = len(rows)
        self.context_tokens = int(positions.sum()) + sum(row["prompt_tokens"] for row in rows)
        for row, position in zip(rows, positions.tolist(), strict=True):
            # a preempted row starts again: its own tokens are computed like its prompt's
            self.new_tokens += 1 if row["started"] else row["prompt_tokens"] + position
            row["started"] = True
        return logits.scatter_(1, tokens.unsqueeze(1), FORCED)

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the draws since the last call, in order: keys (m,), positions (m,), log-probabilities (m,) float32.

        Positions count what this engine generated. vLLM drops draws of a chunked prefill and draws the position again. The last
        draw of a position counts, and only if the position has a token.
        """
        records, self.records = self.records, []
        if not records:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
        keys, positions, logprobs = zip(*records, strict=True)
        return np.concatenate(keys), np.concatenate(positions), torch.cat(logprobs).cpu().numpy()

    def forget(self, key: int) -> None:
        """Drop the outputs of a finished request. Its row is removed when vLLM reports it."""
        self.outputs.pop(key, None)
