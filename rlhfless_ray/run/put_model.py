"""Write a model's files beside others of a folder."""

from __future__ import annotations

from pathlib import Path

from rlhfless_ray.common.disk_space import replace_by_parts, writing
from rlhfless_ray.weights.adapter import CONFIG as ADAPTER_CONFIG
from rlhfless_ray.weights.model_folder import ADAPTER, INDEX, WEIGHTS
from rlhfless_ray.weights.tensor_file import Files, parts_of

WEIGHT_FILES = (f"model*{WEIGHTS}", INDEX, ADAPTER, ADAPTER_CONFIG)  # of a model


def put_model(folder: Path, files: Files) -> None:
    """Write the files of a model or an adapter into a folder, each one atomically. Other files stay, except weights of an earlier model.

    transformers would load these instead: it looks for one file before an index of several, and applies an adapter that it finds.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_by_parts(folder / name, (part.data for part in parts_of(content).parts))
    if ADAPTER not in files:  # beside an adapter there may be its base
        for file in [file for pattern in WEIGHT_FILES for file in folder.glob(pattern) if file.name not in files]:
            file.unlink()
