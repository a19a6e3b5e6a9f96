"""The choices of a step: which layouts each call may have on these devices, and what each takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from placement.call_schedule import Option, Problem
from placement.calls import Call, Kind, ModelRole, StepGraph
from placement.layouts import Devices, Fitting, Layout, NoLayout, layouts_of
from placement.speed.call_seconds import CallSeconds, CallWork
from placement.speed.roofline import Model

BYTES = 2  # bfloat16
KEPT = 2  # layouts of a call for each number of slots: the fastest, and one that may save a change of layout
TRAINED_BYTES = 16  # of a parameter: weights, gradients, float32 weights and moments (ZeRO, arXiv 1910.02054)


@dataclass(frozen=True)
class CallModel:
    """A model of a step: its sizes, and its Hugging Face configuration."""

    sizes: Model
    config: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, config: dict[str, Any], value_bytes: int = BYTES) -> CallModel:
        """Build from a Hugging Face configuration, with weights of so many bytes. Raises ValueError naming a missing or wrong field."""
        return cls(replace(Model.from_config(name, config), value_bytes=value_bytes), config)


def step_problem(
    graph: StepGraph,
    models: Mapping[ModelRole, CallModel],
    work: CallWork,
    devices: Devices,
    seconds: CallSeconds,
    layouts: Mapping[str, Sequence[Fitting]],
) -> Problem:
    """Return the choices of a step.

    Parameters
    ----------
    graph, models, work : StepGraph, mapping, CallWork
        The calls, the model of each role, and the batch that they work on.
    devices, seconds : Devices, CallSeconds
        The devices, and what a call takes on them.
    layouts : mapping
        The layouts that each call may have, by its name (`allowed_layouts`).
    """
    options = {}
    for call in graph.calls:
        predicted = {one.layout: seconds_of(call, models[call.model].sizes, work, seconds, one) for one in layouts[call.name]}
        options[call.name] = _fastest([Option(layout, took_s) for layout, took_s in predicted.items()])

    def change_s(before: Call, had: Layout, call: Call, has: Layout) -> float:
        """Return the seconds of resharding. Engines have a copy of the weights, so it does not matter what a rollout had."""
        return 0.0 if had == has or Kind.GENERATE in (before.kind, call.kind) else seconds.reshard_s(models[call.model].sizes)

    return Problem(graph, options, devices.nodes, devices.slots_per_node, change_s=change_s)


def allowed_layouts(
    call: Call, model: CallModel, work: CallWork, devices: Devices, slots: int | None = None, width: int | None = None
) -> list[Fitting]:
    """Return the layouts of a call that fit the devices' memory.

    Parameters
    ----------
    slots, width : int, optional
        The number of slots and the tensor parallelism that the call must have.

    Raises
    ------
    NoLayout
        If there is none. The message names the call and the nearest layout that fits.
    """
    try:
        fittings = layouts_of(call.kind, model.config, model.sizes.parameters, devices, work.longest, model.sizes.value_bytes)
    except NoLayout as error:
        raise NoLayout(f"{call.name} of {model.sizes.name}: {error}") from None
    found = [one for one in fittings if slots in (None, one.layout.slots) and width in (None, one.layout.tensor)]
    if found:
        return found

    def distance(one: Fitting) -> tuple[int, int]:
        return abs(one.layout.slots - (slots or one.layout.slots)), abs(one.layout.tensor - (width or one.layout.tensor))

    wanted = [f"{slots} slots"] * (slots is not None) + [f"tensor parallelism of {width}"] * (width is not None)
    nearest = min(fittings, key=distance).layout
    raise NoLayout(f"{call.name} of {model.sizes.name}: no layout with {' and '.join(wanted)} fits; the nearest that does is {nearest}")


def seconds_of(call: Call, model: Model, work: CallWork, seconds: CallSeconds, fitting: Fitting) -> float:
    """Return the seconds of a call, from the roofline, with those until its state is on the devices and off again."""
    layout = fitting.layout
    if call.kind is Kind.GENERATE:
        return seconds.sync_s(model) + seconds.generate_s(model, work, layout)
    if call.kind is Kind.TRAIN:
        parked = seconds.park_s(2 * TRAINED_BYTES * model.parameters / layout.slots)
        return parked + seconds.train_s(model, work, layout, fitting.micro_batch_tokens)
    parked = seconds.park_s(model.weight_bytes / (layout.slots if layout.zero_stage == 3 else layout.tensor))
    return parked + seconds.infer_s(model, work, layout, fitting.micro_batch_tokens)


def _fastest(options: list[Option]) -> list[Option]:
    """Return the fastest options of each number of slots."""
    by_slots: dict[int, list[Option]] = {}
    for option in sorted(options, key=lambda one: one.seconds):
        some = by_slots.setdefault(option.layout.slots, [])
        if len(some) < KEPT:
            some.append(option)
    return [option for some in by_slots.values() for option in some]
