"""Large files as arrays: write safetensors files from tensors, and read them as tensors, without a copy in between.

Ray sends a numpy array as a separate buffer, directly from its owner's memory into the object store and from there to the reader. A
`bytes` object of the same content would be copied by the writer, by the pickler and by the reader.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from torch import Tensor

BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # numpy has no such type: two bytes under its name
STORED_AS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"} | {
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
HEADER_ALIGNMENT = 8
READ_BYTES = 1 << 26  # of a file that are in memory at once while it is checked, a multiple of the page size


@dataclass(frozen=True, eq=False)
class FileParts:
    """A file's content as consecutive arrays of bytes (uint8), which may be views of tensors or of a file on disk."""

    parts: tuple[np.ndarray, ...]

    @classmethod
    def map(cls, path: Path) -> FileParts:
        """Map a file that is not empty: it is read from disk when it is used, and its pages can be given back at any time."""
        return cls((np.memmap(path, np.uint8, "r").view(np.ndarray),))  # pickle would copy a memmap

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __bytes__(self) -> bytes:
        return b"".join(part.data for part in self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes | FileParts) and len(self) == len(other) and bytes(self) == bytes(other)

    __hash__ = None  # type: ignore[assignment]  # as the arrays, which may change

    def at(self, start: int, end: int) -> np.ndarray:
        """Return the bytes from `start` to `end`, as a view if they are in one part."""
        pieces, offset = [], 0
        for part in self.parts:
            if start < offset + len(part) and offset < end:
                pieces.append(part[max(0, start - offset) : end - offset])
            offset += len(part)
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.uint8), *pieces])


@dataclass(frozen=True, eq=False)
class RemoteFile:
    """A safetensors file that is not here yet. `header`: its first bytes, see `read_header_bytes`. `fetch` returns the whole file."""

    header: bytes
    fetch: Callable[[], Content]


Content = bytes | FileParts
Files = dict[str, Content]  # a folder: {file name: content}


def parts_of(content: Content) -> FileParts:
    """Return the content as FileParts, without a copy."""
    return content if isinstance(content, FileParts) else FileParts((np.frombuffer(content, np.uint8),))


def read_header(content: Content) -> dict[str, dict] | None:
    """Return a safetensors header's entry for each tensor, or None if the header does not match the content's length."""
    whole = parts_of(content)
    try:
        size, header = _header(whole)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None
    return tensors if len(whole) == 8 + size + max(ends, default=0) else None


def read_header_bytes(content: Content) -> bytes:
    """Return the first bytes of a safetensors file: the header and its length."""
    whole = parts_of(content)
    return whole.at(0, 8 + struct.unpack("<Q", whole.at(0, 8).tobytes())[0]).tobytes()


def read_shapes(content: Content) -> dict[str, tuple[int, ...]]:
    """Return {tensor name: shape} from a header, whose tensors may be missing. Raises ValueError if the header is incomplete."""
    try:
        header = _header(parts_of(content))[1]
    except (struct.error, IndexError):
        raise ValueError("a safetensors file is incomplete") from None
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def read_metadata(content: Content) -> dict[str, str]:
    """Return a safetensors file's own metadata. Raises ValueError if the file is incomplete."""
    try:
        return _header(parts_of(content))[1].get("__metadata__", {})
    except (struct.error, IndexError):
        raise ValueError("a safetensors file is incomplete") from None


def _header(whole: FileParts) -> tuple[int, dict[str, dict]]:
    (size,) = struct.unpack("<Q", whole.at(0, 8).tobytes())
    return size, json.loads(whole.at(8, 8 + size).tobytes())


def checksum(content: Content) -> str:
    """Return the xxh3 checksum of a file's content. Pages of a mapped file are given back as soon as they were read."""
    digest = xxhash.xxh3_64()
    for part in parts_of(content).parts:
        mapped = part.base.base if isinstance(part.base, np.memmap) and len(part.base) == len(part) else None
        for start in range(0, len(part), READ_BYTES):
            piece = part[start : start + READ_BYTES]
            digest.update(piece.data)
            if isinstance(mapped, mmap.mmap):  # otherwise a process that only checks a file would hold all of it
                mapped.madvise(mmap.MADV_DONTNEED, start, len(piece))
    return digest.hexdigest()


def write_file(path: Path, content: Content) -> str:
    """Write a file, and return its checksum. Each part is read once for both."""
    digest = xxhash.xxh3_64()
    with path.open("wb") as file:
        for part in parts_of(content).parts:
            digest.update(part.data)
            file.write(part.data)
    return digest.hexdigest()


def save_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileParts:
    """Lay tensors out as a safetensors file. Contiguous tensors on the host are not copied.

    Like `safetensors.torch.save`, wide types come first, then names in order, so that every tensor is aligned.
    """
    names = {name: key for key, name in STORED_AS.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    arrays, end = [], 0
    for name in order:
        array = as_numpy(tensors[name].detach().cpu()).reshape(-1).view(np.uint8)
        kind = names[str(tensors[name].dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [end, end + len(array)]}
        arrays.append(array)
        end += len(array)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return FileParts((np.frombuffer(struct.pack("<Q", len(text)) + text, np.uint8), *arrays))


def load_tensors(content: Content) -> dict[str, Tensor]:
    """Read a safetensors file's tensors by name. They are views of the content, which may be read-only: copy before changing them.

    Raises ValueError if the file is incomplete.
    """
    return dict(iterate_tensors(content))


def iterate_tensors(content: Content) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) as `load_tensors` does, one at a time."""
    import torch

    whole, header = parts_of(content), read_header(content)
    if header is None:
        raise ValueError("a safetensors file is incomplete")
    data = len(whole) - max((entry["data_offsets"][1] for entry in header.values()), default=0)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        kind, shape = getattr(torch, STORED_AS[entry["dtype"]]), entry["shape"]
        if math.prod(shape) == 0:
            yield name, torch.empty(shape, dtype=kind)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "not writable": nothing writes to it
            content_bytes = whole.at(data + start, data + end)
            if content_bytes.ctypes.data % kind.itemsize:
                content_bytes = content_bytes.copy()
            yield name, torch.from_numpy(content_bytes).view(kind).reshape(shape)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return a host tensor as an array of the same shape, without a copy if it is contiguous. bfloat16 becomes BFLOAT16."""
    import torch

    tensor = tensor.contiguous()
    return tensor.view(torch.uint16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: np.ndarray) -> Tensor:
    """Return an array of `as_numpy` as a tensor, without a copy. The array may be read-only: copy before changing it."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
