"""What the ledger calls nodes, how much of Ray's errors is shown, how large a private Ray's object store is, and what `auto` may be."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local.cluster import RayCluster, _shorten_ray_errors, connect, store_mb
from rlhfless_ray.recipe import Recipe


def cluster_of(monkeypatch: pytest.MonkeyPatch, *nodes: tuple[str, str]) -> RayCluster:
    found: list[dict[str, Any]] = [{"NodeID": id, "NodeManagerHostname": host} for id, host in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    return RayCluster(Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}}))


def test_a_node_is_called_by_its_host_and_the_same_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cluster_of(monkeypatch, ("a1", "box"), ("b1", "other"))
    assert [first.node_name(id) for id in ("a1", "b1", "a1", "gone")] == ["box", "other", "box", "gone"]
    assert cluster_of(monkeypatch, ("a2", "box")).node_name("a2") == "box"


def test_two_nodes_on_one_host_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of(monkeypatch, ("a", "box"), ("b", "box"), ("c", "box"))
    assert [cluster.node_name(id) for id in ("b", "a", "c", "b")] == ["box", "box#2", "box#3", "box"]


def test_of_a_killed_worker_ray_says_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import ray._private.worker as worker

    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, ignore_prefix: shown.append(data))
    for _ in range(2):
        _shorten_ray_errors()
    long = "A worker died or was killed by an unexpected system error. To troubleshoot, check the logs. Lease ID: 01\nNode ID: f7"
    worker.print_to_stdstream({"pid": "raylet", "lines": [long], "is_err": False}, ignore_prefix=False)
    worker.print_to_stdstream({"pid": "autoscaler", "lines": ["a. b. c"], "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == "Ray: A worker died or was killed by an unexpected system error\n"
    assert [data["lines"] for data in shown] == [["a. b. c"]]


def test_the_object_store_holds_weights_and_state_of_the_policy_up_to_a_share_of_the_memory() -> None:
    assert store_mb(0, 24_000, keeps_state=True) == 512 and store_mb(10**6, 1000, keeps_state=True) == 512
    seven = 7 * 10**9  # three versions in float32 are 84 GB; two states with Adam's moments 168 GB more
    assert store_mb(seven, 10**6, keeps_state=False) == pytest.approx(512 + 84e9 / 2**20, abs=1)
    assert store_mb(seven, 10**6, keeps_state=True) == pytest.approx(512 + 252e9 / 2**20, abs=1)
    assert store_mb(seven, 500_000, keeps_state=True) == 150_000


def test_auto_that_is_a_private_ray_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray finds it by its process and would try for minutes to reach it, because it listens on loopback only."""
    import ray._private.services as services

    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda address: "127.0.0.1:9")
    with pytest.raises(UserError, match=r"^--address auto, which is 127.0.0.1:9: no Ray cluster answers there: .*; a private Ray cannot"):
        connect("auto", "--address")


@pytest.mark.parametrize(
    ("mode", "raised", "said"),
    [
        ("token", AuthenticationError("no token"), "RAY_AUTH_MODE is token, and Ray says: no token; put the cluster's token into"),
        ("token", AuthenticationError("Invalid token"), "RAY_AUTH_MODE is token, and Ray says: Invalid token; put the"),
        ("token", ConnectionError("Failed"), "no Ray cluster answers there: Failed; it may ask for another token"),
        ("", ConnectionError("Failed"), "no Ray cluster answers there: Failed; if it asks for a token, set RAY_AUTH_MODE=token"),
    ],
)
def test_a_cluster_whose_token_is_missing_or_another_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, mode: str, raised: Exception, said: str
) -> None:
    def refuse(**settings: object) -> None:
        raise raised

    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(UserError, match=f"^--address there: {said}"):
        connect("there", "--address")


def test_an_address_where_another_program_listens_is_refused_at_once() -> None:
    """Ray itself would try for more than a minute, with warnings."""

    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UserError, match=r"^cluster.address 127.0.0.1:\d+: .* there: another program listens at this port"):
            connect(f"127.0.0.1:{listener.getsockname()[1]}")
