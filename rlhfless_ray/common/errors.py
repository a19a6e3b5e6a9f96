"""Errors that end a run, grouped by cause."""

import traceback


class UserError(Exception):
    """An error in the user's input. The message says what is wrong, where and what to do. Exit code 2."""


class RunError(Exception):
    """A failure of the run, whose cause the message names. Exit code 1."""


class Stopped(Exception):
    """The run was asked to stop by Ctrl-C or SIGTERM. State is saved and leases are released. Exit code 130 or 143."""

    resumable = False  # whether there is a checkpoint to continue from
    continue_with = "--resume"

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


def one_line(error: object, max_chars: int | None = None) -> str:
    """Format an error as one line of at most `max_chars` characters."""
    return " ".join(str(error).split())[:max_chars]


def one_line_with_type(error: BaseException, max_chars: int | None = None) -> str:
    """Format an exception as one line that begins with its type, for errors raised by other libraries.

    An exception without a message, such as a failed assertion, is described by the line of code that raised it.
    """
    text: object = error
    if not str(error) and (frames := traceback.extract_tb(error.__traceback__)):
        text = frames[-1].line or ""
    return f"{type(error).__name__}: {one_line(text, max_chars)}"


def shortened(names: list[str], most: int = 5) -> str:
    """Join the first names with commas, and count the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} others" if len(names) > most else "")


def describe_failure(action: str, error: Exception) -> str:
    """Describe in one line, for log and report, an action that failed without ending the run."""
    return f"{action} failed ({one_line_with_type(error, 200)})"
