"""Count the slots that a command needs here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.translate import Translation
from rlhfless_ray.local.machine_memory import visible_gpus

if TYPE_CHECKING:
    from rlhfless_ray.preflight.memory_needs import Room


class Slots(NamedTuple):
    """Numbers of slots. A slot is a GPU if the cluster has any, else a core."""

    at_least: int
    at_most: int


def slots_of(translation: Translation) -> Slots:
    """Return the slots of the largest phase, because phases take turns."""

    def setting(key: str, otherwise: int) -> int:
        return _whole(translation.settings.get(key, otherwise), otherwise)

    v = translation.values
    engine = _least_width(translation.settings)
    from rlhfless_ray.recipe import Recipe

    rollout = Recipe.model_fields["rollout"].default
    most_engines, fewest_engines = setting("rollout.max_actors", rollout.max_actors), setting("rollout.min_actors", rollout.min_actors)
    ranks = setting("learner.ranks", 1)
    other_models = {"ref": v.has_reference and not v["ds.lora.rank"], "critic": v.has_critic, "reward": not v.external_reward}
    others = [v.ranks(model) for model, used in other_models.items() if used]
    fewest = max(fewest_engines * engine, ranks, setting("critic.ranks", 1), setting("reference.ranks", 1))
    at_most = max(most_engines * engine, ranks, *others)
    if translation.settings.get("rollout.max_lag_steps"):  # engines and learner work at once
        fewest, at_most = max(fewest, fewest_engines * engine + ranks), max(at_most, most_engines * engine + ranks)
    return Slots(fewest, at_most)


def _least_width(settings: Mapping[str, object]) -> int:
    """Return the slots of the narrowest engine."""
    width = settings.get("rollout.tensor_parallel", 1)
    return _whole(width, 1)  # the narrowest of `auto`


def _whole(value: object, otherwise: int) -> int:
    """Return a setting that is a whole number. Of another value, which the recipe will refuse, return `otherwise`."""
    try:
        return int(value) if isinstance(value, int | float | str) else otherwise
    except (ValueError, OverflowError):
        return otherwise


def slots_here(settings: Mapping[str, object], environment: Mapping[str, str] = os.environ, there: Room | None = None) -> int | None:
    """Return the slots of the private cluster that a run would start here, or None if it joins another cluster.

    there: GPUs of another machine, which count instead.
    """
    if there is not None:
        return there.slots
    if settings.get("cluster.address") or environment.get("RAY_ADDRESS"):
        return None
    gpus = visible_gpus(environment)
    if gpus and settings.get("functions.slot", "auto") != "cpu":
        return gpus
    return _whole(settings.get("cluster.cpus"), 0) or len(os.sched_getaffinity(0))


def fit_width(settings: JsonObject, environment: Mapping[str, str] = os.environ, there: Room | None = None) -> str:
    """Reduce the width of engines to the available GPUs. Returns a note, or an empty string.

    Where slots are CPU cores an engine gets one, because cores share their memory and OpenRLHF's number is of devices.
    """
    here, width = slots_here(settings, environment, there), _least_width(settings)
    if here is None or width <= 1:
        return ""
    on_gpus = there is not None or (visible_gpus(environment) and settings.get("functions.slot", "auto") != "cpu")
    fewer = max(n for n in range(1, (here if on_gpus else 1) + 1) if width % n == 0)
    if fewer == width:
        return ""
    settings["rollout.tensor_parallel"] = fewer
    where = f"GPUs of {'that cluster' if there else 'this machine'}: {here}" if on_gpus else "slots are CPU cores"
    return f"the command requests {width} devices per engine ({where}): an engine takes {fewer}, with the same results"


def fit(translation: Translation, environment: Mapping[str, str] = os.environ, there: Room | None = None) -> str:
    """Reduce numbers of ranks, and the width of engines, to the available slots, for which OpenRLHF would wait forever.

    there: GPUs of another machine, which count instead of this one's.

    Returns a note, or an empty string.
    """
    here, notes = slots_here(translation.settings, environment, there), []
    if "rollout.tensor_parallel" not in translation.own and (narrower := fit_width(translation.settings, environment, there)):
        notes.append(narrower)
    for name in ("critic", "reference", "learner"):
        key = f"{name}.ranks"
        ranks = _whole(translation.settings.get(key, 1), 1)
        if here is not None and name == "learner" and translation.settings.get("rollout.max_lag_steps"):
            engines = _whole(translation.settings.get("rollout.min_actors", 1), 1) * _least_width(translation.settings)
            here = max(1, here - engines)
        if here is not None and ranks > here and key not in translation.own:
            translation.settings[key] = here
            notes.append(
                f"the command requests {ranks} ranks of the {name}, and {here} slots exist: it starts with {here}, with the same results"
            )
            for together in (f"{name}.sequence_parallel", f"{name}.tensor_parallel"):
                if together in translation.settings and together not in translation.own:
                    translation.settings[together] = math.gcd(here, translation.settings[together])
    return "; ".join(notes)
