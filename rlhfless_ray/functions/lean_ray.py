"""A Ray of our own without what it does not need: the dashboard's server and its agent on each node, the monitor of logs that nobody
reads, the autoscaler of a cluster that does not grow. Ray has no switch for them; together they take six seconds of a processor at
every start, and more all the time. It also waits longer for a node to start than Ray does. This works on names that are Ray's own, so a
version of Ray that it was not tried with starts whole.

Run as a program this file stands in for the agent, without which Ray ends a node. What it leaves on disk is what Ray's own agent
leaves in an installation without dashboard: ports that say there is nothing to connect to.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

TRIED = "2.60."
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
AGENT = "--dashboard_agent_command="
REGISTERS_S = 150.0  # for a node to be known after its start; Ray's own 30 s are too few for a machine that does much else


@contextmanager
def lean_ray() -> Iterator[None]:
    """Clusters and nodes that are started inside are lean."""
    import ray

    if not ray.__version__.startswith(TRIED):
        yield
        return
    from ray._private import services
    from ray._private.node import Node

    start, find = services.start_ray_process, services.get_node

    def find_patiently(*about: Any) -> Any:
        end = time.monotonic() + REGISTERS_S
        while True:
            try:
                return find(*about)
            except RuntimeError:  # it is not known yet
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)

    def no_server(node: Any, **settings: Any) -> None:
        node._webui_url = None

    def start_lean(command: list[str], *more: Any, **settings: Any) -> Any:
        return start([_stand_in(word) if word.startswith(AGENT) else word for word in command], *more, **settings)

    with (
        patch.object(Node, "start_api_server", no_server), patch.object(Node, "start_log_monitor", lambda node: None),
        patch.object(Node, "start_monitor", lambda node: None), patch.object(services, "start_ray_process", start_lean),
        patch.object(services, "get_node", find_patiently),
    ):
        yield


def _stand_in(word: str) -> str:
    """The node's option with the command of this program in place of the agent's."""
    told = dict(part.split("=", 1) for part in shlex.split(word.removeprefix(AGENT)) if part.startswith(("--session-dir=", "--node-id=")))
    return AGENT + subprocess.list2cmdline([sys.executable, "-I", "-S", __file__, told["--session-dir"], told["--node-id"]])


def main(session: str, node: str) -> None:
    parent = os.getppid()
    for name in PORTS:
        path = os.path.join(session, f"{name}_{node}")
        with open(path + ".part", "w") as file:
            file.write("-1")
        os.rename(path + ".part", path)
    while os.getppid() == parent:
        time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
