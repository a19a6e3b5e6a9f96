"""Wait for the replies of a worker group's ranks, and tell what their errors mean."""

from __future__ import annotations

import errno
import time
from typing import Any

import ray

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError, UserError
from rlhfless_ray.functions.failure_budget import FailureCause
from rlhfless_ray.functions.instance import GONE, raised_at_start, reason_of
from rlhfless_ray.learn.recovery import LearnerLost

DEATH_S = 15.0  # time until Ray knows that a rank died, after other ranks have failed because of it


def wait_for_ranks(refs: list[Any], deadline_s: float, what: str, name: str, ranks: int) -> list[Any]:
    """Return the replies. `what`: for messages. `name`: of the worker group.

    Raises LearnerLost if a process died, UserError and RunError if it raised one, or if the deadline is over.
    """
    try:
        return get(refs, deadline_s, what)
    except ray.exceptions.RayTaskError as error:
        if getattr(error.cause, "errno", None) == errno.EADDRINUSE:  # taken after it was chosen; other ranks already wait at it
            taken = f"{what} failed: another program has taken the rendezvous port of its processes"
            raise LearnerLost(taken, FailureCause.DIED) from error
        if ranks > 1 and (death := _death(refs)) is not None:  # other ranks fail because of it, possibly before it
            raise LearnerLost(f"{what} failed: a {name} process died: {reason_of(death)}") from death
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise RunError(f"{what} failed: {reason_of(error)}") from error
    except GONE as error:
        if raised_at_start(error):
            raise RunError(f"{what} failed: {reason_of(error)}") from error
        raise LearnerLost(f"{what} failed: a {name} process died: {reason_of(error)}") from error


def has_raised(ref: Any) -> bool:
    """Return whether a call that has ended raised, or lost its process. A value that is on another node is not fetched."""
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return False
    except (ray.exceptions.RayTaskError, *GONE):
        return True
    return False


def _death(refs: list[Any]) -> BaseException | None:
    """Return the error of a call whose process died, if Ray reports that within a few seconds."""
    end = time.monotonic() + DEATH_S
    for ref in refs:
        try:
            ray.get(ref, timeout=max(0.0, end - time.monotonic()))
        except GONE as error:
            return error
        except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError):
            continue
    return None
