"""The policy a run starts from: a user's folder, or one made from scratch and warm-started, kept in a cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rlhfless_ray.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.folder import read_folder, write_folder


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rlhfless-ray` or `~/.cache/rlhfless-ray`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhfless-ray"


def initial_policy(recipe: Recipe) -> tuple[dict[str, bytes], bool]:
    """The policy's files, and whether a warm start is still owed. Raises UserError for a folder that is no model."""
    _quiet_libraries()
    if recipe.policy.path:
        return read_folder(Path(recipe.policy.path)), False
    from rlhfless_ray.learn.scratch import scratch_policy
    from rlhfless_ray.learn.warm_start import warm_start_key
    from rlhfless_ray.prompts.tasks import task

    kept = cache_folder() / "policies" / warm_start_key(recipe)
    if kept.is_dir():
        return read_folder(kept), False
    return scratch_policy(recipe, task(recipe.prompts.task)), recipe.warm_start.steps > 0


def keep_policy(recipe: Recipe, files: dict[str, bytes]) -> None:
    """Put a warm-started policy into the cache; a second run that does so at the same time wins or loses whole."""
    from rlhfless_ray.learn.warm_start import warm_start_key

    kept = cache_folder() / "policies" / warm_start_key(recipe)
    kept.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".making-"))
    write_folder(temporary, files)
    try:
        os.rename(temporary, kept)
    except OSError:
        shutil.rmtree(temporary)


def _quiet_libraries() -> None:
    """Drop what libraries say that is no news to a user: progress bars over one file, and that there is no GPU here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def load_tokenizer(files: dict[str, bytes], trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="rlhfless-tokenizer-") as name:
        folder = write_folder(Path(name), {k: v for k, v in files.items() if not k.endswith(".safetensors")})
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = " ".join(str(error).split())[:200]
            raise UserError(f"policy.path: its tokenizer cannot be loaded: {first}") from None


def context_tokens(files: dict[str, bytes]) -> int | None:
    """The longest sequence the policy takes, from its config; None where the config does not say."""
    try:
        config = json.loads(files["config.json"])
    except ValueError:
        raise UserError("policy.path: its config.json is not valid JSON") from None
    return config.get("max_position_embeddings")
