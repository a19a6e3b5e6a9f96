"""`rlhfless explain -- COMMAND`: show how an OpenRLHF command is read, without running it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from rlhfless_ray.cli.passthrough import split_options
from rlhfless_ray.common.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.command import LaunchCommand
    from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
    from rlhfless_ray.compat.openrlhf.translate import Translation

VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*(?:\[[@*]\])?\})")


def explain(ctx: typer.Context) -> None:
    """Show how a command is read: rlhfless explain [--json] -- python3 -m openrlhf.cli.train_ppo_ray …

    Prints its dialect, the slots that it needs, the recipe, and which flags are honoured, read as hints, without effect or
    refused. The command may be wrapped in `ray job submit … --`, `srun` or `bash -c`. It may also be a launch script, or
    flags alone. `rlhfless explain --flags [LAUNCHER]` lists every flag of a launcher (default: train_ppo_ray).
    Of a script that starts several, the first is explained, and of the others whether they would run.
    Exit code 0 if all of them would run, 2 if not.
    """
    chosen, argv = split_options(ctx.args, "--json", "--flags")
    from rlhfless_ray.compat.openrlhf.command import TRANSLATED, find_all, is_submission
    from rlhfless_ray.compat.openrlhf.explain_report import list_flags
    from rlhfless_ray.compat.openrlhf.flags import LAUNCHER

    if "--flags" in chosen:
        name = argv[0].rpartition(".")[2] if argv else LAUNCHER
        if name not in TRANSLATED:
            raise UserError(f"explain --flags {name}: name one of {', '.join(TRANSLATED)}")
        print(list_flags(name))
        return
    first, *rest = find_all(argv)
    text, data = _explained(_translated(first), here=not is_submission(argv))
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


def _translated(launch: LaunchCommand) -> Translation | LauncherTranslation:
    """Return the translation of a launch. Raises UserError for one that cannot be read."""
    from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch

    try:
        translation = translate_launch(launch)
    except UserError as error:
        if empty := _words_without_value(launch, str(error)):
            translation = _translated(replace(launch, flags=[word for word in launch.flags if word not in empty]))
            translation.notes.append(f"no value here, and so no flags: {' '.join(empty)}")
            return translation
        unknown = next((flag for flag in launch.flags if "$" in flag and flag in str(error)), None)
        hint = f"; `{unknown}` is known only when the script runs, so put its value there to explain it" if unknown else ""
        raise UserError(f"{error}{hint}") from None
    if translation is None:
        raise UserError(f"openrlhf.cli.{launch.launcher}: `explain` reads launchers that train; start this one with `rlhfless run`")
    return translation


def _words_without_value(launch: LaunchCommand, error: str) -> list[str]:
    """Return the variables without a value that stand where flags do. A shell leaves such words out."""
    unread = re.search(r"unrecognized arguments: (.*)", error)
    words = unread[1].split() if unread else []
    return [word for word in dict.fromkeys(launch.flags) if VARIABLE.fullmatch(word) and word in words]


def _why_not(launch: LaunchCommand) -> str | None:
    """Return why a launch would not run, or None if it would."""
    try:
        translation = _translated(launch)
    except UserError as error:
        return str(error)
    wrong = translation.refusal() or translation.problem()
    return str(wrong) if wrong else None


def _explained(translation: Translation | LauncherTranslation, here: bool) -> tuple[str, dict[str, Any]]:
    """Return text and data about a command. `here`: it runs on this machine, not as a job on another one."""
    from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation
    from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
    from rlhfless_ray.compat.openrlhf.memory import too_large_here, too_large_stage, width_note
    from rlhfless_ray.compat.openrlhf.resources import fit, fit_width
    from rlhfless_ray.compat.openrlhf.supervised import SupervisedTranslation

    if isinstance(translation, LauncherTranslation):
        if here and (narrower := fit_width(translation.settings)):
            translation.notes.append(narrower)
        problem = _problem(translation)
        if here and isinstance(translation, SupervisedTranslation) and not translation.refused and problem is None:
            problem = too_large_stage(translation)
        text, data = translation.explanation(), translation.as_data()
    else:
        if here and (fewer := fit(translation)):
            translation.notes.append(fewer)
        translation.notes += width_note(translation)
        problem = _problem(translation)
        if here and not translation.refused and problem is None:
            problem = too_large_here(translation)
        text, data = explanation(translation), as_data(translation)
    return text, {**data, "runs": not translation.refused and problem is None, "problem": problem}


def _problem(translation: Translation | LauncherTranslation) -> str | None:
    """Return why the recipe is invalid. None if it is valid, or lacks refused flags."""
    error = None if translation.refused else translation.problem()
    return str(error) if error else None
