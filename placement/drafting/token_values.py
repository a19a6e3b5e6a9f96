"""What a token of each sequence is worth: how much it shortens the time until an engine has ended its last sequence.

If an engine's step takes a + b · rows, its time to the end is a · steps + b · all rows that it computes. A sequence that would end before
the last one gains nothing by drafts. Those that would end later need just enough of them to end together. So one number, the steps until
the end, gives the drafts of every sequence, and the best number is found by trying some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from placement.drafting.acceptance import MOST_TOKENS

REFRESH_STEPS = 16  # steps for which values are kept
CHANCE_RATE = 0.05  # weight of a step in the mean chance of a sequence's drafted token
FIRST_CHANCE = 0.6  # of a sequence without drafts so far
CHANCES = (0.05, 0.95)  # bounds of that mean
LEVELS = (0.5, 0.75, 0.95)  # of each sequence's lengths, by which drafts are tried: cheap drafts may as well be for unlikely lengths
LEAST_CHANCE = 0.05  # that all drafted tokens are accepted: further ones gain nothing
SHARES = np.geomspace(1.0, 0.1, 10)  # numbers of steps that are tried, in shares of those without drafts


def values_of(left: np.ndarray, chance: np.ndarray, step_s: float, row_s: float) -> np.ndarray:
    """Return (n,) what a token of each sequence is worth, relative to their mean.

    left: (n, S) tokens that each sequence still gets, in joint draws. chance: (n,) that a drafted token is accepted after accepted ones.
    step_s, row_s: seconds that a step takes at least, and for each row, which is a sequence or a drafted token.

    With `token_values`, the time is a · steps + b · rows. A sequence that needs k drafted tokens a step to end in time is worth 1 / chanceᵏ
    of one that needs none: so much that exactly these are verified.
    """
    last, log = float(left.max(0).mean()), np.log(chance)
    most = np.minimum(np.log(LEAST_CHANCE) / log, MOST_TOKENS)
    aims = (shrunk_quantiles(left)[:, None] / (last * SHARES[:, None])).reshape(-1, len(left))  # (trials, n) tokens a step
    drafted = np.log(np.maximum(1 - np.maximum(aims, 1.0) * (1 - chance), 1e-9)) / log - 1  # tokens = (1 - chanceᵏ⁺¹) / (1 - chance)
    drafted = np.clip(drafted, 0.0, most)
    step_share = (1 - chance) / -np.expm1(log * (drafted + 1))  # steps a token
    longest = (left * step_share[:, :, None]).max(1).mean(1)  # (trials,)
    rows = ((1 + drafted) * step_share) @ left.mean(1)
    best = drafted[int((step_s * longest + row_s * rows).argmin())]
    values = chance**-best
    return np.asarray(values / values.mean())


def shrunk_quantiles(left: np.ndarray) -> np.ndarray:
    """Return (levels, n) quantiles of draws (n, S): the nearer to their mean, the less of the draws' variance is between sequences."""
    logs = np.log(left)
    within, quantiles = float(logs.var(1).mean()), np.quantile(logs, LEVELS, axis=1)
    between = max(float(logs.mean(1).var()) - within / left.shape[1], 0.0)
    known = between / max(between + within, 1e-12)
    return np.asarray(np.exp(known * quantiles + (1 - known) * quantiles.mean(1, keepdims=True)))


def tokens_left(lengths: np.ndarray, generated: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return (n, S) tokens that sequences still get, from draws of their lengths (n, S) and their tokens so far (n,).

    A sequence that has outgrown some of its draws repeats the others. One that has outgrown all of them gets between a little and
    many times what it has. limits: (n,) tokens that it gets at most.
    """
    left = lengths - generated[:, None]
    outgrown = left < 1
    if outgrown.any():
        count = left.shape[1]
        share = (np.arange(count) + 0.5) / count
        for row in outgrown.any(1).nonzero()[0].tolist():
            rest = left[row, ~outgrown[row]]
            left[row, outgrown[row]] = np.resize(rest, outgrown[row].sum()) if len(rest) else generated[row] * share / (1 - share)
    return np.clip(left, 1.0, np.maximum(limits, 1)[:, None])


class DraftWorth:
    """The values of an engine's running sequences, from the run's forecasts of their lengths."""

    def __init__(self) -> None:
        self.lengths: dict[int, np.ndarray] = {}  # (S,) draws of the whole response, by its key
        self.chances: dict[str, float] = {}  # by the sequence's name
        self.values: dict[str, float] = {}
        self.most = 1.0  # of the values
        self.steps = REFRESH_STEPS  # since the values were computed

    def forecast(self, lengths: Mapping[int, np.ndarray]) -> None:
        """Take over forecasts of responses."""
        self.lengths.update(lengths)
        self.steps = REFRESH_STEPS

    def observe(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Record a step's (drafted, accepted) tokens by sequence, of which at least one was drafted."""
        drafted, accepted = np.array([*counts.values()]).T
        tried = np.minimum(accepted + 1, drafted)
        chance = np.array([self.chances.get(name, FIRST_CHANCE) for name in counts])
        chance += (1 - (1 - CHANCE_RATE) ** tried) * (accepted / tried - chance)
        self.chances.update(zip(counts, chance.tolist(), strict=True))

    def forget(self) -> None:
        """Forget the forecasts, at the end of a call: the next one's responses have the same keys."""
        self.lengths.clear()

    def forget_all_but(self, names: Sequence[str]) -> None:
        """Forget what was observed of sequences that are not among these."""
        for known in (self.chances, self.values):
            for name in known.keys() - set(names):
                del known[name]

    def get(
        self, names: Sequence[str], keys: Sequence[int], generated: np.ndarray, limits: np.ndarray, step_s: float, row_s: float
    ) -> np.ndarray:
        """Return (n,) the values of these sequences, 1 for all if a forecast is missing. See `values_of`.

        generated: (n,) tokens of the responses so far. limits: (n,) tokens that they still get at most.
        """
        self.steps += 1
        if self.steps > REFRESH_STEPS:
            self.steps, values = 0, np.ones(len(names))
            if len(names) > 1 and all(key in self.lengths for key in keys):
                lengths = np.array([self.lengths[key] for key in keys], float)
                chance = np.clip([self.chances.get(name, FIRST_CHANCE) for name in names], *CHANCES)
                values = values_of(tokens_left(lengths, generated, limits), chance, step_s, row_s)
            self.values, self.most = dict(zip(names, values.tolist(), strict=True)), float(values.max(initial=1.0))
        return np.array([self.values.get(name, 1.0) for name in names])
