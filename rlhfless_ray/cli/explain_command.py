"""`rlhfless explain -- COMMAND`: show how an OpenRLHF command is read, without training."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlhfless_ray.cli.passthrough import split_options
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from placement.speed.roofline import Device
    from rlhfless_ray.compat.openrlhf.command import LaunchCommand
    from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
    from rlhfless_ray.compat.openrlhf.script_run import ScriptRun
    from rlhfless_ray.compat.openrlhf.translate import Translation
    from rlhfless_ray.preflight.memory_needs import Room


@dataclass(frozen=True)
class DistantDevices:
    """Devices that are not here."""

    device: Device
    room: Room


def explain(ctx: typer.Context) -> None:
    """Show how a command is read: rlhfless explain [--json] [--gpus N --device KIND] -- python3 -m openrlhf.cli.train_ppo_ray …

    Prints its dialect, the slots that it needs, the recipe, and which flags are honoured, read as hints, without effect or
    refused. The command may be wrapped in `ray job submit … --` or `srun`, or be flags alone. `rlhfless explain --flags [LAUNCHER]`
    lists every flag of a launcher (default: train_ppo_ray). With --gpus and --device it is read for a cluster that is not here: what
    memory and a step would take there, and its price. A command of TRL or verl is pointed to the page that maps its settings.
    A launch script and a `bash -c` text are run, for two minutes at most. Launchers, ray, Slurm, containers and ssh start nothing
    then. Everything else that the script does is done. If it starts several launchers, PPO's or else the first is explained,
    and of the others whether they would run.
    Exit code 0 if all of them would run, 2 if not, 1 if the script did not end in time.
    """
    chosen, argv = split_options(ctx.args, "--json", "--flags", valued=("--gpus", "--device"))
    there = _cluster(chosen)
    from rlhfless_ray.compat.openrlhf.command import TRANSLATED
    from rlhfless_ray.compat.openrlhf.explain_report import list_flags
    from rlhfless_ray.compat.openrlhf.flags import LAUNCHER

    if "--flags" in chosen:
        name = argv[0].rpartition(".")[2] if argv else LAUNCHER
        if name not in TRANSLATED:
            raise UserError(f"explain --flags {name}: name one of {', '.join(TRANSLATED)}")
        print(list_flags(name))
        return
    run = launches(argv)
    # PPO's launcher first, and those that neither train nor generate last
    first, *rest = sorted(run.launches, key=lambda launch: (launch.launcher != LAUNCHER) + (launch.launcher not in TRANSLATED))
    with chdir(first.folder):
        translation = _translated(first)
        translation.notes += run.notes
        text, data = _explained(translation, there, here=there is not None or not first.is_away)
    data["runs"] = data["runs"] and not run.lost
    data["problem"] = data["problem"] or "; ".join(run.lost) or None
    others = [(launch.launcher, _why_not(launch)) for launch in rest if launch.launcher in TRANSLATED]
    if "--json" in chosen:
        data["also_starts"] = [{"launcher": name, "runs": why is None, "problem": why} for name, why in others]
        print(json.dumps(data, indent=2))
    else:
        print(text)
        if data["problem"]:
            print(f"does not run: {data['problem']}")
        for name, why in others:
            print(f"also starts {name}, which would {f'not run: {why}' if why else 'run'}")
    if not data["runs"] or any(why for _, why in others):
        raise typer.Exit(2)
    if not run.is_complete:
        raise typer.Exit(1)


def launches(argv: list[str]) -> ScriptRun:
    """Return the launch in a command, or those that its script starts when it runs. Raises UserError if there is none."""
    from rlhfless_ray.compat.openrlhf.command import check_starts_shell, launch_in
    from rlhfless_ray.compat.openrlhf.script_run import DEADLINE_S, ScriptRun, run_script

    if launch := launch_in(argv):
        return ScriptRun([launch])
    from rlhfless_ray.compat.other_frameworks import other_framework

    if other := other_framework(argv):
        raise UserError(other.text(argv))
    check_starts_shell(argv)
    command = f"`{shlex.join(argv)[:80]}`"
    print(
        f"[rlhfless] {command} runs now, for {DEADLINE_S:g} s at most. OpenRLHF's launchers, ray, Slurm, containers and ssh start nothing. "
        "Everything else that it does is done: files, installations, downloads, other programs.",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    if not (run := run_script(argv)).launches:
        raise UserError("; ".join([f"{command}: it started no launcher of OpenRLHF", *run.lost, *run.notes]))
    return run


def _translated(launch: LaunchCommand) -> Translation | LauncherTranslation:
    """Return the translation of a launch. Raises UserError for one that cannot be read."""
    from rlhfless_ray.cli.line_ends import check_line_ends
    from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch

    check_line_ends(launch.flags, Path(launch.script), launch.line)
    translation = translate_launch(launch)
    if translation is None:
        raise UserError(f"openrlhf.cli.{launch.launcher}: `explain` reads launchers that train; start this one with `rlhfless run`")
    return translation


def _why_not(launch: LaunchCommand) -> str | None:
    """Return why a launch would not run, or None if it would."""
    try:
        with chdir(launch.folder):
            translation = _translated(launch)
            wrong = translation.refusal() or translation.problem()
    except UserError as error:
        return str(error)
    return str(wrong) if wrong else None


def _cluster(chosen: dict[str, str]) -> DistantDevices | None:
    """Return the devices of --gpus and --device, or None without both. Raises UserError."""
    if ("--gpus" in chosen) != ("--device" in chosen):
        raise UserError("explain: give --gpus and --device together, or neither for this machine")
    if "--gpus" not in chosen:
        return None
    from rlhfless_ray.cli.device_recipe import device_of, device_room

    if not chosen["--gpus"].isdigit():
        raise UserError(f"--gpus {chosen['--gpus']}: expected a number of GPUs")
    device = device_of(chosen["--device"])
    return DistantDevices(device, device_room(device, int(chosen["--gpus"])))


def _explained(translation: Translation | LauncherTranslation, there: DistantDevices | None, here: bool) -> tuple[str, JsonObject]:
    """Return text and data about a command.

    there: devices of a cluster that is not here. here: it runs on them or on this machine, not as a job on an unknown one.
    """
    from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation
    from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
    from rlhfless_ray.compat.openrlhf.memory import too_large
    from rlhfless_ray.compat.openrlhf.resources import fit, fit_width
    from rlhfless_ray.compat.openrlhf.supervised import SupervisedTranslation
    from rlhfless_ray.compat.openrlhf.translate import Translation

    problem: UserError | str | None
    room = None if there is None else there.room
    if here:
        fitted = (
            fit_width(translation.settings, there=room) if isinstance(translation, LauncherTranslation) else fit(translation, there=room)
        )
        translation.notes += [fitted] if fitted else []
    problem = None if translation.refused else translation.problem()
    if here and not translation.refused and problem is None and isinstance(translation, Translation | SupervisedTranslation):
        problem = too_large(translation, there=room)
    data = as_data(translation)
    text = explanation(translation)
    if there is not None and not translation.refused and problem is None and isinstance(translation, Translation):
        from rlhfless_ray.cli.model_plan import predicted_run

        data["there"] = predicted_run(translation.recipe(), there.device, there.room)
        text += "\n" + "\n".join(f"{'there' if not number else '':<12}{line}" for number, line in enumerate(data["there"]))
    return text, {**data, "runs": not translation.refused and problem is None, "problem": str(problem) if problem else None}
