"""Sampling inside vLLM whose noise depends only on the request's seed and the position in the response.

vLLM's own generator restarts when a request is continued elsewhere, so a cut request would repeat its noise. Here every request
has a Philox stream. This generator is counter-based: number i depends only on the key and i (Salmon et al., SC 2011). The token at
position i is drawn with number i by inverting the cumulative distribution. It does not depend on the batch or the engine.

The log-probability of a token is that of the sampling distribution, with temperature, top-k and top-p. vLLM offers it only before the
temperature or after all processors, so it is kept here and fetched by request key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput

from rlhfless_ray.common.nucleus import nucleus

UNUSED = -1  # marks in vLLM's output that a sequence has no further token
# Limit on a matrix of probabilities of rows that are drawn at once. vLLM on GPU does not account for these tensors, so they must fit
# into the memory that it leaves free, for any batch and vocabulary.
CHUNK_BYTES = 1 << 26
LARGE = 4096  # tokens of a vocabulary that is worth being cut into blocks
BLOCK = 128  # tokens of a block: large vocabularies are often multiples of it
PER_COUNT = 4  # numbers that Philox draws from one value of its counter
# One generator for all requests, set to the stream and position: creating one takes longer than the rest of the work for a request.
_philox = np.random.Philox(key=0)
_numbers = np.random.Generator(_philox)
_place: Any = _philox.state  # with an empty buffer


class Truncation(NamedTuple):
    """What is left of each row's distribution, see `nucleus`: (rows,) float64 in (0, 1], 1 for all, and (rows,) int64, 0 for all."""

    top_p: torch.Tensor
    top_k: torch.Tensor

    @classmethod
    def of(cls, rows: Iterable[tuple[float, int]], device: torch.device) -> Truncation | None:
        """Make the truncation of rows with these (top_p, top_k). None: every row has its whole distribution."""
        pairs = list(rows)
        if not any(top_p < 1 or top_k for top_p, top_k in pairs):
            return None
        top_p, top_k = zip(*pairs, strict=True)
        return cls(torch.tensor(top_p, dtype=torch.float64, device=device), torch.tensor(top_k, dtype=torch.int64, device=device))


def draw_uniforms(seed: int, count: int, offset: int = 0) -> np.ndarray:
    """Return `count` numbers of a request's stream from number `offset`, float64 in [0, 1). `seed`: below 2**64."""
    whole, rest = divmod(offset, PER_COUNT)
    _place["state"]["key"][0], _place["state"]["counter"][0] = seed, whole
    _philox.state = _place
    return _numbers.random(rest + count)[rest:]


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, truncation: Truncation | None = None, has_greedy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, without waiting for the device.

    logits: (rows, vocabulary) float. temperature: (rows,), 0 for greedy. uniform: (rows,) float64 in [0, 1). truncation: None: no
    row has top-p or top-k. has_greedy: whether a row may be greedy. Returns tokens (rows,) int64 and their log-probabilities (rows,)
    float32 under the sampling distribution (at temperature 1 for greedy rows, which ignore it).
    """
    greedy = temperature == 0
    logprobs = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1), dim=-1)
    if truncation is not None:
        whole = (greedy | ((truncation.top_p >= 1) & (truncation.top_k == 0))).unsqueeze(1)
        kept = logprobs.masked_fill(~nucleus(logprobs, *truncation), -torch.inf)
        logprobs = torch.where(whole, logprobs, kept - kept.logsumexp(-1, keepdim=True))
    tokens = invert(logprobs.exp(), uniform)
    if has_greedy:
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the token of each row whose interval of the cumulative distribution contains the number, (rows,) int64.

    probabilities: (rows, vocabulary) float32, up to a factor. uniform: (rows,) float64 in [0, 1). In a large vocabulary the block of
    the token is found first, by the sums of all blocks. Sums over more than one block are float64, because float32 would move the
    edges of rare tokens. A token without probability is never returned.
    """
    size = probabilities.shape[1]
    if size <= LARGE:
        cumulative = probabilities.double().cumsum(-1)
        return _first_above(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:]).squeeze(1)
    if rest := size % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, BLOCK - rest))
    blocks = probabilities.view(len(probabilities), -1, BLOCK)
    cumulative = blocks.sum(-1).double().cumsum(-1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = cumulative.gather(1, (block - 1).clamp_(min=0)) * (block > 0)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    return (block * BLOCK + _first_above(inside, target - before)).squeeze(1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return (rows, 1) positions of the first sums above `target`, at most those of the first sums that equal the total."""
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def draw_in_chunks(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, truncation: Truncation | None = None, has_greedy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `draw` on chunks of rows whose probabilities take at most CHUNK_BYTES. Rows are independent."""
    size = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
    if len(logits) <= size:
        return draw(logits, temperature, uniform, truncation, has_greedy)
    chunks = [slice(i, i + size) for i in range(0, len(logits), size)]
    limits = [None if truncation is None else Truncation(truncation.top_p[c], truncation.top_k[c]) for c in chunks]
    parts = [draw(logits[c], temperature[c], uniform[c], limit, has_greedy) for c, limit in zip(chunks, limits, strict=True)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


class KeyedSampler:
    """Draw the tokens of a step, and verify drafted ones, in place of vLLM's sampler and rejection sampler.

    A drafted token is accepted if it is the token that is drawn at its position. Tokens and log-probabilities are therefore the same
    with and without drafts, as far as the model's kernels give the same logits for one token of a sequence and for several.

    `SamplingParams.extra_args` of a request: `key` (int, unique among the requests that the engine knows), `seed` (int),
    `temperature` (float), `top_p` (float, default 1), `top_k` (int, default 0), `offset` (tokens generated before a cut).
    With `min_tokens` (int) the tokens `ends` (list of int) cannot be drawn before that many tokens of the whole response. They are
    excluded before temperature, top_k and top_p, as by vLLM's own `min_tokens`, and log-probabilities are those of the remaining tokens.
    """

    def __init__(self, runner: Any) -> None:
        """`runner`: vLLM's model runner, whose batch and requests are read in each step."""
        self.runner = runner
        self.rows: dict[str, dict[str, Any]] = {}  # by vLLM's request id: the requests of the last step
        self.records: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []  # keys, positions, log-probabilities since the last `take`
        self.outputs: dict[int, list[int]] = {}  # by key: vLLM's own list of tokens, until `forget`
        self.begun = 0  # requests that have joined the batch
        self.reset_counts()

    def reset_counts(self) -> None:
        """Start an engine step: zero the counts of its sequences, computed tokens (without drafts) and context tokens, and the drafts."""
        self.running = self.new_tokens = self.context_tokens = 0
        self.tried: dict[str, tuple[int, int]] = {}  # by request id: drafted tokens that were verified, and that were accepted

    def _row(self, name: str) -> dict[str, Any]:
        request = self.runner.requests[name]
        params = request.sampling_params
        extra = params.extra_args
        offset = extra.get("offset", 0)
        self.outputs[extra["key"]] = request.output_token_ids
        self.begun += 1
        return {
            "key": extra["key"],
            "temperature": extra["temperature"],
            "truncation": (extra.get("top_p", 1.0), extra.get("top_k", 0)),
            # vLLM may fill up a request's drafts, also beyond its end
            "noise": draw_uniforms(extra["seed"], params.max_tokens + self.runner.num_spec_tokens, offset),
            "output": request.output_token_ids,
            "max_tokens": params.max_tokens,
            "open_until": extra.get("min_tokens", 0) - offset,  # positions before this one cannot end the response
            "ends": extra.get("ends", ()),
            "prompt_tokens": request.num_prompt_tokens,
            "started": False,
        }

    def __call__(self, logits: torch.Tensor, sampling_metadata: object) -> SamplerOutput:
        """Draw one token per sequence from `logits` (sequences, vocabulary)."""
        tokens, _ = self._draw(logits, [0] * len(logits))
        return SamplerOutput(tokens.to(torch.int32).unsqueeze(1), None)

    def verify(self, metadata: Any, draft_probs: object, logits: torch.Tensor, sampling_metadata: object) -> SamplerOutput:
        """Draw the tokens of sequences with drafts, as vLLM calls its rejection sampler.

        `metadata` has the drafts. `logits` (sequences and drafted tokens, vocabulary) has for each sequence a row per drafted token and
        one after the last. Sequences keep the drawn tokens up to the first that differs from the drafted one.
        """
        drafted = metadata.num_draft_tokens
        if not any(drafted):
            return self(logits, sampling_metadata)
        tokens, kept = self._draw(logits, drafted, metadata.draft_token_ids.tolist())
        kept_tokens = np.full((len(drafted), max(drafted) + 1), UNUSED, np.int32)
        column, counts = np.arange(kept_tokens.shape[1]), np.array(drafted)[:, None] + 1
        held = (column < np.array(kept)[:, None])[column < counts]  # of the drawn tokens, sequence after sequence
        kept_tokens[column < np.array(kept)[:, None]] = tokens.cpu().numpy()[held]
        return SamplerOutput(torch.from_numpy(kept_tokens).to(logits.device), None)

    def _draw(self, logits: torch.Tensor, drafted: list[int], drafts: Sequence[int] = ()) -> tuple[torch.Tensor, list[int]]:
        """Return the tokens drawn from each row of `logits`, and for each sequence how many of its tokens are kept."""
        names = self.runner.input_batch.req_ids
        # A request that left the batch, such as a preempted one, starts again.
        self.rows = {name: self.rows.get(name) or self._row(name) for name in names}
        rows = list(self.rows.values())
        starts = np.array([len(row["output"]) for row in rows])
        counts = np.array(drafted) + 1
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = starts[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        noise = np.concatenate([row["noise"][start : start + count] for row, start, count in zip(rows, starts, counts, strict=True)])
        temperature = torch.tensor([row["temperature"] for row in rows], dtype=torch.float32)[owner]
        truncation = Truncation.of((rows[i]["truncation"] for i in owner), logits.device)
        for i in np.flatnonzero(positions < np.array([row["open_until"] for row in rows])[owner]):
            logits[i, [token for token in rows[owner[i]]["ends"] if token < logits.shape[1]]] = -torch.inf
        device = logits.device
        has_greedy = any(row["temperature"] == 0 for row in rows)
        tokens, logprobs = draw_in_chunks(logits, temperature.to(device), torch.from_numpy(noise).to(device), truncation, has_greedy)
        keys = np.array([row["key"] for row in rows])
        if drafts:
            kept = self._count_kept(tokens.tolist(), drafted, drafts)
            self.tried = {name: (count, k - 1) for name, count, k in zip(names, drafted, kept, strict=True) if count}
            held = positions < (starts + kept)[owner]
            self.records.append((keys[owner[held]], positions[held], logprobs[torch.from_numpy(held)]))
        else:
            kept = [1] * len(rows)
            self.records.append((keys, positions, logprobs))
        self.running = len(rows)
        self.context_tokens = int(starts.sum()) + sum(row["prompt_tokens"] for row in rows)
        for row, start in zip(rows, starts.tolist(), strict=True):
            # a preempted row starts again: its own tokens are computed like its prompt's
            self.new_tokens += 1 if row["started"] else row["prompt_tokens"] + start
            row["started"] = True
        return tokens, kept

    @staticmethod
    def _count_kept(tokens: list[int], drafted: list[int], drafts: Sequence[int]) -> list[int]:
        kept, first, draft = [], 0, 0
        for count in drafted:
            same = 0
            while same < count and tokens[first + same] == drafts[draft + same]:
                same += 1
            kept.append(same + 1)
            first, draft = first + count + 1, draft + count
        return kept

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
