"""The step plans that `ours` tries: where a search begins, and what lies beside a plan."""

from __future__ import annotations

from dataclasses import replace

from placement.simulate.step import Knobs
from placement.simulate.terms import Terms

PREFERS = (0.5, 0.9)  # of the rollout within the step, which weighs the tail less than a rollout alone would
SHARES = (0.4, 0.85)  # of the responses, ended before the early learner is leased
GIVEN_UP = (0.85,)  # the same, where engines are given up for it
HELD = (1.0, 0.75, 0.5)  # of the devices, held throughout where a lease taken anew is a cold start
FINER = (0.0, 0.2, 0.4, 0.55, 0.7, 0.78, 0.85, 0.9, 0.95, 0.98)  # shares beside a plan's own
STEP = 0.1  # of `prefer`


def candidates(terms: Terms) -> list[Knobs]:
    """Where the search begins: all engines and learning afterwards; and an early learner of about a quarter, a half or
    three quarters of the cluster, which may grow to the whole of it after the rollout, on devices that no engine ever had,
    that engines release anyway, or that they give up at a planned moment.

    Where a lease taken anew costs more than waking an engine that was kept, the same is also tried on devices that are held
    throughout: keeping them pays as long as it costs less than the starts it saves.
    """
    d, w = terms.devices, terms.width
    sizes = terms.sizes(d - w)
    found = [Knobs(terms.engines, PREFERS[-1], 0, late) for late in terms.sizes()[-2:]]
    for early in sorted({min(sizes, key=lambda m: abs(m - share * d)) for share in (0.25, 0.5, 0.75)} if sizes else ()):
        fast, split = PREFERS[-1], (d - early) // w
        tried = [(terms.engines, fast, early), (terms.engines, fast, d), (split, fast, d)]
        tried += [(split, prefer, early) for prefer in PREFERS]
        for engines, prefer, late in dict.fromkeys(tried):
            found += [Knobs(engines, prefer, early, late, share) for share in SHARES]
        for engines in sorted({terms.engines, 3 * terms.engines // 4}):
            if engines > split and 3 * early >= d:
                found += [Knobs(engines, fast, early, d, share, narrow=True) for share in GIVEN_UP]
    roomy = terms.learner(awake=True)
    found += [replace(k, awake=True) for k in found if k.late == d and roomy.fits(d) and not terms.awake_capacity(d)]
    if whitened(terms):
        found += [replace(k, linear=True) for k in found if k.early]
    found += [replace(k, hosted=True) for k in found if k.early and _shards_less(terms, k)]
    found = [k for k in found if fits(terms, k)]
    if terms.wake_s > terms.warm_s:
        for m in sorted({round(share * d / terms.gang) * terms.gang for share in HELD}):
            if m >= max(terms.least, w):
                found += [replace(k, held=m) for k in candidates(held(terms, m))]
    return found


def beside(terms: Terms, knobs: Knobs) -> list[Knobs]:
    """The plans next to this one: a device or some half more or less to learn, the learner's moment earlier or later, an engine
    or some third more or less, a rollout that is worth more or less speed. Those that keep the rollout come first."""
    if knobs.held:
        return [replace(k, held=knobs.held) for k in beside(held(terms, knobs.held), replace(knobs, held=0))]
    found = []
    if knobs.early:
        at = min(range(len(FINER)), key=lambda i: abs(FINER[i] - knobs.share))
        found += [replace(knobs, share=FINER[i]) for i in (at - 3, at - 1, at + 1, at + 3) if 0 <= i < len(FINER)]
        sizes = resized(terms, knobs)
        found += sizes + [replace(size, late=size.early) for size in sizes]
    found += [replace(knobs, late=m) for m in _near(knobs.late, terms.gang, terms.least, terms.devices)]
    if whitened(terms) and knobs.early:
        found.append(replace(knobs, linear=not knobs.linear))
    if knobs.hosted or (knobs.early and _shards_less(terms, knobs)):
        found.append(replace(knobs, hosted=not knobs.hosted))
    found += [replace(knobs, engines=m) for m in _near(knobs.engines, 1, 1, terms.engines)]
    found += [replace(knobs, prefer=p) for p in (round(knobs.prefer - STEP, 3), round(knobs.prefer + STEP, 3)) if 0 <= p <= 1]
    if knobs.early and knobs.engines > (terms.devices - knobs.early) // terms.width:
        found.append(replace(knobs, narrow=not knobs.narrow))
    return [k for k in dict.fromkeys(found) if k != knobs and fits(terms, k)]


def resized(terms: Terms, knobs: Knobs) -> list[Knobs]:
    """The plans next to this one that differ in the early learner's size alone."""
    most = terms.devices - terms.width
    return [replace(knobs, early=m) for m in _near(knobs.early, terms.gang, terms.least, most)] if knobs.early else []


def _near(size: int, step: int, least: int, most: int) -> list[int]:
    """Sizes next to this one: a step and about a third away on both sides, within bounds."""
    third = max(step, round(size / 3 / step) * step)
    return [m for m in dict.fromkeys((size - third, size - step, size + step, size + third)) if least <= m <= most]


def _shards_less(terms: Terms, knobs: Knobs) -> bool:
    """Whether the early learner has room for more whole weights or gradients where the optimizer's state is elsewhere."""
    kinds = [terms.learner(linear=knobs.linear, awake=knobs.awake, hosted=h).trainer.sharding(knobs.early) for h in (False, True)]
    return kinds[0] != kinds[1]


def whitened(terms: Terms) -> bool:
    """Whether gradients of whitened advantages could be collected early, by linearity."""
    return terms.ppo and terms.setting.whiten and terms.setting.updates == 1


def held(terms: Terms, m: int) -> Terms:
    """A cluster of m devices that are never given back: engines on them sleep and wake."""
    return replace(terms, devices=m, wake_s=terms.warm_s)


def fits(terms: Terms, knobs: Knobs) -> bool:
    """Whether the learner's state fits its devices, early and late."""
    learner = terms.learner(linear=knobs.linear, awake=knobs.awake, hosted=knobs.hosted)
    return all(learner.fits(m) for m in (knobs.early, knobs.late) if m)
