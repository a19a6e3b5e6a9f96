"""Decode speed with speculative decoding, for simulations: verified tokens are work, weights and contexts are read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placement.speed.decode_speed import Speed

NO_TIME = Speed(0.0, 0.0)
MOST_DRAFTED = 8  # tokens of a sequence in a step, as in Seer and TLT


@dataclass(frozen=True)
class DraftedSpeed(Speed):
    """Speed of an engine that drafts as many tokens as pay. Its terms are an affine fit, by which planners plan.

    A step that verifies k drafted tokens of each of b sequences takes base + (1 + k)·per_seq·b + per_ctx·c, the form that DAS
    measures. It makes (1 - αᵏ⁺¹) / (1 - α) tokens of each, where α is the acceptance (Leviathan et al., arXiv 2211.17192). Each
    number of sequences takes its best k, which may be 0. Drafting itself takes no time.

    plain: without drafts. acceptance: α, the probability that a drafted token is accepted after accepted ones.
    """

    plain: Speed = NO_TIME
    acceptance: float = 0.0

    @classmethod
    def of(cls, plain: Speed, acceptance: float, batch: int) -> DraftedSpeed:
        """Return the speed whose affine terms are exact for one sequence and for `batch` sequences without context."""
        made = cls(0.0, 0.0, plain.per_ctx_s, plain.prefill_s, plain, acceptance)
        one, many = made.step_s(1), made.step_s(batch)
        per_seq_s = (many - one) / (batch - 1) if batch > 1 else 0.0
        return cls(one - per_seq_s, per_seq_s, plain.per_ctx_s, plain.prefill_s, plain, acceptance)

    @cached_property
    def tokens(self) -> np.ndarray:
        """(MOST_DRAFTED + 1,) tokens of a sequence in a step, by the number that is drafted."""
        return np.cumsum(self.acceptance ** np.arange(MOST_DRAFTED + 1))

    @property
    def least(self) -> Speed:
        """Affine terms that no number of sequences and no context go below. A step makes at most `tokens[-1]` tokens of a sequence, and
        at least one verified token for each."""
        most = float(self.tokens[-1])
        return Speed(self.plain.base_s / most, self.plain.per_seq_s, self.plain.per_ctx_s / most, self.plain.prefill_s)

    def per_token(self, running: np.ndarray, rate: np.ndarray, growth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds of a token of each sequence, and their growth, from those of a step without drafts. All (n,)."""
        drafted = np.arange(MOST_DRAFTED + 1)[:, None]
        each = (rate + drafted * self.plain.per_seq_s * running) / self.tokens[:, None]
        best = each.argmin(0)
        return each[best, np.arange(len(rate))], growth / self.tokens[best]

    def step_s(self, running: float, context_tokens: float = 0.0) -> float:
        """Return the seconds in which each of `running` sequences gets one token."""
        rate = np.array([self.plain.step_s(running, context_tokens)])
        return float(self.per_token(np.array([running]), rate, rate)[0][0])
