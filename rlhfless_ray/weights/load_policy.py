"""Load the initial policy: a user's folder, or one made from scratch, warm-started and cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Container, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import peak_memory
from placement.memory import VALUE_BYTES, stored_shapes
from rlhfless_ray.common.disk_space import DiskFull, writing
from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.folders import cache_folder
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.common.remote_files import fetched, is_remote
from rlhfless_ray.local.fast_imports import transformers_without_torch
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.task_tokenizer import TaskTokenizer
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.vision.image_processor import reads_images
from rlhfless_ray.weights.check_config import check_config
from rlhfless_ray.weights.model_folder import (
    INDEX,
    KEPT_SUFFIXES,
    config_of,
    has_valid_ends,
    has_valid_index,
    is_safetensors,
    missing_files,
    read_folder,
    tensor_shapes,
    write_folder,
)
from rlhfless_ray.weights.quantized_base import refuse_quantized
from rlhfless_ray.weights.tensor_file import Files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.prompts.builtin_tasks import Task
    from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

VERSION = 4  # increase it when learn/warm_start.py, weights/tiny_model.py or a task changes the result
FILE_PATTERNS = [f"*{suffix}" for suffix in KEPT_SUFFIXES]
HUB_MODEL = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def warm_start_key(recipe: Recipe) -> str:
    """Hash everything that determines a warm-started policy, but the thread count only for `run.exact`: it changes the last bits."""
    more: JsonObject = {"threads": recipe.learner.max_slots_per_rank} if recipe.run.exact else {}
    more |= {"input_template": recipe.prompts.input_template, "warm_start": recipe.warm_start.model_dump(mode="json")}
    return _scratch_key(recipe, recipe.prompts.task, more)


def _scratch_key(recipe: Recipe | SupervisedRecipe, task: str, more: JsonObject) -> str:
    parts = {
        "version": VERSION,
        "versions": [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")],
        "task": task,
        "seed": recipe.run.seed,
        "policy": recipe.policy.model_dump(mode="json", include={"hidden_size", "layers", "context_tokens", "dtype"}),
        **more,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def initial_policy(recipe: Recipe) -> tuple[Files, bool]:
    """Return the policy's files, and whether it still needs a warm start. Raises UserError for an invalid folder."""
    if recipe.policy.path:
        return read_model(model_folder(recipe.policy.path, "policy.path")), False
    built_in, key = task(recipe.prompts.task), warm_start_key(recipe)
    if built_in.sees_images and recipe.warm_start.steps:
        raise UserError(f"warm_start.steps: the warm start reads no images, which prompts.task {built_in.name} has; set it to 0")
    if (cached := _cached_policy(key)) is not None:
        return cached, False
    return _scratch_policy(recipe, built_in, key if recipe.warm_start.steps == 0 else None), recipe.warm_start.steps > 0


def first_supervised_policy(recipe: SupervisedRecipe) -> Files:
    """Return the files of a built-in task's policy, with which a supervised stage begins."""
    built_in, key = task(recipe.data.task), _scratch_key(recipe, recipe.data.task, {})
    if built_in.sees_images:
        raise UserError(f"data.task: supervised stages read no images, which {built_in.name} has; take chain or sort")
    cached = _cached_policy(key)
    return _scratch_policy(recipe, built_in, key) if cached is None else cached


def _cached_policy(key: str) -> Files | None:
    cached = cache_folder() / "policies" / key
    return read_folder(cached) if cached.is_dir() else None


def _scratch_policy(recipe: Recipe | SupervisedRecipe, built_in: Task, key: str | None) -> Files:
    """Make a policy from scratch. `key`: to cache it by, because importing its libraries takes seconds."""
    quiet_libraries()
    from rlhfless_ray.weights.tiny_model import scratch_policy

    files = scratch_policy(recipe, built_in)
    if key is not None:
        with suppress(OSError, DiskFull):  # making it again costs seconds only
            _cache(key, files)
    return files


def read_model(folder: Path, setting: str = "policy.path") -> Files:
    """Read and check a model folder, see `read_folder` and `check_files`."""
    files = read_folder(folder, setting)
    check_files(files, setting)
    return files


def check_files(files: Files, setting: str = "policy.path") -> None:
    """Raise UserError for a config that no model has, and for missing or truncated weights, as in partial copies and git-lfs pointers."""
    config = config_of(files)
    check_config(config, setting)
    for name, content in files.items():
        if name.endswith(".safetensors") and not is_safetensors(content):
            raise UserError(f"{setting}: {name} is not a complete safetensors file ({len(content):,} bytes); copy it again")
    if not has_valid_index(files):
        raise UserError(f"{setting}: {INDEX} names no weights files; copy it again")
    if not has_valid_ends(files):
        raise UserError(f"{setting}: generation_config.json is no JSON object with numbers as `eos_token_id`; copy it again, or remove it")
    if not files.keys() & {INDEX, "model.safetensors"} and any(name.endswith(".safetensors") for name in files):
        raise UserError(f"{setting}: it has neither model.safetensors nor {INDEX}, which names weights files; copy the whole model folder")
    if missing := missing_files(files):
        raise UserError(f"{setting}: {missing[0]} is missing, which {INDEX} names; copy the whole model folder")
    _check_shapes(files, config, setting)


def _check_shapes(files: Files, config: JsonObject, setting: str) -> None:
    """Raise UserError if the weights have other shapes, or fewer layers, than config.json says, or lack some of a layer, for families
    whose names are known."""
    wanted, layers = stored_shapes(config), 0
    advice, shapes = "take both from the same model", dict(tensor_shapes(files))
    for name, shape in shapes.items():
        *_, parent, module, kind = ("", "", *re.sub(r"\.experts\.\d+\.", ".experts.", name).split("."))
        expected = wanted.get(f"{parent}.{module}", wanted.get(module)) if kind == "weight" else None
        layers += (module, kind) == ("input_layernorm", "weight")
        if expected not in (None, shape):
            there, said = (" × ".join(map(str, one)) for one in (shape, expected))
            raise UserError(f"{setting}: its weights do not fit its config.json: {name} is {there} instead of {said}; {advice}")
    least = config.get("num_hidden_layers")
    if wanted and isinstance(least, int) and layers < least:
        raise UserError(f"{setting}: its weights do not fit its config.json: they have {layers} layers instead of {least}; {advice}")
    if lacking := _missing_in_layers(shapes, config) if wanted and isinstance(least, int) else None:
        raise UserError(f"{setting}: its weights do not fit its config.json: {lacking} is missing; copy the whole model folder")


def _missing_in_layers(names: Collection[str], config: JsonObject) -> str | None:
    """Return a weight of attention or feed-forward that some layers have and another one lacks, or None."""
    has_experts = config.get("num_experts") or config.get("num_local_experts")  # layers may differ in them
    pattern = re.compile(r"(\.layers\.)\d+(\.self_attn\.)" if has_experts else r"(\.layers\.)\d+(\.self_attn\.|\.mlp\.)")
    alike = sorted({pattern.sub(r"\1{}\2", name) for name in names if pattern.search(name)})
    each = (name.format(layer) for name in alike for layer in range(config["num_hidden_layers"]))
    return next((name for name in each if name not in names), None)


def check_family(files: Files, setting: str = "policy.path", *, is_causal: bool = True, trusts_code: bool = True) -> None:
    """Raise UserError for a model type of which neither transformers nor the folder's own code has a causal language model.

    `is_causal`: otherwise any model will do. `trusts_code`: whether the folder's code may run.
    """
    with transformers_without_torch():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    consequence = f"so it cannot be {'trained' if setting == 'policy.path' else 'loaded'}; take another model, or a version that has it"
    config = config_of(files)
    if config.get("auto_map") and not trusts_code and config.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise UserError(f"{setting}: only the Python code in the folder can load it; set policy.trust_remote_code=true to run that code")
    _check_type(files, CONFIG_MAPPING_NAMES, setting, "models of the type", consequence)
    if is_causal and not reads_images(config):
        _check_type(files, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, setting, "causal language model of the type", consequence)


def check_classifier(files: Files, setting: str = "policy.path") -> None:
    """Raise UserError for a model type without a sequence classifier, which critics and reward models are."""
    with transformers_without_torch():
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    consequence = "so it cannot be a critic or reward model; take another model"
    _check_type(files, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, setting, "sequence classifier for models of the type", consequence)


def _check_type(files: Files, known: Container[str], setting: str, what: str, consequence: str) -> None:
    """Raise UserError unless the model type is one of `known`, or the folder has code of its own."""
    config = config_of(files)
    if not config.get("auto_map") and config["model_type"] not in known:
        from transformers import __version__

        raise UserError(f"{setting}: transformers {__version__} has no {what} `{config['model_type']}`, {consequence}")


def small_files(name: str, setting: str) -> Path:
    """Return `model_folder`, but fetch only config.json, which is enough to compute the model's size."""
    return model_folder(name, setting, ("config.json",))


def _is_on_hub(name: str) -> bool:
    return not Path(name).exists() and HUB_MODEL.fullmatch(name) is not None


def cached_folder(name: str) -> Path:
    """Return a local folder or the cached copy of a hub model; a path that does not exist if there is none."""
    if is_remote(name):
        return model_folder(name, "policy.path")
    if not _is_on_hub(name):
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else Path(name)


def model_folder(name: str, setting: str, patterns: Sequence[str] = FILE_PATTERNS) -> Path:
    """Return a local folder, or the copy of a remote one or of the Hugging Face hub's model `org/name`, fetched if necessary.

    Raises UserError if it cannot be fetched. `setting`: the recipe's key. `patterns`: files to fetch.
    """
    if is_remote(name):
        return fetched(name, setting, cache_folder() / "remote", patterns)
    if not _is_on_hub(name):
        return Path(name)
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
    except Exception as error:  # of many types: no network, no such model, no permission
        raise UserError(
            f"{setting}: there is no folder {name}, and the Hugging Face hub does not give a model of that name "
            f"({one_line(error, 200)}), nor has the cache {constants.HF_HUB_CACHE}; "
            f"give a local model folder, or check name, network and login"
        ) from None


def cache_policy(recipe: Recipe, files: Files) -> None:
    """Cache the warm-started policy."""
    _cache(warm_start_key(recipe), files)


def _cache(key: str, files: Files) -> None:
    """Cache a policy. The folder is renamed into place, so concurrent runs cannot mix their files."""
    cached = cache_folder() / "policies" / key
    with writing(cached):
        cached.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cached.parent, prefix=".making-"))
        try:
            write_folder(temporary, files)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    try:
        os.rename(temporary, cached)
    except OSError:
        shutil.rmtree(temporary)


def quiet_libraries() -> None:
    """Silence library messages that are not useful here: progress bars over one file, and the absence of a GPU."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def policy_tokenizer(recipe: Recipe, files: Files) -> Any:
    """Return the policy's tokenizer for the driver.

    Built-in policies get an equivalent one without transformers, whose import takes seconds. A model's own code may need torch.
    """
    if not recipe.policy.path:
        return TaskTokenizer(task(recipe.prompts.task))
    with nullcontext() if recipe.policy.trust_remote_code else transformers_without_torch():
        return load_tokenizer(files, recipe.policy.trust_remote_code)


def load_tokenizer(files: Files, trust_remote_code: bool, setting: str = "policy.path") -> Any:
    quiet_libraries()
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="rlhfless-tokenizer-") as name:
        folder = write_folder(Path(name), {k: v for k, v in files.items() if not k.endswith(".safetensors")})
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:  # libraries raise many types for unreadable files
            raise UserError(f"{setting}: its tokenizer cannot be loaded: {one_line(error, 200)}") from None


def other_model(path: str, setting: str, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Return the folder of a model whose log-probabilities are compared with the policy's. `tokenizer`: the policy's.

    Raises UserError, which names `setting`, for a folder that cannot be read, quantised weights or another vocabulary.
    """
    folder = model_folder(path, setting).resolve()
    files = read_model(folder, setting)
    check_family(files, setting)
    refuse_quantized(config_of(files), setting)
    with transformers_without_torch():
        theirs = load_tokenizer(files, False, setting).get_vocab()
    ours = tokenizer.get_vocab()
    if ours != theirs:
        token = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
        raise UserError(
            f"{setting}: its tokenizer has another vocabulary than that of policy.path ({token!r} is {theirs.get(token, 'unknown')} and "
            f"{ours.get(token, 'unknown')}), so their log-probabilities cannot be compared; choose another model"
        )
    return folder


# Config keys of the context length, in the order of their families' age; vLLM uses the same ones.
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
PLAIN_ATTENTION = ("llama", "qwen2", "qwen3")  # every layer caches one key and one value per token and KV head, and nothing else
# A qwen2 config with these keys needs no defaults from transformers, which takes seconds to import.
COMPLETE_QWEN2 = {
    "hidden_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "use_sliding_window",
}


def context_tokens(files: Files) -> int | None:
    """Return the longest sequence in tokens that the policy takes, or None if its config does not say.

    This is the smallest of the usual config keys, for a multimodal model those of its text part.
    """
    config = text_config(files)
    limits = [config[key] for key in CONTEXT_KEYS if isinstance(config.get(key), int) and config[key] > 0]
    return min(limits, default=None)


def kv_cache_bytes(files: Files, tokens: int, block_size: int, dtype: str, width: int = 1) -> int | None:
    """Return the bytes of KV cache for one sequence in an engine of `width` slots, or None for unknown kinds of attention.

    These are whole blocks, and the one block that vLLM always reserves.
    """
    config = text_config(files)
    windows = config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("model_type") not in PLAIN_ATTENTION or windows:
        return None
    return peak_memory.kv_cache_bytes(config, 1, tokens, block_size, VALUE_BYTES[dtype], width) or None


def check_kv_cache(recipe: Recipe, files: Files, longest_prompt_tokens: int) -> None:
    """Raise UserError if an engine's KV cache on CPU cannot hold the longest possible sequence."""
    tokens = recipe.longest_tokens(longest_prompt_tokens)
    needed = kv_cache_bytes(files, tokens, recipe.rollout.block_size, recipe.policy.dtype, recipe.rollout.least_width)
    if needed is not None and needed > recipe.rollout.engine_kv_mb * 2**20:
        raise UserError(
            f"rollout.kv_cache_mb: {recipe.rollout.engine_kv_mb} MiB cannot hold one sequence of {tokens} tokens (the longest "
            f"prompt and rollout.max_tokens), which needs {-(-needed // 2**20)} MiB; raise it, or lower rollout.max_tokens"
        )


def text_config(files: Files) -> JsonObject:
    """Return config.json with its family's defaults, or unchanged if transformers does not know the family."""
    raw = config_of(files)
    if raw.get("model_type") == "qwen2" and raw.keys() >= COMPLETE_QWEN2:
        return raw
    with transformers_without_torch():
        from transformers import AutoConfig

        try:
            family = AutoConfig.for_model(**raw)
        except Exception:  # an unknown family, or an invalid value, which loading the model will report
            return raw.get("text_config") or raw
        return family.get_text_config().to_dict()
