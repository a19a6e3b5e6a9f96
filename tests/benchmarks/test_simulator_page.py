"""docs/simulator.md and benchmarks/results/ say the same, and a missed target says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import cluster
from benchmarks.common import results
from benchmarks.common.results import FOLDER
from benchmarks.simulated.cluster_targets import targets
from benchmarks.simulator_page import PAGE, TABLES, filled, tables

KEYS = ("step_s", "rollout_s", "full", "busy", "speedup", "full_saving", "busy_saving", "time_over_bound", "cost_over_bound")


def setting(speed: float, saved: float, **others: tuple[float, float]) -> dict:
    """A setting's entry: `fixed` takes 10 s and 100 device-seconds and could take half of that; ours and others by speed and saving."""
    rows = {}
    for name, (x, less) in {"fixed": (1.0, 0.0), "ours": (speed, saved), **others}.items():
        values = (10 / x, 8 / x, 100 * (1 - less), 80 * (1 - less), x, less, less, 2 / x, 3 * (1 - less))
        rows[name] = {key: {"mean": value, "sd": 0.01} for key, value in zip(KEYS, values, strict=True)}
    return {"rollout_share_of_fixed": 0.7, "seeds": 5, "steps": 3, "policies": rows}


RIVALS = {"fixed+": (1.1, 0.05), "global-cut": (1.0, 0.4), "rlhfless-paper": (0.9, 0.5), "oracle": (1.3, 0.5)}


def test_what_was_missed_says_how_much_room_there_was_and_what_the_oracle_reached() -> None:
    content = {"cheaper": 0.5, "paper": {"a": setting(1.25, 0.46, **RIVALS), "b": setting(1.05, 0.45, **RIVALS)}}
    found = {target.name: target for target in targets(content)}
    speed = found["best setting (a): speed over fixed"]
    assert not speed.met and "allow 2.00× at most" in speed.why and "reaches 1.30× and −50 %" in speed.why
    assert found["best setting (a): full cost saved"].met and not found["best setting (a): full cost saved"].why
    assert "below 1.1× are b, the oracle there 1.30×; without them 1.25×" in found["average: speed over fixed"].why
    busy = found["best setting (a): busy cost saved"]
    assert busy.met, "46 % of `fixed`'s 80"
    poor = {target.name: target for target in targets({"paper": {"a": setting(1.25, 0.2, **RIVALS), "b": setting(1.2, 0.45, **RIVALS)}})}
    assert "80% of its devices' time" in poor["average: busy cost saved"].why
    assert "short of it are a, which take 1.25×" in poor["average: full cost saved"].why
    ahead = found["settings ahead of fixed+ on both axes"]
    assert not ahead.met and ahead.value == 1 and ahead.why == "behind: b"
    cut = found["full cost below global-cut, average"]
    assert cut.value == pytest.approx(100 * (0.06 / 0.6 + 0.05 / 0.6) / 2) and "1.15× as fast" in cut.why
    cheap = setting(1.1, 0.6, **RIVALS)
    every, some = (targets(content | {"cheap": dict.fromkeys(names, cheap)}) for names in ("ab", "a"))
    assert "it is 33 % cheaper and 1.10× as fast" in next(t.why for t in every if "global-cut" in t.name)
    assert all("`prefer` 0.5" not in t.why for t in some if "average" in t.name)


def test_processes_that_do_different_settings_lose_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "benchmarks" / "results")
    one, two = (cluster.Kept({"cheaper": 0.5}, Console(quiet=True), quick=False) for _ in range(2))
    for kept in (one, two):
        kept.begin("paper", ["a", "b", "c"])
    one.add("paper", "b", setting(1.2, 0.4, **RIVALS), 1.0)
    two.add("paper", "a", setting(1.3, 0.5, **RIVALS), 2.0)
    two.begin("oracle", ["a"])
    two.add("oracle", "a", {"mean": 0.9, "sd": 0.01, "seeds": 2}, 3.0)
    one.add("paper", "c", setting(1.1, 0.3, **RIVALS), 4.0)
    found = json.loads((tmp_path / "benchmarks" / "results" / "cluster.json").read_text())
    assert list(found["paper"]) == ["a", "b", "c"] and found["oracle"]["a"]["mean"] == 0.9
    assert found["seconds"] == {"paper: b": 1.0, "paper: a": 2.0, "oracle: a": 3.0, "paper: c": 4.0}
    missed = next(t for t in found["targets"] if t["name"].startswith("oracle's speed"))
    assert not missed["met"] and "± 1.0 % over seeds" in missed["why"]


def test_a_table_replaces_what_stood_between_its_marks_and_nothing_else() -> None:
    page = "before\n<!-- x -->\nold\nlines\n<!-- end -->\nbetween\n<!-- y -->\n?\n<!-- end -->\n"
    new = filled(page, {"x": "| 1 |"})
    assert new == "before\n<!-- x -->\n| 1 |\n<!-- end -->\nbetween\n<!-- y -->\n?\n<!-- end -->\n"
    with pytest.raises(ValueError, match="one place for <!-- z -->"):
        filled(page, {"z": ""})


def test_the_page_shows_what_the_results_say() -> None:
    page = PAGE.read_text()
    assert page == filled(page, tables()), "run `python -m benchmarks.simulator_page`"
    assert len(TABLES) == page.count("<!-- end -->")
    for name in ("cluster", "rollout_policies", "shared_pool_simulated"):
        for target in json.loads((FOLDER / f"{name}.json").read_text())["targets"]:
            assert target["met"] or target["why"], f"{target['name']} was missed and the table does not say why"
