"""Find the model that a user names: a model folder, a name on the hub, or a run folder, finished or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.run.checkpoint_files import DamagedCheckpoint, check_files
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.weights.adapter import CONFIG, Adapter, merge_folder
from rlhfless_ray.weights.layout import whole_layers
from rlhfless_ray.weights.load_policy import first_supervised_policy, initial_policy, model_folder, read_model
from rlhfless_ray.weights.model_folder import (
    AVERAGE,
    MAX_FILE_BYTES,
    WEIGHTS,
    as_folder,
    complete_folder,
    read_content,
    read_folder,
    split_files,
    with_dtype,
    without_weights,
    write_folder,
)
from rlhfless_ray.weights.shards import slices_in
from rlhfless_ray.weights.tensor_file import Files, as_tensor

AnyRecipe = TypeVar("AnyRecipe", Recipe, SupervisedRecipe)


def find_model(name: str | Path, setting: str, written: Path) -> Path:
    """Return the folder of a model.

    Args:
        name: a model folder, a hub model, a checkpoint, or a run folder. Of a run that is done the final model is used, else its newest
            checkpoint. A run that was continued after its end still has the model of that end.
        setting: name of the setting in messages.
        written: folder into which a checkpoint's model is written, below its run's name, with adapters merged.

    Raises:
        UserError: There is no model.
    """
    path = Path(name)
    if (path / "config.json").is_file() or not path.is_dir():
        folder = model_folder(str(name), setting)
        if not folder.is_dir():
            raise UserError(f"{setting}: there is no model or run folder {name}")
        return folder
    run = next((parent for parent in (path, *path.resolve().parents) if (parent / "recipe.yaml").is_file()), None)
    checkpoint = path if (path / "learner.json").is_file() else _newest_checkpoint(path)
    has_model = (path / "model" / "config.json").is_file()
    if has_model and (run is None or checkpoint is None or RunFolder(path).read_status().get("status", "done") == "done"):
        return path / "model"
    if run is None or checkpoint is None:
        raise UserError(f"{setting}: {path} is neither a model folder nor a run folder with a model or a checkpoint")
    target = written / f"{run.name}-{checkpoint.name}"
    if not target.is_dir():
        try:
            check_files(checkpoint)
        except DamagedCheckpoint as error:
            raise UserError(f"{setting}: {error.path} {error.what}; name another checkpoint") from None
        adapted = (checkpoint / CONFIG).is_file()
        swap_folder(target, partial(_merge if adapted else _write_model, run, checkpoint))
    return target


def _newest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint of a run, in its folder or where its recipe's `checkpoint.path` put it."""
    recipe = run / "recipe.yaml"
    section = (_recipe_tree(run).get("checkpoint") or {}) if recipe.is_file() else {}
    elsewhere = Path(section.get("path") or run)
    folders = (run / "checkpoints", elsewhere / "_actor", elsewhere / run.name)  # the last: of a supervised stage
    checkpoints = [file.parent for folder in folders for file in folder.glob("[scg]*/learner.json")]
    return max(checkpoints, key=lambda path: (path / "learner.json").stat().st_mtime, default=None)


def _recipe_tree(run: Path) -> JsonObject:
    tree = RunFolder(run).recipe_before()
    if tree is None:
        raise UserError(f"{run / 'recipe.yaml'} cannot be read as a recipe; name a model folder")
    return tree


def _merge(run: Path, checkpoint: Path, target: Path) -> None:
    """Write the run's first model with the checkpoint's adapters merged."""
    first, dtype = _first_model(run), _recipe_tree(run)["policy"]["dtype"]
    with as_folder(first) as base:
        merge_folder(base, Adapter.read(checkpoint), target, dtype)
    index = {name: content for name, content in first.items() if name.endswith(".index.json")}
    write_folder(target, {**with_dtype(without_weights(first), [read_content(file) for file in target.glob(f"*{WEIGHTS}")]), **index})


def _write_model(run: Path, checkpoint: Path, target: Path) -> None:
    """Write a model folder: weights of a checkpoint, by the names of `save_pretrained`, and the rest of the run's first model.

    With `ema.beta` the weights are their moving average, as in the model at the run's end. Parts of a tensor that several ranks saved are
    put together, for one file of the folder at a time.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhfless_ray.weights.saved_names import saved_state

    others = without_weights(_first_model(run))
    stored = sorted(checkpoint.glob(f"{AVERAGE}*{WEIGHTS}")) or sorted(checkpoint.glob(f"model*{WEIGHTS}"))
    held = slices_in(map(read_content, stored))
    with as_folder(others) as folder, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name in held}
    count = -(-sum(file.stat().st_size for file in stored) // MAX_FILE_BYTES)
    owner = whole_layers({name: shape.numel() for name, shape in shapes.items()}, count)
    for number in range(count):
        own = {name: as_tensor(held[name]).view(shape) for name, shape in shapes.items() if owner[name] == number}
        write_folder(target, split_files(saved_state(model, own), rank=number, ranks=count))
    complete_folder(target, others)


def _first_model(run: Path) -> Files:
    """Return the model that a run began with."""
    if (run / "reference").is_dir():
        return read_folder(run / "reference")
    tree = _recipe_tree(run)
    if path := tree["policy"]["path"]:
        return read_model(model_folder(path, "policy.path"))
    if "task" in tree:
        return first_supervised_policy(_scratch_recipe(SupervisedRecipe, "data", tree, task="sft"))
    return initial_policy(_scratch_recipe(Recipe, "prompts", tree, reward={"function": "task"}))[0]


def _scratch_recipe(kind: type[AnyRecipe], data: str, tree: JsonObject, **required: object) -> AnyRecipe:
    """Return a recipe with the settings of a run that its policy was made by.

    The others are not read, because an older version may have accepted some that are refused now. `data`: section with the built-in task.
    """
    recipe = kind.parse({data: {"task": tree[data]["task"]}, **required})
    keys = {"run": ("seed",), "policy": ("hidden_size", "layers", "context_tokens", "dtype"), data: ("input_template",)}
    keys["warm_start"] = ("steps", "batch_size", "learning_rate")
    found = {name: {key: tree[name][key] for key in of_section if key in tree[name]} for name, of_section in keys.items() if name in tree}
    return recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=values) for name, values in found.items()})
