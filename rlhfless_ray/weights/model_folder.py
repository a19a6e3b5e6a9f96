"""A Hugging Face model folder as a dict of files, which travels through Ray and needs no shared file system."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.weights.shards import shard_name, write_slices
from rlhfless_ray.weights.tensor_file import Content, FileParts, Files, iterate_tensors, parts_of, read_header, save_tensors, write_file

if TYPE_CHECKING:
    from torch import Tensor

    from rlhfless_ray.weights.tensor_slice import Slices

KEPT_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".py")
WEIGHTS = ".safetensors"
ADAPTER = "adapter_model.safetensors"
AVERAGE = "ema"  # in a checkpoint: the stem of the files with the moving average of the weights, see `shard_name`
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9  # limit of a weights file, as in `save_pretrained`; a tenth of the hub's limit
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
PACKED = ".weight_packed"  # ending of compressed-tensors' name for a tensor with eight 4-bit values in each int32
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_folder(path: Path, setting: str = "policy.path", needs_tokenizer: bool = True) -> Files:
    """Read {file name: content}.

    Raises UserError if the folder has no config, safetensors weights or tokenizer, or its config.json is no JSON object. `setting`: the
    recipe's key of the folder.
    """
    if not path.is_dir():
        hub = ", or a name `org/name` of the Hugging Face hub" if setting == "policy.path" else ""
        raise UserError(f"{setting}: {path} is not a folder; give a local Hugging Face model folder{hub}")
    files = {file.name: file for file in sorted(path.iterdir()) if file.is_file() and file.suffix in KEPT_SUFFIXES}
    if [name for name in files if name.endswith(WEIGHTS)] == [ADAPTER]:
        raise UserError(
            f"{setting}: {path} is the folder of an adapter, without its base model; merge both with rlhfless_ray.cli.lora_combiner, and "
            "name the merged model"
        )
    if "config.json" not in files:
        raise UserError(f"{setting}: {path} has no config.json, so it is not a Hugging Face model folder")
    if needs_tokenizer:
        check_tokenizer(files, path, setting)
    if not any(name.endswith(WEIGHTS) for name in files):
        raise UserError(f"{setting}: {path} has no *.safetensors weights; save them with model.save_pretrained")
    contents = {name: read_content(file) for name, file in files.items()}
    try:
        config = config_of(contents)
    except ValueError:
        raise UserError(f"{setting}: its config.json is not valid JSON") from None
    if not isinstance(config, dict):
        raise UserError(f"{setting}: its config.json is not a JSON object, so it names no model_type")
    check_sizes(config, setting)
    return contents


def check_sizes(config: Mapping[str, object], setting: str) -> None:
    """Raise UserError, which names `setting`, if a config.json has sizes that no model can have."""
    from placement.config_sizes import wrong_size  # here, because engines' processes import this module without the planner

    if wrong := wrong_size(config):
        raise UserError(f"{setting}: its config.json describes no model: {wrong}; copy the whole model folder")


def check_tokenizer(names: Iterable[str], path: Path, setting: str) -> None:
    """Raise UserError if there is no tokenizer among the files of a model folder."""
    if {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}.isdisjoint(names):
        raise UserError(f"{setting}: {path} has no tokenizer (tokenizer.json); save one with tokenizer.save_pretrained")


def read_files(folder: Path) -> Files:
    """Read {file name: content} of all files in a folder, see `read_content`."""
    return {path.name: read_content(path) for path in sorted(folder.iterdir())}


def read_content(file: Path) -> Content:
    """Read a file, or map it if it holds weights, so that weights are in memory only while they are used."""
    return FileParts.map(file) if file.suffix == WEIGHTS and file.stat().st_size else file.read_bytes()


def config_of(files: Files) -> Any:
    """Parse a folder's config.json. Raises ValueError if it is not valid JSON, as transformers reads it: in UTF-8, without a mark."""
    try:
        return json.loads(bytes(files["config.json"]).decode())
    except RecursionError:
        raise ValueError("config.json is nested too deeply") from None


def stop_tokens(files: Mapping[str, Content], end_token_id: int | None) -> list[int]:
    """Return the tokens that end a response, as vLLM has them: those of generation_config.json, else config.json, and the tokenizer's.

    They differ for a base model that was tuned to another end, say that of a chat's turn. `end_token_id`: the tokenizer's. One beyond the
    vocabulary of the model is left out.
    """
    ids: list[int] = []
    generation, config = (json.loads(bytes(files.get(name, b"{}"))) for name in ("generation_config.json", "config.json"))
    for content in (generation, config, config.get("text_config") or {}):
        if (found := content.get("eos_token_id")) is not None:
            ids = [found] if isinstance(found, int) else list(found)
            break
    size = (config.get("text_config") or config).get("vocab_size", math.inf)
    return [*ids, end_token_id] if end_token_id is not None and end_token_id < size and end_token_id not in ids else ids


def is_safetensors(content: Content) -> bool:
    """Return whether the content is a safetensors file of the length that its header declares."""
    return read_header(content) is not None


def parameter_count(files: Files) -> int:
    """Return the number of parameters that transformers would load from these files. Invalid files count as empty."""
    return sum(math.prod(shape) * (8 if name.endswith(PACKED) else 1) for name, shape in tensor_shapes(files))


def tensor_shapes(files: Files) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the weights that transformers would load from these files. Invalid files count as empty."""
    for file in _loaded_files(files, files.get(INDEX)):
        for name, entry in (read_header(files[file]) or {}).items():
            yield name, tuple(entry["shape"])


def stored_tensors(path: Path) -> JsonObject:
    """Return {tensor name: header entry} of the weights that transformers would load from a folder.

    An entry has `shape`, `dtype` and `data_offsets`.

    Reads only the headers of the safetensors files. Files with incomplete headers are skipped.
    """
    tensors: JsonObject = {}
    names, index = {file.name for file in path.glob(f"*{WEIGHTS}")}, path / INDEX
    for name in _loaded_files(names, index.read_bytes() if index.is_file() else None):
        try:
            with (path / name).open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        except (OSError, struct.error, ValueError):
            continue
        if isinstance(header, dict):
            tensors |= {key: entry for key, entry in header.items() if key != "__metadata__"}
    return tensors


def stored_dtype(path: Path) -> str | None:
    """Return the dtype of most elements of a folder's weights, or None if it has no weights in `DTYPES`."""
    return _main_dtype(stored_tensors(path).values())


def _main_dtype(entries: Iterable[JsonObject]) -> str | None:
    counts: dict[str, int] = {}
    for entry in entries:
        if entry["dtype"] in DTYPES:
            counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + math.prod(entry["shape"])
    return DTYPES[max(counts, key=lambda name: counts[name])] if counts else None


def _loaded_files(names: Collection[str], index: Content | None) -> list[str]:
    """Return the files that transformers loads. A folder may hold its weights twice: in one file, and in shards or other formats.

    `names`: of the folder's files. `index`: content of INDEX.
    """
    if "model.safetensors" in names:
        return ["model.safetensors"]
    wanted = _named_files(index)
    return sorted(name for name in names if (name in wanted if wanted else name.endswith(WEIGHTS)))


def _named_files(index: Content | None) -> set[str]:
    """Return the files that the content of INDEX names, none if it is missing or invalid."""
    try:
        return set(json.loads(bytes(index or b"{}"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


def has_valid_index(files: Files) -> bool:
    """Return whether the folder's index names files, if it has one that counts."""
    return INDEX not in files or "model.safetensors" in files or bool(_named_files(files[INDEX]))


def has_valid_ends(files: Files) -> bool:
    """Return whether `stop_tokens` can read generation_config.json, if there is one."""
    try:
        return all(isinstance(token, int) for token in stop_tokens({**files, "config.json": b"{}"}, None))
    except (ValueError, TypeError, AttributeError):
        return False


def missing_files(files: Files) -> list[str]:
    """Return the weights files that the folder's index names and the folder lacks."""
    return [] if "model.safetensors" in files else sorted(_named_files(files.get(INDEX)).difference(files))


def without_weights(files: Files) -> Files:
    """Return the files of config and tokenizer, which an engine needs before it pulls a weight version."""
    return {name: content for name, content in files.items() if not name.endswith((WEIGHTS, ".index.json"))}


def stored_weights(files: Files) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the weights that transformers would load from a folder with these files, as views of them."""
    for name in _loaded_files(files, files.get(INDEX)):
        yield from iterate_tensors(files[name])


def split_files(tensors: Mapping[str, Tensor], most_bytes: int = MAX_FILE_BYTES, *, rank: int = 0, ranks: int = 1) -> Files:
    """Lay weights out in files as `save_pretrained` does: one file, or several of at most `most_bytes` with an index.

    `rank`: of the `ranks` that each lay out a part. Then there is no index, see `folder_index`.
    """
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > most_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    if ranks > 1:
        stems = ["model", *(f"model.{number}" for number in range(2, len(groups) + 1))]
        own = (shard_name(stem, rank, ranks) for stem in stems)
        return {name: save_tensors(group, {"format": "pt"}) for name, group in zip(own, groups, strict=True)}
    if len(groups) == 1:
        return {"model.safetensors": save_tensors(groups[0], {"format": "pt"})}
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    files: Files = {name: save_tensors(group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)}
    return {**files, INDEX: folder_index(files)}


def folder_index(files: Files) -> bytes:
    """Return the content of INDEX for these weights files."""
    headers = {name: read_header(content) or {} for name, content in files.items() if name.endswith(WEIGHTS)}
    sizes = (end - start for header in headers.values() for start, end in (entry["data_offsets"] for entry in header.values()))
    weight_map = {tensor: name for name, header in headers.items() for tensor in header}
    return json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}, indent=2).encode()


def missing_index(files: Files) -> Files:
    """Return the index of a model folder's weights if several ranks wrote a part each, else no file."""
    several = sum(name.endswith(WEIGHTS) for name in files) > 1
    return {INDEX: folder_index(files)} if several and INDEX not in files else {}


def with_dtype(files: Files, weights: Iterable[Content]) -> Files:
    """Return a model folder's other files for these weights (safetensors).

    As in transformers' `save_pretrained`, config.json names their dtype: that of most elements. It loses a quantisation that they do
    not have.
    """
    entries = {name: entry for content in weights for name, entry in (read_header(content) or {}).items()}
    dtype = _main_dtype(entries.values())
    files = dict(files)
    if dtype and "config.json" in files:
        config = config_of(files)
        names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
        wanted = {**config, **dict.fromkeys(names, dtype)}
        if not any(name.endswith(PACKED) for name in entries):
            wanted.pop("quantization_config", None)
        if wanted != config:
            files["config.json"] = json.dumps(wanted, indent=2).encode()
    return files


def complete_folder(folder: Path, others: Files) -> None:
    """Add the other files to a folder that has the weights of a model or an adapter, and an index where several ranks wrote a part each.

    A model's config.json gets the dtype of its weights. If the folder has one already, it is kept instead of the one in `others`.
    """
    written = read_files(folder)
    added = {**others, **missing_index(written)}
    if ADAPTER not in written:
        added |= {name: content for name, content in written.items() if name == "config.json"}
        added = with_dtype(added, [content for name, content in written.items() if name.endswith(WEIGHTS)])
    write_folder(folder, added)


def move_model(parts: Path, folder: Path, others: Files) -> None:
    """Move the files that the ranks wrote to `parts` into a folder, and complete it, see `complete_folder`."""
    for file in parts.iterdir():
        shutil.move(file, folder / file.name)
    complete_folder(folder, others)


def content_addressed_folder(root: Path, files: Files) -> Path:
    """Write the files to a folder below `root` that is named by their hash, and return it.

    The same files always have the same path. The folder is kept. Concurrent writers never see partial folders. Raises OSError
    if the folder cannot be written.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        for part in (name.encode(), content):
            digest.update(len(part).to_bytes(8, "big"))
            for piece in parts_of(part).parts:
                digest.update(piece.data)
    path = root / digest.hexdigest()
    if path.is_dir():
        return path
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        whole = write_folder(Path(name) / "whole", files)
        try:
            whole.rename(path)
        except OSError:
            if not path.is_dir():  # otherwise another process has written it meanwhile
                raise
    return path


@dataclass(frozen=True)
class DividedFiles:
    """A model folder of which a rank of ZeRO 3 fetches its part of every tensor.

    `others`: files without weights. `headers`: {file name: header} of those with weights. `fetch` returns {file name: `share_of`} of a
    rank.
    """

    others: Files
    headers: Mapping[str, bytes]
    fetch: Callable[[int], Mapping[str, Slices]]
    rank: int
    ranks: int

    @contextmanager
    def folder(self, *, whole: bool = False) -> Iterator[Path]:
        """Yield a folder that exists only inside the block. Unless `whole`, what other ranks keep of a tensor is a hole in its file."""
        parts = [self.fetch(rank) for rank in (range(self.ranks) if whole else [self.rank])]
        with as_folder(self.others) as path:
            for name, header in self.headers.items():
                write_slices(path / name, header, (part[name] for part in parts))
            yield path


@contextmanager
def as_folder(model: Files | Path) -> Iterator[Path]:
    """Yield a model folder's path. If `model` is files, the folder exists only inside the block."""
    if isinstance(model, Path):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="rlhfless-model-") as name:
        yield write_folder(Path(name), model)


def write_folder(path: Path, files: Files) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_file(path / name, content)
    return path
