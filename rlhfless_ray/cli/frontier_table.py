"""The frontier that `rlhfless plan` found, as a table, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.cli.pictures import draw_bounds, picture
from rlhfless_ray.cli.tables import rows_to_show
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from placement import Bounds, Choice, Plan, Pool
    from placement.forecast.recorded_lengths import Recorded

MAX_TABLE_ROWS = 14


def _plan_tree(plan: Plan, bounds: Bounds) -> JsonObject:
    sizes = [len(group) for group in plan.groups]
    return {
        "time_s": plan.time_s,
        "cost": plan.cost,
        "actors": plan.actors,
        "largest_group": max(sizes),
        "smallest_group": min(sizes),
        "time_over_bound": plan.time_s / bounds.time_s,
        "cost_over_bound": plan.cost / bounds.cost if bounds.cost else None,
        "actors_of_pools": {p: plan.pools.count(p) for p in sorted(set(plan.pools))},
    }


def _pool_tree(pool: Pool) -> JsonObject:
    speed = pool.speed
    return {
        "actors": pool.max_actors,
        "price": pool.price,
        "start_s": pool.start_s,
        "preempt_per_hour": pool.preempt_per_hour,
        "capacity": pool.capacity,
        "devices_per_actor": pool.devices,
        "speed": {"base_s": speed.base_s, "per_seq_s": speed.per_seq_s, "per_ctx_s": speed.per_ctx_s},
    }


def frontier_tree(
    recorded: Recorded, scenarios: int, pools: list[Pool], plans: list[Plan], bounds: Bounds, choice: Choice[Plan]
) -> JsonObject:
    return {
        "lengths": {
            "source": recorded.source,
            "responses": len(recorded.tokens),
            "prompts": int(recorded.group.max()) + 1,
            "mean": float(recorded.tokens.mean()),
            "max": float(recorded.tokens.max()),
        },
        "scenarios": scenarios,
        "pools": [_pool_tree(pool) for pool in pools],
        "bounds": {"time_s": bounds.time_s, "cost": bounds.cost, "reason": bounds.reason},
        "frontier": [_plan_tree(plan, bounds) for plan in plans],
        "chosen": {
            "index": choice.index,
            "reason": choice.reason,
            **_plan_tree(choice.plan, bounds),
            "groups": [group.tolist() for group in choice.plan.groups],
            "pools": list(choice.plan.pools),
        },
    }


def _describe_pool(pool: Pool) -> str:
    speed = pool.speed
    steps = [f"{speed.base_s * 1e3:.3g} ms", f"{speed.per_seq_s * 1e6:.3g} µs per sequence"]
    steps += [f"{speed.per_ctx_s * 1e9:.3g} ns per context token"] if speed.per_ctx_s else []
    return (
        f"at most {pool.max_actors} actors"
        + (f" of {pool.devices} devices" if pool.devices > 1 else "")
        + f"; a decode step takes {' + '.join(steps)}"
        + (f"; an actor holds {pool.capacity:,} KV tokens" if pool.capacity else "")
        + (f"; {pool.start_s:g} s to start" if pool.start_s else "")
        + (f"; preempted {pool.preempt_per_hour:g} times an hour" if pool.preempt_per_hour else "")
    )


def show_frontier(recorded: Recorded, scenarios: int, pools: list[Pool], plans: list[Plan], bounds: Bounds, choice: Choice[Plan]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, several = Console(highlight=False), len(pools) > 1
    n, prompts = len(recorded.tokens), int(recorded.group.max()) + 1
    known = f"{scenarios} scenarios of their next visit" if scenarios else "lengths known"
    console.print(
        f"{n} responses to {prompts} prompts, mean {recorded.tokens.mean():.0f}, longest {recorded.tokens.max():.0f} tokens; {known}"
        + ("" if several else f"; {_describe_pool(pools[0])}")
    )
    for i, pool in enumerate(pools if several else ()):
        console.print(f"pool {i}: {_describe_pool(pool)}; {pool.price:g} per device-second")
    table = Table()
    middle = ("count × pool",) if several else ("largest", "smallest")
    for name in ("", "time (s)", "cost", "actors", *middle, "+ time", "+ cost"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = rows_to_show(len(plans), MAX_TABLE_ROWS, choice.index)
    for i in rows:
        row = _plan_tree(plans[i], bounds)
        over = "" if row["cost_over_bound"] is None else f"{max(0.0, row['cost_over_bound'] - 1):.1%}"
        sizes = [str(row["largest_group"]), str(row["smallest_group"])]
        kinds = [" + ".join(f"{count} × {pool}" for pool, count in row["actors_of_pools"].items())]
        table.add_row(
            "→" if i == choice.index else "",
            f"{row['time_s']:.4g}",
            f"{row['cost']:.4g}",
            str(row["actors"]),
            *(kinds if several else sizes),
            f"{max(0.0, row['time_over_bound'] - 1):.1%}",
            over,
            style="bold" if i == choice.index else None,
        )
    console.print(table)
    if len(rows) < len(plans):
        console.print(f"{len(rows)} of {len(plans)} points; all of them with --json")
    console.print(
        f"cost in {_unit(pools)}; + is above the lower bounds: {bounds.time_s:.4g} s ({bounds.reason}) and {bounds.cost:.4g} "
        "(everything on one actor)"
    )
    console.print(f"chosen: {choice.reason}")


def draw_frontier(path: Path, plans: list[Plan], bounds: Bounds, choice: Choice[Plan], pools: list[Pool]) -> None:
    most = max(plan.actors for plan in plans) if len(pools) > 1 else pools[0].max_actors
    times, costs = [plan.time_s for plan in plans], [plan.cost for plan in plans]
    with picture(path, xlabel="rollout time (s)", ylabel=_unit(pools), title=f"Plans for at most {most} actors") as axes:
        axes.step(times, costs, where="post", color="0.75", zorder=0)  # stairs, because no plan lies between two neighbours
        actors = [plan.actors for plan in plans]
        axes.figure.colorbar(axes.scatter(times, costs, c=actors), label="actors", ticks=sorted({min(actors), max(actors)}))
        axes.plot(choice.plan.time_s, choice.plan.cost, "o", markersize=12, fillstyle="none", color="crimson", label="chosen")
        draw_bounds(axes, bounds.time_s, bounds.cost)


def _unit(pools: list[Pool]) -> str:
    return "device-seconds" if all(pool.price == 1 for pool in pools) else "cost"
