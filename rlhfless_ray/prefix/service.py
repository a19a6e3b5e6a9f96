"""The prefix-KV service: a Ray Serve application with a handle and no route.

Its replica keeps the index and *owns* the pages: it makes the calls whose return values they are, so a page outlives the prefill
instance that computed it and goes with the run. It imports no vLLM and computes nothing. The application's name is the run's;
it alone is removed at the end, and it removes itself when the run's heartbeat stops, for Serve would keep it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhfless_ray.errors import RunError, one_line
from rlhfless_ray.prefix.actor import Prefilled
from rlhfless_ray.prefix.address import distinct_prefixes, salt
from rlhfless_ray.prefix.index import PAGES_PER_BUNDLE, Held, PageIndex
from rlhfless_ray.prefix.pages import Kind
from rlhfless_ray.waits import STOP

HEARTBEAT_S = 20.0  # without a word from the run for this long, the application ends itself
START_S = 60.0  # Serve's controller and one replica take 2-3 s on a free machine
ANSWER_S = 10.0  # for what computes nothing


@dataclass(frozen=True)
class Producer:
    """A prefill instance at work: its actor, and the slots it was leased."""

    actor: Any
    threads: int


@dataclass(frozen=True)
class Prepared:
    """Where the pages of some prompts lie. refs: bundles; of[i]: those of prompt i (positions in `refs`). done: by producer
    (position), what its jobs did; failed: why jobs came to nothing; no_room: pages that did not fit under the memory cap."""

    refs: list[Any] = field(default_factory=list)
    of: list[list[int]] = field(default_factory=list)
    done: list[tuple[int, Prefilled]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    no_room: int = 0

    def needed_by(self, prompts: Sequence[int]) -> list[Any]:
        """References of the bundles that these prompts (positions) use."""
        return [self.refs[i] for i in sorted({i for prompt in prompts for i in self.of[prompt]})]


class PrefixApp:
    """The deployment: a plain class, run by Serve in one replica. All its state is touched on one event loop."""

    def __init__(self, name: str, cap_bytes: int, heartbeat_s: float, pages_per_bundle: int = PAGES_PER_BUNDLE) -> None:
        self.name, self.heartbeat_s = name, heartbeat_s
        self.index = PageIndex(cap_bytes, pages_per_bundle)
        self.kinds: dict[Any, Kind] = {}
        self.heard_s = time.monotonic()
        threading.Thread(target=self._end_when_alone, daemon=True).start()

    async def beat(self) -> None:
        self.heard_s = time.monotonic()

    async def keep_only(self, version: int) -> int:
        """After a weight update: free the pages of every other version. Returns how many."""
        return self.index.keep_only(salt(version))

    async def stats(self) -> dict[str, int]:
        return {**self.index.counts, "bytes": self.index.bytes, "bundles": len(self.index.held)}

    async def prepare(self, version: int, prompts: Sequence[np.ndarray], producers: Sequence[Producer], within_s: float) -> Prepared:
        """The pages of these prompts (token ids (n,) int32), computing on `producers` those that nobody has or is computing.

        Whoever asks meanwhile is given the same pages. Returns when the jobs of this call are over; pages that others compute
        may still be on their way. Without producers, or where they fail, what is missing is missing.
        """
        self.heard_s = time.monotonic()
        if not producers:
            return Prepared(of=[[] for _ in prompts])
        kind, able, refused = await self._able(producers, within_s)
        if kind is None:
            return Prepared(of=[[] for _ in prompts], failed=refused)
        trie = distinct_prefixes(prompts, kind.block_size, kind.start(salt(version)))
        no_room = self.index.counts["no_room"]
        # from here to the submission nothing is awaited: no other question comes between
        new = self.index.missing(trie, kind.page_bytes)
        running: list[Any] = []
        returns: list[list[Any]] = []
        for job in self.index.jobs(trie, new, len(able)):
            prefixes = [np.asarray(prompts[prompt][:tokens], np.int32) for prompt, tokens in job.prefixes]
            bundles = [tuple(trie.nodes[n].address for n in nodes) for nodes in job.bundles]
            needs = [held.ref for held in job.needs] + [ref for number in job.after for ref in returns[number]]
            producer = producers[able[job.producer]]
            made = producer.actor.prefill.options(num_returns=1 + len(bundles)).remote(
                version, prefixes, bundles, needs, within_s, producer.threads
            )
            done, *refs = made
            returns.append(refs)
            held = [
                self.index.add(ref, salt(version), addresses, kind.page_bytes)
                for ref, addresses in zip(refs, bundles, strict=True)
            ]
            running.append(self._watched(able[job.producer], done, held, within_s))
        outcomes = await asyncio.gather(*running)
        found, of = self.index.bundles_of(trie)
        return Prepared(
            [held.ref for held in found], of, [one for one in outcomes if not isinstance(one, str)],
            refused + [one for one in outcomes if isinstance(one, str)], self.index.counts["no_room"] - no_room,
        )  # fmt: skip

    async def _able(self, producers: Sequence[Producer], within_s: float) -> tuple[Kind | None, list[int], list[str]]:
        """The kind of pages to make, the producers (positions) that make it, and why the others do not."""
        told = await asyncio.gather(*(self._kind(one.actor, within_s) for one in producers), return_exceptions=True)
        refused = [_said(one) for one in told if isinstance(one, BaseException)]
        kind = next((one for one in told if isinstance(one, Kind)), None)
        able = [i for i, one in enumerate(told) if one == kind]
        others = len(producers) - len(able) - len(refused)
        if others:
            refused.append(f"{others} of {len(producers)} prefill instances make pages of another kind than the first")
        return kind, able, refused

    async def _kind(self, actor: Any, within_s: float) -> Kind:
        key = actor._actor_id
        if key not in self.kinds:
            self.kinds[key] = await asyncio.wait_for(_value(actor.kind.remote()), within_s)
        return self.kinds[key]

    async def _watched(self, producer: int, done: Any, held: list[Held], within_s: float) -> tuple[int, Prefilled] | str:
        """What a job did, or why it failed: its pages are then forgotten, so that the next who asks has them computed."""
        try:
            return producer, await asyncio.wait_for(_value(done), within_s)
        except Exception as error:
            for one in held:
                self.index.drop(one)
            return _said(error)

    def _end_when_alone(self) -> None:
        from ray import serve

        while time.monotonic() - self.heard_s < self.heartbeat_s:
            time.sleep(min(1.0, self.heartbeat_s / 4))
        serve.delete(self.name, _blocking=False)


async def _value(ref: Any) -> Any:
    return await ref


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "a prefill instance did not answer in time"
    from rlhfless_ray.functions.instance import reason_of

    return reason_of(error)


class PrefixService:
    """The driver's end: starts the application, keeps it alive, asks it, removes it."""

    def __init__(self, run_id: str, cap_bytes: int, *, heartbeat_s: float = HEARTBEAT_S, start_s: float = START_S) -> None:
        """`run_id`: unique on the cluster. `cap_bytes`: most memory of the object store that pages may take."""
        self.name = f"rlhfless-prefix-{run_id}"
        self.cap_bytes, self.heartbeat_s, self.start_s = cap_bytes, heartbeat_s, start_s
        self.handle: Any = None
        self.failures: list[str] = []  # why the service could not answer, newest last
        self._ended = threading.Event()

    def start(self) -> None:
        """Raises RunError when no replica runs within `start_s`."""
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            num_replicas=1, max_ongoing_requests=1000, graceful_shutdown_timeout_s=1, ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )(PrefixApp)  # fmt: skip
        bound = deployment.options(name="PrefixApp").bind(self.name, self.cap_bytes, self.heartbeat_s)
        target = serve.RunTarget(target=bound, name=self.name, route_prefix=None)
        self.handle = serve.run_many([target], wait_for_applications_running=False)[0]
        end = time.monotonic() + self.start_s
        while (status := serve.status().applications.get(self.name)) is None or status.status != "RUNNING":
            STOP.check()
            if time.monotonic() > end or (status is not None and status.status == "DEPLOY_FAILED"):
                said = one_line(status.message if status else "it is not known", 300)
                raise RunError(f"waited {self.start_s:.0f} s for the prefix service in vain: {said}")
            time.sleep(0.05)
        threading.Thread(target=self._beat, daemon=True).start()

    def prepare(self, version: int, prompts: Sequence[Sequence[int]], producers: Sequence[Producer], within_s: float) -> Prepared:
        """See `PrefixApp.prepare`. A service that does not answer costs nothing but the recomputation: nothing is prepared then,
        and `failures` says why."""
        tokens = [np.asarray(prompt, np.int32) for prompt in prompts]
        nothing = Prepared(of=[[] for _ in prompts])
        return self._ask("prepare", within_s + ANSWER_S, nothing, version, tokens, list(producers), within_s)

    def keep_only(self, version: int) -> int:
        return self._ask("keep_only", ANSWER_S, 0, version)

    def stats(self) -> dict[str, int]:
        return self._ask("stats", ANSWER_S, {})

    def _ask(self, what: str, within_s: float, otherwise: Any, *arguments: Any) -> Any:
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        response = getattr(self.handle, what).remote(*arguments)
        end = time.monotonic() + within_s
        while True:
            try:
                return response.result(timeout_s=min(0.1, max(0.0, end - time.monotonic())))
            except TimeoutError:
                STOP.check()
                if time.monotonic() >= end:
                    response.cancel()
                    self.failures.append(f"no answer to {what} within {within_s:.0f} s")
                    return otherwise
            except (RayError, RayServeException) as error:
                self.failures.append(f"{what}: {_said(error)}")
                return otherwise

    def _beat(self) -> None:
        while not self._ended.wait(self.heartbeat_s / 4):
            with contextlib.suppress(Exception):  # a replica that died comes back; whoever asks is told what failed
                self.handle.beat.remote()

    def stop(self, remove: bool = True) -> None:
        """Remove our application, and with it the pages. Serve itself stays: it may be somebody else's. Without `remove` the
        cluster is about to end."""
        self._ended.set()
        if self.handle is not None:
            self.handle = None
            if remove:
                from ray import serve

                serve.delete(self.name)
