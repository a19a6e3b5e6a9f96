"""The further members of an engine, as its own process sees them.

This module does not import vLLM, so that all members can import it at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless_ray.local.member_process import MemberProcess

STEP_CALLS = ("execute_model", "sample_tokens")

started: list[MemberProcess] = []  # ahead of the engine, whose executor vLLM itself creates


def start_members(count: int, on_cpu: bool, architectures: Sequence[str] = ()) -> None:
    """Start the processes of further members up to `count`. They end with this process. `architectures`: as in `prepare`."""
    command = "rlhfless_ray.engine.engine_member", str(int(on_cpu)), *architectures
    started.extend(MemberProcess(*command) for _ in range(count - len(started)))
