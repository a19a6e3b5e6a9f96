"""Folders that workers write or read in place if they see the driver's file system. Otherwise files travel through Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

from rlhfless_ray.common.disk_space import FULL
from rlhfless_ray.weights.model_folder import AVERAGE, WEIGHTS, DividedFiles, read_content, without_weights
from rlhfless_ray.weights.shards import has_intervals, share_of
from rlhfless_ray.weights.tensor_file import Content, Files, read_header_bytes, write_file

Writer = Callable[[Path], dict[str, str]]  # puts files into an existing folder, and returns {file name: checksum}


@dataclass(frozen=True)
class Delivery:
    """The result of delivering a worker's files."""

    sums: dict[str, str] = field(default_factory=dict)  # checksums of the files that are in the folder
    files: Files = field(default_factory=dict)  # for the driver to write, because the worker does not see the folder
    disk_full: bool = False


def deliver(files: Files, folder: str) -> Delivery:
    """On the worker: write the files to the driver's folder if this machine sees it. The folder's name is unique."""
    if not Path(folder).is_dir():
        return Delivery(files=files)
    try:
        return Delivery(sums={name: write_file(Path(folder) / name, content) for name, content in files.items()})
    except OSError as error:
        if error.errno not in FULL:
            raise
        return Delivery(disk_full=True)


def receive(deliveries: list[Delivery], folder: Path) -> dict[str, str]:
    """On the driver: complete the folder, and return {file name: checksum}. Raises OSError if a disk is full."""
    sums: dict[str, str] = {}
    for delivery in deliveries:
        if delivery.disk_full:
            raise OSError(ENOSPC, "no space left on device", str(folder))
        sums |= delivery.sums | {name: write_file(folder / name, content) for name, content in delivery.files.items()}
    return sums


def writer(files: Files) -> Writer:
    """Return a writer of files that the driver has."""
    return lambda folder: receive([Delivery(files=files)], folder)


@dataclass(frozen=True)
class StoredFiles:
    """Files of a folder on the driver's file system. Their content is mapped, and read when it is used.

    `folder`: None if the files are in no folder.
    """

    folder: Path | None
    files: Files
    prefix: str = ""  # prefix of the names in the folder, which the names in `files` lack

    @property
    def sizes(self) -> dict[str, int]:
        return {self.prefix + name: len(content) for name, content in self.files.items()}


def is_divided(name: str, content: Content) -> bool:
    """Return whether ranks read a part of a checkpoint's file: of optimizer state, a moving average, or weights at ZeRO 3."""
    return has_tensors_of_ranks(name) and (not name.startswith("model") or has_intervals(content))


def has_tensors_of_ranks(name: str) -> bool:
    """Return whether a checkpoint's file has weights, optimizer state or a moving average, of which ranks have different parts."""
    return name.endswith(WEIGHTS) and name.startswith(("model", "optimizer", AVERAGE))


@dataclass(frozen=True)
class FilesInStore:
    """Files in Ray's object store, as references."""

    files: Any  # to files that every reader fetches
    parts: Mapping[str, tuple[bytes, Any]] = field(
        default_factory=dict
    )  # {name: (header, reference to files with this one)}, see `RemoteFile`

    @property
    def references(self) -> list[Any]:
        return list(dict.fromkeys([self.files, *(ref for _, ref in self.parts.values())]))


def divide_folder(files: Files, ranks: int) -> DividedFiles:
    """Put a model folder's weights into Ray's object store, an object for each rank."""
    import ray

    weights = {name: content for name, content in files.items() if name.endswith(WEIGHTS)}
    parts = [ray.put({name: share_of(content, rank, ranks) for name, content in weights.items()}) for rank in range(ranks)]
    headers = {name: read_header_bytes(content) for name, content in weights.items()}
    return DividedFiles(without_weights(files), headers, partial(_part_of, parts), 0, ranks)


def _part_of(parts: Sequence[Any], rank: int) -> Any:
    import ray

    return ray.get(parts[rank])


def sees(folder: str, sizes: Mapping[str, int]) -> bool:
    """On the worker: return whether this machine has the folder, with files of these sizes."""
    return all((path := Path(folder, name)).is_file() and path.stat().st_size == size for name, size in sizes.items())


def map_files(folder: str, sizes: Mapping[str, int], prefix: str) -> Files:
    """On the worker: map the folder's files, without the prefix of their names."""
    return {name.removeprefix(prefix): read_content(Path(folder, name)) for name in sizes}
