"""Decide whether a prefix service pays for a step's prompts.

Off, every engine computes each block prefix of its own prompts once (its cache keeps them), and the rest of a prompt,
which fills no block, for every response. On, prefill instances compute each distinct prefix once for all engines,
partly filled blocks included. Engines load pages and compute one token of each prompt. Both sides are linear in tokens
and pages, so there is a break-even length of a shared header.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from placement.measurements.term import Term
from placement.plain_data import JsonObject

MARGIN = 0.1  # share of the cost without the service that the service must save: fitted times are no more accurate
MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class PrefixDemand:
    """Prompt tokens and pages of a step, for E engines that each get a share of the prompts.

    distinct_tokens, distinct_pages: over all prompts, each block prefix once. trunk_tokens: the part of these that
    every prompt begins with, in whole blocks. off_tokens (E,): prompt tokens that each engine computes without the
    service. on_tokens (E,): the same with the service. load_pages (E,): pages that each engine copies in. fetch_pages (E,):
    pages that are sent to each engine.
    """

    block_size: int
    distinct_tokens: int
    distinct_pages: int
    trunk_tokens: int
    off_tokens: np.ndarray
    on_tokens: np.ndarray
    load_pages: np.ndarray
    fetch_pages: np.ndarray


@dataclass(frozen=True)
class PrefixCosts:
    """Costs in seconds of one slot.

    prefill_token_s: compute a prompt token. save_page_s: copy a page out and seal it. load_page_s: copy a page in.
    fetch_page_s: take a page out of the object store and check it. engine_s: per engine that fetches. instance_s: per
    prefill instance. step_s: per step, while no instance works.
    """

    prefill_token_s: float
    save_page_s: float = 0.0
    load_page_s: float = 0.0
    fetch_page_s: float = 0.0
    engine_s: float = 0.0
    instance_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class PrefixChoice:
    """The decision: whether the service is on, and with how many prefill `instances`.

    Engine-seconds are given for both cases. break_even_tokens: length of a header shared by all prompts from which the
    service pays (inf: never). no_room: off because memory is short.
    """

    on: bool
    instances: int
    reason: str
    off_engine_s: float = 0.0
    on_engine_s: float = 0.0
    break_even_tokens: float = math.inf
    no_room: bool = False

    @property
    def saved_engine_s(self) -> float:
        return self.off_engine_s - self.on_engine_s


def choose_prefix(
    demand: PrefixDemand,
    costs: PrefixCosts,
    *,
    mode: str = "auto",
    time_value: float = 0.0,
    max_instances: int = 1,
    page_bytes: int = 0,
    cap_bytes: float = math.inf,
) -> PrefixChoice:
    """Choose whether a step uses the prefix service.

    mode: "auto" turns it on if it saves more than a tenth. "on" turns it on at any cost, unless out of memory.
    time_value: slot-seconds that a second of the step is worth.

    Raises ValueError for another mode, or if there is no engine.
    """
    if mode not in MODES:
        raise ValueError(f"prefix_kv is one of {', '.join(MODES)}, not {mode!r}")
    if not len(demand.off_tokens):
        raise ValueError("a step has at least one engine")
    if mode == "off":
        return PrefixChoice(False, 0, "prefix_kv: off")
    if demand.distinct_pages == 0:
        return PrefixChoice(False, 0, "off: no prompt has a token before its last")
    needed = demand.distinct_pages * page_bytes
    if needed > cap_bytes:
        return PrefixChoice(
            False, 0,
            f"off: the pages of {demand.distinct_tokens} distinct prompt tokens need {needed / 2**20:.0f} MB of the object store and "
            f"may take {cap_bytes / 2**20:.0f} MB", no_room=True,
        )  # fmt: skip
    off_cost, off_time = costs_off(demand, costs)
    tried = {n: costs_on(demand, costs, n) for n in range(1, max(1, max_instances) + 1)}
    best = min(tried, key=lambda n: tried[n][0] + time_value * tried[n][1])
    on_cost, on_time = tried[best]
    gain = off_cost - on_cost + time_value * (off_time - on_time)
    bar = MARGIN * (off_cost + time_value * off_time)
    # cost per further token of a header shared by all, on both sides of the inequality gain > bar
    per_off = costs.prefill_token_s * (len(demand.off_tokens) + time_value)
    moved = (costs.load_page_s + costs.fetch_page_s) / demand.block_size
    per_on = (costs.prefill_token_s + costs.save_page_s / demand.block_size) * (1 + time_value)
    per_on += moved * (len(demand.off_tokens) + best - 1 + time_value * (2 if best > 1 else 1))
    slope = (1 - MARGIN) * per_off - per_on
    even = _break_even(gain - bar, slope, demand.trunk_tokens)
    numbers = (off_cost, on_cost, even)
    figures = f"{off_cost:.3g} engine-s of prefill without it, {on_cost:.3g} with"
    if even < math.inf:
        figures += f"; pays from a shared header of {even:.0f} tokens, this step's has {demand.trunk_tokens}"
    else:
        figures += "; no shared header is long enough to pay"
    if mode == "on":
        return PrefixChoice(True, best, f"prefix_kv: on; {figures}", *numbers)
    return PrefixChoice(gain > bar, best if gain > bar else 0, f"{'on' if gain > bar else 'off'}: {figures}", *numbers)


def costs_off(demand: PrefixDemand, costs: PrefixCosts) -> tuple[float, float]:
    """Return (engine-seconds, seconds until the last engine can decode) without the service."""
    each = costs.prefill_token_s * demand.off_tokens
    return float(each.sum()), float(each.max())


def costs_on(demand: PrefixDemand, costs: PrefixCosts, instances: int) -> tuple[float, float]:
    """Return the same two with it. With several instances, one computes the shared header first and the others load it."""
    each = costs.prefill_token_s * demand.on_tokens + costs.load_page_s * demand.load_pages
    each = each + costs.fetch_page_s * demand.fetch_pages + costs.engine_s * (demand.fetch_pages > 0)
    make = costs.prefill_token_s + costs.save_page_s * demand.distinct_pages / demand.distinct_tokens
    trunk = make * demand.trunk_tokens
    rest = make * (demand.distinct_tokens - demand.trunk_tokens)
    again = (costs.load_page_s + costs.fetch_page_s) * demand.trunk_tokens / demand.block_size * (instances > 1)
    cost = trunk + rest + instances * costs.instance_s + (instances - 1) * again + float(each.sum())
    time = costs.step_s + costs.instance_s + trunk + again + rest / instances + float(each.max())
    return cost, time


def _break_even(advantage: float, slope: float, header: int) -> float:
    """Return the header tokens at which the advantage is zero, from its present value and its slope per token."""
    if slope <= 0:
        return 0.0 if advantage > 0 else math.inf  # it pays now, and with shorter headers even more
    return max(0.0, header - advantage / slope)


@dataclass
class PrefixSpeed:
    """`PrefixCosts` fitted to the times of prefill instances and engines."""

    prefill: Term
    save: Term
    load: Term
    fetch: Term
    step: Term = field(default_factory=lambda: Term(0.05))

    @classmethod
    def first_guess(cls, prefill_token_s: float, page_bytes: int) -> PrefixSpeed:
        """Return a seed for when there are no records: copies at 1 GB/s, plus some hundredths of a millisecond per page."""
        copy_s = page_bytes / 1e9
        return cls(Term(0.002, prefill_token_s), Term(0.001, copy_s + 1e-5), Term(0.0, copy_s + 1e-5), Term(0.002, copy_s + 2e-5))

    def costs(self) -> PrefixCosts:
        return PrefixCosts(
            self.prefill.per_unit_s, self.save.per_unit_s, self.load.per_unit_s, self.fetch.per_unit_s, self.fetch.fixed_s,
            self.prefill.fixed_s + self.save.fixed_s, self.step.fixed_s,
        )  # fmt: skip

    def observe_job(self, tokens: int, pages: int, prefill_s: float, save_s: float) -> None:
        """Record a prefill job."""
        self.prefill.observe(tokens, prefill_s)
        self.save.observe(pages, save_s)

    def observe_fetch(self, fetched_pages: int, fetch_s: float, loaded_pages: int, load_s: float) -> None:
        """Record that an engine fetched pages and copied some in."""
        self.fetch.observe(fetched_pages, fetch_s)
        self.load.observe(loaded_pages, load_s)

    def observe_step(self, overhead_s: float) -> None:
        """Record the seconds of a prefill phase in which no job ran."""
        self.step.observe(0.0, overhead_s)

    def state(self) -> JsonObject:
        return {name: getattr(self, name).state() for name in ("prefill", "save", "load", "fetch", "step")}

    def restore(self, state: JsonObject) -> None:
        for name, one in state.items():
            getattr(self, name).restore(one)
