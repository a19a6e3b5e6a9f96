"""Find the published tensors that an engine holds incorrectly, from digests ("prints") of the engine's own parameters.

An engine fuses and packs weights, so its parameters have other names and layouts than the files. A print has one row per row (or
expert) of a parameter, so that a difference can be traced back to the tensor of that row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

EXPERTS = {"w13": ("gate_proj", "up_proj", "w1", "w3"), "w2": ("down_proj", "w2")}


def different_rows(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return (rows,) bool of the rows that differ. Hashes are compared exactly, outputs of packed layers up to rounding."""
    if found.shape != wanted.shape:
        return np.ones(len(found), bool)
    same = found == wanted if found.dtype.kind == "u" else np.isclose(found, wanted, rtol=1e-3, atol=1e-6)
    return np.logical_not(np.reshape(same, (len(found), -1)).all(1))


def differing(
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    shapes: Mapping[str, Sequence[int]],
    fused: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the names of the tensors that differ between two engines.

    Args:
        found, wanted: prints of the two engines, by parameter name.
        shapes: shapes of the published tensors, by their names in a file.
        fused: the engine's fused modules, {module: modules it is made of, in the order of their rows}.

    Returns:
        Published names if they are known, else the engine's.
    """
    names: set[str] = set()
    for name in found.keys() | wanted.keys():
        if name not in found or name not in wanted:
            names.add(name)
        elif (rows := different_rows(found[name], wanted[name])).any():
            names.update(_sources(name, rows, shapes, fused) or [name])
    return sorted(names)


def _sources(name: str, rows: np.ndarray, shapes: Mapping[str, Sequence[int]], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the published tensors behind these rows of an engine's parameter, or [] if they are unknown."""
    if name in shapes:
        return [name]
    for module, parts in fused.items():
        if f".{module}." not in name:
            continue
        sources = [name.replace(f".{module}.", f".{part}.") for part in parts]
        if all(source in shapes for source in sources):
            ends = np.cumsum([shapes[source][0] for source in sources])
            if ends[-1] != len(rows):
                return sources
            pieces = np.split(rows, ends[:-1])
            return [source for source, piece in zip(sources, pieces, strict=True) if piece.any()]
    if match := re.match(r"(.+\.experts)\.(?:.+\.)?(w13|w2)_", name):
        kinds = EXPERTS[match[2]]
        wanted = [f"{match[1]}.{expert}.{kind}." for expert in np.flatnonzero(rows) for kind in kinds]
        return [source for source in shapes if source.startswith(tuple(wanted))]
    return []
