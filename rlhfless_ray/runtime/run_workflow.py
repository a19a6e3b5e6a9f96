"""Run the stages of a workflow one after another, each in its own run folder, and resume a stopped workflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.recipe.workflow_file import PAIRS, PlannedStage, Workflow
from rlhfless_ray.report.workflow_report import write_workflow_report
from rlhfless_ray.run.checkpoints import Checkpoints
from rlhfless_ray.run.folder import RunFolder, check_writable
from rlhfless_ray.run.responses import RECORD, preference_pairs, read_groups, write_rows
from rlhfless_ray.runtime.evaluate_models import FILE, evaluate
from rlhfless_ray.runtime.generation import generate
from rlhfless_ray.runtime.runtime import Resume, Runtime
from rlhfless_ray.supervise.find_checkpoints import has_checkpoint
from rlhfless_ray.supervise.run_supervised import run_supervised

PLAN = "workflow.json"  # the stages' recipes as the file gave them


def run_workflow(workflow: Workflow, *, resume: Resume = False, resume_changed: bool = False, say: Callable[[str], None] = print) -> Path:
    """Run every stage and return the workflow's folder.

    It holds a run folder for each stage, `workflow.json` with their recipes, and `report.html` over all stages, which is written after
    each. Stages share one Ray.

    Args:
        workflow: The stages. All recipes are checked before the first one starts.
        resume: Continue the workflow of this name. Finished stages are kept, and a stopped one continues from its checkpoint, or with
            `"previous"` from the one before that.
        resume_changed: Continue a stopped stage although its recipe changes what is learned or counted.
        say: Called with one line before each stage, and about prompts without a pair.

    Raises:
        UserError: For a mistake in the file, or if a finished stage's recipe has changed.
        RunError: If a stage fails. Its run folder stays.

    Examples:
        >>> from rlhfless_ray import Workflow, run_workflow
        >>> quiet = {"progress": "off", "wandb": "off"}
        >>> train = {"task": "sft", "run": {"steps": 1}, "data": {"task": "chain", "rows": 64}, "watch": quiet}
        >>> workflow = Workflow.parse({"run": {"name": "mine"}, "stages": [{"name": "sft", "train": train}]})
        >>> (run_workflow(workflow, say=lambda line: None) / "report.html").exists()
        True
    """
    stages, folder = workflow.plan(), workflow.folder
    if folder.is_dir() and not resume:
        raise UserError(f"{folder} exists already; continue it with --resume, or set another run.name")
    check_writable(folder, "run.root")
    _check_unchanged(folder, stages)
    replace_file(folder / PLAN, json.dumps([{"name": s.name, "kind": s.kind, "recipe": s.tree} for s in stages], indent=1).encode())
    waiting = [stage for stage in stages if not is_done(folder, stage)]
    with ExitStack() as stack:
        if len(waiting) > 1:
            recipe = waiting[0].recipe
            engines = not all(isinstance(stage.recipe, SupervisedRecipe) for stage in waiting)
            stack.enter_context(RayCluster.shared(recipe, store_mb=RayCluster.largest_store_mb(recipe), engines=engines))
        for stage in waiting:
            STOP.check()
            say(f"stage {stage.name}, {stages.index(stage) + 1} of {len(stages)}: {stage.kind}")
            try:
                _run(folder / stage.name, stage, say, resume, resume_changed)
            finally:
                write_workflow_report(folder, [(stage.name, stage.kind) for stage in stages])
    write_workflow_report(folder, [(stage.name, stage.kind) for stage in stages])
    return folder


def is_done(folder: Path, stage: PlannedStage) -> bool:
    """Return whether a stage has its result."""
    path = folder / stage.name
    if stage.kind == "evaluate":
        return (path / FILE).is_file()
    return RunFolder(path).is_done and (stage.kind == "train" or not stage.makes_pairs or (path / PAIRS).is_file())


def _check_unchanged(folder: Path, stages: list[PlannedStage]) -> None:
    """Raise UserError if a finished stage had another recipe, or one that generates. A training stage compares its own when it resumes."""
    try:
        before: JsonObject = {stage["name"]: stage["recipe"] for stage in json.loads((folder / PLAN).read_bytes())}
    except FileNotFoundError:
        return
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{folder / PLAN} is damaged, so nothing tells what its stages were made with; set another run.name") from None
    for stage in stages:
        compares = stage.kind == "train" and not is_done(folder, stage)
        if compares or not (folder / stage.name).is_dir() or stage.name not in before:
            continue
        if before[stage.name] != json.loads(json.dumps(stage.tree)):
            raise UserError(
                f"stage {stage.name}: {folder / stage.name} was made with another recipe; set it back, or remove that folder and those of "
                "the stages that use it"
            )


def _run(path: Path, stage: PlannedStage, say: Callable[[str], None], how: Resume = True, resume_changed: bool = False) -> None:
    recipe = stage.recipe
    if path.is_dir() and not _can_resume(path, stage):
        shutil.rmtree(path)  # it ended before its first checkpoint
    resume = path.is_dir()
    if isinstance(recipe, GenerationRecipe):
        if stage.kind == "evaluate":
            evaluate(recipe, list(stage.models.values()), resume=resume, labels=list(stage.models))
            return
        responses = generate(recipe, resume=resume)
        if stage.makes_pairs:
            pairs, prompts = write_rows(path / PAIRS, preference_pairs(responses)), sum(1 for _ in read_groups(responses))
            if not pairs:
                raise UserError(
                    f"stage {stage.name}: no prompt has responses of different rewards, so there are no pairs; raise the temperature"
                )
            if pairs < prompts:
                say(f"stage {stage.name}: {pairs} pairs of {prompts} prompts; the others have no two responses of different rewards")
    elif isinstance(recipe, SupervisedRecipe):
        run_supervised(recipe, resume=resume and (how or True), resume_changed=resume_changed)
    else:
        with Runtime(recipe, resume=resume and (how or True), resume_changed=resume_changed) as run:
            for _ in run:
                pass


def _can_resume(path: Path, stage: PlannedStage) -> bool:
    if stage.kind == "generate":
        return (path / RECORD).is_file()
    if isinstance(stage.recipe, SupervisedRecipe):
        return has_checkpoint(stage.recipe)
    return stage.kind == "evaluate" or bool(Checkpoints(stage.recipe.checkpoint, path).list())
