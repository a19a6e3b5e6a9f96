"""The prefix-KV service: a Ray Serve application with a handle and without a route.

Its replica keeps the index and owns the pages, because it makes the calls that return them. A page therefore outlives the prefill
instance that computed it, and is freed with the run. The replica imports no vLLM and computes nothing. The application is named
after the run. It deletes itself when the run's heartbeat stops, because Serve would keep it forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfless_ray.common.deadlines import STOP
from rlhfless_ray.common.errors import RunError, one_line
from rlhfless_ray.prefix.block_hash import distinct_prefixes, salt
from rlhfless_ray.prefix.page_index import HeldBundle, PageIndex
from rlhfless_ray.prefix.pages import PageLayout
from rlhfless_ray.step.step_prefixes import Prepared
from rlhfless_ray.types import Prefilled

HEARTBEAT_S = 20.0  # the application deletes itself after this long without a heartbeat
START_S = 60.0  # Serve's controller and one replica take 2-3 s on an idle machine
ANSWER_S = 10.0  # timeout of calls that compute nothing


@dataclass(frozen=True)
class Producer:
    """A working prefill instance. `threads`: number of its leased slots."""

    actor: Any
    threads: int


class PrefixApp:
    """The deployment: a plain class, run by Serve in one replica. Only one event loop accesses its state."""

    def __init__(self, name: str, cap_bytes: int, heartbeat_s: float) -> None:
        self.name, self.heartbeat_s = name, heartbeat_s
        self.index = PageIndex(cap_bytes)
        self.layouts: dict[Any, PageLayout] = {}
        self.last_heartbeat_s = time.monotonic()
        threading.Thread(target=self._delete_when_orphaned, daemon=True).start()

    async def heartbeat(self) -> None:
        self.last_heartbeat_s = time.monotonic()

    async def keep_only(self, version: int) -> int:
        """Free the pages of all other policy versions, and return their number. Called after a weight update."""
        return self.index.keep_only(salt(version))

    async def prepare(self, version: int, prompts: Sequence[np.ndarray], producers: Sequence[Producer], within_s: float) -> Prepared:
        """Return the pages of these prompts (token ids (n,) int32), and compute missing ones on `producers`.

        Concurrent calls get the same pages. Returns when the jobs of this call have ended; pages of other calls' jobs may
        still be computed. Without producers, or after failures, pages remain missing.
        """
        self.last_heartbeat_s = time.monotonic()
        if not producers:
            return Prepared(of=[[] for _ in prompts])
        kind, matching, refused = await self._matching_producers(producers, within_s)
        if kind is None:
            return Prepared(of=[[] for _ in prompts], failed=refused)
        trie = distinct_prefixes(prompts, kind.block_size, kind.start(salt(version)))
        # no await until all jobs are submitted, so that no other call comes between
        new, no_room = self.index.missing(trie, kind.page_bytes), self.index.no_room
        running: list[Any] = []
        returns: list[list[Any]] = []
        for job in self.index.jobs(trie, new, len(matching)):
            prefixes = [np.asarray(prompts[prompt][:tokens], np.int32) for prompt, tokens in job.prefixes]
            bundles = [tuple(trie.nodes[n].address for n in nodes) for nodes in job.bundles]
            needs = [held.ref for held in job.needs] + [ref for number in job.after for ref in returns[number]]
            producer = producers[matching[job.producer]]
            made = producer.actor.prefill.options(num_returns=1 + len(bundles)).remote(
                version, prefixes, bundles, needs, within_s, producer.threads
            )
            done, *refs = made
            returns.append(refs)
            held = [self.index.add(ref, salt(version), addresses, kind.page_bytes) for ref, addresses in zip(refs, bundles, strict=True)]
            running.append(self._run_job(matching[job.producer], done, held, within_s))
        outcomes = await asyncio.gather(*running)
        available, positions = self.index.bundles_of(trie)
        return Prepared(
            [held.ref for held in available], positions, [outcome for outcome in outcomes if not isinstance(outcome, str)],
            refused + [outcome for outcome in outcomes if isinstance(outcome, str)], no_room,
        )  # fmt: skip

    async def _matching_producers(self, producers: Sequence[Producer], within_s: float) -> tuple[PageLayout | None, list[int], list[str]]:
        """Return the page layout, the positions of the producers that have it, and why others do not."""
        replies = await asyncio.gather(*(self._layout(producer.actor, within_s) for producer in producers), return_exceptions=True)
        refused = [_describe(reply) for reply in replies if isinstance(reply, BaseException)]
        kind = next((reply for reply in replies if isinstance(reply, PageLayout)), None)
        matching = [i for i, reply in enumerate(replies) if reply == kind]
        others = len(producers) - len(matching) - len(refused)
        if others:
            refused.append(f"{others} of {len(producers)} prefill instances have another page layout than the first")
        return kind, matching, refused

    async def _layout(self, actor: Any, within_s: float) -> PageLayout:
        key = actor._actor_id
        if key not in self.layouts:
            self.layouts[key] = await asyncio.wait_for(actor.kind.remote(), within_s)
        return self.layouts[key]

    async def _run_job(self, producer: int, done: Any, held: list[HeldBundle], within_s: float) -> tuple[int, Prefilled] | str:
        """Await a job, and return its result or the reason of its failure. A failed job's pages are dropped, to be computed again."""
        try:
            return producer, await asyncio.wait_for(done, within_s)
        except Exception as error:
            for bundle in held:
                self.index.drop(bundle)
            return _describe(error)

    def _delete_when_orphaned(self) -> None:
        from ray import serve

        while time.monotonic() - self.last_heartbeat_s < self.heartbeat_s:
            time.sleep(min(1.0, self.heartbeat_s / 4))
        serve.delete(self.name, _blocking=False)


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "a prefill instance did not reply in time"
    from rlhfless_ray.functions.instance import reason_of

    return reason_of(error)


class PrefixService:
    """The driver's side: start the application, keep it alive, call it and delete it."""

    def __init__(self, run_id: str, cap_bytes: int, *, heartbeat_s: float = HEARTBEAT_S, start_s: float = START_S) -> None:
        """`run_id`: unique on the cluster. `cap_bytes`: limit of object store memory for pages."""
        self.name = f"rlhfless-prefix-{run_id}"
        self.cap_bytes, self.heartbeat_s, self.start_s = cap_bytes, heartbeat_s, start_s
        self.handle: Any = None
        self.failures: list[str] = []  # reasons of failed calls, newest last
        self._ended = threading.Event()

    def start(self) -> None:
        """Deploy the application. Raises RunError if no replica runs within `start_s`."""
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        deployment = serve.deployment(
            num_replicas=1, max_ongoing_requests=1000, graceful_shutdown_timeout_s=1, graceful_shutdown_wait_loop_s=0.1,
            ray_actor_options={"num_cpus": 0}, logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )(PrefixApp)  # fmt: skip
        bound = deployment.options(name="PrefixApp").bind(self.name, self.cap_bytes, self.heartbeat_s)
        target = serve.RunTarget(target=bound, name=self.name, route_prefix=None)
        self.handle = serve.run_many([target], wait_for_applications_running=False)[0]
        end = time.monotonic() + self.start_s
        while (status := serve.status().applications.get(self.name)) is None or status.status != "RUNNING":
            STOP.check()
            if time.monotonic() > end or (status is not None and status.status == "DEPLOY_FAILED"):
                status_text = one_line(status.message if status else "its status is unknown", 300)
                raise RunError(f"timed out after {self.start_s:.0f} s waiting for the prefix service: {status_text}")
            time.sleep(0.05)
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def prepare(self, version: int, prompts: Sequence[Sequence[int]], producers: Sequence[Producer], within_s: float) -> Prepared:
        """Call `PrefixApp.prepare`. If the service does not reply, nothing is prepared, and `failures` has the reason."""
        tokens = [np.asarray(prompt, np.int32) for prompt in prompts]
        nothing = Prepared(of=[[] for _ in prompts])
        return self._call("prepare", within_s + ANSWER_S, nothing, version, tokens, list(producers), within_s)

    def keep_only(self, version: int) -> int:
        return self._call("keep_only", ANSWER_S, 0, version)

    def _call(self, what: str, within_s: float, otherwise: object, *arguments: object) -> Any:
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
                    self.failures.append(f"no reply to {what} within {within_s:.0f} s")
                    return otherwise
            except (RayError, RayServeException) as error:
                self.failures.append(f"{what}: {_describe(error)}")
                return otherwise

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self.heartbeat_s / 4):
            with contextlib.suppress(Exception):  # Serve restarts a replica that died; the next call reports its failure
                self.handle.heartbeat.remote()

    def stop(self, remove: bool = True) -> None:
        """Delete the application and its pages. Serve itself stays, because others may use it.

        `remove` False: the cluster ends anyway.
        """
        self._ended.set()
        if self.handle is not None:
            self.handle = None
            if remove:
                from ray import serve

                serve.delete(self.name)
