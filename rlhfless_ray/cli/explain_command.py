"""`rlhfless explain -- COMMAND`: show how an OpenRLHF command is read, without running it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from rlhfless_ray.cli.passthrough import split_options
from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
    from rlhfless_ray.compat.openrlhf.outcomes import CommandTranslation


def explain(ctx: typer.Context) -> None:
    """Show how a command is read: rlhfless explain [--json] -- python3 -m openrlhf.cli.train_ppo_ray …

    Prints its dialect, the slots that it needs, the recipe, and which flags are honoured, read as hints, without effect or
    refused. The command may be wrapped in `ray job submit … --`, `srun` or `bash -c`. It may also be a launch script, or
    flags alone. `rlhfless explain --flags [LAUNCHER]` lists every flag of a launcher (default: train_ppo_ray).
    Exit code 0 if the command would run, 2 if not.
    """
    chosen, argv = split_options(ctx.args, "--json", "--flags")
    from rlhfless_ray.compat.openrlhf.command import find, is_submission
    from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation, flags_of_launcher, flags_today
    from rlhfless_ray.compat.openrlhf.flags import LAUNCHER
    from rlhfless_ray.compat.openrlhf.inference_table import LAUNCHERS
    from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
    from rlhfless_ray.compat.openrlhf.memory import too_large_here, width_note
    from rlhfless_ray.compat.openrlhf.resources import fit
    from rlhfless_ray.compat.openrlhf.supervised_table import TASKS
    from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch

    if "--flags" in chosen:
        name = argv[0].rpartition(".")[2] if argv else LAUNCHER
        if name not in (LAUNCHER, *TASKS, *LAUNCHERS):
            raise UserError(f"explain --flags {name}: name one of {', '.join((LAUNCHER, *TASKS, *LAUNCHERS))}")
        print(flags_today() if name == LAUNCHER else flags_of_launcher(name))
        return
    launch = find(argv)
    translation = translate_launch(launch)
    if translation is None:
        raise UserError(f"openrlhf.cli.{launch.launcher}: `explain` reads launchers that train; start this one with `rlhfless run`")
    if isinstance(translation, LauncherTranslation):
        _explain_other(translation, as_json="--json" in chosen)
        return
    fewer = "" if is_submission(argv) else fit(translation)  # a job runs on another machine
    if fewer:
        translation.notes.append(fewer)
    translation.notes += width_note(translation)
    wrong = _problem(translation)
    if not translation.refused and wrong is None and not is_submission(argv):
        wrong = too_large_here(translation)
    if "--json" in chosen:
        print(json.dumps({**as_data(translation), "problem": wrong, "runs": not translation.refused and wrong is None}, indent=2))
    else:
        print(explanation(translation))
        if wrong:
            print(f"does not run: {wrong}")
    if translation.refused or wrong:
        raise typer.Exit(2)


def _problem(translation: CommandTranslation) -> str | None:
    """Return why the recipe is invalid. None if it is valid, or lacks refused flags."""
    error = None if translation.refused else translation.problem()
    return str(error) if error else None


def _explain_other(translation: LauncherTranslation, as_json: bool) -> None:
    """Explain a command of a launcher beside PPO's."""
    wrong = _problem(translation)
    runs = not translation.refused and wrong is None
    if as_json:
        outcomes = [{"flag": flag, "status": status, "why": why} for flag, status, why in translation.outcomes]
        described = {"dialect": translation.version, "runs": runs, "flags": outcomes, "problem": wrong, "recipe": translation.tree}
        print(json.dumps(described, indent=2))
    else:
        print(translation.explanation())
        if wrong:
            print(f"does not run: {wrong}")
    if not runs:
        raise typer.Exit(2)
