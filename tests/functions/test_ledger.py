from __future__ import annotations

import csv
import itertools
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_ray.functions import cluster_nodes
from rlhfless_ray.functions import ledger as module
from rlhfless_ray.functions.cluster_nodes import ClusterNodes
from rlhfless_ray.functions.ledger import Ledger, PoolCost, Prices, Row, read_ledger
from rlhfless_ray.functions.node_pools import NodePools
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.engine_pools import engine_pools
from rlhfless_ray.runtime.worker_pools import prices
from rlhfless_ray.types import Span

START = 1_000_000.0


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = START

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def short(row: Row) -> tuple[Any, ...]:
    return row.lease, row.instance, row.activity, row.step, row.from_s, row.to_s


def test_nodes_are_called_by_their_names(clock: Clock) -> None:
    ledger = Ledger("cpu", name_of={"f00d": "host"}.__getitem__)
    ledger.hold("L", "f00d", "0", "rollout", "A")
    ledger.park("B", "f00d", "0", "score", 1.0)
    for step in (1, 2):
        clock.now += 1
        ledger.begin_step(step)
    assert {row.node for row in ledger.rows} == {"host"} and len(ledger.rows) == 4


def work(begin: float, end: float, activity: str = "work") -> Span:
    return Span(activity, "", START + begin, START + end)


def test_work_without_a_lease_costs_money_and_no_slot_seconds(clock: Clock, tmp_path: Path) -> None:
    ledger = Ledger("gpu", Prices(slot_per_hour=lambda node: 3600.0, core_per_hour=360.0))
    ledger.hold("L", "node", "0", "rollout", "A")
    ledger.begin_step(1)
    clock.now += 10
    ledger.spans(["L"], [work(0, 10)])
    ledger.unleased("agent", "agent-1", "node", START + 2, START + 10, 1.5, "agents play")
    ledger.begin_step(2)
    assert [(row.step, row.resource, row.seconds, row.money) for row in ledger.rows if row.kind == "agent"] == [(1, "cpu", 1.5, 0.15)]
    assert ledger.totals() == {"busy_slot_s": 10.0, "full_slot_s": 10.0, "idle_share": 0.0, "money": 10.15}
    assert ledger.unleased_core_s("agent", 0) == 1.5 and ledger.unleased_core_s("rollout", 0) == 0
    ledger.append_to(tmp_path / "ledger.csv")
    assert module.read_ledger(tmp_path / "ledger.csv") == ledger.rows


def test_a_lease_is_billed_from_grant_to_release(clock: Clock) -> None:
    ledger = Ledger("cpu", 3600.0)
    clock.now += 5
    ledger.hold("L", "node", "0", "rollout", "A")
    clock.now += 10
    ledger.spans(["L"], [work(7, 9, "start"), work(10, 14)])
    ledger.release("L")
    assert [short(row) for row in ledger.rows] == [
        ("L", "A", "idle", 0, 5, 7),
        ("L", "A", "start", 0, 7, 9),
        ("L", "A", "idle", 0, 9, 10),
        ("L", "A", "work", 0, 10, 14),
        ("L", "A", "idle", 0, 14, 15),
    ]
    assert ledger.totals() == {"busy_slot_s": 4.0, "full_slot_s": 10.0, "idle_share": 0.4, "money": pytest.approx(10.0)}
    row = ledger.rows[3]
    assert (row.node, row.device, row.resource, row.kind, row.slots, row.money) == ("node", "0", "cpu", "rollout", 1, 4.0)


def test_hand_over_leaves_no_gap_and_no_double_billing(clock: Clock) -> None:
    ledger = Ledger("cpu", 0.0)
    ledger.hold("L", "n", "0", "rollout", "A")
    clock.now += 3
    ledger.spans(["L"], [work(0, 3)])
    ledger.hold("L", "n", "0", "learn", "B")
    clock.now += 4
    ledger.spans(["L"], [work(2, 6)])  # B's clock is ahead: its work began before it had the lease
    ledger.release("L")
    assert [short(row)[1:] for row in ledger.rows] == [("A", "work", 0, 0, 3), ("B", "work", 0, 3, 6), ("B", "idle", 0, 6, 7)]


def test_slots_beside_a_function_are_those_of_the_others_in_the_same_seconds(clock: Clock) -> None:
    ledger = Ledger("cpu", Prices(slot_per_hour=lambda node: 0.0, parked_share=0.25))
    ledger.hold("L", "n", "0", "rollout", "A")
    clock.now += 3
    ledger.release("L")
    ledger.hold("L", "n", "0", "learner", "B")
    ledger.hold("M", "n", "1", "rollout", "C")
    ledger.park("A", "n", "0", "rollout", 100.0)
    clock.now += 2
    ledger.release("M")
    clock.now += 2
    assert ledger.beside(["learner"], 4.0) == pytest.approx((2 + 0.25 * 4) / 4)
    assert ledger.beside(["learner"], 1.0) == pytest.approx(0.25)


def test_spans_are_clipped_and_overlaps_counted_once(clock: Clock) -> None:
    ledger = Ledger("cpu", 0.0)
    ledger.hold("L", "n", "0", "rollout", "A")
    clock.now += 10
    ledger.spans(["L"], [work(6, 99), work(-5, 2), work(1, 4, "transfer"), work(3, 3.5), work(20, 30), work(5, 5)])
    ledger.release("L")
    assert [short(row)[2:] for row in ledger.rows] == [("work", 0, 0, 2), ("transfer", 0, 2, 4), ("idle", 0, 4, 6), ("work", 0, 6, 10)]


def test_spans_of_a_released_lease_are_nobodys(clock: Clock) -> None:
    ledger = Ledger("cpu", 0.0)
    ledger.spans(["gone"], [work(0, 1)])
    ledger.release("gone")
    ledger.unpark("gone")
    assert ledger.rows == []


def test_a_gang_works_on_all_its_leases(clock: Clock) -> None:
    ledger = Ledger("cpu", 0.0)
    for lease in ("L0", "L1"):
        ledger.hold(lease, "n", lease, "learn", "A")
    clock.now += 2
    ledger.spans(["L0", "L1"], [work(0, 2)])
    ledger.close()
    assert ledger.totals()["busy_slot_s"] == 4.0


def test_parked_memory_is_shown_and_not_billed(clock: Clock) -> None:
    ledger = Ledger("gpu", 10.0)
    ledger.park("A", "n", "0", "rollout", 1800.04)
    clock.now += 3
    ledger.park("A", "n", "0", "rollout", 5.0)  # it is parked already
    ledger.begin_step(1)
    clock.now += 1
    ledger.unpark("A")
    assert [(short(row)[2:], row.slots, row.memory_mb, row.money) for row in ledger.rows] == [
        (("parked", 0, 0, 3), 0, 1800.0, 0.0),
        (("parked", 1, 3, 4), 0, 1800.0, 0.0),
    ]
    assert ledger.totals() == {"busy_slot_s": 0.0, "full_slot_s": 0.0, "idle_share": 0.0, "money": 0.0}


def test_parked_memory_that_has_a_price_is_billed_by_what_is_kept(clock: Clock) -> None:
    ledger = Ledger("cpu", Prices(slot_per_hour=lambda node: 36.0, parked_share=0.5))  # money for an hour of a slot: 0.01 a second
    ledger.park("A", "n", "0", "rollout", 800.0)
    clock.now += 2
    ledger.begin_step(1)
    clock.now += 4
    ledger.kept("A", 200.0, 0.25)  # told late, true since the step began
    ledger.kept("B", 1.0, 1.0)  # is not parked
    ledger.hold("L", "n", "1", "rollout", "C")
    ledger.kept("L", 1.0, 0.5)  # neither is this one: it works under a lease
    clock.now += 1
    ledger.close()
    assert [(row.step, row.seconds, row.slots, row.memory_mb, row.money) for row in ledger.rows] == [
        (0, 2, 0, 800.0, pytest.approx(0.01)), (1, 5, 0, 200.0, pytest.approx(5 * 0.01 * 0.5 * 0.25)), (1, 1, 1, 0.0, pytest.approx(0.01)),
    ]  # fmt: skip
    assert ledger.totals()["money"] == pytest.approx(0.02625) and ledger.totals()["full_slot_s"] == 1.0


def test_parked_memory_costs_its_part_of_what_goes_with_a_slot(clock: Clock) -> None:
    """400 of 8,000 MB are a twentieth of the slot; of a node whose memory is not known, and of a process that has not told, nothing."""
    slot_mb = lambda node: {"n": 8000.0}.get(node, math.inf)  # noqa: E731
    ledger = Ledger("cpu", Prices(slot_per_hour=lambda node: 36.0, parked_share=None, slot_mb=slot_mb), name_of=str.upper)
    ledger.park("A", "n", "0", "rollout", 800.0)
    ledger.park("B", "elsewhere", "0", "rollout", 800.0)
    ledger.park("C", "n", "0", "rollout", 0.0)
    assert ledger.hold_price("AC") == pytest.approx(0.05) and ledger.hold_price("B") == ledger.hold_price("D") == 0.0
    ledger.begin_step(1)
    ledger.kept("A", 400.0, 0.5)
    clock.now += 10
    ledger.close()
    money = {row.instance: row.money for row in ledger.rows}
    assert money == {"A": pytest.approx(10 * 0.01 / 20), "B": 0.0, "C": 0.0}
    assert ledger.parked_price("n", 16000.0) == 2.0, "who keeps the memory of two slots from others pays for two"


def test_a_node_that_is_drained_keeps_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"NodeID": "a", "Alive": True, "Labels": {"market": "spot"}, "Resources": {"CPU": 2}}
    monkeypatch.setattr(cluster_nodes, "ray", SimpleNamespace(nodes=lambda: [node]))
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"nodes": {"market": "spot"}}}
    tree["price"] = {"cpu_slot_per_hour": 10.0, "rollout_slot_per_hour": 2.0}
    nodes, drained = ClusterNodes("cpu"), dict[str, float]()
    nodes.notices = lambda: drained
    recipe = Recipe.parse(tree)
    price = prices(recipe, NodePools(nodes, engine_pools(recipe.rollout, recipe.price, "cpu"))).slot_per_hour
    assert price("a") == 2.0
    drained["a"] = 0.0
    assert price("a") == 2.0, "an engine that is parked before it leaves"


def test_a_cut_gives_every_row_one_step(clock: Clock) -> None:
    ledger = Ledger("cpu", 0.0)
    ledger.hold("L", "n", "0", "rollout", "A")
    clock.now += 2
    ledger.spans(["L"], [work(1, 2)])
    ledger.begin_step(1)
    first = len(ledger.rows)
    clock.now += 2
    ledger.spans(["L"], [work(1.5, 3)])  # it began in the step before, where it was not known yet
    ledger.hold("M", "n", "1", "score", "B")
    clock.now += 1
    ledger.begin_step(2)
    assert [short(row) for row in ledger.rows] == [
        ("L", "A", "idle", 0, 0, 1),
        ("L", "A", "work", 0, 1, 2),
        ("L", "A", "work", 1, 2, 3),
        ("L", "A", "idle", 1, 3, 5),
        ("M", "B", "idle", 1, 4, 5),
    ]
    assert ledger.totals_since(first)["full_slot_s"] == 4.0


# ---- any history ------------------------------------------------------------------------------------------------

TICK = 1 / 8
EVENT = st.tuples(
    st.sampled_from(["hold", "release", "spans", "cut", "park", "unpark"]),
    st.sampled_from(["L0", "L1", "L2"]),
    st.integers(0, 9),
    st.integers(0, 12),
    st.integers(0, 12),
    st.sampled_from(["work", "start", "transfer"]),
)


@given(st.lists(EVENT, max_size=40))
@settings(max_examples=150, deadline=None)
def test_every_leased_second_is_billed_exactly_once(events: list[tuple[str, str, int, int, int, str]]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        ledger = Ledger("cpu", 36.0)
        held_ticks: defaultdict[str, int] = defaultdict(int)
        parked_ticks = 0
        held, parked, step = set(), set(), 0
        for what, lease, wait, back, length, activity in events:
            clock.now += wait * TICK
            for key in held:
                held_ticks[key] += wait
            parked_ticks += wait * len(parked)
            instance = f"I{lease}"
            if what == "hold":
                ledger.hold(lease, "n", "0", "rollout", instance)
                held.add(lease)
            elif what == "release":
                ledger.release(lease)
                held.discard(lease)
            elif what == "spans":
                begin = clock.now - START - back * TICK
                ledger.spans([lease], [work(begin, begin + length * TICK, activity)])
            elif what == "cut":
                step += 1
                ledger.begin_step(step)
            elif what == "park":
                ledger.park(instance, "n", "0", "rollout", 1.0)
                parked.add(instance)
            else:
                ledger.unpark(instance)
                parked.discard(instance)
        ledger.close()
    assert ledger.open == {}
    by_lease = defaultdict(list)
    for row in ledger.rows:
        assert row.seconds == row.to_s - row.from_s > 0
        by_lease[row.lease].append(row)
    parked_rows = by_lease.pop("", [])
    assert sum(row.seconds for row in parked_rows) == parked_ticks * TICK
    for lease, ticks in held_ticks.items():
        rows = sorted(by_lease[lease], key=lambda row: row.from_s)
        assert sum(row.seconds for row in rows) == ticks * TICK
        assert all(a.to_s <= b.from_s for a, b in itertools.pairwise(rows)), "billed twice"
        assert [row.step for row in rows] == sorted(row.step for row in rows)
    totals = ledger.totals()
    assert totals["full_slot_s"] == sum(held_ticks.values()) * TICK
    assert totals["money"] == pytest.approx(totals["full_slot_s"] * 0.01)
    assert totals["busy_slot_s"] == sum(row.seconds for row in ledger.rows if row.activity == "work")
    assert 0 <= totals["idle_share"] <= 1


# ---- on disk ----------------------------------------------------------------------------------------------------


def three_steps(clock: Clock, path: Path) -> Ledger:
    ledger = Ledger("cpu", 7.0)
    ledger.hold("L", "n", "0", "rollout", "A")
    for step in (1, 2, 3):
        ledger.begin_step(step)
        clock.now += 1.123456
        ledger.spans(["L"], [Span("work", "", clock.now - 1, clock.now)])
        ledger.begin_step(step)
        ledger.append_to(path)
    ledger.close()
    return ledger


def test_rows_are_written_once(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    ledger = three_steps(clock, path)
    ledger.append_to(path)
    ledger.append_to(path)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["activity"], line["step"]) for line in lines] == [(activity, step) for step in "123" for activity in ("idle", "work")]
    on_disk = sum(float(line["seconds"]) * int(line["slots"]) for line in lines)
    assert on_disk == pytest.approx(ledger.totals()["full_slot_s"])


def test_what_is_on_disk_and_counted_need_not_stay_in_memory(clock: Clock, tmp_path: Path) -> None:
    """Ten thousand steps of a few dozen rows each would be some hundred MB of the driver's."""
    whole, lean = both = Ledger("cpu", 7.0), Ledger("cpu", 7.0)
    for ledger in both:
        ledger.hold("L", "n", "0", "rollout", "A")
    for step in range(1, 51):
        first = lean.count
        assert first == whole.count == len(whole.rows)
        clock.now += 1
        for ledger in both:
            ledger.spans(["L"], [Span("work", "", clock.now - 0.5, clock.now)])
            ledger.begin_step(step)
        assert lean.totals_since(first) == whole.totals_since(first)
        assert lean.held_slot_s("rollout", first) == whole.held_slot_s("rollout", first) == 1.0
        lean.forget(lean.count)
        assert len(lean.rows) == 2, "what is not on disk yet stays"
        counted = lean.count
        for ledger in both:
            ledger.unleased("agent", "B", "n", clock.now - 1, clock.now, 0.5, "agents play")
            ledger.append_to(tmp_path / ("whole.csv" if ledger is whole else "lean.csv"))
        lean.forget(counted)
        assert len(lean.rows) == 1, "and what is of the next step"
        assert lean.unleased_core_s("agent", counted) == 0.5
    assert lean.totals() == whole.totals() == totals_of(whole.rows)
    assert (tmp_path / "lean.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_resume_keeps_what_was_paid_for_steps_that_are_done_again(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    before = three_steps(clock, path)
    text = path.read_text()
    path.write_text(text + text.splitlines()[-1][:40])
    clock.now += 10_000  # nothing ran for hours
    ledger = Ledger("cpu", 7.0)
    ledger.resume_from(path, last_step=2)
    assert ledger.rows == [replace(row, repeated=int(row.step == 3)) for row in before.rows]
    assert ledger.totals() == totals_of(before.rows), "not a second of the step that is repeated is forgotten"
    ledger.begin_step(3)
    ledger.hold("M", "n", "0", "rollout", "B")
    clock.now += 2
    ledger.close()
    assert short(ledger.rows[-1])[2:] == ("idle", 3, pytest.approx(3.370368), pytest.approx(5.370368))
    assert ledger.rows[-1].repeated == 0
    ledger.append_to(path)
    again = Ledger("cpu", 7.0)
    again.resume_from(path, last_step=99)
    assert again.rows == ledger.rows
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger.csv"]


def test_a_ledger_without_the_mark_is_taken_over(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    before = three_steps(clock, path)
    path.write_text("".join(line.rsplit(",", 3)[0] + "\n" for line in path.read_text().splitlines()))
    ledger = Ledger("cpu", 7.0)
    ledger.resume_from(path, last_step=9)
    assert ledger.rows == [replace(row, pool="") for row in before.rows]


def totals_of(rows: list[Row]) -> dict[str, float]:
    part = Ledger("cpu", 7.0)
    part.rows = rows
    return part.totals()


@pytest.mark.parametrize("keep", range(2, 60, 3))
def test_a_file_torn_anywhere_keeps_its_whole_lines(clock: Clock, tmp_path: Path, keep: int) -> None:
    """Killed while writing: of the last line only some characters are there. What is wrong must not be taken over."""
    path = tmp_path / "ledger.csv"
    before = three_steps(clock, path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:keep])
    ledger = Ledger("cpu", 7.0)
    ledger.resume_from(path, last_step=99)
    assert ledger.rows == before.rows[: len(lines) - 2]


def test_lost_rows_are_said(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    rows, lines = three_steps(clock, path).rows, path.read_bytes().splitlines(keepends=True)

    def said(content: bytes | None, least_rows: int = 0) -> list[str]:
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        return [message.removeprefix(str(path)) for message in Ledger("cpu", 7.0).resume_from(path, 99, least_rows)]

    last, text = len(lines), b"".join(lines)
    assert said(text, len(rows)) == []
    torn = f": line {last} (step {rows[-1].step}) not complete and left out, and so are their costs"
    assert said(text[:-3]) == [torn] and said(text[:-1]) == [torn], "without its end a line may have lost digits"
    few = f": 1 of the {len(rows)} rows that it had at the checkpoint are lost, and their costs"
    assert said(text[:-3], len(rows)) == [torn, few] and said(b"".join(lines[:-1]), len(rows)) == [few]
    assert said(lines[0] + b"\xff\xfe\0,,\n" + b"".join(lines[2:])) == [": line 2 not complete and left out, and so are their costs"]
    assert not said(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"), 2), "saved again by a spreadsheet"
    assert said(b"\xff" + text)[0].startswith(": line 2 (step 1), line 3") and said(b"", 2)[0].startswith(": 2 of the 2 rows")
    assert said(None, 3) == [" is missing: the 3 rows that it had at the checkpoint are lost, and their costs"] and said(None) == []
    assert said(lines[0] + b'"' + b"x" * 200_000 + b"\n" + b"".join(lines[1:]))[0].startswith(": line 2 not complete")


def test_a_new_run_has_nothing_to_take_over(tmp_path: Path) -> None:
    ledger = Ledger("cpu", 1.0)
    ledger.resume_from(tmp_path / "ledger.csv", 5)
    assert ledger.rows == [] and not (tmp_path / "ledger.csv").exists()


def test_money_and_lost_seconds_add_up_by_pool(clock: Clock, tmp_path: Path) -> None:
    prices_of = {"a": 3.6, "home": 36.0}  # per hour: 0.001 and 0.01 a second
    pool_of = {"a": "spot", "home": "own"}
    ledger = Ledger("cpu", Prices(slot_per_hour=prices_of.__getitem__, pool=pool_of.__getitem__))
    ledger.hold("L", "a", "0", "rollout", "A")
    ledger.hold("M", "home", "0", "rollout", "B")
    clock.now += 10
    ledger.preempted("rollout", "A", "a", "0", 2.5)
    ledger.release("L")
    clock.now += 10
    ledger.close()
    costs = ledger.pools_since(0)
    assert costs == {"spot": PoolCost(10.0, pytest.approx(0.01), 2.5, 1), "own": PoolCost(20.0, pytest.approx(0.2), 0.0, 0)}
    totals = ledger.totals()
    assert totals["money"] == pytest.approx(0.21) and totals["full_slot_s"] == 30.0
    ledger.append_to(tmp_path / "ledger.csv")
    written = [(row.pool, row.activity) for row in read_ledger(tmp_path / "ledger.csv")]
    assert written == [("spot", "preempted"), ("spot", "idle"), ("own", "idle")]
