"""Record who held which slot, when, and for what.

A lease is billed from grant to release. Within it the ledger keeps holdings (which function had it) and spans (what the
instances reported doing). Time outside of spans is idle. Busy cost counts working slot-seconds only, as papers do; full cost
counts every leased second. Both include steps that a stop or crash made the run repeat. Parked processes take no slot, but their
memory costs money. Processes without slots, such as agents, cost the CPU time that they used. A row "preempted" says which seconds of an
instance's work were lost with its node, and costs nothing more.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from placement.pools import OWN, PREEMPTED
from rlhfless_ray.common.disk_space import append
from rlhfless_ray.common.errors import shortened
from rlhfless_ray.types import Span

BUSY = ("work",)


@dataclass
class Row:
    """One line of ledger.csv. Times are in seconds since the run started."""

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
    seconds: float  # for the activity "unleased": CPU seconds between the two
    slots: int
    memory_mb: float
    money: float
    repeated: int = 0  # 1: the step was interrupted and repeated; its cost still counts
    what: str = ""  # the instance's description of the activity
    pool: str = ""  # of the node; older ledgers lack it


@dataclass(frozen=True)
class PoolCost:
    """What a pool cost: leased slot-seconds, money with that of parked processes, and seconds of work lost to preemptions."""

    slot_s: float = 0.0
    money: float = 0.0
    lost_s: float = 0.0
    preemptions: int = 0

    def plus(self, row: Row) -> PoolCost:
        is_lost = row.activity == PREEMPTED
        slot_s, lost_s = self.slot_s + row.seconds * row.slots, self.lost_s + is_lost * row.seconds
        return PoolCost(slot_s, self.money + row.money, lost_s, self.preemptions + is_lost)


@dataclass
class Holding:
    """A function's time with a lease, in seconds since the epoch."""

    lease: str
    node: str
    device: str
    kind: str
    instance: str
    step: int
    from_s: float
    memory_mb: float = 0.0
    slots: int = 1  # 0: parked, with memory but without a lease
    parked: float = 0.0  # price of the parked memory, as a share of a slot's price
    node_id: str = ""
    price_per_hour: float = 0.0
    pool: str = OWN
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of slots, of CPU cores without a lease, and of parked memory."""

    slot_per_hour: Callable[[str], float]  # node id → price of a slot-hour
    core_per_hour: float = 0.0  # without a lease
    parked_share: float | None = 0.0  # a process parked with all its memory, as a share of a slot; None: its share of a slot's memory
    slot_mb: Callable[[str], float] = lambda node: math.inf  # node id → memory per slot in MB
    pool: Callable[[str], str] = lambda node: OWN  # node id → name of the node's pool

    @classmethod
    def flat(cls, slot_per_hour: float) -> Prices:
        """Return prices of a ledger that bills slots only, and those of every node alike."""
        return cls(slot_per_hour=lambda node: slot_per_hour)


class Ledger:
    def __init__(
        self, resource: str, prices: Prices | float = 0.0, started_s: float | None = None, name_of: Callable[[str], str] = str
    ) -> None:
        """`prices`: a number is the price of a slot-hour on any node. `name_of`: node id → readable name."""
        self.resource = resource
        self.prices = prices if isinstance(prices, Prices) else Prices.flat(prices)
        self.started_s = time.time() if started_s is None else started_s
        self.name_of = name_of
        self.open: dict[str, Holding] = {}
        self.rows: list[Row] = []  # without forgotten rows, which are on disk
        self.forgotten = 0
        self.written = 0
        self.summed_totals, self.summed_rows = np.zeros(4), 0  # of the first `summed_rows` rows
        self.by_kind: dict[str, dict[str, float]] = {}  # kind → activity → slot-seconds, of the same rows
        self.step = 0

    def _repr_html_(self) -> str:
        from rlhfless_ray.report.inline import ledger_html

        self.totals()
        return ledger_html(self.by_kind)

    # ---- recording --------------------------------------------------------------------------------------------

    def hold(self, lease: str, node: str, device: str, kind: str, instance: str, since_s: float | None = None) -> None:
        """Record that a function holds a lease, granted (since `since_s`) or handed over by another function."""
        now = time.time() if since_s is None else since_s
        if lease in self.open:
            self._close(lease, now)
        price, pool = self.prices.slot_per_hour(node), self.prices.pool(node)
        self.open[lease] = Holding(lease, self.name_of(node), device, kind, instance, self.step, now, price_per_hour=price, pool=pool)

    def spans(self, leases: Iterable[str], spans: Iterable[Span]) -> None:
        """Add an instance's activities under `leases`, on its own clock. A span that continues the last one extends it."""
        new_spans = list(spans)
        for lease in leases:
            if lease not in self.open:
                continue
            known = self.open[lease].spans
            for span in new_spans:
                last = known[-1] if known else None
                if last and (last.activity, last.what, last.to_s) == (span.activity, span.what, span.from_s):
                    known[-1] = replace(last, to_s=span.to_s)
                else:
                    known.append(span)

    def release(self, lease: str) -> None:
        self._close(lease, time.time())

    def park(self, instance: str, node: str, device: str, kind: str, memory_mb: float, kept: float = 1.0) -> None:
        """Record that an instance stays warm without a lease. Its memory is billed at `parked_price`, and no slot is."""
        if instance not in self.open:
            who = "", self.name_of(node), device, kind, instance, self.step, time.time()
            share, price, pool = self.parked_price(node, memory_mb, kept), self.prices.slot_per_hour(node), self.prices.pool(node)
            self.open[instance] = Holding(*who, memory_mb, slots=0, parked=share, node_id=node, price_per_hour=price, pool=pool)

    def parked_price(self, node: str, memory_mb: float, kept: float = 1.0) -> float:
        """Return the price of a process parked with `memory_mb`, as a share of a slot's price.

        This is `parked_share` times `kept`, the share of its working memory. Without `parked_share` it is the share of the
        memory that belongs to a slot of the node.
        """
        share = self.prices.parked_share
        return memory_mb / self.prices.slot_mb(node) if share is None else share * kept

    def hold_price(self, instances: Iterable[str]) -> float:
        """Return the average price of the parked ones among `instances`, as a share of a slot's price; 0 without any."""
        prices = [self.open[one].parked for one in instances if one in self.open and not self.open[one].slots]
        return sum(prices) / len(prices) if prices else 0.0

    def kept(self, instance: str, memory_mb: float, kept: float) -> None:
        """Correct the memory of a parked instance for its whole row, when it is known."""
        holding = self.open.get(instance)
        if holding is not None and not holding.slots:
            price = self.parked_price(holding.node_id, memory_mb, kept)
            self.open[instance] = replace(holding, memory_mb=memory_mb, parked=price)

    def unpark(self, instance: str) -> None:
        self._close(instance, time.time())

    def unleased(self, kind: str, instance: str, node: str, from_s: float, to_s: float, core_s: float, what: str) -> None:
        """Record `core_s` CPU seconds of a process without a lease. They cost money but are not slot-seconds. Times since the epoch."""
        process = Holding("", self.name_of(node), instance, kind, instance, self.step, from_s, slots=0, pool=self.prices.pool(node))
        self._add(process, "cpu", "unleased", from_s, to_s, core_s, core_s * self.prices.core_per_hour / 3600, what)

    def preempted(self, kind: str, instance: str, node: str, device: str, seconds: float) -> None:
        """Record that an instance's node has gone, and with it the last `seconds` of its work. They are billed in its other rows."""
        now = time.time()
        of = Holding("", self.name_of(node), device, kind, instance, self.step, now, slots=0, pool=self.prices.pool(node))
        self._add(of, self.resource, PREEMPTED, now - seconds, now, seconds, 0.0)

    def begin_step(self, step: int, at_s: float | None = None) -> None:
        """Begin a step (at `at_s`): close and reopen all holdings, so that each row belongs to one step."""
        now = time.time() if at_s is None else at_s
        for key, holding in list(self.open.items()):
            self._close(key, now)
            self.open[key] = replace(holding, step=step, from_s=now, spans=[])
        self.step = step

    def close(self) -> None:
        now = time.time()
        for key in list(self.open):
            self._close(key, now)

    # ---- totals -----------------------------------------------------------------------------------------------

    def _close(self, key: str, now: float) -> None:
        holding = self.open.pop(key, None)
        if holding is None:
            return
        if holding.slots == 0:
            self._row(holding, "parked", holding.from_s, now)
            return
        at = holding.from_s
        for span in sorted(holding.spans, key=lambda s: s.from_s):
            # clocks of two nodes differ slightly, and a span may have begun before the lease was handed over
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
        self._add(holding, self.resource, activity, begin, end, seconds, money, what)

    def _add(
        self, of: Holding, resource: str, activity: str, begin: float, end: float, seconds: float, money: float, what: str = ""
    ) -> None:
        who = of.lease, of.node, of.device, resource, of.kind, of.instance, activity, of.step
        when = round(begin - self.started_s, 6), round(end - self.started_s, 6), round(seconds, 6)
        self.rows.append(Row(*who, *when, of.slots, round(of.memory_mb, 1), money, what=what, pool=of.pool))

    @property
    def count(self) -> int:
        """Number of rows so far, which is the number of the next row."""
        return self.forgotten + len(self.rows)

    def totals(self) -> dict[str, float]:
        """Return busy and full slot-seconds, idle share and money of all rows. Sums are kept, so a long run costs no more."""
        for row in self.rows[self.summed_rows :]:
            self.summed_totals += _row_totals(row)
            if row.slots:
                cells = self.by_kind.setdefault(row.kind, {})
                cells[row.activity] = cells.get(row.activity, 0.0) + row.seconds * row.slots
        self.summed_rows = len(self.rows)
        return _totals(self.summed_totals)

    def totals_since(self, row: int) -> dict[str, float]:
        """Return the same totals of the rows from number `row` on."""
        return _totals(sum((_row_totals(r) for r in self._since(row)), np.zeros(4)))

    def pools_since(self, row: int) -> dict[str, PoolCost]:
        """Return the costs of each pool in the rows from number `row` on."""
        found: dict[str, PoolCost] = {}
        for one in self._since(row):
            found[one.pool] = found.get(one.pool, PoolCost()).plus(one)
        return found

    def held_slot_s(self, kind: str, since_row: int) -> float:
        """Return slot-seconds of the leases held by functions of a kind, in the rows from `since_row` on."""
        return sum(row.seconds * row.slots for row in self._since(since_row) if row.kind == kind)

    def beside(self, kinds: Collection[str], seconds: float) -> float:
        """Return how many slots functions of other kinds held on average in the last seconds. Parked processes count by their price."""
        now = time.time()
        since_s = now - seconds
        held_s = sum((one.slots or one.parked) * (now - max(one.from_s, since_s)) for one in self.open.values() if one.kind not in kinds)
        for row in itertools.takewhile(lambda row: row.to_s + self.started_s > since_s, reversed(self.rows)):
            if row.kind not in kinds:
                held_s += row.slots * (row.to_s - max(row.from_s, since_s - self.started_s))
        return held_s / seconds

    def unleased_core_s(self, kind: str, since_row: int) -> float:
        """Return CPU seconds of functions of a kind without a lease, in the rows from `since_row` on."""
        return sum(row.seconds for row in self._since(since_row) if row.kind == kind and row.activity == "unleased")

    def _since(self, row: int) -> list[Row]:
        return self.rows[max(0, row - self.forgotten) :]

    def forget(self, before: int) -> None:
        """Drop rows below number `before` from memory if they are on disk. Totals still include them."""
        self.totals()
        dropped = max(0, min(before - self.forgotten, self.written))
        del self.rows[:dropped]
        self.forgotten, self.written, self.summed_rows = (self.forgotten + dropped, self.written - dropped, self.summed_rows - dropped)

    # ---- on disk ----------------------------------------------------------------------------------------------

    def append_to(self, path: Path) -> None:
        """Write the rows that are not on disk yet, all or none. Raises DiskFull."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [f.name for f in fields(Row)])
        if not path.exists() or not path.stat().st_size:
            writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows[self.written :])
        append(path, text.getvalue().encode())
        self.written = len(self.rows)

    @property
    def saved_rows(self) -> int:
        """Number of rows that are on disk."""
        return self.forgotten + self.written

    def resume_from(self, path: Path, last_step: int, least_rows: int = 0) -> list[str]:
        """Continue the ledger of an earlier run. Rows after `last_step`, whose steps are repeated, are marked `repeated`.

        The clock continues after the last row: time in which nothing ran is not billed. Rows that a killed run had not written
        are unknown. `least_rows`: rows that the file had at the checkpoint. Returns messages for the user about lost rows.
        """
        if not path.exists():
            return (
                [f"{path} is missing: the {least_rows} rows that it had at the checkpoint are lost, and their costs"] if least_rows else []
            )
        rows, problems = read_ledger_lines(path)
        self.rows = [row if row.step <= last_step else replace(row, repeated=1) for row in rows]
        self.summed_totals, self.summed_rows, self.forgotten, self.by_kind = np.zeros(4), 0, 0, {}
        self.started_s = time.time() - max((row.to_s for row in self.rows), default=0.0)
        self.written = 0
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        self.append_to(temporary)
        os.replace(temporary, path)
        messages = [f"{path}: {shortened(problems)} not complete and left out, and so are their costs"] if problems else []
        if len(rows) < least_rows:
            lost = least_rows - len(rows)
            messages.append(f"{path}: {lost} of the {least_rows} rows that it had at the checkpoint are lost, and their costs")
        return messages


def read_ledger(path: Path) -> list[Row]:
    """Return the complete rows of a ledger.csv."""
    return read_ledger_lines(path)[0]


def read_ledger_lines(path: Path) -> tuple[list[Row], list[str]]:
    """Return the complete rows of a ledger.csv, and the lines that are none, such as the last one of a killed run: `line 7 (step 3)`."""
    rows, problems = [], []
    lines = path.read_bytes().decode("utf-8-sig", errors="replace").split("\n")
    header = lines[0].rstrip("\r").split(",")
    for number, text in enumerate(lines[1:], 2):
        if not text.strip():
            continue
        cells: list[str] = []
        try:
            cells = next(csv.reader([text.removesuffix("\r")]))
            if number == len(lines) or len(cells) != len(header) or "\ufffd" in text:  # the last line has no end
                raise ValueError
            rows.append(_row_of(dict(zip(header, cells, strict=True))))
        except (csv.Error, TypeError, ValueError, KeyError, StopIteration):
            at = dict(zip(header, cells, strict=False)).get("step", "")
            whole = len(cells) > header.index("step") + 1 if "step" in header else False  # otherwise digits of it may be missing
            problems.append(f"line {number}" + (f" (step {at})" if whole and at.isdigit() else ""))
    return rows, problems


def _row_totals(row: Row) -> np.ndarray:
    """Return (busy slot-s, full slot-s, idle slot-s, money) of a row."""
    used = row.seconds * row.slots
    return np.array([used * (row.activity in BUSY), used, used * (row.activity == "idle"), row.money])


def _totals(summed_totals: np.ndarray) -> dict[str, float]:
    busy, full, idle, money = (float(value) for value in summed_totals)
    return {"busy_slot_s": busy, "full_slot_s": full, "idle_share": idle / full if full else 0.0, "money": money}


def _row_of(line: dict[str, str]) -> Row:
    line = {"repeated": "0", "what": "", "pool": "", **line}  # older ledgers lack these columns
    types = {"step": int, "slots": int, "repeated": int, **dict.fromkeys(("from_s", "to_s", "seconds", "memory_mb", "money"), float)}
    return Row(**{f.name: types.get(f.name, str)(line[f.name]) for f in fields(Row)})
