"""`rlhfless plan`: a recipe for a model on given devices, plans for given response lengths, memory and calls of a recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless_ray.cli.local_file import local_file
from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from placement import Bounds, Choice, Objective, Plan, Pool
    from placement.forecast.recorded_lengths import Recorded
    from rlhfless_ray.cli.plan_pools import PoolOptions

MAX_SCENARIOS, MAX_DRAWS = 10_000, 50_000_000  # a few seconds and 400 MB; more changes no plan


FOR_MODEL = {"lengths", "overrides", "as_json", "device", "devices", "workload", "steps"}
FOR_MEMORY = {"lengths", "overrides", "memory", "as_json", "device", "devices"}
FOR_EXECUTION = {"lengths", "overrides", "execution", "as_json", "device", "devices", "prefer", "deadline", "budget", "knee"}
ONLY_FOR_FLEET = {"fleet", "steps", "workload", "spot_discount", "calibrate"}
FOR_FLEET = {"lengths", "column", "model", "device", "prefer", "deadline", "budget", "knee", "as_json", *ONLY_FOR_FLEET}


def plan(
    ctx: typer.Context,
    lengths: Annotated[
        Path,
        typer.Argument(
            parser=local_file,
            help="A model: a folder, a name on the hub or a known name. Or response tokens: .json, .jsonl, .csv or a run folder. "
            "With --memory or --execution: a recipe.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="With a model, --memory or --execution: settings of the recipe, as section.key=value.")
    ] = None,
    actors: Annotated[int | None, typer.Option(help="Maximum number of actors.")] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            "--gpus",
            help="Number of devices of --device. For lengths: the most, instead of --actors; engines get the best width.",
        ),
    ] = None,
    speed: Annotated[str | None, typer.Option(help="Seconds of a decode step, as base,per_seq[,per_ctx].")] = None,
    device: Annotated[
        str | None, typer.Option(help="A known device, or a YAML file of its fields. With --model, a roofline gives speed and capacity.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A known model, or its Hugging Face config.json.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices of one actor.")] = 1,
    prefer: Annotated[float | None, typer.Option(help="From 0 (cheapest) to 1 (fastest); 0.5 if no goal is given.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Take the cheapest plan that ends within this many seconds.")] = None,
    budget: Annotated[float | None, typer.Option(help="Take the fastest plan that costs at most this.")] = None,
    knee: Annotated[bool, typer.Option("--knee", help="Take the plan beyond which more speed costs more than it gains.")] = False,
    scenarios: Annotated[
        int, typer.Option(help="0: plan for exactly these lengths. S: they are the last step's; plan for S draws of the next step's.")
    ] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="Length at which responses are cut, with --scenarios.")] = None,
    column: Annotated[str | None, typer.Option(help="Column or key of the lengths.")] = None,
    price: Annotated[float, typer.Option(help="Price of one device-second.")] = 1.0,
    start: Annotated[float, typer.Option(help="Seconds from lease to first token of every actor.")] = 0.0,
    preempt: Annotated[float, typer.Option(help="Expected preemptions of one actor per hour.")] = 0.0,
    capacity: Annotated[int | None, typer.Option(help="KV tokens that one actor holds.")] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            help="Another kind of actor for the same plan, as key=value,… of actors, device, model, speed (with : for ,), "
            "tensor_parallel, price, start, preempt, capacity. Missing keys have the options' values. Repeat it for more pools.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the scenarios.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the groups of the chosen plan.")] = False,
    plot: Annotated[Path | None, typer.Option(parser=local_file, help="Also draw the frontier into this .svg, .png or .pdf file.")] = None,
    fleet: Annotated[
        int | None,
        typer.Option(help="Plan whole GRPO steps of --model on at most this many GPUs of any kind (or of --device), not only a rollout."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of a run, with --fleet or a model.")] = 100,
    workload: Annotated[str, typer.Option(help="Built-in lengths of responses for a model: gsm8k, gpqa or livecodebench.")] = "gsm8k",
    spot_discount: Annotated[
        float | None, typer.Option(help="With --fleet: share off the on-demand price on spot. Default: the table's own spot prices.")
    ] = None,
    calibrate: Annotated[float, typer.Option(help="With --fleet: measured divided by planned seconds. Scales times and costs.")] = 1.0,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the memory that a recipe's functions need, here or on --gpus of --device.")
    ] = False,
    execution: Annotated[
        bool, typer.Option("--execution", help="Show which calls of a recipe's step run when, on this machine or on --devices of --device.")
    ] = False,
) -> None:
    """Print a recipe for a model on --gpus of --device, with its predicted step, price and memory.

    For response lengths instead: the frontier of time and cost of a rollout, and the plan that a goal selects.
    """
    if memory:
        from rlhfless_ray.cli.device_recipe import device_of, device_room
        from rlhfless_ray.cli.memory_table import show_memory

        leave_out(ctx, ctx.params.keys() - FOR_MEMORY, "--memory shows no plans")
        if (device is None) != (devices is None):
            raise UserError("--memory: give --gpus and --device together, or neither for this machine")
        show_memory(
            lengths, overrides or [], as_json, None if device is None or devices is None else device_room(device_of(device), devices)
        )
        return
    if execution:
        from rlhfless_ray.cli.execution_table import show_execution

        leave_out(ctx, ctx.params.keys() - FOR_EXECUTION, "--execution plans a step of the recipe, not a rollout of these lengths")
        show_execution(lengths, overrides or [], device, devices, _objective(prefer, deadline, budget, knee), as_json)
        return
    from rlhfless_ray.cli.model_plan import names_model, show_model_plan

    if names_model(lengths):
        leave_out(ctx, ctx.params.keys() - FOR_MODEL, "a plan from a model chooses a recipe, not a rollout of given lengths")
        show_model_plan(str(lengths), overrides or [], device, devices, workload, steps, as_json)
        return
    if overrides:
        raise UserError(f"unexpected argument {overrides[0]}: settings of a recipe can only be given with a model, --memory or --execution")
    if fleet is not None:
        from rlhfless_ray.cli.fleet_table import show_fleets

        why = "--fleet chooses devices, widths and speed itself, and plans for exactly these lengths"
        leave_out(ctx, ctx.params.keys() - FOR_FLEET, why)
        goal = _objective(prefer, deadline, budget, knee)
        show_fleets(
            lengths,
            model,
            device,
            fleet,
            goal,
            column=column,
            steps=steps,
            spot_discount=spot_discount,
            calibrate=calibrate,
            as_json=as_json,
        )
        return
    from rlhfless_ray.cli.frontier_table import draw_frontier, frontier_tree, show_frontier
    from rlhfless_ray.cli.pictures import check_picture
    from rlhfless_ray.cli.plan_pools import PoolOptions

    leave_out(ctx, ONLY_FOR_FLEET, "without --fleet it changes nothing")
    if plot is not None:
        check_picture(plot)
    _check_numbers(scenarios, seed)
    objective = _objective(prefer, deadline, budget, knee)
    options = PoolOptions(actors, speed, device, model, tensor_parallel, price, start, preempt, capacity)
    pools, sets, options_of_pools = _pools(options, devices, pool or [])
    recorded = _read(lengths, column, scenarios, max_tokens)
    drawn = _scenarios(recorded, scenarios, seed, max_tokens) if scenarios else recorded.tokens
    plans, bounds, choice = _choose(drawn, recorded, pools, sets, objective)
    if plot is not None:
        draw_frontier(plot, plans, bounds, choice, pools)
    if as_json:
        print(json.dumps(frontier_tree(recorded, scenarios, pools, plans, bounds, choice), indent=1))
    else:
        show_frontier(recorded, scenarios, pools, plans, bounds, choice)
        if plot is not None:
            print(f"plot: {plot.resolve()}")
    longest = float((recorded.prompt_tokens + recorded.tokens).max())
    warnings = (options_of_pools[p].low_kv(pools[p].devices, longest) for p in sorted(set(choice.plan.pools)))
    for warning in dict.fromkeys(filter(None, warnings)):
        print(warning, file=sys.stderr)


def leave_out(ctx: typer.Context, names: Collection[str], why: str) -> None:
    """Raise UserError if the command line has any of these options, which would be ignored."""
    given = [name for name in sorted(names) if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"]
    if given:
        raise UserError(f"leave out {', '.join('--' + name.replace('_', '-') for name in given)}: {why}")


def _check_numbers(scenarios: int, seed: int) -> None:
    if scenarios < 0:
        raise UserError(f"--scenarios: must be 0 or more, got {scenarios}")
    if seed < 0:
        raise UserError(f"--seed: must be 0 or more, got {seed}")


def _pools(options: PoolOptions, devices: int | None, others: list[str]) -> tuple[list[Pool], list[list[int]], list[PoolOptions]]:
    """Return the pools, the sets of them that a plan may use, and each pool's options. `others`: texts of --pool."""
    if (options.actors is None) == (devices is None):
        raise UserError("give either --actors or --devices, the maximum number of them")
    if devices is not None:
        if others or options.tensor_parallel != 1:
            raise UserError("--devices tries every width for one kind of device; give --actors with --pool or --tensor-parallel")
        pools = options.widths(devices)
        return pools, [[i] for i in range(len(pools))], [options] * len(pools)
    given = [options, *(options.other(text) for text in others)]
    names = ["", *(f"--pool {text}: " for text in others)]
    pools = [of_pool.pool(name) for of_pool, name in zip(given, names, strict=True)]
    return pools, [list(range(len(pools)))], given


def _read(lengths: Path, column: str | None, scenarios: int, max_tokens: int | None) -> Recorded:
    """Read the recorded lengths, and check the options that depend on them."""
    from placement.forecast.recorded_lengths import read_lengths

    try:
        recorded = read_lengths(lengths, column)
    except ValueError as error:
        raise UserError(str(error)) from None
    if scenarios * len(recorded.tokens) > MAX_DRAWS or scenarios > MAX_SCENARIOS:
        raise UserError(
            f"--scenarios {scenarios}: with {len(recorded.tokens)} responses at most "
            f"{min(MAX_SCENARIOS, MAX_DRAWS // len(recorded.tokens))} can be planned on"
        )
    if max_tokens is not None and not scenarios:
        raise UserError("--max-tokens: known lengths are not cut; give it with --scenarios only")
    if max_tokens is not None and recorded.tokens.max() > max_tokens:
        raise UserError(f"--max-tokens {max_tokens}: the longest of these responses has {recorded.tokens.max():.0f}")
    return recorded


def _choose(
    drawn: np.ndarray, recorded: Recorded, pools: list[Pool], sets: list[list[int]], objective: Objective
) -> tuple[list[Plan], Bounds, Choice[Plan]]:
    from placement import NotFeasible, choose

    try:
        plans, bounds = _frontier(drawn, recorded.prompt_tokens, pools, sets)
        unit = "device-s" if all(pool.price == 1 for pool in pools) else "of cost"
        return plans, bounds, choose(plans, objective, unit)
    except NotFeasible as nothing:
        raise UserError(str(nothing)) from None
    except ValueError as error:
        raise UserError(f"{recorded.source}: {error}") from None


def _frontier(drawn: np.ndarray, prompts: np.ndarray, pools: list[Pool], sets: list[list[int]]) -> tuple[list[Plan], Bounds]:
    """Return the best plans, each on one of these sets of pools, and the lower bounds of all sets.

    Pools with different widths of the same devices exclude each other, so each is a set of its own.
    """
    from dataclasses import replace

    from placement import frontier, rollout_bounds
    from placement.planning.partition import pareto

    plans_of_sets: list[Plan] = []
    bounds: list[Bounds] = []
    for chosen in sets:
        pools_of_set = [pools[i] for i in chosen]
        plans = frontier(drawn, pools=pools_of_set, prompts=prompts, thin=0.005)
        plans_of_sets += [replace(plan, pools=tuple(chosen[p] for p in plan.pools)) for plan in plans]
        bounds.append(rollout_bounds(drawn, pools=pools_of_set, prompts=prompts))
    least = min(bounds, key=lambda b: b.time_s)
    return pareto(plans_of_sets), replace(least, cost=min(b.cost for b in bounds))


def _objective(prefer: float | None, deadline: float | None, budget: float | None, knee: bool) -> Objective:
    from placement import Objective

    given = [
        name
        for name, value in (("--prefer", prefer), ("--deadline", deadline), ("--budget", budget), ("--knee", knee or None))
        if value is not None
    ]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]}: a plan has one goal; give one of them")
    try:
        return Objective(0.5 if not given else prefer, deadline, budget, knee)
    except ValueError as error:
        raise UserError(f"{given[0]}: {error}") from None


def _scenarios(recorded: Recorded, count: int, seed: int, max_tokens: int | None) -> np.ndarray:
    """Draw `count` forecasts of the same prompts' next lengths, cut at `max_tokens`. Returns shape (responses, count)."""
    import numpy as np

    from placement.forecast.forecaster import LengthForecaster

    order = np.argsort(recorded.group, kind="stable")
    sizes = np.bincount(recorded.group)
    first = order[np.cumsum(sizes) - sizes]
    prompts, tokens = range(len(sizes)), recorded.prompt_tokens[first]
    forecaster = LengthForecaster(float(recorded.tokens.mean()), max_tokens=max_tokens)
    forecaster.observe(prompts, tokens, np.split(recorded.tokens[order], np.cumsum(sizes)[:-1]))
    drawn = np.empty((len(recorded.tokens), count))
    largest = int(sizes.max())
    wide = forecaster.scenarios(prompts, tokens, largest, count, seed).reshape(len(sizes), largest, count)
    for prompt, members in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
        drawn[members] = wide[prompt, : len(members)]
    return drawn
