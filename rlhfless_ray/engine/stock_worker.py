"""What vLLM's own worker does for a stock engine. vLLM mixes this class into it, see `worker_extension_cls` in vLLM's arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.engine.worker_weights import drop_memory, reload_weights, restore_unregistered, save_unregistered
from rlhfless_ray.local.member_process import call_after_end
from rlhfless_ray.local.process_memory import release_free_heap, release_unused_memory
from rlhfless_ray.weights.tensor_file import FileParts, as_numpy, iterate_tensors

if TYPE_CHECKING:
    import numpy as np


class WeightFiles(Mapping[str, "np.ndarray"]):
    """The tensors in a folder of safetensors files with one tensor each, which are mapped one after the other."""

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        """`names`: {tensor name: file name}."""
        self.folder, self.names = folder, names

    def __getitem__(self, name: str) -> np.ndarray:
        return as_numpy(dict(iterate_tensors(FileParts.map(self.folder / self.names[name])))[name])

    def __iter__(self) -> Any:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class StockWorker:
    """Methods that `collective_rpc` calls by name. `self` is vLLM's worker too. The prefix keeps them apart from vLLM's own names."""

    def rlhfless_watch(self, process: int) -> None:
        """End this process when another one has ended. vLLM's processes would outlive an engine that was killed."""
        call_after_end(process, lambda: os._exit(0))

    def rlhfless_load(self, folder: str, names: dict[str, str], on_cpu: bool) -> list[list[str]]:
        """Load the weights in a folder. Returns the names of weights that got none, and of biases that the model does not use."""
        missing, unused = reload_weights(self, WeightFiles(Path(folder), names), on_cpu, in_place=False)
        if on_cpu:
            release_free_heap()
        return [sorted(missing), sorted(unused)]

    def rlhfless_leave(self, on_cpu: bool) -> None:
        """Release the memory of weights and KV cache on CPU, where vLLM's own sleep does nothing. On GPU, prepare that sleep."""
        if on_cpu:
            drop_memory(self)
            release_unused_memory()
        else:
            save_unregistered(self)

    def rlhfless_return(self) -> None:
        """Restore what vLLM's own sleep on GPU has lost, except for the weights."""
        restore_unregistered(self)
