"""The process group of a worker group's ranks."""

from __future__ import annotations

import importlib
import os
import socket

import psutil

INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}  # variables of the backends, which listen too
_own: list[bool] = []  # not empty while this process is in a group that `join_process_group` initialized


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port of an address of this machine."""
    with listening_socket(address, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


def listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens on one address of this machine only. Raises OSError if the port is taken."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def interface_of(address: str) -> str:
    """Return the network interface that has an address, "" if none of this machine has it."""
    found = (name for name, addresses in psutil.net_if_addrs().items() if address in [one.address for one in addresses])
    return next(found, "lo" if address.startswith("127.") else "")


def join_process_group(rendezvous: tuple[str, int] | None, rank: int, ranks: int, device: str) -> None:
    """Connect the ranks for DeepSpeed. `device`: "cpu" or "cuda".

    `rendezvous`: address and port of rank 0, which listens there and on no other address. None: torch.distributed is initialized already.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import torch.distributed as dist
    from deepspeed.constants import default_pg_timeout

    if device == "cpu":
        # DeepSpeed would compile a shared-memory all-reduce (about 45 s, needs g++ and ninja); gloo does it too.
        setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)  # noqa: B010
    if dist.is_initialized() or rendezvous is None:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it, and not all who initialize set it, such as vLLM
        return
    _own.append(True)
    address, port = rendezvous
    backend = "nccl" if device == "cuda" else "gloo"
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_SIZE="1")
    if interface := interface_of(address if rank == 0 else own_address_towards(address)):
        os.environ.setdefault(
            INTERFACES[backend], f"={interface}" if backend == "nccl" else interface
        )  # NCCL takes a bare name for a prefix
    listening = listening_socket(address, port).detach() if rank == 0 else None  # torch's own would listen on all interfaces
    store = dist.TCPStore(address, port, ranks, rank == 0, default_pg_timeout, master_listen_fd=listening)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=default_pg_timeout)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


def leave_process_group() -> None:
    """Leave the process group, so that this process can join another one. The engines that used it must be gone.

    A group that something else initialized stays.
    """
    if not _own:
        return
    import deepspeed.comm as communication

    communication.destroy_process_group()
    communication.comm.cdb = None  # else DeepSpeed would use the backend object of the group that has ended
    _own.clear()


def own_address_towards(address: str) -> str:
    """Return the address with which this machine reaches another one. Sends nothing."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own: str = probe.getsockname()[0]
        return own
