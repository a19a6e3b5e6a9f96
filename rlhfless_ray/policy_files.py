"""The policy a run starts from: a user's folder, or one made from scratch and warm-started, kept in a cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rlhfless_ray.errors import UserError, one_line
from rlhfless_ray.prompts.tasks import task
from rlhfless_ray.prompts.tokenizer import TaskTokenizer
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.folder import KEPT, is_safetensors, read_folder, write_folder

VERSION = 4  # raise it when anything in learn/warm_start.py, learn/scratch.py or a task changes what comes out
HUB_MODEL = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rlhfless-ray` or `~/.cache/rlhfless-ray`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhfless-ray"


def warm_start_key(recipe: Recipe) -> str:
    """Hash of all that determines the policy from scratch and its warm start, except the thread count (it moves the last bits only)."""
    parts = {
        "version": VERSION,
        "versions": [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")],
        "task": recipe.prompts.task,
        "seed": recipe.run.seed,
        "policy": recipe.policy.model_dump(mode="json", include={"hidden_size", "layers", "dtype"}),
        "warm_start": recipe.warm_start.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def initial_policy(recipe: Recipe) -> tuple[dict[str, bytes], bool]:
    """The policy's files, and whether a warm start is still owed. Raises UserError for a folder that is no model."""
    if recipe.policy.path:
        files = read_folder(model_folder(recipe.policy.path, "policy.path"))
        _check(files)
        return files, False
    built_in = task(recipe.prompts.task)
    kept = cache_folder() / "policies" / warm_start_key(recipe)
    if kept.is_dir():
        return read_folder(kept), False
    quiet_libraries()
    from rlhfless_ray.learn.scratch import scratch_policy

    files = scratch_policy(recipe, built_in)
    if recipe.warm_start.steps == 0:
        keep_policy(recipe, files)  # the libraries that make it take seconds to import
    return files, recipe.warm_start.steps > 0


def _check(files: dict[str, bytes]) -> None:
    """Raises UserError for a config that names no family, and for weights that are torn: a copy that ended early, a pointer of git."""
    config = _config(files)
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("auto_map")):
        raise UserError("policy.path: its config.json names no model_type, so nothing can load it; copy the whole model folder")
    for name, content in files.items():
        if name.endswith(".safetensors") and not is_safetensors(content):
            raise UserError(f"policy.path: {name} is no whole safetensors file ({len(content):,} bytes); copy it again")


def model_folder(name: str, setting: str) -> Path:
    """A local folder, or the copy of a model on the Hugging Face hub that `org/name` names, fetched where it is not there yet.
    Raises UserError where the hub does not give it; `setting` is the recipe's key."""
    if Path(name).exists() or not HUB_MODEL.fullmatch(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[f"*{suffix}" for suffix in KEPT], ignore_patterns=["*/*"]))
    except Exception as error:  # of many types: no network, no such model, no right to it
        raise UserError(
            f"{setting}: there is no folder {name}, and the Hugging Face hub does not give a model of that name "
            f"({one_line(error, 200)}); give a local model folder, or check name, network and login"
        ) from None


def keep_policy(recipe: Recipe, files: dict[str, bytes]) -> None:
    """Put the policy a run starts from into the cache; a second run that does so at the same time wins or loses whole."""
    kept = cache_folder() / "policies" / warm_start_key(recipe)
    kept.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".making-"))
    write_folder(temporary, files)
    try:
        os.rename(temporary, kept)
    except OSError:
        shutil.rmtree(temporary)


def quiet_libraries() -> None:
    """Drop what libraries say that is no news to a user: progress bars over one file, and that there is no GPU here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def policy_tokenizer(recipe: Recipe, files: dict[str, bytes]) -> Any:
    """The policy's tokenizer; of a built-in policy one that does the same without transformers, which takes seconds to import."""
    return load_tokenizer(files, recipe.policy.trust_remote_code) if recipe.policy.path else TaskTokenizer(task(recipe.prompts.task))


def load_tokenizer(files: dict[str, bytes], trust_remote_code: bool) -> Any:
    quiet_libraries()
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="rlhfless-tokenizer-") as name:
        folder = write_folder(Path(name), {k: v for k, v in files.items() if not k.endswith(".safetensors")})
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:  # of whatever type the libraries raise for files that they cannot read
            raise UserError(f"policy.path: its tokenizer cannot be loaded: {one_line(error, 200)}") from None


# Names under which a config says it, in the order of their families' age; vLLM looks for the same ones.
CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)
PLAIN_ATTENTION = ("llama", "qwen2", "qwen3")  # every layer keeps a key and a value of every token, and nothing else
# With these a config of type qwen2 leaves nothing of what is asked here to its family's defaults.
WHOLE_QWEN2 = {
    "hidden_size", "layer_types", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "use_sliding_window",
}


def context_tokens(files: dict[str, bytes]) -> int | None:
    """The longest sequence the policy takes, from its config: the shortest of what the config (a multimodal model's: that
    of its text part) says under any of the usual names. None where it does not say."""
    config = text_config(files)
    said = [config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int) and config[key] > 0]
    return min(said, default=None)


def kv_cache_bytes(files: dict[str, bytes], tokens: int, block_size: int, dtype: str) -> int | None:
    """Bytes of KV cache for one sequence of `tokens`: whole blocks, and the one that vLLM always holds back. None for kinds of
    attention not known here."""
    config = text_config(files)
    windows = config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("model_type") not in PLAIN_ATTENTION or windows:
        return None
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    return (-(-tokens // block_size) + 1) * block_size * values * (4 if dtype == "float32" else 2)


def check_kv_cache(recipe: Recipe, files: dict[str, bytes], longest_prompt_tokens: int) -> None:
    """Raises UserError when an engine's KV cache on CPU could not hold the longest sequence there may be."""
    tokens = recipe.longest_tokens(longest_prompt_tokens)
    needed = kv_cache_bytes(files, tokens, recipe.rollout.block_size, recipe.policy.dtype)
    if needed is not None and needed > recipe.rollout.kv_cache_mb * 2**20:
        raise UserError(
            f"rollout.kv_cache_mb: {recipe.rollout.kv_cache_mb} MiB do not hold one sequence of {tokens} tokens (the longest "
            f"prompt and rollout.max_tokens), for which it takes {-(-needed // 2**20)}; raise it, or lower rollout.max_tokens"
        )


def text_config(files: dict[str, bytes]) -> dict[str, Any]:
    """config.json with its family's defaults filled in; as it stands for a family that transformers does not know."""
    raw = _config(files)
    if raw.get("model_type") == "qwen2" and raw.keys() >= WHOLE_QWEN2:
        return raw
    from transformers import AutoConfig

    try:
        family = AutoConfig.for_model(**raw)
    except Exception:  # a family of its own, or a value that whoever loads the model will name
        return raw.get("text_config") or raw
    return family.get_text_config().to_dict()


def _config(files: dict[str, bytes]) -> Any:
    try:
        return json.loads(files["config.json"])
    except ValueError:
        raise UserError("policy.path: its config.json is not valid JSON") from None
