"""The catalog has the parameters that published steps give, and they hold on steps that the fit did not use."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import fit_device_model as fitted
from placement.catalog import catalog

MIXTURES = ("30b-a3b", "235b")


def remaining(parameters: fitted.Parameters) -> float:
    return float(np.mean(np.square(list(fitted._residuals(parameters)))))


def test_lengths_have_the_published_mean_and_reach_the_limit() -> None:
    for step in fitted.published().values():
        drawn = fitted.lengths(step)
        assert len(drawn) == step["prompts"] * step["samples"]
        assert drawn.mean() == pytest.approx(step["response_tokens"], rel=0.01)
        assert drawn.max() == step["response_limit"] - step["prompt_tokens"]


def test_no_parameter_of_the_catalog_can_be_changed_for_a_better_fit() -> None:
    parameters = fitted.committed()
    best = remaining(parameters)
    for key, value in parameters.items():
        for factor in (0.96, 1.04):
            assert remaining({**parameters, key: value * factor}) > best, f"{key}: run `python -m benchmarks.fit_device_model --write`"


def test_steps_that_were_held_out() -> None:
    off = {name: abs(error) for name, error in fitted.errors(fitted.committed(), "held_out").items()}
    dense = {name: error for name, error in off.items() if not name.startswith(MIXTURES)}
    assert len(dense) == 10 and max(dense.values()) <= 0.15 and np.median(list(dense.values())) <= 0.08
    assert np.median(list(off.values())) <= 0.08
    assert sum(error <= 0.15 for error in off.values()) >= 17, "of 21; releases of one framework differ by up to 58 % on the others"


def test_writing_changes_fitted_figures_only(tmp_path, monkeypatch) -> None:
    for name in ("phases", "devices"):
        (tmp_path / f"{name}.yaml").write_text((catalog.DATA / f"{name}.yaml").read_text())
    before = {name: catalog.read(name) for name in ("phases", "devices")}
    monkeypatch.setattr(fitted.catalog, "DATA", tmp_path)
    fitted.write({**fitted.committed(), "step_s": 0.5, "weight_sync_s": 7.0})
    catalog.read.cache_clear()
    try:
        phases, devices = catalog.read("phases"), catalog.read("devices")
        assert phases["weight_sync_s"][0] == 7.0
        assert {key for key in phases if phases[key] != before["phases"][key]} == {"weight_sync_s"}
        changed = {(name, key) for name, table in devices.items() for key in table if table[key] != before["devices"][name][key]}
        assert changed == {(name, "step_s") for name in ("H100", "H200", "B200", "A100-80GB")}
    finally:
        catalog.read.cache_clear()
