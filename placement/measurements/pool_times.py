"""What a run has measured of each pool of nodes: how long engines take to start there, and how often its nodes are preempted."""

from __future__ import annotations

from collections.abc import Sequence

from placement.measurements.term import Term
from placement.plain_data import JsonObject
from placement.pools import PoolKind

PRIOR_H = 1.0  # node-hours without a preemption that the prior of a pool stands for, if the recipe expects none


class PreemptionRate:
    """Preemptions of one node per hour: the mean of a Gamma posterior, whose prior weighs as much as one expected preemption."""

    def __init__(self, prior_per_hour: float = 0.0) -> None:
        """Set the prior. Raises ValueError if it is negative."""
        if prior_per_hour < 0:
            raise ValueError(f"a rate of preemptions needs a prior of at least 0 per hour, got {prior_per_hour}")
        self.prior_per_hour = prior_per_hour
        self.prior_h = 1 / prior_per_hour if prior_per_hour else PRIOR_H
        self.hours, self.preemptions = 0.0, 0

    def observe(self, node_s: float, preemptions: int) -> None:
        """Add the seconds for which nodes were in use, summed over nodes, and the preemptions meanwhile."""
        self.hours += node_s / 3600
        self.preemptions += preemptions

    @property
    def per_hour(self) -> float:
        return (self.prior_per_hour * self.prior_h + self.preemptions) / (self.prior_h + self.hours)


class PoolTimes:
    """Start times and preemption rates by pool."""

    def __init__(self) -> None:
        self.starts: dict[str, Term] = {}
        self.rates: dict[str, PreemptionRate] = {}

    def expect(self, pools: Sequence[PoolKind]) -> None:
        """Take the priors of these pools. What was observed before stays."""
        for pool in pools:
            before, rate = self.rates.get(pool.name), PreemptionRate(pool.preempt_per_hour)
            if before is not None:
                rate.hours, rate.preemptions = before.hours, before.preemptions
            self.rates[pool.name] = rate

    def observe_start(self, pool: str, seconds: float) -> None:
        """Record the start of an engine, from lease to ready, without a process before."""
        self.starts.setdefault(pool, Term(seconds)).observe(0.0, seconds)

    def observe_use(self, pool: str, node_s: float, preemptions: int) -> None:
        """Record the seconds for which a pool's nodes were in use, summed over nodes, and how many of them were preempted."""
        self.rates.setdefault(pool, PreemptionRate()).observe(node_s, preemptions)

    def start_s(self, pool: str, of_all: Term) -> float:
        """Return the seconds of an engine's start. `of_all`: that of any pool, which stands for a pool without records."""
        return (self.starts.get(pool) or of_all).predict()

    def preempt_per_hour(self, pool: str) -> float:
        return self.rates[pool].per_hour if pool in self.rates else 0.0

    def by_words(self) -> dict[str, Term]:
        """Return the times by what they are, in words."""
        return {f"start of an engine in pool {pool}": term for pool, term in self.starts.items()}

    def settle(self) -> None:
        """Fit the pending records."""
        for term in self.starts.values():
            term.settle()

    def state(self) -> JsonObject:
        rates = {pool: [rate.hours, rate.preemptions] for pool, rate in self.rates.items()}
        return {"starts": {pool: term.state() for pool, term in self.starts.items()}, "rates": rates}

    def restore(self, state: JsonObject) -> None:
        for pool, term in state["starts"].items():
            self.starts[pool] = Term(1.0)
            self.starts[pool].restore(term)
        for pool, (hours, preemptions) in state["rates"].items():
            rate = self.rates.setdefault(pool, PreemptionRate())
            rate.hours, rate.preemptions = hours, preemptions
