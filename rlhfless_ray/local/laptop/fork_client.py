"""Have the fork server fork a worker: the program that Ray starts in the place of each.

It exits with the worker's status, and killing it kills the worker. Without a server it becomes the worker itself. It imports next to
nothing, because it runs once for each worker: 13 ms of processor, of which Python's own start takes 11. With `socket` it takes 24 ms,
because that imports `enum` and `selectors`, so the module below it is used.
"""

from __future__ import annotations

import _socket
import os
import sys
import time

READY_S, POLL_S = 30.0, 0.05  # Ray gives a worker 60 s to register
REFUSED_S = 1.0  # longest time between a server's socket and its first answer
FAILED = ".failed"  # suffix of a file that says that the server could not start
STREAMS = (0, 1, 2)  # standard input, output and error, which a worker takes over


def ask(address: str, command: list[str]) -> None:
    """Have a worker forked, wait until it ends and exit as it does. Run the command here if there is no server."""
    server = _socket.socket(_socket.AF_UNIX)
    end = time.monotonic() + READY_S  # it imports everything first, which every worker would do otherwise
    while True:
        try:
            server.connect(address)
            break
        except ConnectionRefusedError:  # it has ended, or listens in a moment
            end = min(end, time.monotonic() + REFUSED_S)
        except OSError:  # it is not there yet
            pass
        if time.monotonic() > end or os.path.exists(address + FAILED):
            os.execv(command[0], command)
        time.sleep(POLL_S)
    wanted = write_request(command, dict(os.environ), os.getcwd())
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in STREAMS)  # as C integers
    server.sendmsg([len(wanted).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    server.sendall(wanted)
    sys.exit(int.from_bytes(server.recv(1) or b"\1", "big"))


def write_request(command: list[str], environment: dict[str, str], folder: str) -> bytes:
    """Encode command, environment and folder as one message, separated by zero bytes."""
    variables = (f"{name}={value}" for name, value in environment.items())
    return b"\0".join(map(os.fsencode, (folder, str(len(command)), *command, *variables)))


def read_request(content: bytes) -> tuple[list[str], dict[str, str], str]:
    """Return command, environment and folder of `write_request`. Raises ValueError if there are none."""
    folder, count, *words = map(os.fsdecode, content.split(b"\0"))
    variables = (word.partition("=") for word in words[int(count) :])
    return words[: int(count)], {name: value for name, _, value in variables}, folder


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:])
