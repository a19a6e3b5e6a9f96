"""Errors that end a run, by whose they are."""


class UserError(Exception):
    """A mistake in what the user gave: one sentence that says what, where and what to do. Exit code 2."""


class RunError(Exception):
    """The run failed for a reason the message names. Exit code 1."""


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C or SIGTERM): state is saved, leases are freed. Exit code 130 or 143."""

    resumable = False  # whether there is a checkpoint to continue from
    continue_with = "--resume"

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


def one_line(said: object, most: int | None = None) -> str:
    """What an error says, for a sentence of ours; `most`: characters."""
    return " ".join(str(said).split())[:most]


def typed_line(error: BaseException, most: int | None = None) -> str:
    """The same behind the error's type, for errors that are not ours."""
    return f"{type(error).__name__}: {one_line(error, most)}"


def trouble(what: str, error: Exception) -> str:
    """What failed without ending the run, in one line for its log and report."""
    return f"{what} failed ({typed_line(error, 200)})"
