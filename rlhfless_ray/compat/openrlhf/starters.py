"""Programs that start a launcher once for each rank: what they say about the ranks, before they run and in each process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

STARTERS = ("deepspeed", "torchrun")
"""Programs that start the launchers of supervised stages, one process for each rank."""
STARTING_WORDS = (*STARTERS, "torch.distributed.run", "torch.distributed.launch", "accelerate")
"""Words of a command after which the number of ranks may follow: these programs, and others that start processes too."""
MPI_WORDS = ("mpirun", "mpiexec", "mpiexec.hydra")
"""The same for MPI, in whose processes DeepSpeed asks MPI for the ranks."""
MPI_COUNTS = ("n", "np", "c")
PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, and srun with --mpi=pmi2
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),  # srun with --mpi=pmix
)
"""Variables with the number of a process, and with the number of all processes."""
OWN_VARIABLES = re.compile(
    r"TORCHELASTIC_.*|(LOCAL_|GROUP_|ROLE_|CROSS_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|(LOCAL_|CROSS_)SIZE|MASTER_(ADDR|PORT)"
    r"|OMPI_COMM_WORLD_.*|PMIX?_(RANK|SIZE)"
)
"""Variables that these programs set for each process."""


def process_place(environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the number of this process among those that were started for the ranks, and how many they are: (0, None) if it is alone."""
    for rank, size in PLACES:
        if rank in environment:
            return int(environment[rank]), int(environment[size]) if size in environment else None
    return 0, None


def ranks_before(words: Sequence[str]) -> int | None:
    """Return the number of ranks that a program before the launcher would start. None if no option says it.

    `words`: those of the command before the launcher.
    """
    place = _place(words, STARTING_WORDS)
    if place is None:
        place = _place(words, MPI_WORDS)
        counts = [value for name, value in _pairs(words[place + 1 :]) if name.lstrip("-") in MPI_COUNTS] if place is not None else []
        return int(counts[0]) if counts and counts[0].isdigit() else None
    values = {name.lstrip("-").replace("-", "_"): value for name, value in _pairs(words[place + 1 :])}
    if included := values.get("include"):  # deepspeed: host:0,1@host:0,1
        devices = [part.partition(":")[2].split(",") for part in included.split("@") if ":" in part]
        return sum(map(len, devices)) or None
    if values.get("num_processes", "").isdigit():  # accelerate: of all nodes
        return int(values["num_processes"])
    each = next((values[name] for name in ("num_gpus", "nproc_per_node") if values.get(name, "").isdigit()), None)
    nodes = next((values[name] for name in ("num_nodes", "nnodes") if values.get(name, "").isdigit()), "1")
    return int(each) * int(nodes) if each else None


def _place(words: Sequence[str], programs: Sequence[str]) -> int | None:
    return next((place for place, word in enumerate(words) if Path(word).name in programs), None)


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    for option, following in pairwise([*options, ""]):
        name, equals, value = option.partition("=")
        yield name, value if equals else following
