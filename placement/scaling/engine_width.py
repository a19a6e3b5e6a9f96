"""The width of a rollout's engines, in slots: which widths there are, how fast each is, and when to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.planning.objective import Choice, Objective, choose_nearest, in_words
from placement.planning.plan import Plan
from placement.scaling.resize_policy import MAX_COST_SHARE, MIN_SAVING, pays_back
from placement.speed.decode_speed import Speed


@dataclass(frozen=True)
class WidthDecision:
    """The width of the next engines, in slots, and the reason in words."""

    width: int
    reason: str


def scale_speed(measured: Speed, seed: Speed, other_seed: Speed) -> Speed:
    """Return the speed at another width, which was not measured: that of the seeds' ratios, term by term.

    measured: at the known width. seed, other_seed: what the roofline expects at the known width and at the other one.
    """

    def scaled(value: float, known: float, other: float) -> float:
        return value * other / known if known > 0 else other

    return Speed(
        scaled(measured.base_s, seed.base_s, other_seed.base_s),
        scaled(measured.per_seq_s, seed.per_seq_s, other_seed.per_seq_s),
        scaled(measured.per_ctx_s, seed.per_ctx_s, other_seed.per_ctx_s),
        measured.prefill_s,
    )


def best_width(plans: Mapping[int, Sequence[Plan]], objective: Objective) -> tuple[int, Choice[Plan]]:
    """Return the width whose frontier has the objective's plan, and that choice. Of equal plans the first width's is taken."""
    every = [(width, plan) for width, some in plans.items() for plan in some]
    choice = choose_nearest([plan for _, plan in every], objective)
    return every[choice.index][0], choice


def decide_width(
    current: int,
    stay: Plan | None,
    width: int,
    chosen: Plan,
    *,
    start_s: float,
    value_per_s: float,
    lasts: float,
    gamma: float = MAX_COST_SHARE,
    unit: str = "slot-s",
) -> WidthDecision:
    """Decide whether engines of `width` slots replace those of the `current` width.

    stay: the best plan at the current width, or None if none of them meets the objective. chosen: the best at `width`. start_s:
    until its engines are ready. value_per_s: worth of a second of the step. lasts: steps that the change will last. unit: of costs.

    A change pays back as any resize does (`resize_policy.decide`): it saves at least MIN_SAVING of a step's cost, and
    the starts of its engines cost at most gamma · saving per step · steps.
    """
    if width == current:
        return WidthDecision(current, f"engines of {slots(current)}")
    figures = f"engines of {slots(width)} instead of {current}: {in_words(chosen, unit)}"
    if stay is None:
        return WidthDecision(width, f"{figures}, and no plan with {current} meets the objective")
    figures += f" (now {in_words(stay, unit)})"
    before = stay.cost + value_per_s * stay.time_s
    saving = before - chosen.cost - value_per_s * chosen.time_s
    once = (width * chosen.actors + value_per_s) * start_s
    pays, why = pays_back(saving, before, once, lasts, gamma, MIN_SAVING, unit)
    return WidthDecision(width if pays else current, f"{figures} {why}")


def slots(count: int) -> str:
    return f"{count} slot" + "s" * (count != 1)
