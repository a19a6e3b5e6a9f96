"""`rlhfless simulate`: every policy on a simulated cluster, as a table, JSON or a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless_ray.cli.local_file import local_file
from rlhfless_ray.cli.pictures import check_picture, draw_bounds, picture
from rlhfless_ray.cli.tables import table_console
from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from placement.simulate import Setting, SimulatedRun


def simulate(
    spec: Annotated[
        Path | None,
        typer.Argument(parser=local_file, help="A setting in YAML: device, nodes, model, lengths or trace, …", show_default=False),
    ] = None,
    setting: Annotated[
        str | None, typer.Option("--setting", help="A built-in setting by name; `list` shows all names.", show_default=False)
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="A policy to run (fixed, fixed+, global-cut, ours, oracle, …); repeat it for several. Default: all.",
            show_default=False,
        ),
    ] = None,
    prefer: Annotated[
        float | None, typer.Option("--prefer", help="From 0 (cheapest) to 1 (fastest), instead of the setting's value.", show_default=False)
    ] = None,
    max_lag_steps: Annotated[
        int | None,
        typer.Option("--max-lag-steps", help="0: synchronous steps; 1: one step off, instead of the setting's value.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Workloads to average over.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", parser=local_file, help="Write a picture of time against cost.", show_default=False)
    ] = None,
) -> None:
    """Simulate training steps in virtual time, and compare placement policies by step time and cost.

    The policies are fixed, elastic, and an oracle that knows all response lengths in advance. No model runs.

    rlhfless simulate --setting qwen3b-gsm8k-grpo --policy fixed --policy ours
    """
    if (spec is None) == (setting is None):
        raise UserError("give either a YAML file or --setting NAME; `rlhfless simulate --setting list` shows the built-in ones")
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}")
    if plot is not None:
        check_picture(plot)
    from placement import simulate as simulator
    from placement.speed.roofline import low_kv_warning

    if setting == "list":
        print("\n".join(simulator.names()))
        return
    try:
        chosen = simulator.load(spec, "auto") if spec is not None else simulator.named(str(setting), "auto")
        if prefer is not None:
            chosen = chosen.but(prefer=prefer)
        if max_lag_steps is not None:
            chosen = chosen.but(max_lag_steps=max_lag_steps)
        runs = [simulator.simulate(chosen, policy, seed) for seed in range(seeds)]
        narrowest = simulator.PhaseTimes.from_setting(chosen).width  # of the engines that hold the model
        basic = _plain(chosen)
        plain = [simulator.simulate(basic, ["fixed"], seed) for seed in range(seeds)]
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from None
    results = summary(runs, plain)
    if plot is not None:
        _plot(results, plot)
    if as_json:
        print(json.dumps(results, indent=1))
    else:
        _show(results)
    longest = chosen.prompt_limit + chosen.response_limit
    if warning := low_kv_warning(chosen.engine_model, chosen.device, narrowest, chosen.phases["engine_memory"], longest):
        print(warning, file=sys.stderr)


def _plain(chosen: Setting) -> Setting:
    """Return the setting with synchronous steps, without drafts, and in bf16 if engines of some width hold the model in it.

    The engines have the setting's width. If that is `auto` or too narrow for bf16, they have the narrowest that holds the model.
    """
    from placement.simulate import PhaseTimes

    basic = chosen.but(max_lag_steps=0, partial=False, acceptance=0.0)
    in_bf16 = basic.but(quantization="off")
    for tried in (in_bf16, in_bf16.but(tensor_parallel="auto")):
        try:
            return tried.but(tensor_parallel=PhaseTimes.from_setting(tried).width)
        except ValueError:  # engines of this width hold the model in 8 bits only
            continue
    return basic.but(tensor_parallel=PhaseTimes.from_setting(basic).width)


def summary(runs: list[SimulatedRun], plain: list[SimulatedRun]) -> JsonObject:
    """Return means and standard deviations over seeds: seconds per step, device-seconds held and worked, and the bounds.

    `plain`: `fixed` on the same workloads, with synchronous steps and without drafts or 8-bit weights. Ratios are of means.
    `saving_if_all_are_billed` is for clusters where nobody takes released devices at once, so that all devices are billed throughout. With
    partial rollouts a response may be spread over steps, so there is no bound of one.
    """
    import numpy as np

    setting = runs[0].setting
    bound = {"step_s": float(np.mean([r.bound_s for r in runs])), "device_s": float(np.mean([r.bound_cost for r in runs]))}
    rows: JsonObject = {}
    for name in runs[0].policies:
        runs_of_policy = [run.policies[name] for run in runs]
        figures = {
            "step_s": [p.step_s for p in runs_of_policy],
            "full_device_s": [p.full for p in runs_of_policy],
            "busy_device_s": [p.busy for p in runs_of_policy],
            "rollout_s": [float(np.mean([s.rollout_s for s in p.steps])) for p in runs_of_policy],
        }
        rows[name] = {k: {"mean": float(np.mean(v)), "sd": float(np.std(v, ddof=1)) if len(v) > 1 else 0.0} for k, v in figures.items()}
        rows[name]["last_plan"] = runs_of_policy[-1].steps[-1].reason
        rows[name]["tokens_by_lag"] = [
            float(np.mean(share)) for share in zip(*(s.lag for p in runs_of_policy for s in p.steps), strict=True)
        ]
        for key, base in (("over_plain_fixed", plain), ("over_fixed", runs if "fixed" in runs[0].policies else [])):
            if base:
                step_s, full = (float(np.mean([getattr(r.policies["fixed"], f) for r in base])) for f in ("step_s", "full"))
                speedup = step_s / rows[name]["step_s"]["mean"]
                sold = 1 - rows[name]["full_device_s"]["mean"] / full
                rows[name][key] = {"speedup": speedup, "saving": sold, "saving_if_all_are_billed": 1 - 1 / speedup}
        price = setting.device.price_per_hour
        if price is not None:
            rows[name]["money_per_step"] = rows[name]["full_device_s"]["mean"] * price / 3600
    return {
        "setting": setting.name,
        "device": setting.device.name,
        "devices": setting.devices,
        "model": setting.model.name,
        "algorithm": setting.algorithm,
        "responses_per_step": setting.prompts * setting.samples,
        "prefer": setting.prefer,
        "max_lag_steps": setting.max_lag_steps,
        "partial": setting.partial,
        "acceptance": setting.acceptance,
        "quantization": setting.quantization,
        "tensor_parallel": setting.tensor_parallel,
        "plain_fixed": {
            "tensor_parallel": plain[0].setting.tensor_parallel,
            "quantization": plain[0].setting.quantization,
            "step_s": float(np.mean([r.policies["fixed"].step_s for r in plain])),
        },
        "seeds": len(runs),
        "steps": len(runs[0].bounds),
        "bound": None if setting.partial else bound,
        "policies": rows,
    }


def _show(results: JsonObject) -> None:
    from rich.table import Table

    console = table_console()
    title = (
        f"{results['setting']}: {results['model']}, {results['algorithm'].upper()}, {results['responses_per_step']} responses on "
        f"{results['devices']} × {results['device']}; mean of {results['steps']} steps × {results['seeds']} seeds"
    )
    table = Table(title=title, title_justify="left")
    for head in ("policy", "step, s", "full, device-s", "busy, device-s", "over plain fixed", "over fixed", "plan"):
        table.add_column(head, justify="left" if head in ("policy", "plan") else "right", overflow="fold")

    def over(row: JsonObject, key: str) -> str:
        r = row.get(key)
        return f"{r['speedup']:.2f}×, {0 - r['saving']:+.0%} ({0 - r['saving_if_all_are_billed']:+.0%})" if r else ""

    for name, row in results["policies"].items():
        table.add_row(
            name,
            f"{row['step_s']['mean']:.2f} ± {row['step_s']['sd']:.2f}",
            f"{row['full_device_s']['mean']:.0f}",
            f"{row['busy_device_s']['mean']:.0f}",
            over(row, "over_plain_fixed"),
            over(row, "over_fixed"),
            row["last_plan"],
        )
    console.print(table)
    width, bound = results["plain_fixed"]["tensor_parallel"], results["bound"]
    wide = (
        "every policy takes its best width of engines (the runtime chooses widths with rollout.tensor_parallel=auto)"
        if results["tensor_parallel"] == "auto"
        else f"engines of {results['tensor_parallel']}"
    )
    plain = "without drafts or 8-bit weights " * bool(results["acceptance"] or results["quantization"] != "off")
    if (kind := results["plain_fixed"]["quantization"]) != "off":
        plain = f"without drafts and with {kind} weights, because no width holds the model in bf16, "
    console.print(
        f"{wide}; plain fixed has engines of {width} {plain}and takes {results['plain_fixed']['step_s']:.2f} s a step. Cost: with released "
        "devices sold at once, and in brackets with all devices billed throughout (`--prefer 1` plans for that)."
    )
    if bound:
        console.print(f"no policy can come below {bound['step_s']:.2f} s, nor below {bound['device_s']:.0f} device-seconds")


def _plot(results: JsonObject, path: Path) -> None:
    """Draw each policy's mean full cost against its mean time, and the bounds."""
    with picture(path, xlabel="seconds per step", ylabel="device-seconds held per step", title=results["setting"]) as axes:
        for name, row in results["policies"].items():
            at = (row["step_s"]["mean"], row["full_device_s"]["mean"])
            axes.errorbar(*at, xerr=row["step_s"]["sd"], yerr=row["full_device_s"]["sd"], fmt="o", capsize=2)
            axes.annotate(name, at, textcoords="offset points", xytext=(6, 4), fontsize=8)
        if bound := results["bound"]:
            draw_bounds(axes, bound["step_s"], bound["device_s"])
