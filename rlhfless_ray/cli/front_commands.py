"""`rlhfless recipes`, `init`, `chat`, `push`, `compare` and `completion`: for a first run and for what comes after it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml

from rlhfless_ray.cli.local_file import local_file
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject


def recipes() -> None:
    """List the shipped recipes, with what each needs. `rlhfless train NAME` runs one."""
    from rich.console import Console
    from rich.table import Table

    from rlhfless_ray.recipe.shipped import shipped_recipes

    table = Table(box=None, pad_edge=False)
    for column in ("name", "command", "needs", "what it does"):
        table.add_column(column, overflow="fold")
    for name, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
        command = "workflow" if "stages" in tree else "sweep" if "recipe" in tree else "train"
        table.add_row(name, command, needs_of(tree), first_sentence(text))
    Console().print(table)


def first_sentence(text: str) -> str:
    """Return the first sentence of the comment at a file's head."""
    lines = (line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines() if line.startswith("#"))
    comment = " ".join(line for line in lines if not line.startswith("yaml-language-server"))
    return comment.partition(". ")[0].rstrip(".:")


def needs_of(tree: JsonObject) -> str:
    """Return the models and data sets that a recipe names, which are on the hub or on disk."""
    sections = ("policy", "reference", "critic", "prompts", "data", "evaluate")
    found = [tree[name]["path"] for name in sections if isinstance(tree.get(name), dict) and tree[name].get("path")]
    return ", ".join(dict.fromkeys(found)) or "nothing"


def init(out: Annotated[Path, typer.Argument(help="Where to write the recipe.")] = Path("recipe.yaml")) -> None:
    """Ask four questions, and write a recipe that answers them."""
    if out.exists():
        raise UserError(f"{out} exists already; name another file")
    from rlhfless_ray.front.train import reward_settings
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.recipe.shipped import schema_line
    from rlhfless_ray.recipe.starting_tree import FIRST_COLUMN, FIRST_DATA, FIRST_MODEL, starting_tree

    model = typer.prompt("Which model? A folder, or a name on the Hugging Face hub", default=FIRST_MODEL)
    data = typer.prompt("Which prompts? A file, or a data set on the hub", default=FIRST_DATA)
    column = typer.prompt("In which column are the prompts?", default=FIRST_COLUMN)
    reward = typer.prompt("Which reward? `math`, file.py:function, an address, or a reward model's folder", default="math")
    tree = starting_tree(model, data, column, reward_settings(reward))
    Recipe.parse(tree, where=str(out))
    out.write_text(schema_line() + yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    print(f"wrote {out}; what it would do: rlhfless plan --memory {out}; run it: rlhfless train {out}")


def chat(
    model: Annotated[Path, typer.Argument(parser=local_file, help="A run folder, or a model folder.")],
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
) -> None:
    """Talk to the policy of a run. An empty line ends the conversation."""
    from rlhfless_ray.front.trained_run import TrainedPolicy

    TrainedPolicy(model / "model" if (model / "status.json").is_file() else model, temperature).chat()


def push(
    run: Annotated[Path, typer.Argument(parser=local_file, help="A run folder.")],
    repo_id: Annotated[str, typer.Argument(help="Name of the repository on the Hugging Face hub, such as me/my-policy.")],
    private: Annotated[bool, typer.Option(help="Make a private repository.")] = False,
) -> None:
    """Upload a run's policy to the Hugging Face hub, with a model card of recipe, curve and cost."""
    from rlhfless_ray.front.trained_run import TrainedRun

    print(TrainedRun(run).push_to_hub(repo_id, private=private))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("compare.html"),
) -> None:
    """Write one page with the curves and costs of several runs."""
    from rlhfless_ray.report.compare import write_comparison

    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run}: not a run folder, it has no metrics.jsonl")
    print(write_comparison(runs, out).resolve())


class Shell(StrEnum):
    """Shells for which `rlhfless completion` prints a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell that reads the script.")]) -> None:
    """Print a script that completes commands, options and names of recipes in a shell. For bash: source <(rlhfless completion bash)"""
    from typer.completion import get_completion_script

    print(get_completion_script(prog_name="rlhfless", complete_var="_RLHFLESS_COMPLETE", shell=shell.value))


def recipe_names(incomplete: str) -> list[str]:
    """Return the shipped recipes, and the YAML files and folders here, that begin with a text."""
    from rlhfless_ray.recipe.shipped import shipped_recipes

    here = [f"{path}/" if path.is_dir() else str(path) for path in sorted(Path().glob(f"{incomplete}*"))]
    return [*(name for name in shipped_recipes() if name.startswith(incomplete)), *(name for name in here if name.endswith(("/", ".yaml")))]
