"""The planner's checked inputs: sequences, and the types of actor that may decode them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placement.planning.plan import Pool
from placement.speed.decode_speed import Speed


@dataclass(frozen=True)
class ActorType:
    """A pool in the units of the search. Times include the rework that preemption is expected to cause.

    An actor with sequences G takes setup_s + base_s · max L + Σ (per_seq_s · L + per_ctx_s · (p·L + L²/2) + prefill_s ·
    p) seconds, and costs `price` per second of that.

    Preemption is a Poisson process with rate r per second of an actor's life. Token streams resume from the tokens already
    delivered. So each preemption loses `loss_s`: what is left of a successor's start after the notice, the transfer, and
    without notice one interval of tokens. The runtime may move the sequences to other actors instead, which it does only
    if that is quicker. Work and setup of u seconds then take t = u + r·loss·t seconds in expectation, so t = u / (1 - r·loss):
    all terms grow by one factor. The re-prefill of running sequences belongs in transfer_s.
    """

    base_s: float
    per_seq_s: float
    per_ctx_s: float
    setup_s: float
    price: float
    max_actors: int
    capacity: float
    prefill_s: float = 0.0
    preempt_per_s: float = 0.0
    loss_s: float = 0.0

    @property
    def growth(self) -> float:
        """Expected seconds of an actor over its seconds without a preemption."""
        return 1 / (1 - self.preempt_per_s * self.loss_s)

    @classmethod
    def from_pool(cls, pool: Pool, index: int, transfer_s: float) -> ActorType:
        """Convert a pool. `index` names it in error messages. Raises ValueError for values that cannot work."""
        speed, name = pool.speed, f"pool {index}"
        terms = (speed.base_s, speed.per_seq_s, speed.per_ctx_s, speed.prefill_s)
        if not all(math.isfinite(t) and t >= 0 for t in terms) or speed.base_s + speed.per_seq_s <= 0:
            raise ValueError(f"{name} needs a speed with finite terms ≥ 0 and a decode step of more than 0 s, got {speed}")
        if pool.max_actors < 1 or pool.devices < 1:
            raise ValueError(f"{name} needs at least one actor and one device, got {pool.max_actors} and {pool.devices}")
        if not (math.isfinite(pool.price) and pool.price > 0):
            raise ValueError(f"{name} needs a finite price above 0, got {pool.price}")
        if pool.capacity is not None and not pool.capacity > 0:
            raise ValueError(f"{name} needs a capacity above 0 tokens, got {pool.capacity}")
        setup_s = pool.start_s + transfer_s
        rate = pool.preempt_per_hour / 3600
        if not all(
            math.isfinite(v) and v >= 0 for v in (pool.start_s, pool.restart_s or 0.0, transfer_s, rate, pool.notice_s, pool.interval_s)
        ):
            raise ValueError(f"{name} needs finite start_s, restart_s, transfer_s, preempt_per_hour, notice_s and interval_s of at least 0")
        loss_s = pool.loss_s + transfer_s
        if rate * loss_s >= 1:
            raise ValueError(
                f"{name} is preempted {pool.preempt_per_hour:g} times an hour but needs {loss_s:g} s to start: it would never decode"
            )
        grow = 1 / (1 - rate * loss_s)
        capacity = math.inf if pool.capacity is None else float(pool.capacity)
        base_s, per_seq_s, per_ctx_s, prefill_s = (t * grow for t in terms)
        price = pool.price * pool.devices
        return cls(base_s, per_seq_s, per_ctx_s, setup_s * grow, price, pool.max_actors, capacity, prefill_s, rate, loss_s)

    def work_s(self, lengths: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Return the seconds each sequence adds to its actor besides base_s · max L. Prompts broadcast against lengths."""
        seconds = self.per_seq_s * lengths
        if self.per_ctx_s:
            seconds = seconds + self.per_ctx_s * lengths * (prompts + lengths / 2)
        return seconds + self.prefill_s * prompts if self.prefill_s else seconds


@dataclass(frozen=True)
class RolloutWorkload:
    """Sequences and actor types.

    lengths (n, S): response tokens, one column per scenario (S = 1: known lengths). prompts (n,): prompt tokens.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    kinds: tuple[ActorType, ...]

    @classmethod
    def from_arguments(
        cls,
        lengths: np.ndarray,
        speed: Speed | None = None,
        *,
        max_actors: int | None = None,
        capacity: int | None = None,
        price: float = 1.0,
        pools: Sequence[Pool] | None = None,
        prompts: np.ndarray | float | None = None,
        transfer_s: float = 0.0,
    ) -> RolloutWorkload:
        """Check the arguments of `frontier` and convert them. Raises ValueError naming what is wrong."""
        lengths = check_lengths(lengths)
        if pools is None:
            if speed is None or max_actors is None:
                raise ValueError("give either speed and max_actors, or pools")
            pools = [Pool(speed, price=price, max_actors=max_actors, capacity=capacity)]
        elif speed is not None or max_actors is not None or capacity is not None:
            raise ValueError("give either speed, max_actors and capacity, or pools, not both")
        if not len(pools):
            raise ValueError("there are no pools to plan on")
        if lengths.shape[1] > 1 and np.array_equal(lengths[:, 0], lengths[:, 1]) and (lengths == lengths[:, :1]).all():
            lengths = lengths[:, :1]  # identical scenarios are known lengths
        kinds = tuple(ActorType.from_pool(pool, index, transfer_s) for index, pool in enumerate(pools))
        prompt_tokens = np.zeros(()) if prompts is None else np.asarray(prompts, float)
        if prompt_tokens.ndim > 1 or (prompt_tokens.ndim and len(prompt_tokens) != len(lengths)):
            raise ValueError(f"prompts must be one number or one per sequence ({len(lengths)}), got {prompt_tokens.shape}")
        if not np.all(np.isfinite(prompt_tokens)) or np.any(prompt_tokens < 0):
            raise ValueError("prompts must be finite token counts of at least 0")
        prompt_tokens = np.broadcast_to(prompt_tokens, (len(lengths),))
        most = max(kind.capacity for kind in kinds)
        if math.isfinite(most):
            held = prompt_tokens + lengths.max(1)
            if held.max() > most:
                worst = int(held.argmax())
                raise ValueError(
                    f"sequence {worst} needs {held[worst]:g} KV tokens and no actor holds more than {most:g}: capacity too small"
                )
        return cls(lengths, prompt_tokens, kinds)

    @property
    def known(self) -> bool:
        return self.lengths.shape[1] == 1

    @property
    def is_risky(self) -> bool:
        """Whether a preemption may delay an actor."""
        return any(kind.preempt_per_s * kind.loss_s > 0 for kind in self.kinds)

    def work_s(self, kind: ActorType) -> np.ndarray:
        """Return (n, S) seconds, see `ActorType.work_s`."""
        return kind.work_s(self.lengths, self.prompts[:, None])

    def held_tokens(self) -> np.ndarray:
        """Return (n, S) KV-cache tokens that each sequence holds at its end."""
        return self.prompts[:, None] + self.lengths

    def evaluate(self, groups: Sequence[np.ndarray], pools: Sequence[int]) -> tuple[float, float]:
        """Return (time_s, cost) of a partition straight from the definition. Actor i has type `pools[i]`."""
        each, cost = np.zeros((len(groups), self.lengths.shape[1])), 0.0
        for seconds, group, pool in zip(each, groups, pools, strict=True):
            kind = self.kinds[pool]
            work = kind.work_s(self.lengths[group], self.prompts[group][:, None]).sum(0)
            seconds[:] = kind.setup_s + kind.base_s * self.longest(group, kind) + work
            cost += kind.price * float(seconds.mean())
        return float(self.ends_s(each, np.array(pools)[:, None]).mean()), cost

    def ends_s(self, seconds: np.ndarray, pools: np.ndarray) -> np.ndarray:
        """Return (S,) expected seconds until the last actor ends. seconds (k, S): expected ones of each actor. pools (k, S) or (k, 1).

        An actor is delayed with the probability that it is preempted at all, by what makes its mean right. So an actor that
        would end early anyway delays no other: short responses go where actors may be lost.
        """
        if not self.is_risky:
            return np.asarray(seconds.max(0))
        growth, rate = (np.array([getattr(kind, name) for kind in self.kinds])[pools] for name in ("growth", "preempt_per_s"))
        undisturbed = seconds / growth
        delayed = -np.expm1(-rate * undisturbed)
        late = undisturbed + np.divide(seconds - undisturbed, delayed, out=np.zeros_like(undisturbed), where=delayed > 0)
        order = np.argsort(-late, axis=0)
        late, delayed = np.take_along_axis(late, order, 0), np.take_along_axis(delayed, order, 0)
        is_latest = delayed * np.cumprod(np.vstack([np.ones((1, late.shape[1])), 1 - delayed[:-1]]), axis=0)
        last = undisturbed.max(0)
        return np.asarray(last + (is_latest * np.maximum(late - last, 0.0)).sum(0))

    def longest(self, group: np.ndarray, kind: ActorType) -> np.ndarray:
        """Return (S,) decode steps of a group: its longest response, or the sum over its waves where it overflows the cache."""
        rows = self.lengths[group]
        if math.isinf(kind.capacity):
            return rows.max(0)
        held = self.prompts[group][:, None] + rows
        if np.all(held.sum(0) <= kind.capacity):
            return rows.max(0)
        order = np.argsort(-rows, axis=0, kind="stable")
        rows, held = np.take_along_axis(rows, order, 0), np.take_along_axis(held, order, 0)
        return np.array([rows[wave_starts(held[:, s], kind.capacity)[:-1], s].sum() for s in range(rows.shape[1])])


def wave_starts(held: np.ndarray, capacity: float) -> list[int]:
    """Return where waves start, and the end, if each wave runs as many of the next sequences as fit the cache. held (m,): tokens."""
    tokens = np.concatenate(([0.0], np.cumsum(held)))
    starts = [0]
    while starts[-1] < len(held):
        i = starts[-1]
        starts.append(max(i + 1, int(np.searchsorted(tokens, tokens[i] + capacity, side="right")) - 1))
    return starts


def check_lengths(lengths: np.ndarray) -> np.ndarray:
    """Return lengths as (n, S) floats. Raises ValueError if they are empty, not finite or not positive."""
    lengths = np.asarray(lengths, float)
    if lengths.ndim not in (1, 2) or lengths.size == 0:
        raise ValueError(f"lengths must be (n,) or (n, scenarios) and not empty, got shape {lengths.shape}")
    lengths = lengths.reshape(len(lengths), -1)
    low, high = lengths.min(), lengths.max()  # both propagate NaN
    if not (math.isfinite(low) and math.isfinite(high) and low > 0):
        row = int(np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)).all(1))[0])
        raise ValueError(f"lengths must be finite and positive; sequence {row} has {lengths[row].min()}")
    return lengths
