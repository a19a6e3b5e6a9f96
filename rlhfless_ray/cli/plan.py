"""`rlhfless plan`: what would you do with these lengths on this hardware?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhfless_ray.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from placement import Bounds, Choice, Objective, Plan, Pool
    from rlhfless_ray.cli.read_lengths import Lengths

SHOWN = 14  # rows of the table


def plan(
    lengths: Annotated[Path, typer.Argument(help="Response tokens: .json, .jsonl or .csv, or a run folder.")],
    actors: Annotated[int, typer.Option(help="How many actors there may be.")],
    speed: Annotated[str | None, typer.Option(help="base,per_seq[,per_ctx]: seconds of a decode step.")] = None,
    device: Annotated[str | None, typer.Option(help="A known device, with --model: speed and capacity by roofline.")] = None,
    model: Annotated[str | None, typer.Option(help="A known model, or its Hugging Face config.json.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices of one actor.")] = 1,
    prefer: Annotated[float | None, typer.Option(help="0: cheapest, 1: fastest. 0.5 if no goal is given.")] = None,
    deadline: Annotated[float | None, typer.Option(help="The cheapest plan within so many seconds.")] = None,
    budget: Annotated[float | None, typer.Option(help="The fastest plan that costs no more.")] = None,
    knee: Annotated[bool, typer.Option("--knee", help="Where going faster begins to cost more than it gains.")] = False,
    scenarios: Annotated[
        int,
        typer.Option(help="0: these lengths are known. S: they are what the prompts did last time; plan S draws of the next."),
    ] = 0,
    column: Annotated[str | None, typer.Option(help="Column or key of the lengths.")] = None,
    price: Annotated[float, typer.Option(help="Of one device-second.")] = 1.0,
    start: Annotated[float, typer.Option(help="Seconds from lease to first token of every actor.")] = 0.0,
    capacity: Annotated[int | None, typer.Option(help="KV tokens that one actor holds.")] = None,
    seed: Annotated[int, typer.Option(help="Of the scenarios.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine readable, with the groups of the chosen plan.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the frontier into this .svg.")] = None,
) -> None:
    """Show the cost/speed frontier of a rollout of these lengths, and the plan that a goal takes from it."""
    from placement import NotFeasible, choose, frontier, rollout_bounds
    from rlhfless_ray.cli.read_lengths import read_lengths

    if actors < 1:
        raise UserError(f"--actors: at least one actor is needed, got {actors}")
    if scenarios < 0:
        raise UserError(f"--scenarios: 0 or more, got {scenarios}")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UserError(f"--plot {plot}: plots are written as .svg")
    objective = _objective(prefer, deadline, budget, knee)
    pool = _pool(actors, speed, device, model, tensor_parallel, price, start, capacity)
    recorded = read_lengths(lengths, column)
    drawn = _scenarios(recorded, scenarios, seed) if scenarios else recorded.tokens
    try:
        plans = frontier(drawn, pools=[pool], prompts=recorded.prompt_tokens, thin=0.005)
        bounds = rollout_bounds(drawn, pools=[pool], prompts=recorded.prompt_tokens)
        choice = choose(plans, objective)
    except NotFeasible as nothing:
        raise UserError(str(nothing)) from None
    except ValueError as error:
        raise UserError(f"{recorded.source}: {error}") from None
    if plot is not None:
        _draw(plot, plans, bounds, choice, pool)
    if as_json:
        print(json.dumps(_tree(recorded, scenarios, pool, plans, bounds, choice), indent=1))
    else:
        _show(recorded, scenarios, pool, plans, bounds, choice)
        if plot is not None:
            print(f"plot: {plot.resolve()}")


def _objective(prefer: float | None, deadline: float | None, budget: float | None, knee: bool) -> Objective:
    from placement import Objective

    given = [
        name
        for name, value in (("--prefer", prefer), ("--deadline", deadline), ("--budget", budget), ("--knee", knee or None))
        if value is not None
    ]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]}: a plan has one goal, give one of them")
    try:
        return Objective(0.5 if not given else prefer, deadline, budget, knee)
    except ValueError as error:
        raise UserError(f"{given[0]}: {error}") from None


def _pool(
    actors: int, speed: str | None, device: str | None, model: str | None, width: int, price: float, start: float,
    capacity: int | None,
) -> Pool:
    from placement import Pool, Speed

    if (speed is None) == (device is None and model is None):
        raise UserError("say how fast an actor decodes: either --speed base,per_seq[,per_ctx] or --device and --model")
    if width < 1:
        raise UserError(f"--tensor-parallel: at least 1, got {width}")
    if not price >= 0 or not start >= 0:
        raise UserError(f"--price and --start must not be negative, got {price:g} and {start:g}")
    if speed is not None:
        try:
            numbers = [float(part) for part in speed.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or not all(0 <= x < float("inf") for x in numbers) or not any(numbers):
            raise UserError(f"--speed {speed}: give base,per_seq or base,per_seq,per_ctx in seconds, such as 0.0085,3e-5")
        return Pool(Speed(*numbers), price, actors, start, capacity=capacity, devices=width)
    if device is None or model is None:
        raise UserError("--device and --model belong together: the speed follows from both")
    from placement.roofline import decode_speed, kv_capacity
    from placement.simulate import catalog

    try:
        the_model, the_device = catalog.model(model), catalog.device(device)
        holds = kv_capacity(the_model, the_device, width, 0.9) if capacity is None else capacity
    except ValueError as error:
        raise UserError(str(error)) from None
    return Pool(decode_speed(the_model, the_device, width), price, actors, start, capacity=holds, devices=width)


def _scenarios(recorded: Lengths, count: int, seed: int) -> np.ndarray:
    """(n, count): what the same prompts will probably do the next time, by what they did."""
    import numpy as np

    from placement.lengths import LengthForecaster

    order = np.argsort(recorded.group, kind="stable")
    sizes = np.bincount(recorded.group)
    first = order[np.cumsum(sizes) - sizes]
    prompts, tokens = range(len(sizes)), recorded.prompt_tokens[first]
    forecaster = LengthForecaster(float(recorded.tokens.mean()))
    forecaster.observe(prompts, tokens, np.split(recorded.tokens[order], np.cumsum(sizes)[:-1]))
    drawn = np.empty((len(recorded.tokens), count))
    most = int(sizes.max())
    wide = forecaster.scenarios(prompts, tokens, most, count, seed).reshape(len(sizes), most, count)
    for prompt, members in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
        drawn[members] = wide[prompt, : len(members)]
    return drawn


def _row(plan: Plan, bounds: Bounds) -> dict[str, Any]:
    sizes = [len(group) for group in plan.groups]
    return {
        "time_s": plan.time_s, "cost": plan.cost, "actors": plan.actors,
        "largest_group": max(sizes), "smallest_group": min(sizes),
        "time_over_bound": plan.time_s / bounds.time_s, "cost_over_bound": plan.cost / bounds.cost if bounds.cost else None,
    }


def _tree(
    recorded: Lengths, scenarios: int, pool: Pool, plans: list[Plan], bounds: Bounds, choice: Choice[Plan]
) -> dict[str, Any]:
    speed = pool.speed
    return {
        "lengths": {
            "source": recorded.source, "responses": len(recorded.tokens), "prompts": int(recorded.group.max()) + 1,
            "mean": float(recorded.tokens.mean()), "max": float(recorded.tokens.max()),
        },
        "scenarios": scenarios, "actors": pool.max_actors, "price": pool.price, "start_s": pool.start_s,
        "capacity": pool.capacity, "devices_per_actor": pool.devices,
        "speed": {"base_s": speed.base_s, "per_seq_s": speed.per_seq_s, "per_ctx_s": speed.per_ctx_s},
        "bounds": {"time_s": bounds.time_s, "cost": bounds.cost, "reason": bounds.reason},
        "frontier": [_row(plan, bounds) for plan in plans],
        "chosen": {
            "index": choice.index, "reason": choice.reason, **_row(choice.plan, bounds),
            "groups": [group.tolist() for group in choice.plan.groups],
        },
    }


def _shown(count: int, chosen: int) -> list[int]:
    """Both ends, the chosen point, and others evenly between."""
    if count <= SHOWN:
        return list(range(count))
    evenly = {round(i * (count - 1) / (SHOWN - 1)) for i in range(SHOWN)}
    return sorted(evenly | {chosen})


def _show(recorded: Lengths, scenarios: int, pool: Pool, plans: list[Plan], bounds: Bounds, choice: Choice[Plan]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, speed = Console(highlight=False), pool.speed
    n, prompts = len(recorded.tokens), int(recorded.group.max()) + 1
    known = f"{scenarios} scenarios of their next visit" if scenarios else "lengths known"
    steps = [f"{speed.base_s * 1e3:.3g} ms", f"{speed.per_seq_s * 1e6:.3g} µs per sequence"]
    steps += [f"{speed.per_ctx_s * 1e9:.3g} ns per context token"] if speed.per_ctx_s else []
    console.print(
        f"{n} responses to {prompts} prompts, mean {recorded.tokens.mean():.0f}, longest {recorded.tokens.max():.0f} tokens; "
        f"{known}; at most {pool.max_actors} actors; a decode step takes {' + '.join(steps)}"
        + (f"; an actor holds {pool.capacity:,} KV tokens" if pool.capacity else "")
    )
    table = Table()
    for name in ("", "time (s)", "cost", "actors", "largest", "smallest", "+ time", "+ cost"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = _shown(len(plans), choice.index)
    for i in rows:
        row = _row(plans[i], bounds)
        over = "" if row["cost_over_bound"] is None else f"{max(0.0, row['cost_over_bound'] - 1):.1%}"
        table.add_row(
            "→" if i == choice.index else "", f"{row['time_s']:.4g}", f"{row['cost']:.4g}", str(row["actors"]),
            str(row["largest_group"]), str(row["smallest_group"]), f"{max(0.0, row['time_over_bound'] - 1):.1%}", over,
            style="bold" if i == choice.index else None,
        )
    console.print(table)
    if len(rows) < len(plans):
        console.print(f"{len(rows)} of {len(plans)} points; all of them with --json")
    console.print(
        f"cost in {_unit(pool)}; + is above the lower bounds: {bounds.time_s:.4g} s ({bounds.reason}) and {bounds.cost:.4g} "
        "(everything on one actor)"
    )
    console.print(f"chosen: {choice.reason}")


def _draw(path: Path, plans: list[Plan], bounds: Bounds, choice: Choice[Plan], pool: Pool) -> None:
    from rlhfless_ray.cli.frontier_svg import frontier_svg

    title = f"Plans for at most {pool.max_actors} actors"
    try:
        path.write_text(frontier_svg(plans, bounds, choice.index, cost=_unit(pool), title=title))
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror}") from None


def _unit(pool: Pool) -> str:
    return "device-seconds" if pool.price == 1 else "cost"
