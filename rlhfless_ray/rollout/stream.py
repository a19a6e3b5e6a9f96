"""The driver's side of a rollout: share requests out, gather completions, replace engines that die.

A completion depends on its request and the weights only, so the requests of a dead engine are simply asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError

from placement.policy import Decision, Release
from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.instance import Instance, State, reason_of
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.types import Completion, EngineStep, Request, Span, WeightVersion
from rlhfless_ray.waits import wait_any


@dataclass
class Stream:
    """What a rollout has given so far."""

    completions: dict[int, Completion] = field(default_factory=dict)
    steps: list[EngineStep] = field(default_factory=list)
    decode_s: dict[str, float] = field(default_factory=dict)  # seconds each instance spent in its engine's steps
    load_s: list[float] = field(default_factory=list)  # seconds each instance took to load the weight version
    replaced: int = 0


def fetch_weights(pool: Pool, weights: WeightVersion) -> None:
    """Every working instance pulls the version it lacks; the calls queue in its actor before the next rollout."""
    for instance in pool.working:
        if instance.version != weights.version:
            checksum = weights.checksum
            instance.loading = instance.actor.load.remote(weights.version, weights.ref, checksum)
            instance.version = weights.version
        instance.state = State.READY


def run_rollout(
    pool: Pool,
    requests: list[Request],
    shares: Sequence[np.ndarray],
    expected: np.ndarray,
    weights: WeightVersion,
    *,
    interval_s: float,
    deadline_s: float,
    max_replacements: int,
    needed_next: int,
    drained: Callable[[float, bool], Decision],
    give_back: Callable[[Instance, Decision], None],
    on_progress: Callable[[int, int], None],
) -> Stream:
    """Answer every request on the pool's working instances.

    shares: indices of the requests of each working instance, in the pool's order; instances beyond them get nothing to
    do and are given back at once. expected (n,): forecast tokens. `needed_next`: slots the next phase will want.
    When an instance has nothing left to do, `drained` (seconds of tail left, whether the next phase needs the slot) decides
    what becomes of its lease, and `give_back` carries it out. Raises RunError past the deadline or when more engines died
    than may be replaced.
    """
    start = time.monotonic()
    stream = Stream()
    fetch_weights(pool, weights)
    by_key = {request.key: i for i, request in enumerate(requests)}
    running: dict[Any, tuple[Instance, list[Request]]] = {}

    def launch(instance: Instance, share: list[Request]) -> None:
        generator = instance.actor.rollout.options(num_returns="streaming").remote(
            share, interval_s, len(instance.leases)
        )
        running[generator] = (instance, share)

    shares = [share for share in shares if len(share)]
    if sum(map(len, shares)) != len(requests) or len(shares) > len(pool.working):
        raise ValueError(
            f"{len(shares)} shares with {sum(map(len, shares))} requests for {len(pool.working)} engines and {len(requests)} requests"
        )
    for instance, part in zip(list(pool.working), shares, strict=False):
        launch(instance, [requests[i] for i in part])
    for instance in pool.working[len(shares) :]:
        give_back(instance, Release(0, "the plan has nothing for it to do"))

    while running:
        left = deadline_s - (time.monotonic() - start)
        missing = len(requests) - len(stream.completions)
        ready = wait_any(list(running), left, f"{missing} of {len(requests)} responses from {len(running)} engines")
        for generator in ready:
            instance, share = running[generator]
            try:
                completions, steps, spans = ray.get(next(generator))
                loaded = _loaded(instance)
                stream.load_s += [span.to_s - span.from_s for span in loaded]
                spans = [*loaded, *spans]
            except StopIteration:
                del running[generator]
                remaining = max((float(expected[by_key[r.key]]) for _, s in running.values() for r in s), default=0.0)
                if running:
                    kept = len(pool.working) <= needed_next
                    give_back(instance, drained(remaining * _step_s(stream.steps), kept))
                continue
            except RayActorError as error:
                del running[generator]
                stream.replaced += 1
                if error.actor_init_failed:  # an exception, not a death: it would be raised again in the next process
                    raise RunError(f"rollout engine {instance.id} could not start: {reason_of(error)}") from error
                if pool.replaced >= max_replacements:
                    raise RunError(
                        f"rollout engine {instance.id} died and functions.max_replacements = {max_replacements} are used up: "
                        f"{instance.failure() or reason_of(error)}"
                    ) from error
                replacement = pool.replace(instance)
                fetch_weights(pool, weights)
                launch(replacement, [r for r in share if r.key not in stream.completions])
                continue
            except RayTaskError as error:
                failure = instance.failure() or f"{instance.id} failed: {reason_of(error)}"
                raise RunError(f"rollout engine {failure}") from error
            for completion in completions:
                stream.completions[completion.key] = completion
            stream.steps += steps
            stream.decode_s[instance.id] = stream.decode_s.get(instance.id, 0.0) + sum(step.seconds for step in steps)
            pool.ledger.spans([lease.id for lease in instance.leases], spans)
            on_progress(len(stream.completions), len(requests))
    lost = len(requests) - len(stream.completions)
    if lost:
        raise RunError(f"{lost} of {len(requests)} responses are missing although every engine reported to be done")
    return stream


def _loaded(instance: Instance) -> list[Span]:
    """What the instance said of its last weight loading, once: it is done when the rollout after it has answers."""
    loading, instance.loading = instance.loading, None
    return ray.get(loading) if loading is not None else []


def _step_s(steps: list[EngineStep]) -> float:
    return float(np.median([s.seconds for s in steps[-64:]])) if steps else 0.0
