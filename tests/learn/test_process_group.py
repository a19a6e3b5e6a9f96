"""Where the ranks of a worker group listen while they meet."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from rlhfless_ray.learn.process_group import free_port, interface_of, listening_socket, own_address_towards
from tests.conftest import ROOT

RANK = """
import os, sys
import psutil
from rlhfless_ray.learn.process_group import join_process_group

rank, port, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
join_process_group((address, port), rank, 2, "cpu")
import torch, deepspeed

summed = torch.ones(1) * (rank + 1)
deepspeed.comm.all_reduce(summed)
places = {one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN}
print(summed.item(), *sorted(places))
deepspeed.comm.barrier()
"""


def other_address() -> str:
    """Return an IPv4 address of this machine that is not loopback, or skip the test."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no network")


def test_a_port_is_free_on_its_address_and_taken_once_somebody_listens_there() -> None:
    with listening_socket("127.0.0.1", free_port("127.0.0.1")) as taken:
        address, port = taken.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(OSError, match="already in use"):
            listening_socket(address, port)


def test_the_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") == "lo"
    assert interface_of("203.0.113.7") == ""
    own = other_address()
    assert interface_of(own) not in ("", "lo") and own_address_towards(own) == own
    assert own_address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.learner
@pytest.mark.parametrize("is_cluster", [False, pytest.param(True, marks=pytest.mark.long)])
def test_ranks_listen_on_the_address_of_their_node_only(is_cluster: bool) -> None:
    address = other_address() if is_cluster else "127.0.0.1"
    port = free_port(address)
    words = [[sys.executable, "-c", RANK, str(rank), str(port), address] for rank in (1, 0)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for command in words]
    assert [rank.communicate(timeout=200)[0].split()[-2:] for rank in ranks] == [["3.0", address]] * 2
