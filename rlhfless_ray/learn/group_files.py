"""The files that a worker group reads and writes: models and checkpoints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.functions.instance import GONE
from rlhfless_ray.learn.ranks import Ranks
from rlhfless_ray.learn.recovery import LearnerLost, Snapshot
from rlhfless_ray.weights.model_folder import missing_index, read_content
from rlhfless_ray.weights.remote_folder import Delivery, FilesInStore, StoredFiles, divide_folder, is_divided, receive
from rlhfless_ray.weights.tensor_file import read_header_bytes, write_file


class GroupFiles:
    def __init__(self, group: Ranks) -> None:
        self.group = group

    def sources(self, model: StoredFiles, state: Snapshot, *, divides: bool) -> tuple[Any, Any]:
        """Return what the ranks read the model from, and its state, both as arguments of their method `build`.

        `divides`: each rank gets a part of every tensor of a folder that it does not see.
        """
        files: Any = self._folder(model)
        files = files or (ray.put(divide_folder(model.files, self.group.ranks)) if divides else self._stored(model))
        return files, state if not isinstance(state, StoredFiles) else self._folder(state) or self._stored(state, divides=True)

    def _folder(self, files: StoredFiles) -> tuple[str, dict[str, int], str] | None:
        """Return arguments of `map_files` if all ranks see the folder, so that no copy of it is in memory."""
        if files.folder is None:
            return None
        where = str(files.folder.resolve()), files.sizes
        replies = self.group.wait_for(
            [i.actor.sees.remote(*where) for i in self.group.by_rank], f"the {self.group.name} to look for {files.folder}"
        )
        return (*where, files.prefix) if all(replies) else None

    def _stored(self, files: StoredFiles, *, divides: bool = False) -> list[FilesInStore]:
        """Put files into the object store. `divides`: of a checkpoint, from which each rank fetches those that it reads."""
        parts = {name: (read_header_bytes(x), ray.put({name: x})) for name, x in files.files.items() if divides and is_divided(name, x)}
        return [FilesInStore(ray.put({name: content for name, content in files.files.items() if name not in parts}), parts)]

    def model(self) -> list[Any]:
        """Return references to each rank's files of the weights as a model folder has them, adapters merged. Needs leases."""
        files: list[Any] = []

        def ask() -> list[Any]:
            refs = [i.actor.model.options(num_returns=2).remote() for i in self.group.by_rank]
            files[:] = [of_rank for of_rank, _ in refs]
            return [spans for _, spans in refs]

        self.group.record_spans(self.group.call(ask, f"the {self.group.name}'s weights"))
        return files

    def save_model(self, folder: Path, *, trained: bool = False) -> dict[str, str]:
        """Write the files of the weights to a folder, and return their checksums.

        `trained`: write only what is trained, see `TrainerRank.model_files`; this needs no lease. Otherwise the complete weights are
        written, adapters merged, which needs leases. Raises OSError if the disk is full.
        """
        working = self.group.working
        if not self.group.by_rank:
            self.group.assign_free_leases()
        ask = lambda: [i.actor.save_model.remote(str(folder.resolve()), trained) for i in self.group.by_rank]  # noqa: E731
        replies = self.group.call(ask, f"the {self.group.name}'s model files")
        self.group.record_spans(spans for _, spans in replies)
        if self.group.working and not working:  # ranks that were lost have started again under leases
            self.group.broker.put(self.group.park())
        sums = receive([delivery for delivery, _ in replies], folder)
        index = missing_index({name: read_content(folder / name) for name in sums})
        return sums | {name: write_file(folder / name, content) for name, content in index.items()}

    def ask_save(self, folder: Path, prefix: str = "") -> list[Any]:
        """Return references for `save`, or an empty list if there is a snapshot of the current state already."""
        return [] if self.group.recovery.has_now else self._start_save(folder, prefix)

    def _start_save(self, folder: Path, prefix: str) -> list[Any]:
        return [i.actor.save.remote(str(folder.resolve()), prefix) for i in self.group.by_rank]

    def save(self, folder: Path, deadline_s: float | None = None, prefix: str = "", asked: list[Any] | None = None) -> dict[str, str]:
        """Write model, optimizer and random state to a folder as files, and return their checksums.

        Every rank writes its own files. Works without leases, because the state is in host memory. Raises OSError if the disk is full.
        """
        deadline_s = deadline_s or self.group.deadline_s
        if (kept := self.group.recovery.current(deadline_s)) is not None:
            with suppress(*GONE):  # its node was lost: the ranks still have the state
                found = get([ref for one in kept for ref in one.references], deadline_s, f"the {self.group.name}'s snapshot")
                return receive([Delivery(files={prefix + name: x for name, x in files.items()}) for files in found], folder)
        working = self.group.working
        while True:
            try:
                if not self.group.by_rank:
                    self.group.assign_free_leases()
                refs, asked = asked or self._start_save(folder, prefix), None
                deliveries = self.group.wait_for(refs, f"the {self.group.name}'s checkpoint", deadline_s)
            except LearnerLost as lost:
                self.group.handle_loss(lost)
            else:
                if not working:
                    self.group.broker.put(self.group.park())
                return receive(deliveries, folder)
