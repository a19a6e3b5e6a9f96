"""Ranks of learner gangs, each a process of its own that works on many cases in turn, because starting one takes seconds.

    python learner_process.py FOLDER RANKS:PORT [RANKS:PORT …]

The imports, 4 s of a core, are made once; then each rank is forked. A gang of RANKS reads FOLDER/cases<ranks>, and its ranks write
FOLDER/results<ranks>-<rank> and FOLDER/log<ranks>-<rank>. It ends with 1 as soon as a rank fails.

A case is a dict: `settings` and `files` of the learner, `batches` to update with, `state` (files of a snapshot) to
start from, `looks`: names of what to ask of `logprobs` before each update, `passes`: the same, in three parts that the update is
then given, `snapshots`: after how many updates to take one, `parks`: whether to leave the device after each, `reads`: whether to save
memory as for a large model and read the published weights after each,
`chunk_bytes`: of the logits that the head computes at once, `device`. The result holds `stats` per update, this rank's shard of the
`weights` after each update, and `snapshots` as {updates done: this rank's files}; on GPU `memory` as (bytes at work,
bytes away) per update.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from rlhfless_ray.learn.rank_settings import CriticSettings, RankSettings, ReferenceSettings
from rlhfless_ray.local.fast_imports import fast_imports
from rlhfless_ray.local.member_process import PARENT_DEATH_SIGNAL
from rlhfless_ray.local.process_memory import LARGE_PARAMETERS
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.weights.model_folder import DividedFiles
from rlhfless_ray.weights.shards import share_of
from rlhfless_ray.weights.tensor_file import read_header_bytes
from rlhfless_ray.weights.tensor_slice import HeldSlices, Slices


def _values(shard: Slices) -> Slices:
    """Return copies that numpy can compute with: of bfloat16 as float32."""
    from rlhfless_ray.weights.tensor_file import BFLOAT16, as_tensor

    def copied(array: np.ndarray) -> np.ndarray:
        return as_tensor(array).float().numpy() if array.dtype == BFLOAT16 else array.copy()

    return {piece: copied(values) for piece, values in shard.items()}


def _read_published(trainer: Any, weights: Slices) -> None:
    """Read a copy that cannot be written to. Memory that would be released is spoilt instead, so that its use would be seen."""
    from rlhfless_ray.learn import rank_weights

    rank_weights.release_pages = lambda start, size: ctypes.memset(start, 255, size)
    copies = {name: array.copy() for name, array in HeldSlices.of(weights).items()}  # of this rank's share; the others lie on other nodes
    for array in copies.values():
        array.setflags(write=False)
    trainer.held.read_published(copies)
    read = {name: parameter.data_ptr() for name, parameter in trainer.engine.module.model.named_parameters()}
    assert all(read[name] == array.ctypes.data for name, array in copies.items())


def _files(case: dict[str, Any], rank: int, ranks: int) -> Any:
    """Return the model's files, of which one of several ranks of ZeRO 3 has its part."""
    files = case["files"]
    if case["settings"].learner.zero_stage < 3 or ranks == 1:
        return files
    weights = {name: content for name, content in files.items() if name.endswith(".safetensors")}
    return DividedFiles(
        {name: content for name, content in files.items() if name not in weights},
        {name: read_header_bytes(content) for name, content in weights.items()},
        lambda other: {name: share_of(content, other, ranks) for name, content in weights.items()},
        rank,
        ranks,
    )


def _copied(found: Any) -> Any:
    """Return files as bytes: they are views of the live state, which the next update changes."""
    if isinstance(found, dict):
        return {name: bytes(content) for name, content in found.items()}
    return None if found is None else bytes(found)


def _together(trainer: Any, share: Any, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values of all ranks, whose shares have some each."""
    import torch

    total = int(share.response_lengths.sum())
    whole = {name: np.zeros(total, np.float32) for name in found}
    for name, values in found.items():
        whole[name][share.tokens] = values
    return {name: trainer.over_ranks(torch.from_numpy(values)).numpy() for name, values in whole.items()}


def _own(shares: list[Any], rank: int, ranks: int) -> Any:
    """Return the share of a rank. Ranks of one copy of the model have the same."""
    return shares[rank * len(shares) // ranks]


def run(case: dict[str, Any], rank: int, ranks: int, port: int) -> dict[str, Any]:
    import torch

    from rlhfless_ray.learn import logprobs, trainer_rank
    from rlhfless_ray.learn.learner_rank import LearnerRank
    from rlhfless_ray.learn.rank_state import read_state
    from rlhfless_ray.learn.reference_rank import ReferenceRank

    logprobs.CHUNK_BYTES = case.get("chunk_bytes", 1 << 28)
    trainer_rank.LARGE_PARAMETERS = 0 if case.get("reads") else LARGE_PARAMETERS
    settings: RankSettings = replace(case["settings"], rank=rank, device=case.get("device", "cpu"))
    assert settings.learner.ranks == ranks
    state = case.get("state")
    learner = LearnerRank(settings)
    reference = None
    if settings.algorithm.kl.coefficient and not settings.lora.rank:
        own = ReferenceSettings(
            dtype=settings.policy.dtype, trust_remote_code=False, micro_batch_tokens=settings.learner.micro_batch_tokens,
            temperature=settings.temperature, ranks=ranks // settings.learner.sequence_parallel,
            rank=rank // settings.learner.sequence_parallel, device=settings.device,
            tensor_parallel=settings.learner.tensor_parallel,
        )  # fmt: skip
        reference = ReferenceRank(own)
        reference.open(case["files"], ("127.0.0.1", port))

    def own(shares: list[Any]) -> Any:
        return _own(shares, rank, ranks)

    def passed(rank_of: Any, batch: Any, *more: Any) -> dict[str, np.ndarray]:
        """What a gang does with the answers of its ranks."""
        share = own(rank_of.cutter.of_pass(batch))
        found = rank_of.logprobs(share, *more)
        return _together(learner.trainer, share, found if isinstance(found, dict) else {"reference": found})

    learner.open(_files(case, rank, ranks), ("127.0.0.1", port), None if state is None else read_state(state))
    found: dict[str, Any] = {
        "stats": [],
        "weights": [],
        "snapshots": {},
        "memory": [],
        "logprobs": [],
        "reference": [],
        "rng": torch.get_rng_state().numpy(),
        "hosted": learner.trainer.engine.zero_cpu_offload(),
        "adds_in": getattr(learner.trainer.engine.optimizer, "gradient_accumulation_dtype", None),
    }
    if 0 in case.get("snapshots", ()):
        found["snapshots"][0] = _copied(learner.trainer.state_files())
    for number, batch in enumerate(case["batches"], 1):
        if reference is not None and batch.reference is None and len(batch):
            told = passed(reference, batch)["reference"]
            found["reference"].append(told)
            batch = replace(batch, reference=told)
        if names := case.get("looks"):
            found["logprobs"].append(passed(learner, batch, names))
        if names := case.get("passes"):
            parts = [passed(learner, batch.take(part), names) for part in np.array_split(np.arange(len(batch)), 3)]
            batch = replace(batch, **{name: np.concatenate([part[name] for part in parts]) for name in names})
        found["stats"].append(learner.update(own(learner.cutter.of_update(batch))))
        weights = learner.trainer.weights()  # arrays of the live parameters: Ray would copy them
        found["weights"].append(_values(weights))
        if case.get("reads"):
            _read_published(learner.trainer, weights)
        if number in case.get("snapshots", ()):
            found["snapshots"][number] = _copied(learner.trainer.state_files())
        if case.get("parks"):
            at_work = torch.cuda.memory_allocated()  # 0 on CPU
            learner.leave_device()
            found["memory"].append((at_work, torch.cuda.memory_allocated()))
            if number in case.get("snapshots", ()):
                found["snapshots"][f"{number} away"] = _copied(learner.trainer.state_files())
            learner.return_to_device()
    learner.trainer.engine.destroy()
    return found


def run_critic(case: dict[str, Any], rank: int, ranks: int, port: int) -> dict[str, Any]:
    """`settings` of a critic. The batches hold the returns, and perhaps other old values than the critic's own.

    The result holds `values` before each update too.
    """
    import torch

    from rlhfless_ray.learn.critic_rank import CriticRank
    from rlhfless_ray.learn.rank_state import read_state

    critic = CriticRank(replace(case["settings"], rank=rank))
    assert critic.settings.learner.ranks == ranks
    state = case.get("state")
    critic.open(_files(case, rank, ranks), ("127.0.0.1", port), None if state is None else read_state(state))
    found: dict[str, Any] = {"stats": [], "weights": [], "values": [], "snapshots": {}, "config": critic.config()}
    found["rng"] = torch.get_rng_state().numpy()
    for number, batch in enumerate(case["batches"], 1):
        share = _own(critic.cutter.of_pass(batch), rank, ranks)
        values = _together(critic.trainer, share, {"values": critic.values(share)})["values"]
        found["values"].append(values.copy())
        batch = replace(batch, values=values if batch.values is None else batch.values)
        found["stats"].append(critic.update(_own(critic.cutter.of_update(batch), rank, ranks)))
        weights = critic.trainer.weights()
        found["model"] = _copied(critic.trainer.model_files())
        found["weights"].append(_values(weights))
        if number in case.get("snapshots", ()):
            found["snapshots"][number] = _copied(critic.trainer.state_files())
        critic.leave_device()
        critic.return_to_device()
    critic.trainer.engine.destroy()
    return found


def run_supervised(case: dict[str, Any], rank: int, ranks: int, port: int) -> dict[str, Any]:
    """`settings`: the recipe of a supervised stage. `examples`, `steps` (rows of each), `second` (files of a reference or a teacher) and
    `reward_tokens`: what `SupervisedRank` takes. `packs`: whether rows are packed, however little time that saves."""
    from rlhfless_ray.learn import packing
    from rlhfless_ray.supervise.supervised_rank import SupervisedRank
    from rlhfless_ray.weights.model_folder import as_folder

    found: dict[str, Any] = {"stats": [], "weights": []}
    with patch.object(packing, "CALL_WORK", -(10**12) if case["packs"] else packing.CALL_WORK), ExitStack() as folders:
        second = None if case["second"] is None else folders.enter_context(as_folder(case["second"]))
        stage = SupervisedRank(case["settings"], len(case["steps"]), rank, ranks)
        stage.trainer.join_process_group(("127.0.0.1", port))
        stage.open(case["files"], second, [case["examples"]], None, None, case["reward_tokens"])
        for rows in case["steps"]:
            found["stats"].append(stage.step(case["examples"], rows))
            found["weights"].append(_values(stage.trainer.weights()))
    stage.trainer.engine.destroy()
    return found


def run_any(case: dict[str, Any], rank: int, ranks: int, port: int) -> dict[str, Any]:
    """Run a case of what its settings are of."""
    kinds = {CriticSettings: run_critic, SupervisedRecipe: run_supervised}
    return kinds.get(type(case["settings"]), run)(case, rank, ranks, port)


def work(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Run every case of a gang as one of its ranks."""
    cases = pickle.loads((folder / f"cases{ranks}").read_bytes())
    results = {}
    for name, case in cases.items():
        try:
            results[name] = run_any(case, rank, ranks, port)
        except Exception:  # the test that asks for this case fails with it; with two ranks both stop here
            results[name] = {"error": traceback.format_exc()}
        gc.collect()
        gc.freeze()  # or what is left of a case is looked through in each collection after it
    (folder / f"results{ranks}-{rank}").write_bytes(pickle.dumps(results))


def fork(rank: int, ranks: int, port: int, folder: Path) -> int:
    """Start a rank and return its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        log = os.open(folder / f"log{ranks}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(rank, ranks, port, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the parent's clean-up is not this process's


def main() -> None:
    folder = Path(sys.argv[1])
    with fast_imports():  # as in a rank's actor: what is imported is frozen, or each collection on leaving a device looks through it
        import rlhfless_ray.learn.critic_rank
        import rlhfless_ray.learn.learner_rank  # noqa: F401
    wanted = [
        (rank, ranks, port) for ranks, port in (map(int, worker_group.split(":")) for worker_group in sys.argv[2:]) for rank in range(ranks)
    ]
    if len(wanted) == 1:  # also because a GPU may be out of reach after a fork
        return work(*wanted[0], folder)
    left = {fork(*one, folder) for one in wanted}
    failed = False
    while left and not failed:
        process, status = os.wait()
        left.discard(process)
        failed = status != 0
    for process in left:
        os.kill(process, signal.SIGKILL)
    sys.exit(failed)


if __name__ == "__main__":
    main()
