"""`rlhfless explain -- COMMAND`: show how an OpenRLHF command is read, without running it."""

from __future__ import annotations

import json

import typer

from rlhfless_ray.cli.passthrough import split_options
from rlhfless_ray.common.errors import UserError


def explain(ctx: typer.Context) -> None:
    """Show how a command is read: rlhfless explain [--json] -- python3 -m openrlhf.cli.train_ppo_ray …

    Prints its dialect, the slots that it needs, the recipe, and which flags are honoured, read as hints, without effect or
    refused. The command may be a whole one, with `ray job submit … --`, `srun` or `bash -c` around it, a launch script, or
    flags alone. `rlhfless explain --flags` lists every flag of the newest version, and the recipe keys that it still lacks.
    Exit code 0 if the command would run, 2 if not.
    """
    chosen, argv = split_options(ctx.args, "--json", "--flags")
    from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation, flags_today
    from rlhfless_ray.compat.openrlhf.memory import too_large_here, width_note
    from rlhfless_ray.compat.openrlhf.resources import fit

    if "--flags" in chosen:
        print(flags_today())
        return
    from rlhfless_ray.compat.openrlhf.command import find, is_submission
    from rlhfless_ray.compat.openrlhf.dialect import Unreadable
    from rlhfless_ray.compat.openrlhf.flags import LAUNCHER
    from rlhfless_ray.compat.openrlhf.supervised_table import TASKS
    from rlhfless_ray.compat.openrlhf.translate import problem, translate

    launch = find(argv)
    if launch.launcher in TASKS:
        _explain_supervised(launch.launcher, launch.flags, as_json="--json" in chosen)
        return
    if launch.launcher != LAUNCHER:
        raise UserError(f"openrlhf.cli.{launch.launcher}: `explain` reads launchers that train; start this one with `rlhfless run`")
    try:
        found = translate(launch.flags)
    except Unreadable as error:
        raise UserError(f"{error} (read as OpenRLHF {error.version})") from None
    fewer = "" if is_submission(argv) else fit(found)  # a job runs on another machine
    if fewer:
        found.notes.append(fewer)
    found.notes += width_note(found)
    wrong = None if found.refused else problem(found)
    if not found.refused and wrong is None and not is_submission(argv):
        wrong = too_large_here(found)
    if "--json" in chosen:
        print(json.dumps({**as_data(found), "problem": wrong, "runs": not found.refused and wrong is None}, indent=2))
    else:
        print(explanation(found))
        if wrong:
            print(f"does not run: {wrong}")
    if found.refused or wrong:
        raise typer.Exit(2)


def _explain_supervised(launcher: str, flags: list[str], as_json: bool) -> None:
    from rlhfless_ray.compat.openrlhf.supervised import translate_supervised

    found = translate_supervised(launcher, flags)
    wrong = ""
    if found.refusal() is None:
        try:
            found.recipe()
        except UserError as error:
            wrong = str(error)
    runs = not wrong and found.refusal() is None
    if as_json:
        outcomes = [{"flag": flag, "status": status, "why": why} for flag, status, why in found.outcomes]
        print(
            json.dumps(
                {"dialect": found.version, "runs": runs, "flags": outcomes, "problem": wrong or None, "recipe": found.tree}, indent=2
            )
        )
    else:
        print(found.explanation())
        if wrong:
            print(f"does not run: {wrong}")
    if not runs:
        raise typer.Exit(2)
