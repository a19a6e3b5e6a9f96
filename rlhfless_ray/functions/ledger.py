"""Who held which slot, from when to when, doing what.

A lease is billed from the moment it is granted until it is released. Inside it the ledger keeps *holdings* (which
function had it) and, reported by the instances, *spans* (what they did). What no span covers is idle. Two figures
stand side by side: busy cost, working slot-seconds only (the papers' metric), and full cost, every leased second. Both
count what a stop or a crash made a run pay twice. Parked processes take no slot; the memory that they keep costs money.
Processes that never have a slot, of agents, cost the seconds that they were at work on a core.
"""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from rlhfless_ray.types import Span

BUSY = ("work",)


@dataclass
class Row:
    """One line of ledger.csv; times in seconds since the run started."""

    lease: str
    node: str
    device: str
    resource: str
    kind: str
    instance: str
    activity: str
    step: int
    from_s: float
    to_s: float
    seconds: float  # of activity "unleased": of a core, between the two
    slots: int
    memory_mb: float
    money: float
    repeated: int = 0  # 1: of a step that a stop or a crash cut short and that was done again: paid for all the same
    what: str = ""  # what the activity was, in the instance's words


@dataclass
class Holding:
    """A function's time with a lease; `until_s` is None while it lasts. Wall-clock seconds since the epoch."""

    lease: str
    node: str
    device: str
    kind: str
    instance: str
    step: int
    from_s: float
    until_s: float | None = None
    memory_mb: float = 0.0
    slots: int = 1  # 0: parked, warm memory without a lease
    parked: float = 0.0  # what that costs, as a share of a slot's price
    node_id: str = ""
    price_per_hour: float = 0.0
    spans: list[Span] = field(default_factory=list)


class Ledger:
    def __init__(self, resource: str, price_per_hour: float = 0.0, started_s: float | None = None) -> None:
        self.resource = resource
        self.price_of: Callable[[str], float] = lambda node: price_per_hour  # of a slot for an hour, by Ray's id of its node
        self.core_per_hour = 0.0  # price of a core for an hour, to who has no lease
        self.parked_share: float | None = 0.0  # price of a process that is parked with all its memory, as a share of its slot's; None:
        self.slot_mb: Callable[[str], float] = lambda node: math.inf  # by the memory that goes with a slot, by Ray's id of its node
        self.started_s = time.time() if started_s is None else started_s
        self.name_of: Callable[[str], str] = str  # from Ray's id of a node to what people call it
        self.open: dict[str, Holding] = {}
        self.rows: list[Row] = []  # but for those that were forgotten, which are on disk
        self.forgotten = 0
        self.written = 0
        self.sums, self.summed = np.zeros(4), 0  # of the first `summed` rows
        self.step = 0

    # ---- what happens -----------------------------------------------------------------------------------------

    def hold(self, lease: str, node: str, device: str, kind: str, instance: str, since_s: float | None = None) -> None:
        """A function takes a lease: freshly granted, maybe at `since_s` already, or handed over by the function that had it."""
        now = time.time() if since_s is None else since_s
        if lease in self.open:
            self._close(lease, now)
        price = self.price_of(node)
        self.open[lease] = Holding(lease, self.name_of(node), device, kind, instance, self.step, now, price_per_hour=price)

    def spans(self, leases: Iterable[str], spans: Iterable[Span]) -> None:
        """What the instance holding `leases` did with them, on its own clock. A span that goes on with the one before, as when
        an engine reports in between, is one with it."""
        told = list(spans)
        for lease in leases:
            if lease not in self.open:
                continue
            known = self.open[lease].spans
            for span in told:
                last = known[-1] if known else None
                if last and (last.activity, last.what, last.to_s) == (span.activity, span.what, span.from_s):
                    known[-1] = replace(last, to_s=span.to_s)
                else:
                    known.append(span)

    def release(self, lease: str) -> None:
        self._close(lease, time.time())

    def park(self, instance: str, node: str, device: str, kind: str, memory_mb: float, kept: float = 1.0) -> None:
        """An instance stays warm without a lease: no slot is billed, its memory is shown and costs what `parked_price` says."""
        if instance not in self.open:
            self.open[instance] = Holding(
                "", self.name_of(node), device, kind, instance, self.step, time.time(), memory_mb=memory_mb, slots=0,
                parked=self.parked_price(node, memory_mb, kept), node_id=node, price_per_hour=self.price_of(node),
            )

    def parked_price(self, node: str, memory_mb: float, kept: float = 1.0) -> float:
        """What a process costs that is parked on a node with so much memory, the share `kept` of what it works with; as a share of a
        slot's price: `parked_share` times `kept`, or where that is None its share of the memory that goes with a slot there."""
        return memory_mb / self.slot_mb(node) if self.parked_share is None else self.parked_share * kept

    def hold_price(self, instances: Iterable[str]) -> float:
        """The same of those that are parked now, on average; 0 without any."""
        prices = [self.open[one].parked for one in instances if one in self.open and not self.open[one].slots]
        return sum(prices) / len(prices) if prices else 0.0

    def kept(self, instance: str, memory_mb: float, kept: float) -> None:
        """What a parked instance has kept, from the beginning of its row on: it was told a little later."""
        holding = self.open.get(instance)
        if holding is not None and not holding.slots:
            price = self.parked_price(holding.node_id, memory_mb, kept)
            self.open[instance] = replace(holding, memory_mb=memory_mb, parked=price)

    def unpark(self, instance: str) -> None:
        self._close(instance, time.time())

    def unleased(self, kind: str, instance: str, node: str, from_s: float, to_s: float, core_s: float, what: str) -> None:
        """What a process without a lease has done: `core_s` seconds of a core, at a core's price. They cost money and are in no
        slot-seconds, so that none of these counts twice. Times since the epoch."""
        self.rows.append(
            Row(
                "", self.name_of(node), instance, "cpu", kind, instance, "unleased", self.step, round(from_s - self.started_s, 6),
                round(to_s - self.started_s, 6), round(core_s, 6), 0, 0.0, core_s * self.core_per_hour / 3600, what=what,
            )
        )

    def cut(self, step: int) -> None:
        """A step begins: close every holding into rows and reopen it, so that rows belong to one step each."""
        now = time.time()
        for key, holding in list(self.open.items()):
            self._close(key, now)
            self.open[key] = replace(holding, step=step, from_s=now, until_s=None, spans=[])
        self.step = step

    def close(self) -> None:
        now = time.time()
        for key in list(self.open):
            self._close(key, now)

    # ---- what it adds up to -----------------------------------------------------------------------------------

    def _close(self, key: str, now: float) -> None:
        holding = self.open.pop(key, None)
        if holding is None:
            return
        if holding.slots == 0:
            self._row(holding, "parked", holding.from_s, now)
            return
        at = holding.from_s
        for span in sorted(holding.spans, key=lambda s: s.from_s):
            # clocks of two nodes differ a little, and a span may have begun before the lease was handed over
            begin, end = max(span.from_s, at), min(span.to_s, now)
            if end <= begin:
                continue
            self._row(holding, "idle", at, begin)
            self._row(holding, span.activity, begin, end, span.what)
            at = end
        self._row(holding, "idle", at, now)

    def _row(self, holding: Holding, activity: str, begin: float, end: float, what: str = "") -> None:
        seconds = end - begin
        if seconds <= 0:
            return
        money = seconds * (holding.slots or holding.parked) * holding.price_per_hour / 3600
        self.rows.append(
            Row(
                holding.lease, holding.node, holding.device, self.resource, holding.kind, holding.instance, activity,
                holding.step, round(begin - self.started_s, 6), round(end - self.started_s, 6), round(seconds, 6),
                holding.slots, round(holding.memory_mb, 1), money, what=what,
            )
        )

    @property
    def count(self) -> int:
        """Rows so far, which is the number of the next one."""
        return self.forgotten + len(self.rows)

    def totals(self) -> dict[str, float]:
        """Slot-seconds and money of all rows: busy, full, idle share, money. Kept as rows come: a long run's cost no more."""
        for row in self.rows[self.summed :]:
            self.sums += _figures(row)
        self.summed = len(self.rows)
        return _totals(self.sums)

    def totals_since(self, row: int) -> dict[str, float]:
        """The same of the rows from number `row` on."""
        return _totals(sum((_figures(r) for r in self._since(row)), np.zeros(4)))

    def held_slot_s(self, kind: str, since_row: int) -> float:
        """Slot-seconds for which functions of a kind held leases, of the rows from `since_row` on."""
        return sum(row.seconds * row.slots for row in self._since(since_row) if row.kind == kind)

    def unleased_core_s(self, kind: str, since_row: int) -> float:
        """Seconds of a core that functions of a kind took without a lease, of the rows from `since_row` on."""
        return sum(row.seconds for row in self._since(since_row) if row.kind == kind and row.activity == "unleased")

    def _since(self, row: int) -> list[Row]:
        return self.rows[max(0, row - self.forgotten) :]

    def forget(self, before: int) -> None:
        """Rows below number `before` go from memory as far as they are on disk, where whoever asks for one finds it. The totals keep
        them: a long run's ledger takes no more memory than a short one's."""
        self.totals()
        gone = max(0, min(before - self.forgotten, self.written))
        del self.rows[:gone]
        self.forgotten, self.written, self.summed = self.forgotten + gone, self.written - gone, self.summed - gone

    # ---- on disk ----------------------------------------------------------------------------------------------

    def append_to(self, path: Path) -> None:
        """Write the rows that are not on disk yet."""
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Row)])
            if new:
                writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows[self.written :])
        self.written = len(self.rows)

    def resume_from(self, path: Path, last_step: int) -> None:
        """Take over the rows of the run before; those after `last_step`, whose steps are done again, are marked `repeated`.

        The clock continues after the last row: time in which nothing ran is not billed. What a killed run had not written
        down yet is not known here.
        """
        if not path.exists():
            return
        self.rows = [row if row.step <= last_step else replace(row, repeated=1) for row in read_rows(path)]
        self.sums, self.summed, self.forgotten = np.zeros(4), 0, 0
        self.started_s = time.time() - max((row.to_s for row in self.rows), default=0.0)
        self.written = 0
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        self.append_to(temporary)
        os.replace(temporary, path)


def read_rows(path: Path) -> list[Row]:
    """The lines of a ledger.csv; one that a killed run tore is not among them."""
    text = path.read_text()
    rows = []
    for line in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        try:
            rows.append(_row_of(line))
        except (TypeError, ValueError):
            continue
    return rows


def _figures(row: Row) -> np.ndarray:
    """(busy slot-s, full slot-s, idle slot-s, money)"""
    used = row.seconds * row.slots
    return np.array([used * (row.activity in BUSY), used, used * (row.activity == "idle"), row.money])


def _totals(sums: np.ndarray) -> dict[str, float]:
    busy, full, idle, money = (float(value) for value in sums)
    return {"busy_slot_s": busy, "full_slot_s": full, "idle_share": idle / full if full else 0.0, "money": money}


def _row_of(line: dict[str, str]) -> Row:
    line = {"repeated": "0", "what": "", **line}  # a ledger of before there were these columns
    types = {"step": int, "slots": int, "repeated": int, **dict.fromkeys(("from_s", "to_s", "seconds", "memory_mb", "money"), float)}
    return Row(**{f.name: types.get(f.name, str)(line[f.name]) for f in fields(Row)})
