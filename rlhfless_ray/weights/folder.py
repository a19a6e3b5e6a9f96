"""A Hugging Face model folder as a dict of files, so that it can travel through Ray instead of a shared file system."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

from rlhfless_ray.errors import UserError

KEPT = (".json", ".safetensors", ".txt", ".model", ".jinja", ".py")
WEIGHTS = ".safetensors"


def read_folder(path: Path, setting: str = "policy.path") -> dict[str, bytes]:
    """{file name: content}. Raises UserError when it is no model folder with safetensors weights and a tokenizer; `setting` is
    the recipe's key that named it."""
    if not path.is_dir():
        raise UserError(f"{setting}: {path} is not a folder; give a local Hugging Face model folder")
    files = {file.name: file for file in sorted(path.iterdir()) if file.is_file() and file.suffix in KEPT}
    if "config.json" not in files:
        raise UserError(f"{setting}: {path} has no config.json, so it is not a Hugging Face model folder")
    if not {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"} & files.keys():
        raise UserError(f"{setting}: {path} has no tokenizer (tokenizer.json); save one with tokenizer.save_pretrained")
    if not any(name.endswith(WEIGHTS) for name in files):
        raise UserError(f"{setting}: {path} has no *.safetensors weights; save them with model.save_pretrained")
    return {name: file.read_bytes() for name, file in files.items()}


def is_safetensors(content: bytes) -> bool:
    """Whether its header tells of as many bytes as there are."""
    return _tensors(content) is not None


def parameter_count(files: dict[str, bytes]) -> int:
    """Of all weights in the files; of a file that is no safetensors file, none."""
    told = [_tensors(content) or {} for name, content in files.items() if name.endswith(WEIGHTS)]
    return sum(math.prod(entry["shape"]) for tensors in told for entry in tensors.values())


def _tensors(content: bytes) -> dict[str, Any] | None:
    """What the header says of each tensor; None where it does not tell of as many bytes as there are."""
    try:
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return tensors if len(content) == 8 + size + max(ends, default=0) else None


def without_weights(files: dict[str, bytes]) -> dict[str, bytes]:
    """Config and tokenizer: what an engine needs before it pulls a weight version."""
    return {name: content for name, content in files.items() if not name.endswith((WEIGHTS, ".index.json"))}


def kept_folder(root: Path, files: dict[str, bytes]) -> Path:
    """The files in a folder below `root` that is called after what is in it, so that the same files always have the same path. It
    stays. Processes that write it at once do not see each other's halves. Raises OSError where nothing can be written."""
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    path = root / digest.hexdigest()
    if path.is_dir():
        return path
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        whole = write_folder(Path(name) / "whole", files)
        try:
            whole.rename(path)
        except OSError:
            if not path.is_dir():  # else somebody was faster
                raise
    return path


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path
