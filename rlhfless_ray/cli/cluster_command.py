"""`rlhfless cluster`: show which run holds the slots that a cluster's runs share, which run waits, and the costs."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Annotated

import typer

from rlhfless_ray.cli.tables import table_console
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

ANSWER_S = 30.0
MAX_PAST = 20  # ended runs with a row of their own in the table


def cluster(
    address: Annotated[str, typer.Option("--address", help="Ray address. Default: RAY_ADDRESS.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the slots that the runs of a cluster share: who holds them, who waits, and what they cost, in all and today."""
    from rlhfless_ray.local.cluster import connect

    where = address or os.environ.get("RAY_ADDRESS", "")
    if not where:
        raise UserError("cluster: name the cluster with --address or RAY_ADDRESS; the private Ray of a run has no pool")
    connect(where, "--address")
    from ray.exceptions import RayActorError

    from rlhfless_ray.common.deadlines import get
    from rlhfless_ray.functions.pool_messages import MESSAGES
    from rlhfless_ray.functions.slot_pool import ended_pools, find_pools

    pools = []
    for handle in find_pools():
        with suppress(RayActorError):  # it has just ended with its last run
            pools.append(get(handle.status.remote(), ANSWER_S, "the slot pool to answer"))
    if not as_json and any(pool.get("messages") != MESSAGES for pool in pools):
        raise UserError("cluster: the runs on this cluster use another version of rlhfless-ray; use the same version, or --json")
    running = {pool["resource"] for pool in pools}
    pools += [pool for pool in ended_pools() if pool["resource"] not in running]
    if as_json:
        print(json.dumps(pools, indent=1))
        return
    for pool in pools:
        show(pool)
    if not running:
        print("no run shares the slots of this cluster now")


def kinds_of_nodes(pool: JsonObject) -> dict[str, list[str]]:
    """Return {labels: node ids}, or nothing if all nodes have the same labels."""
    kinds: dict[str, list[str]] = {}
    for node, labels in pool.get("labels", {}).items():
        kinds.setdefault(", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "other nodes", []).append(node)
    return dict(sorted(kinds.items())) if len(kinds) > 1 else {}


def show(pool: JsonObject) -> None:
    from rich.table import Table

    from rlhfless_ray.report.formatting import duration, money, slot_time

    unit = "GPUs" if pool["resource"] == "gpu" else "CPU cores"
    kinds = kinds_of_nodes(pool)
    title = f"{pool['slots']} slots ({unit}) on {len(pool['nodes'])} nodes, {pool['slots'] - pool['held']} without a run"
    costs = ("paid", "money", "paid today", "money today")
    table = Table(
        "run",
        "since",
        "holds",
        *(f"on {kind}" for kind in kinds),
        "target",
        "waits for",
        "share",
        *costs,
        "lent",
        "borrowed",
        "why",
        title=title,
    )

    def cost(*runs: JsonObject) -> list[str]:
        slot_s, amount, today_s, amount_today = (
            sum(run[key] for run in runs) for key in ("slot_s", "money", "today_slot_s", "money_today")
        )
        return [slot_time(slot_s), money(amount), slot_time(today_s), money(amount_today)]

    for run in pool["runs"]:
        share = "–" if run["share"] is None else f"{run['share']:.0%}"
        table.add_row(
            run["name"] if run["silent_s"] < 5 else f"{run['name']} (silent for {duration(run['silent_s'])})",
            duration(run["since_s"]),
            str(run["held"]),
            *(str(sum(run["slots_by_node"].get(node, 0) for node in nodes)) for nodes in kinds.values()),
            str(run["target"]),
            str(run["waits"] or ""),
            share if run["priority"] == 1 else f"{share}, priority {run['priority']:g}",
            *cost(run),
            slot_time(run["lent_slot_s"]),
            slot_time(run["borrowed_slot_s"]),
            run["reason"],
        )
    blank = [""] * len(kinds)
    earlier, newest = pool["past"][:-MAX_PAST], pool["past"][-MAX_PAST:]
    if earlier:
        table.add_row(f"{len(earlier)} runs", "", "", *blank, "", "", "", *cost(*earlier), "", "", "ended before those below")
    for run in newest:
        ended = f"ended {duration(run['ended_s_ago'])} ago"
        table.add_row(run["name"], duration(run["lasted_s"]), "", *blank, "", "", "", *cost(run), "", "", ended)
    table.add_section()
    slots = (f"of {sum(pool['nodes'][node] for node in nodes)}" for nodes in kinds.values())
    table.add_row(
        "all runs", "", str(pool["held"]), *slots, "", "", "", *cost(*pool["runs"], *pool["past"]), "", "", "today begins at 0:00 UTC"
    )
    console = table_console(200)
    console.print(table)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(pool["began_s"]))
    console.print(f"since {since}: {pool['handovers']} slots passed from run to run; {slot_time(pool['free_slot_s'])} were paid by none")
