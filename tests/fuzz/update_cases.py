"""Which random updates cover every option, and how they are compared with float64."""

from __future__ import annotations

from typing import Any

from tests.fuzz.compare import is_close, weight_differences
from tests.fuzz.draw_updates import UpdateCase, draw_plan
from tests.fuzz.sections import Read, options_in, options_of
from tests.fuzz.update_reference import UpdateReference

FEATURES: set[tuple[str, object]] = {
    *(("ZeRO stage", stage) for stage in range(4)),
    *(("ranks", ranks) for ranks in (1, 2)),
    *(("band", (level, gating)) for level in ("token", "seq") for gating in ("ratio", "binary_kl", "tv")),
    *(("empty", mean) for mean in ("token", "sequence")),
    ("empty", "seq"),
}
WITHOUT_NUMBERS = {"uncorrected_lag", "filter_range", "filter_draw", "filter_patience", "advantage"}  # decide before the update


def options_of_updates() -> set[tuple[str, object]]:
    """Return every option of the section `algorithm` that the update depends on."""
    from rlhfless_ray.recipe import AlgorithmConfig

    every = options_of(AlgorithmConfig, "algorithm")
    return {option for option in every if option[0].split(".")[1] not in WITHOUT_NUMBERS}


def covering(seeds: range) -> list[int]:
    """Return the first seeds that together draw every option of the update, and every feature of FEATURES."""
    left, chosen = options_of_updates() | FEATURES, []
    for seed in seeds:
        case = draw_plan(seed)
        drawn = options_in(case.settings.algorithm, "algorithm") | case.features
        if left & drawn:
            chosen.append(seed)
            left -= drawn
    assert not left, f"never drawn: {sorted(map(str, left))}; let tests/fuzz/draw_updates.py draw them"
    return chosen


def reference_of(case: UpdateCase) -> UpdateReference:
    settings = case.settings
    microbatches = "one" if case.microbatches == "one" else "each"
    sections = Read(settings.algorithm, "algorithm"), Read(settings.learner, "learner")
    return UpdateReference(case.files, *sections, settings.temperature, settings.seed, microbatches)


def differences(case: UpdateCase, found: dict[str, Any]) -> tuple[list[str], float]:
    """Return what differs by more than float32's rounding, and the reference's smallest distance from a bound."""
    reference, wrong = reference_of(case), list[str]()
    before = {name: w.detach().clone() for name, w in reference.policy.weights.items()}
    for number, batch in enumerate(case.batches):
        wanted, stats = reference.update(batch), found["stats"][number]
        for name, value in wanted.items():
            got = stats.kl_by_lag[int(name[4:])] if name.startswith("lag ") else getattr(stats, name)
            if not is_close(got, value):
                wrong.append(f"update {number}: {name} is {got!r}, and should be {value!r}")
        wrong += [f"update {number}: {error}" for error in weight_differences(found["weights"][number], reference.policy.weights, before)]
    return wrong, reference.margin
