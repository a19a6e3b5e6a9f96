"""`rlhfless generate`, `evaluate` and `workflow`: responses without training, and stages one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhfless_ray.cli.local_file import local_file
from rlhfless_ray.cli.resume_option import ChangedOption, From, resume_of

ARGUMENTS = typer.Argument(help="A recipe in YAML, if any, then keys to set, as section.key=value.", show_default=False)
RESUME = typer.Option("--resume", help="Continue the latest run of this name. Existing responses are not generated again.")


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Return the recipe's path, if the first argument is one, and the overrides."""
    given = arguments or []
    return (None, given) if not given or "=" in given[0] else (given[0], given[1:])


def generate(
    arguments: Annotated[list[str] | None, ARGUMENTS] = None,
    out: Annotated[Path | None, typer.Option("--out", parser=local_file, help="Also write the responses to this JSONL file.")] = None,
    resume: Annotated[bool, RESUME] = False,
) -> None:
    """Generate responses with their log-probabilities, and score them if the recipe has a reward.

    rlhfless generate policy.path=my-model prompts.path=prompts.jsonl prompts.prompt_column=question rollout.samples_per_prompt=4
    """
    from rlhfless_ray.recipe.generation import GenerationRecipe

    recipe = GenerationRecipe.read(*split_arguments(arguments))
    from rlhfless_ray.runtime.generation import generate as run

    responses = run(recipe, out=out, resume=resume)
    print(f"responses: {out or responses}")
    print(f"report:    {(responses.parent / 'report.html').resolve()}")


def drafter(
    out: Annotated[Path, typer.Option("--out", parser=local_file, help="The folder of the head, for `rollout.drafter`.")],
    arguments: Annotated[list[str] | None, ARGUMENTS] = None,
    hidden: Annotated[int, typer.Option(help="Width of the head, a multiple of 32. 0: that of the policy.", min=0)] = 0,
    passes: Annotated[int, typer.Option(help="Passes over the responses.", min=1)] = 6,
    resume: Annotated[bool, RESUME] = False,
) -> None:
    """Train an EAGLE-3 head that drafts for a policy, on responses that are generated first.

    rlhfless drafter recipes/gsm8k.yaml policy.path=my-model prompts.path=train.jsonl prompts.rows=512 --out my-head
    """
    from rlhfless_ray.recipe.generation import GenerationRecipe

    recipe = GenerationRecipe.read(*split_arguments(arguments), name="drafter")
    from rlhfless_ray.runtime.head_for_policy import head_for_policy as run

    print(f"head: {run(recipe, out, hidden, passes, resume=resume)}")


def evaluate(
    arguments: Annotated[list[str] | None, ARGUMENTS] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A model or run folder. Several are compared.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", help="A data set, or several. Default: the held-out prompts.", show_default=False)
    ] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="Responses for pass@k.", show_default=False)] = None,
    resume: Annotated[bool, RESUME] = False,
) -> None:
    """Evaluate models on the same prompts, side by side: mean reward, pass@k, lengths and costs as a table and as JSON.

    rlhfless evaluate recipes/quickstart.yaml --model runs/sft --model runs/dpo evaluate.samples_per_prompt=4
    """
    from rlhfless_ray.common.errors import UserError
    from rlhfless_ray.recipe.generation import GenerationRecipe

    path, overrides = split_arguments(arguments)
    if not model and not any(one.startswith("policy.path=") for one in overrides):
        raise UserError("--model: name a model or run folder")
    if path is None and not data and not any(one.startswith("prompts.") for one in overrides):
        raise UserError("--data: name a data set, or give a recipe with held-out prompts")
    models = model or [one.partition("=")[2] for one in overrides if one.startswith("policy.path=")][-1:]
    source = [f"prompts.path={data[0]}"] if data and path is None else []  # a recipe needs one; all of --data are used
    recipe = GenerationRecipe.read(path, [*source, *overrides, f"policy.path={models[0]}"], name="evaluate")
    from rlhfless_ray.runtime.evaluate_models import FILE, with_own_folder
    from rlhfless_ray.runtime.evaluate_models import evaluate as run

    recipe = with_own_folder(recipe, resume=resume)
    print(run(recipe, models, data or (), k or (), resume=resume))
    print(f"\njson: {Path(recipe.run.root) / recipe.run.name / FILE}")


def workflow(
    file: Annotated[Path, typer.Argument(help="A workflow in YAML.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Keys to set, as section.key=value.", show_default=False)] = None,
    resume: Annotated[
        From | None,
        typer.Option(
            "--resume",
            help="Continue the workflow of this name; finished stages are kept. --resume=previous: the stopped stage continues from the "
            "checkpoint before its newest.",
            show_default=False,
        ),
    ] = None,
    resume_changed: ChangedOption = False,
) -> None:
    """Run the stages of a file one after another: training, generation, evaluation. One report covers all of them."""
    from rlhfless_ray.recipe.workflow_file import Workflow

    parsed = Workflow.load(file, overrides or [])
    from rlhfless_ray.report.progress_display import ProgressDisplay
    from rlhfless_ray.runtime.run_workflow import run_workflow

    say = ProgressDisplay("plain", 0).message  # unlike print, it does not fail on a closed pipe
    folder = run_workflow(parsed, resume=resume_of(resume, resume_changed), resume_changed=resume_changed, say=say)
    print(f"report: {(folder / 'report.html').resolve()}")
