"""What a run learns of its pool: the slots granted to it, its target, and which of its slots others wait for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from placement.market import entitled_slots
from rlhfless_ray.functions.pool_messages import PoolSlot, PoolView, Reply, SlotRequest
from rlhfless_ray.functions.pool_state import PoolState


def reply_to(state: PoolState, run: str, now_s: float) -> Reply:
    """Return the slots that a run has not confirmed, and its view of the pool."""
    known = state.runs[run]
    granted = {id: replace(slot) for id, slot in state.leased.items() if slot.holder == run and id not in known.holds}
    return Reply(known.session, granted, view_of(state, run, now_s), known.number)


def view_of(state: PoolState, run: str, now_s: float) -> PoolView:
    state.account(now_s)
    known, cleared, held_by_run = state.runs[run], state.clearing(), state.held_by_run()
    waiting = {name: missing for name, missing in state.waiting(now_s).items() if name != run}
    surplus, wanted = _surplus(state, run, held_by_run[run] - cleared.slots[run], waiting)
    parked_mb, due = Counter[str](), list[tuple[float, int]]()
    for name, other in state.runs.items():
        if name != run:
            parked_mb.update(other.parked_mb)  # type: ignore[arg-type]
            if other.gives_at_s is not None and (above := held_by_run[name] - cleared.slots[name]) > 0:
                due.append((max(0.0, other.gives_at_s - now_s), above))
    return PoolView(
        slots=state.size,
        runs=len(state.runs),
        held=held_by_run.pop(run, 0),
        target=cleared.slots[run],
        surplus=surplus,
        price=cleared.price,
        reason=cleared.reasons[run],
        slot_s=known.slot_s,
        lent_slot_s=known.lent_slot_s,
        borrowed_slot_s=known.borrowed_slot_s,
        others=dict(held_by_run),
        waiting=tuple(sorted(waiting)),
        parked_mb=dict(parked_mb),
        due=tuple(sorted(due)),
        surplus_leases=wanted,
        today_slot_s=known.today_slot_s,
        day=state.day,
        warm_free=_warm_free(state, run),
        warm_lent=_lent(state, run),
    )


def _warm_free(state: PoolState, run: str) -> tuple[tuple[str, str], ...]:
    """Return the devices of a run's parked processes that no run holds, also those that went back to Ray."""
    held = {slot.place for slot in state.slots.values() if slot.holder}
    return tuple(sorted(place for place in state.runs[run].warm - held if place[0] in state.nodes))


def _lent(state: PoolState, run: str) -> tuple[tuple[str, str], ...]:
    """Return the devices of a run's parked processes that other runs hold beyond their shares. These are asked for them first."""
    warm, by_holder = state.runs[run].warm, dict[str, list[tuple[str, str]]]()
    for slot in state.slots.values():
        if slot.holder not in ("", run) and slot.place in warm:
            by_holder.setdefault(slot.holder, []).append(slot.place)
    if not by_holder:
        return ()
    held = state.held_by_run()
    entitled = entitled_slots(state.size, [known.bid for known in state.runs.values()], held, state.credits)
    beyond = {name: max(0, held[name] - entitled[name]) for name in by_holder}
    return tuple(place for name, places in sorted(by_holder.items()) for place in sorted(places)[: beyond[name]])


def _surplus(state: PoolState, run: str, above: int, waiting: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """Return how many slots a run should give back to runs that wait, and the requests of its slots that these could use.

    `above`: slots above its target. `waiting`: slots that each of them lacks. A learner waits for the node of its state, on GPU for its
    device, and engines may wait for a label. The run also gives back a device below its target, because it can use any other one
    instead, unless its own learner returns to it. Prefer slots where a waiting run has parked engines. Name only these if they suffice,
    and no more of them than that run lacks if several runs wait.
    """
    homes, held, count = state.runs[run].homes, [slot for slot in state.slots.values() if slot.holder == run], 0
    needed, usable, named = set[str](), set[str](), set[str]()
    for name, missing in waiting.items():
        asked = {(one.node, one.device, one.width, *one.labels.items()): one for one in _asked(state, name)}.values()
        nodes = [(one, _nodes_for(state, one, held)) for one in asked]
        fitting = [slot for slot in held if any(slot.node in where and state.fits(one, slot) for one, where in nodes)]
        count += min(missing, len(fitting))
        usable |= {slot.request for slot in fitting}
        fitting.sort(key=lambda slot: slot.place in homes)
        warm = [slot.request for slot in fitting if slot.place in state.runs[name].warm and slot.request not in named]
        if len(warm) < missing:
            named |= {slot.request for slot in fitting}
        else:
            named |= set(warm if len(waiting) == 1 else warm[:missing])
        bound = [one for one in asked if one.device is not None]
        foreign = [slot for slot in fitting if slot.place not in homes]
        needed |= {slot.request for slot in foreign if any(state.fits(one, slot) for one in bound)}
    surplus = max(0, min(above, count))
    if len(needed) > surplus:
        return len(needed), tuple(sorted(needed))
    return surplus, tuple(sorted(named if len(named) >= surplus else usable)) if surplus else ()


def _nodes_for(state: PoolState, request: SlotRequest, held: Iterable[PoolSlot]) -> set[str]:
    """Return the nodes of slots that may serve a request: one node if it is for several slots, where the fewest are missing."""
    free = Counter(slot.node for slot in state.free if state.fits(request, slot))
    there = Counter(slot.node for slot in held if state.fits(request, slot))
    nodes = [node for node in there if there[node] + free[node] >= request.width]
    return set(nodes) if request.width == 1 else set(sorted(nodes, key=lambda node: (-free[node], node))[:1])


def _asked(state: PoolState, run: str) -> list[SlotRequest]:
    """Return the requests of a run, or the one that it withdrew last."""
    known = state.runs[run].withdrew
    return [request for request in state.requests.values() if request.run == run] or ([known] if known is not None else [])
