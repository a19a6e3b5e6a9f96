"""How a command ends: its errors as one sentence, with an exit code. Imports only the standard library and the project's errors."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from rlhfless_ray.cli.line_ends import check_line_ends
from rlhfless_ray.common.errors import RunError, Stopped, UserError


def guarded(action: Callable[[], None], usage: Callable[[], str] = str) -> NoReturn:
    """Run an action and end the process.

    Exit code 2 means a user's mistake, 1 a failed run, and 128 + signal a stopped one. If nobody reads the output any more, as after
    `| head`, the process ends without a message, and with the code of SIGPIPE instead of 0 or 1. `usage`: returns the text before the
    message of a mistake, as argparse prints it.
    """
    try:
        code = _exit_code(action, usage)
    except BrokenPipeError:
        if not _output_is_closed():  # a pipe to another process of the run
            raise
        code = 0
    if _output_is_closed() and code in (0, 1):  # 1 is click's code for a closed pipe
        code = 128 + signal.SIGPIPE
    os._exit(code)  # exit hooks of vLLM, wandb and Ray may hang, and everything of a run is closed already


def _exit_code(action: Callable[[], None], usage: Callable[[], str]) -> int:
    """Run an action unless a script broke the command line, print its error, and return the exit code."""
    try:
        check_line_ends(sys.argv[1:])
        action()
    except UserError as error:
        _print_error(f"{usage()}error: {error}")
        return 2
    except RunError as error:
        _print_error(f"run failed: {error}")
        return 1
    except Stopped as stop:
        left = f"continue with {stop.continue_with}" if stop.resumable else "there is nothing to resume from yet"
        _print_error(f"stopped: all leases are released; {left}")
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        _print_error("interrupted")
        return 128 + signal.SIGINT
    except SystemExit as end:  # of typer and argparse, which have printed their messages
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _output_is_closed() -> bool:
    """Write what is buffered, and return whether stdout or stderr is a pipe without a reader."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(BrokenPipeError):
            stream.flush()
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_error(text: str) -> None:
    print(text, file=sys.stderr)
