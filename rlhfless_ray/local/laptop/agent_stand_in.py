"""Stand in for the agents of a Ray node. Ray ends a node whose agents are missing, so it starts this program in the place of each.

For the dashboard's agent it writes the files that this agent writes in an installation without a dashboard: port numbers of -1. For
the agent of runtime environments, which few runs need, it waits for the first request and then becomes that agent. It imports next to
nothing, because it runs twice on each node.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
ENVIRONMENT_PORT, OWN_PORT = "runtime_env_agent_port", "--runtime-env-agent-port="  # names of its file and of its option
LOOK_S = 1.0  # interval between checks that the node still lives
# Runs Ray's agent with a socket in the place of the one that it binds to the same port: requests wait in it.
BECOME_AGENT = """
import os, runpy, socket, sys
listening, sys.argv = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
bind = socket.socket.bind

def take_over(own, address):
    if address == listening.getsockname():
        os.dup2(listening.fileno(), own.fileno())
    else:
        bind(own, address)

socket.socket.bind = take_over
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main(session: str, node: str, host: str = "", *agent: str) -> None:
    """Stand in for an agent while its node lives. `host`, `agent`: address and command of the one to become when there is a request."""
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) if agent else None
    for name in PORTS if listening is None else [ENVIRONMENT_PORT]:
        path = os.path.join(session, f"{name}_{node}")
        with open(path + ".part", "w") as file:
            file.write("-1" if listening is None else str(listening.getsockname()[1]))
        os.rename(path + ".part", path)
    parent = os.getppid()
    while os.getppid() == parent:
        if listening is None:
            time.sleep(LOOK_S)
        elif select.select([listening], [], [], LOOK_S)[0]:
            become(agent, listening)


def become(agent: tuple[str, ...], listening: socket.socket) -> None:
    """Run the agent's command in this process. `listening`: a socket with a request, which it takes over."""
    listening.set_inheritable(True)
    words = [f"{OWN_PORT}{listening.getsockname()[1]}" if word.startswith(OWN_PORT) else word for word in agent]
    script = next(place for place, word in enumerate(words) if word.endswith(".py"))
    os.execv(words[0], [*words[:script], "-P", "-c", BECOME_AGENT, str(listening.fileno()), *words[script:]])


if __name__ == "__main__":
    main(*sys.argv[1:])
