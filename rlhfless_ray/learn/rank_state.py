"""The files of a rank's part of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfless_ray.learn.lora import LoraAdapters, live_name, trained
from rlhfless_ray.weights.model_folder import ADAPTER, AVERAGE, WEIGHTS
from rlhfless_ray.weights.shards import save_slices, shard_name, slices_in
from rlhfless_ray.weights.tensor_file import Files, RemoteFile, as_numpy, as_tensor, load_tensors, save_tensors
from rlhfless_ray.weights.tensor_slice import NOTHING, FormerRank, HeldSlices, ReshardedSlices, TensorSlice

Former = dict[str, FormerRank]  # by beginning of the names of a state's files


def write_state(
    state: dict[str, Any], rank: int, ranks: int, lora: LoraAdapters | None, divided: Mapping[TensorSlice, Tensor] | None
) -> Files:
    """Return a rank's files of its state. `divided`: the parts of the weights that it holds, if nothing is gathered."""
    files: Files = {}
    if divided is not None:
        # one rank has whole tensors, which other programs read too
        content = save_tensors(_whole(divided), {"format": "pt"}) if ranks == 1 else save_slices(divided)
        files[shard_name("model", rank, ranks)] = content
    elif lora is None:
        files[shard_name("model", rank, ranks)] = save_tensors(state["weights"], {"format": "pt"})
    elif rank == 0:
        files |= lora.files(state["weights"])
    moments = state["moments"]
    files[shard_name("optimizer", rank, ranks)] = save_tensors(_whole(moments)) if ranks == 1 else save_slices(moments)
    if rank == 0:
        numbers = {"optimizer_steps": state["optimizer_steps"], "rng": state["rng"].numpy().tobytes().hex()}
        files["learner.json"] = json.dumps(numbers).encode()
    if state["average"]:
        files[shard_name(AVERAGE, rank, ranks)] = save_tensors(state["average"], {"format": "pt"})
    return files


def former_rank(held: Mapping[TensorSlice, Tensor], file: str, is_kept: bool) -> FormerRank:
    """Return what a rank held of a `file` of the state, with the values themselves if they are kept."""
    values = {piece: as_numpy(tensor).reshape(-1) for piece, tensor in held.items()} if is_kept else {}
    return FormerRank(HeldSlices.of(values), tuple(held), file)


def fetched_by(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes that a process has fetched of other ranks' parts of a state that it read, and those that it had to fetch."""
    parts = [part for part in state.values() if isinstance(part, ReshardedSlices)]
    return sum(part.fetched_bytes for part in parts), sum(part.lacked_bytes for part in parts)


def _whole(held: Mapping[TensorSlice, Tensor]) -> dict[str, Tensor]:
    """Return slices that are whole tensors by name."""
    return {piece.name: values.view(piece.shape) for piece, values in held.items()}


def read_state(files: Files, divided: Mapping[str, RemoteFile] | None = None, former: Former | None = None) -> dict[str, Any]:
    """Read the files that `TrainerRank.state_files` returned on all ranks. Tensors are views of the files, which may be read-only.

    Args:
        divided: files with tensors of ranks, which are fetched when they are used.
        former: what the process held when it was one of these ranks; it reads this first.
    """
    parts = [(name, content) for name, content in sorted({**files, **(divided or {})}.items()) if name.endswith(WEIGHTS)]

    def of(stem: str) -> HeldSlices:
        named = [(name, content) for name, content in parts if name.startswith(stem)]
        if former is None:
            return slices_in(content for _, content in named)
        mine = former.get(stem, NOTHING)
        own, others = (slices_in(x for name, x in named if (name == mine.file) is is_own) for is_own in (True, False))
        return ReshardedSlices(own, others, mine)

    model, moments, average = map(of, ("model", "optimizer", AVERAGE))
    adapters = {live_name(name): tensor for name, tensor in load_tensors(files[ADAPTER]).items()} if ADAPTER in files else None
    weights = model if adapters is None else adapters
    numbers = json.loads(bytes(files["learner.json"]))
    numbers["rng"] = torch.frombuffer(bytearray.fromhex(numbers["rng"]), dtype=torch.uint8)
    return {"weights": weights, "moments": moments, "average": average, **numbers}


def load_weights(model: Any, weights: Any, *, adapters: bool, divided: bool) -> HeldSlices | None:
    """Load a checkpoint's weights: HeldSlices, or a dict of adapters.

    `divided`: ZeRO 3 will divide the model, and reads the weights then, so they are only returned.
    Raises ValueError if they are of another model.
    """
    own = model.state_dict()
    wanted = trained(model) if adapters else [name for name, _ in model.named_parameters()]
    wrong = [name for name in weights if name not in own or (not adapters and weights.elements(name) != own[name].numel())]
    wrong += [name for name in wanted if name not in weights and name != "lm_head.weight"]  # a tied head is stored once
    if wrong:
        raise ValueError(f"the checkpoint is of another model: {wrong[0]} is in one of them only, or has another size")
    if adapters:
        model.load_state_dict(weights, strict=False)  # the base's weights come from the model's files
    elif divided:
        return weights
    else:
        for name in weights:
            own[name].copy_(as_tensor(weights[name]).view(own[name].shape))
    return None
