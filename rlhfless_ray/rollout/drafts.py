"""Drafted tokens inside vLLM: which sequences get drafts, and how many of them each decode step verifies.

Imported by engines with `rollout.speculation` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from placement.drafting import MOST_TOKENS, NOTHING, Attempts, Draft, Learned, choose_lengths
from rlhfless_ray.rollout.text_drafts import TextSource
from rlhfless_ray.types import EngineStep

ALL = 1 << 30  # sequences
TRIAL_TOKENS = 2  # drafted for a sequence until the time of a verified token is known


class Drafter:
    """vLLM's proposer of drafts (`method="custom_class"`). `attach` completes it; until then, and in further members, it drafts
    nothing."""

    def __init__(self, vllm_config: Any) -> None:
        self.most_tokens = vllm_config.model_config.max_model_len
        self.runner: Any = None

    def attach(self, runner: Any, always: bool) -> None:
        """`always`: verify all that the sources offer, in each step."""
        self.runner, self.always = runner, always
        # vLLM would verify zeros for all sequences when one is near the end of the context. `propose` keeps to the end itself.
        runner.effective_drafter_max_model_len = self.most_tokens + MOST_TOKENS + 1
        self.config = runner.speculative_config
        self.text, self.learned = TextSource(), Learned()
        self.attempts = Attempts(self.learned)
        self.offered: dict[str, Draft] = {}  # by vLLM's request id: the draft whose first tokens the next step verifies
        self.most = 0  # sequences for which the step looks up drafts
        self.verified: dict[str, Draft] = {}  # the same of the step that has just ended
        self.draft_s = 0.0  # that the step spent on drafts
        self.running = self.context_tokens = 0  # of the last step

    def begin_step(self, running: int, context_tokens: int) -> None:
        """Decide whether the next step looks up drafts. `running`, `context_tokens`: of the last one.

        A step that neither looks up nor verifies drafts takes vLLM's shorter way, without a speculative configuration.
        """
        self.running, self.context_tokens, self.draft_s = running, context_tokens, 0.0
        self.most = ALL if self.always else self.attempts.begin_step(running, context_tokens)
        self.runner.speculative_config = self.config if self.most or self.offered else None

    def observe_step(self, step: EngineStep) -> None:
        """Learn from a step: its time, and what it saved."""
        tried: Mapping[str, tuple[int, int]] = self.runner.sampler.tried
        for name, (drafted, accepted) in tried.items():
            if (draft := self.verified.get(name)) is not None:
                self.learned.acceptance.observe(draft, drafted, accepted)
                self.attempts.note(name, accepted > 0)
        if step.new_tokens == step.running:  # the step computed no prompt
            verifies = self.runner.speculative_config is not None
            self.learned.times.observe(step.running, step.context_tokens, step.drafted, step.seconds - step.draft_s, verifies)
        self.attempts.settle(step.running, step.context_tokens, step.drafted, step.accepted, step.draft_s)

    def finish(self, number: int, response: Sequence[int]) -> None:
        """Draft from a response that has ended."""
        self._read(self.text.finish, number, np.asarray(response, np.int32))

    def hear(self, learned: dict[str, Any], said: Sequence[tuple[int, np.ndarray]]) -> None:
        """Take over what a run has learned, and draft from what other engines and earlier steps have said."""
        self.learned.restore(learned)
        for name, tokens in said:
            self._read(self.text.add, ("said", name), tokens)

    def _read(self, read: Callable[..., None], *text: Any) -> None:
        """Add a text, unless too little was saved by drafts to pay for it."""
        if self.always or self.attempts.balance > 0:
            begin = time.perf_counter()
            read(*text)
            self.attempts.spend(time.perf_counter() - begin, self.running, self.context_tokens)

    def load_model(self, *_: Any) -> None:
        """Called by vLLM. There is no model."""

    def propose(self, sampled: list[list[int]], lengths: np.ndarray, token_ids: np.ndarray, **_: Any) -> list[list[int]]:
        """Return the drafted tokens of each sequence of the batch.

        sampled: tokens of the step that has just ended, none for a prompt that is not computed yet. lengths: (sequences,) tokens
        so far. token_ids: (sequences, columns) int32.
        """
        found: list[list[int]] = [[] for _ in sampled]
        if self.runner is None:
            return found
        self.verified, self.offered = self.offered, {}
        if not self.most:
            return found
        begin = time.perf_counter()
        batch = self.runner.input_batch
        names = batch.req_ids[: len(sampled)]
        keys = [self.runner.sampler.rows[name]["key"] for name in names]
        self.text.forget_all_but(keys)
        self.attempts.forget_all_but(names)
        rows = [row for row, new in enumerate(sampled) if new]
        due = rows if self.always else [rows[i] for i in self.attempts.due([names[row] for row in rows], self.most)]
        drafts = [self._draft(batch, row, keys[row], int(lengths[row]), token_ids) for row in due]
        for row, draft, count in zip(due, drafts, self._choose(drafts, len(rows), int(lengths[rows].sum())), strict=True):
            if count:
                found[row] = draft.tokens[:count]
                self.offered[names[row]] = draft
            else:
                self.attempts.note(names[row], False)
        seconds = time.perf_counter() - begin
        self.draft_s = seconds
        if due:
            self.attempts.observe_look_up(seconds, len(due))
        return found

    def _choose(self, drafts: Sequence[Draft], running: int, context_tokens: int) -> list[int]:
        """Return how many tokens of each draft the next step verifies."""
        if self.always or not drafts:
            return [len(draft.tokens) for draft in drafts]
        times = self.learned.times
        step_s = times.step_s(running, context_tokens)
        if step_s is None or not times.is_known:
            return [min(TRIAL_TOKENS, len(draft.tokens)) for draft in drafts]
        return choose_lengths(self.learned.acceptance.survival(drafts), step_s, times.verify_s, times.path_s, running)

    def _draft(self, batch: Any, row: int, key: int, length: int, token_ids: np.ndarray) -> Draft:
        request = self.runner.requests[batch.req_ids[row]]
        # The step draws one token besides the drafted ones.
        left = (request.sampling_params.max_tokens or 0) - len(request.output_token_ids) - 1
        most = min(MOST_TOKENS, left, self.most_tokens - length - 1)
        if most <= 0:
            return NOTHING
        return self.text.propose(key, int(batch.num_prompt_tokens[row]), token_ids[row, :length], most)
