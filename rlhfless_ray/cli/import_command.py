"""`rlhfless import-logs`: read response lengths and times of another system's run, and plan the same work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhfless_ray.cli.local_file import local_file
from rlhfless_ray.cli.plan_command import leave_out
from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from placement.simulate.fleet_search import Fleet


def import_logs(
    ctx: typer.Context,
    log: Annotated[
        Path,
        typer.Argument(
            parser=local_file,
            help="A log of verl, OpenRLHF or TRL: console lines, JSON lines or trainer_state.json. With --tokenizer: a folder or file of "
            "verl's dumps of rollouts.",
        ),
    ],
    write: Annotated[
        Path | None, typer.Option(parser=local_file, help="Write lengths like the log's into this .json file, for `rlhfless plan`.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="With --write, for a log: prompts per step.")] = 128,
    samples: Annotated[int, typer.Option(help="With --write, for a log: responses to each prompt.")] = 8,
    model: Annotated[str | None, typer.Option(help="With --write: also plan a step of this model.")] = None,
    device: Annotated[str, typer.Option(help="The run's devices, with --model.")] = "H100",
    devices: Annotated[int, typer.Option(help="Number of devices: 1, 2, 4, 8, 16, …")] = 8,
    tokenizer: Annotated[
        Path | None, typer.Option(parser=local_file, help="Model folder whose tokenizer counts the tokens of dumped responses.")
    ] = None,
) -> None:
    """Read response lengths and times from another system's log, and compare them with a plan of the same work."""
    from placement.forecast.rollout_dumps import is_dump
    from placement.forecast.training_logs import read_log

    if prompts < 1 or samples < 2:
        raise UserError(f"--prompts and --samples: must be at least 1 and 2, got {prompts} and {samples}")
    if model is not None and write is None:
        raise UserError("--model needs --write: a step is planned for the lengths in that file")
    if not log.exists():
        raise UserError(f"{log}: no such file or folder")
    dumped = is_dump(log)
    if dumped:
        leave_out(ctx, {"prompts", "samples"}, f"{log} has dumps of rollouts, and their prompts and responses are counted")
    else:
        leave_out(ctx, {"tokenizer"}, f"{log} has no dumps of rollouts, and a log has the numbers of tokens")
    if write is None:
        leave_out(ctx, {"prompts", "samples"}, "without --write no lengths are drawn")
    if model is None:
        leave_out(ctx, {"device", "devices"}, "without --model no step is planned")
    if write is not None and write.suffix != ".json":
        raise UserError(f"--write {write}: give a file name that ends in .json")
    try:
        step_s, yours = None, ""
        if dumped:
            lengths = _dumped_lengths(log, tokenizer)
        else:
            history = read_log(log)
            longest = "" if history.max_tokens is None else f", longest {history.max_tokens:.0f}"
            print(f"{log}: {history.steps} steps of {history.system}; medians: responses of {history.mean_tokens:.0f} tokens{longest}")
            for name, seconds in history.phases_s.items():
                print(f"  {name}: {seconds:.4g} s")
            if history.step_s is not None:
                print(f"  the whole step: {history.step_s:.4g} s")
            lengths = [] if write is None else history.lengths(prompts, samples).astype(int).tolist()
            step_s = history.step_s
            yours = "the log has no step time; " if step_s is None else f"your run: {step_s:.4g} s a step; "
        if write is not None:
            write.write_text(json.dumps(lengths))
            print(f"lengths: {write}")
        if model is not None and write is not None:
            fleet = _planned(write, model, device, devices)
            ours = f"{fleet.time_s:.4g} s, of which rollout {fleet.rollout_s:.4g} s"
            print(f"{yours}planned here: {ours} ({devices} × {device}, engines of {fleet.width})")
            if step_s is not None:
                factor = step_s / fleet.time_s
                print(f"for plans with your times: rlhfless plan {write} --model {model} --fleet … --calibrate {factor:.3g}")
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None


def _dumped_lengths(log: Path, tokenizer: Path | None) -> list[list[int]]:
    """Read, describe and return the lengths of dumped responses, a list for each prompt."""
    from placement.forecast.rollout_dumps import read_dump
    from rlhfless_ray.local.fast_imports import transformers_without_torch
    from rlhfless_ray.weights.load_policy import load_tokenizer
    from rlhfless_ray.weights.model_folder import KEPT_SUFFIXES, WEIGHTS, check_tokenizer
    from rlhfless_ray.weights.tensor_file import Files

    if tokenizer is None:
        raise UserError(f"{log}: dumps of rollouts hold text; give --tokenizer, a model folder whose tokenizer counts the tokens")
    if not tokenizer.is_dir():
        raise UserError(f"--tokenizer: {tokenizer} is not a folder")
    names = [file.name for file in tokenizer.iterdir() if file.suffix in KEPT_SUFFIXES and file.suffix != WEIGHTS]
    check_tokenizer(names, tokenizer, "--tokenizer")
    files: Files = {name: (tokenizer / name).read_bytes() for name in names}
    with transformers_without_torch():
        loaded = load_tokenizer(files, False, "--tokenizer")
    dump = read_dump(log, lambda texts: [len(ids) for ids in loaded(texts, add_special_tokens=False)["input_ids"]])
    tokens = [count for group in dump.lengths for count in group]
    print(
        f"{dump.path}: {len(tokens)} responses to {len(dump.lengths)} prompts; {sum(tokens) / len(tokens):.0f} tokens on average, "
        f"longest {max(tokens)}"
    )
    return dump.lengths


def _planned(lengths: Path, model: str, device: str, devices: int) -> Fleet:
    """Return the quickest width of this many devices. Raises ValueError where the model does not fit."""
    from rlhfless_ray.cli.fleet_table import search

    search_result = search(lengths, model, device, devices, None, 0.0)
    fits = [fleet for fleet in search_result.fleets if fleet.count == devices and not fleet.spot]
    if not fits:
        raise ValueError("; ".join(search_result.refused.values()) or f"--devices {devices}: must be a power of two")
    return min(fits, key=lambda fleet: fleet.time_s)
