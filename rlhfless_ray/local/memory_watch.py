"""Measure the memory of a run's processes on one machine while the run works."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import psutil

FUNCTIONS = {  # by class name, which Ray puts into a worker's process title
    "ExactEngineActor": "engines",
    "StockEngineActor": "engines",
    "RewardActor": "reward",
    "LearnerActor": "learner",
    "CriticActor": "critic",
    "ReferenceActor": "reference",
    "DrafterActor": "drafter",
    "RayTrainWorker": "learner",  # a rank of a supervised stage
}
WORKER = "ray::"  # beginning of the title of Ray's workers
VLLM = "VLLM::"  # beginning of the titles of a stock engine's processes
MEMBERS = {  # by the module that a further process of an engine or a reward model runs
    "rlhfless_ray.engine.engine_member": "engines",
    "rlhfless_ray.reward.reward_model_member": "reward",
}
LEAST_INTERVAL_S = 1.0
REST = 100  # seconds of rest for each second of looking: the kernel walks every page of a process to measure it


class MemoryWatch:
    """Samples proportional set sizes in a thread. A page that n processes share counts as 1/n, so sizes add up.

    On a private cluster, and in a worker, every process below the one that watches counts. On a joined cluster those workers of the
    driver's job that are on its node.
    """

    def __init__(self, *, private: bool, job: str) -> None:
        """`job`: Ray's id of the driver's job, as hex."""
        self.private, self.job = private, job
        self._peaks: dict[str, float] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Return the peaks in MB since the last call: of each function's processes together, and of all together ("total")."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
        return peaks

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        took_s = 0.0
        while not self._closed.wait(max(LEAST_INTERVAL_S, REST * took_s)):
            began_s = time.thread_time()
            self.sample()
            took_s = time.thread_time() - began_s

    def sample(self) -> None:
        """Look once, and raise the peaks."""
        sizes: dict[str, float] = defaultdict(float)
        for process, function in self._processes():
            try:
                sizes[function] += process.memory_full_info().pss / 1e6
            except (psutil.Error, OSError):  # it has ended
                continue
        sizes["total"] = sum(sizes.values())
        with self._lock:
            self._peaks = {name: max(self._peaks.get(name, 0.0), sizes.get(name, 0.0)) for name in self._peaks.keys() | sizes.keys()}

    def _processes(self) -> Iterator[tuple[psutil.Process, str]]:
        own = psutil.Process()
        title = (own.cmdline() or [""])[0]
        yield own, function_of(title) if title.startswith(WORKER) else "driver"
        for process in own.children(recursive=True) if self.private else psutil.process_iter():
            try:
                command = process.cmdline() or [""]
                is_worker = command[0].startswith(WORKER) or not MEMBERS.keys().isdisjoint(command)
                if self.private or (is_worker and process.environ().get("RAY_JOB_ID") == self.job):
                    yield process, function_of(*command)
            except (psutil.Error, OSError):
                continue


def function_of(title: str, *arguments: str) -> str:
    """Return the function of a process by its title, such as "ray::LearnerActor.update", and its other arguments."""
    if title.startswith(VLLM):
        return "engines"
    if not title.startswith(WORKER):
        return next((MEMBERS[argument] for argument in arguments if argument in MEMBERS), "Ray")
    return FUNCTIONS.get(title.removeprefix(WORKER).split(".")[0], "other workers")


def summed_peaks(watched: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the peaks of each function that several processes watched together. They need not have been at the same time."""
    sums: dict[str, float] = defaultdict(float)
    for peaks in watched:
        for name, size in peaks.items():
            sums[name] += size
    return dict(sums)


def memory_metrics(peaks: Mapping[str, float], least: Mapping[str, float], predicted: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics of measured peaks, the functions' least needs and their predicted peaks, all in MB."""
    kinds = {"peak": peaks, "least": least, "predicted": predicted}
    told = {f"{name}_{kind}": size for kind, sizes in kinds.items() for name, size in sizes.items()}
    return {f"memory/{name.lower().replace(' ', '_')}_mb": round(size, 1) for name, size in told.items()}
