"""The `rlhfless` command: subcommands, and errors as one sentence with an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhfless_ray.cli.cluster_command import cluster
from rlhfless_ray.cli.explain_command import explain
from rlhfless_ray.cli.front_commands import chat, compare, completion, init, push, recipe_names, recipes
from rlhfless_ray.cli.generate_command import drafter, evaluate, generate, workflow
from rlhfless_ray.cli.guarded import guarded
from rlhfless_ray.cli.local_file import local_file
from rlhfless_ray.cli.passthrough import PassthroughCommand
from rlhfless_ray.cli.plan_command import plan
from rlhfless_ray.cli.resume_option import ChangedOption, ResumeCommand, ResumeOption, resume_of
from rlhfless_ray.cli.run_command import run, submit
from rlhfless_ray.cli.serve_command import serve
from rlhfless_ray.cli.simulate_command import simulate
from rlhfless_ray.common.errors import UserError

app = typer.Typer(
    help="Elastic RLHF on Ray.", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rlhfless_ray import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


app.command()(plan)


@app.command(cls=ResumeCommand)
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe in YAML, or the name of a shipped one.", autocompletion=recipe_names)],
    overrides: Annotated[list[str] | None, typer.Argument(help="Recipe keys to set, as section.key=value.", show_default=False)] = None,
    resume: ResumeOption = None,
    resume_changed: ChangedOption = False,
) -> None:
    """Train a policy, or run the supervised stage that `task` names.

    Exit code 0 after the final save, 2 for a mistake in the input, 1 for a failed run.
    """
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.recipe_file import is_stage

    if is_stage(recipe, overrides or []):
        from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
        from rlhfless_ray.supervise.run_supervised import run_supervised

        stage = SupervisedRecipe.load(recipe, overrides or [])
        goes_on = resume_of(resume, resume_changed)
        print_results(run_supervised(stage, resume=goes_on, resume_changed=resume_changed).path, stage.save.path)
        return
    parsed = Recipe.load(recipe, overrides or [])
    from rlhfless_ray.runtime.runtime import Runtime

    with Runtime(parsed, resume=resume_of(resume, resume_changed), resume_changed=resume_changed) as run:
        for _ in run:
            pass
    print_results(run.folder.path, parsed.save.path)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep in YAML.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue the latest sweep of this name; finished runs are kept.")] = False,
    resume_changed: Annotated[
        bool, typer.Option("--resume-changed", help="Continue runs although the sweep changes what they learn or count; implies --resume.")
    ] = False,
) -> None:
    """Run many runs on one cluster, a limited number at once.

    Exit code 0 if all succeeded, 2 for a mistake in the input, 1 if one failed.
    """
    from rlhfless_ray.sweep.sweep_file import load_sweep

    planned = load_sweep(file)
    from rlhfless_ray.sweep.run_sweep import SweepRunner

    SweepRunner(planned, resume=resume or resume_changed, resume_changed=resume_changed).run()


def print_results(folder: Path, saved: str = "") -> None:
    """Print where the results of a run are. `saved`: `save.path` of its recipe."""
    print(f"model:  {folder / 'model'}")
    if saved:
        print(f"saved:  {saved}")
    print(f"report: {(folder / 'report.html').resolve()}")


@app.command()
def report(run: Annotated[Path, typer.Argument(parser=local_file, help="A run folder, finished, stopped or crashed.")]) -> None:
    """Write report.html and timeline.json again from the files of a run folder."""
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder")
    if not any((run / name).is_file() for name in ("status.json", "recipe.yaml", "metrics.jsonl", "ledger.csv")):
        raise UserError(f"{run}: not a run folder, it has neither status.json nor recipe.yaml, metrics.jsonl or ledger.csv")
    from rlhfless_ray.report.report import write_report
    from rlhfless_ray.report.timeline import write_timeline

    if (run / "ledger.csv").exists():
        write_timeline(run)
    print(write_report(run).resolve())


for asked in (recipes, init, generate, drafter, evaluate, chat, push, compare, completion):
    app.command()(asked)
app.command(cls=ResumeCommand)(workflow)
app.command()(simulate)
app.command()(cluster)
app.command()(serve)
for command in (explain, run, submit):
    app.command(cls=PassthroughCommand)(command)


def main() -> None:
    """Entry point of `rlhfless`."""
    guarded(lambda: app(standalone_mode=True))
