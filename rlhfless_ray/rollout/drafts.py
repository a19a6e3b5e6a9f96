"""Drafted tokens inside vLLM: where they come from, and how many of them each decode step verifies.

Imported by engines with `rollout.speculation` only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

from placement.drafting import MOST_TOKENS, Acceptance, Draft, StepTimes, choose_lengths
from rlhfless_ray.types import EngineStep

MATCH_TOKENS = 24  # longest part of a sequence's end that is looked up
KEPT_TOKENS = 400_000  # of responses, the newest. A token takes about 300 bytes, so these take some 120 MB
PER_MATCHED = 2.0  # drafted tokens per matched token, at most
LEAST_ESTIMATE = 0.1
FIRST_REST, LONGEST_REST = 4, 256  # steps without drafts after a step in which none was worth its time; doubled each time
TRIAL_TOKENS = 2  # drafted for each sequence until the time of a verified token is known
SMOOTHING = 0.05  # weight of the newest measurement of the time that drafting takes


class SuffixSource:
    """Drafts from text: what has followed the longest match of a sequence's end, in its own text or in any response of this engine.

    That includes the responses of earlier steps, whose version does not matter: a wrong draft costs time and changes no token.
    """

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        self.cache = SuffixDecodingCache(MATCH_TOKENS)
        self.kept_tokens = kept_tokens
        self.known: dict[str, int] = {}  # by running request: tokens that the cache has
        self.sizes: dict[str, int] = {}  # by request, oldest first: tokens of its response that all requests may draft from
        self.total = 0  # of these

    def propose(self, name: str, prompt_tokens: int, tokens: np.ndarray, most: int) -> Draft:
        """Return a draft that follows `tokens` (n,) int32, of which the first `prompt_tokens` are the request's prompt."""
        known = self.known.get(name)
        if known is None:
            self.cache.start_request(name, np.ascontiguousarray(tokens[:prompt_tokens]))
            self.total -= self.sizes.pop(name, 0)  # of a request that was preempted, which starts again
            known, self.sizes[name] = prompt_tokens, 0
        if known < len(tokens):
            self.cache.add_active_response(name, np.ascontiguousarray(tokens[known:]))
            if name in self.sizes:
                self.sizes[name] += len(tokens) - known
                self.total += len(tokens) - known
        self.known[name] = len(tokens)
        found = self.cache.speculate(
            name, np.ascontiguousarray(tokens[-MATCH_TOKENS:]), most, max_spec_factor=PER_MATCHED, min_token_prob=LEAST_ESTIMATE
        )
        return Draft(list(found.token_ids), list(found.probs), found.match_len)

    def forget_all_but(self, names: Sequence[str]) -> None:
        """Drop the prompts of requests that have left the engine, and the oldest responses beyond `kept_tokens`."""
        for name in self.known.keys() - set(names):
            del self.known[name]
            self.cache.stop_request(name)
        while self.total > self.kept_tokens:
            oldest = next(iter(self.sizes))
            self.total -= self.sizes.pop(oldest)
            self.cache.evict_cached_response(oldest)


class DraftingPolicy:
    """Decides in each step how many drafted tokens to verify. `always`: all that the source offers."""

    def __init__(self, always: bool) -> None:
        self.always = always
        self.acceptance, self.times = Acceptance(), StepTimes()
        self.overhead_s = 0.0
        self.rest = self.resting = 0
        self.offered: dict[str, Draft] = {}  # by request: the draft whose first tokens the next step verifies

    def is_resting(self) -> bool:
        """Count a step, and return whether none of its sequences gets a draft."""
        self.resting -= 1
        return self.resting >= 0

    def choose(self, drafts: Sequence[Draft], context_tokens: int) -> list[int]:
        """Return how many tokens of each draft the next step verifies."""
        if self.always:
            return [len(draft.tokens) for draft in drafts]
        step_s = self.times.step_s(len(drafts), context_tokens)
        if step_s is None or not self.times.verify_s:
            return [min(TRIAL_TOKENS, len(draft.tokens)) for draft in drafts]
        survivals = [self.acceptance.survival(draft) for draft in drafts]
        lengths = choose_lengths(survivals, step_s, self.times.verify_s, self.overhead_s)
        if any(lengths):
            self.rest = 0
        else:
            self.rest = min(max(FIRST_REST, 2 * self.rest), LONGEST_REST)
            self.resting = self.rest
        return lengths

    def observe(self, tried: dict[str, tuple[int, int]]) -> None:
        """Learn from a step's {request: drafted tokens that were verified, and that were accepted}."""
        offered, self.offered = self.offered, {}
        for name, (drafted, accepted) in tried.items():
            if name in offered:
                self.acceptance.observe(offered[name], drafted, accepted)

    def observe_overhead(self, seconds: float) -> None:
        self.overhead_s += SMOOTHING * (seconds - self.overhead_s) if self.overhead_s else seconds


class Drafter:
    """vLLM's proposer of drafts (`method="custom_class"`). `attach` completes it; until then, and in further members, it drafts
    nothing."""

    def __init__(self, vllm_config: Any) -> None:
        self.most_tokens = vllm_config.model_config.max_model_len
        self.runner: Any = None
        self.propose_s = 0.0  # of the last step

    def attach(self, runner: Any, always: bool) -> None:
        self.runner = runner
        # vLLM would verify zeros for all sequences when one is near the end of the context. `propose` keeps to the end itself.
        runner.effective_drafter_max_model_len = self.most_tokens + MOST_TOKENS + 1
        self.source, self.policy = SuffixSource(), DraftingPolicy(always)

    def observe_step(self, step: EngineStep) -> None:
        """Learn the time of a step."""
        if step.new_tokens == step.running:  # the step computed no prompt
            self.policy.times.observe(step.running, step.context_tokens, step.drafted, step.seconds - self.propose_s)

    def load_model(self, *_: Any) -> None:
        """Called by vLLM. There is no model."""

    def propose(self, sampled: list[list[int]], lengths: np.ndarray, token_ids: np.ndarray, **_: Any) -> list[list[int]]:
        """Return the drafted tokens of each sequence of the batch.

        sampled: tokens of the step that has just ended, none for a prompt that is not computed yet. lengths: (sequences,) tokens
        so far. token_ids: (sequences, columns) int32.
        """
        self.propose_s = 0.0
        if self.runner is None:
            return [[] for _ in sampled]
        self.policy.observe(self.runner.sampler.tried)
        if self.policy.is_resting():
            return [[] for _ in sampled]
        begin = time.perf_counter()
        batch = self.runner.input_batch
        names = batch.req_ids[: len(sampled)]
        self.source.forget_all_but(names)
        rows = [row for row, new in enumerate(sampled) if new]
        drafts = [self._draft(batch, row, int(lengths[row]), token_ids) for row in rows]
        counts = self.policy.choose(drafts, int(lengths[rows].sum()))
        found: list[list[int]] = [[] for _ in sampled]
        for row, draft, count in zip(rows, drafts, counts, strict=True):
            if count:
                found[row] = draft.tokens[:count]
                self.policy.offered[names[row]] = draft
        self.propose_s = time.perf_counter() - begin
        self.policy.observe_overhead(self.propose_s)
        return found

    def _draft(self, batch: Any, row: int, length: int, token_ids: np.ndarray) -> Draft:
        name = batch.req_ids[row]
        request = self.runner.requests[name]
        # The step draws one token besides the drafted ones.
        left = (request.sampling_params.max_tokens or 0) - len(request.output_token_ids) - 1
        most = min(MOST_TOKENS, left, self.most_tokens - length - 1)
        return self.source.propose(name, int(batch.num_prompt_tokens[row]), token_ids[row, :length], max(most, 0))
