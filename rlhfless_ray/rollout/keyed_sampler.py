"""Sampling inside vLLM whose noise is a function of (request seed, response position) only.

vLLM's own per-request generator restarts when a request is continued elsewhere, so a cut request would repeat its
noise. Here every request owns one Philox stream (a counter-based generator: number i of the stream depends on the key
and i alone; Salmon et al., SC 2011), and the token at response position i is drawn with number i by inverting the
cumulative distribution. Neither the batch around a request nor the engine it runs on takes part.

The log-probability of the token is that of the sampling distribution: temperature and top-p applied, taken before the noise.
vLLM offers it before the temperature or after all processors only, so it is kept here and fetched by request key.
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

FORCED = 1e30  # logit of the drawn token: greater than any real one, so vLLM's greedy pick takes it
# Of the float64 probabilities of as many rows as are drawn from at once; several such tensors are held meanwhile. On GPU vLLM does not
# know of them: what it leaves free of a device is to be enough, however many sequences run and however many words there are.
CHUNK_BYTES = 1 << 27


PER_COUNT = 4  # numbers that Philox draws from one value of its counter
# One generator, put where it is wanted: to make one takes longer than all else that is done for a request here.
_philox = np.random.Philox(key=0)
_numbers = np.random.Generator(_philox)
_place: Any = _philox.state  # its buffer is empty, and stays so


def uniforms(seed: int, count: int, offset: int = 0) -> np.ndarray:
    """`count` numbers of the request's stream from number `offset` on, float64 in [0, 1). `seed` below 2**64."""
    whole, rest = divmod(offset, PER_COUNT)
    _place["state"]["key"][0], _place["state"]["counter"][0] = seed, whole
    _philox.state = _place
    return _numbers.random(rest + count)[rest:]


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, top_p: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    logits (rows, vocabulary) float; temperature (rows,), 0 meaning greedy; uniform (rows,) float64 in [0, 1); top_p (rows,) in
    (0, 1], None: 1 for all. Returns tokens (rows,) int64 and their log-probabilities (rows,) float32 in the distribution that was
    drawn from (a greedy row's at temperature 1).
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
    """`draw`, of so many rows at a time that their probabilities take CHUNK_BYTES at most. Rows have nothing to do with one another."""
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
    """vLLM logits processor that draws every token itself; requests run greedily as far as vLLM is concerned.

    A request's `SamplingParams.extra_args` carry `key` (int, unlike that of any other request the engine still knows), `seed`
    (int), `temperature` (float), `top_p` (float, 1 where it is absent) and `offset` (tokens generated before, when a cut request goes on).
    With `min_tokens` (int) the tokens `ends` (list of int) cannot be drawn before that many tokens of the whole response. They are left
    out before temperature and top_p, as vLLM's own `min_tokens` does, and the log-probability is that of what is left.
    """

    latest: KeyedSampler | None = None  # the engine in this process finds its sampler here (vLLM builds it)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, dict[str, Any]] = {}
        self.records: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []  # since the last `take`
        self.outputs: dict[int, list[int]] = {}  # by key: vLLM's own list of the tokens so far, until `forget`
        self.count_nothing()
        KeyedSampler.latest = self

    def count_nothing(self) -> None:
        """An engine step begins: sequences in it, tokens it computes, tokens in its contexts."""
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
                "noise": uniforms(extra["seed"], params.max_tokens or 0, offset),
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
            # a row that was thrown out of the cache starts again: its own tokens are computed like its prompt's
            self.new_tokens += 1 if row["started"] else row["prompt_tokens"] + position
            row["started"] = True
        return logits.scatter_(1, tokens.unsqueeze(1), FORCED)

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What was drawn since the last call: keys (m,), positions (m,) in what the engine generates, log-probabilities (m,)
        float32, in the order of drawing. vLLM drops draws of a chunked prefill and draws the position again: the last
        one of a position counts, and only where the position has a token."""
        records, self.records = self.records, []
        if not records:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
        keys, positions, logprobs = zip(*records, strict=True)
        return np.concatenate(keys), np.concatenate(positions), torch.cat(logprobs).cpu().numpy()

    def forget(self, key: int) -> None:
        """The request is over. Its row goes when vLLM says so."""
        self.outputs.pop(key, None)
