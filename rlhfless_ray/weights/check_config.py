"""Check the values of a config.json by transformers, before a worker builds the model. Imports no torch."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.local.fast_imports import transformers_without_torch
from rlhfless_ray.weights.known_differences import package_source
from rlhfless_ray.weights.model_folder import as_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPE_NAMES = ("None", "auto", "float16", "bfloat16", "float32", "float64")


def check_config(config: Mapping[str, object], setting: str) -> None:
    """Raise UserError, which names `setting`, if a config.json names no family, or one of which transformers cannot build such a model.

    Models with code of their own are not judged, and neither are families that transformers lacks.
    """
    if config.get("auto_map"):
        return
    if not config.get("model_type"):
        raise UserError(f"{setting}: its config.json names no model_type, so nothing can load it; copy the whole model folder")
    with transformers_without_torch():
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if config.get("model_type") not in CONFIG_MAPPING_NAMES:
            return
        with as_folder({"config.json": json.dumps(config).encode()}) as folder, _without_messages():
            try:
                text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
            except Exception as error:  # of many types: a class of its own, KeyError, TypeError
                wrong = one_line(error, 200)
            else:
                wrong = _unknown_part(text)
    if wrong:
        raise UserError(f"{setting}: its config.json describes no model: {wrong}; copy the whole model folder")


@contextmanager
def _without_messages() -> Iterator[None]:
    """Silence what transformers logs beside the errors that it raises."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _unknown_part(text: PreTrainedConfig) -> str:
    """Return which dtype, activation, rotary embeddings or padding token torch or transformers does not have, or an empty string.

    They are looked up when a worker builds the model. The family's code says by which keys. It is read as text, because it needs torch.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if isinstance(text, Mapping):
        return "models of its type have no `text_config`"
    dtype = str(getattr(text, "dtype", None)).removeprefix("torch.")
    if dtype not in DTYPE_NAMES and not dtype.startswith("float8"):
        return f"torch has no numbers of type {dtype!r} for weights (`dtype`)"
    *_, family, module = type(text).__module__.split(".")
    code = package_source("transformers", f"models/{family}/{module.replace('configuration', 'modeling', 1)}.py")
    listed = package_source("transformers", "activations.py").partition("ACT2CLS = {")[2].partition("\n}")[0]
    known = re.findall(r'^    "(\w+)":', listed, re.MULTILINE)
    for key in re.findall(r"ACT2FN\[config\.(\w+)\]", code) if known else ():
        if isinstance(name := getattr(text, key, None), str) and name not in known:
            return f"transformers has no activation {name!r} (`{key}`)"
    pad, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if isinstance(pad, int) and isinstance(size, int) and not -size <= pad < size and "self.padding_idx)" in code:
        return f"`pad_token_id` {pad} is not in its vocabulary of {size} tokens"
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()) if "ROPE_INIT_FUNCTIONS[" in code else ():
        kind, theta = (part.get("rope_type"), part.get("rope_theta")) if isinstance(part, Mapping) else (None, None)
        if kind not in (None, "default", *ROPE_INIT_FUNCTIONS):
            return f"transformers has no rotary embeddings of type {kind!r}"
        if not isinstance(theta, int | float | None):
            return f"`rope_theta` must be a number, not {theta!r}"
    return ""
