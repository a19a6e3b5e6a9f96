"""The process group of a worker group's ranks."""

from __future__ import annotations

import importlib
import os
import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def join_process_group(rendezvous: tuple[str, int] | None, rank: int, ranks: int, device: str) -> None:
    """Connect the ranks for DeepSpeed. `device`: "cpu" or "cuda".

    `rendezvous`: address and port of rank 0; None: torch.distributed is initialized already.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import torch.distributed as dist

    if device == "cpu":
        # DeepSpeed would compile a shared-memory all-reduce (about 45 s, needs g++ and ninja); gloo does it too.
        setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)  # noqa: B010
    if dist.is_initialized() or rendezvous is None:
        return
    address, port = rendezvous
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_SIZE="1")
    if address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deepspeed.init_distributed(
        dist_backend="nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=ranks,
        verbose=False,
    )
