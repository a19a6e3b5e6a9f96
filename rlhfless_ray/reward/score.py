"""The driver's side of scoring: share samples out, count what failed, replace a worker that hangs."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayActorError

from rlhfless_ray.errors import RunError
from rlhfless_ray.functions.instance import Instance
from rlhfless_ray.functions.pool import Pool
from rlhfless_ray.reward.functions import RewardSource
from rlhfless_ray.reward.worker import RewardWorker, Score
from rlhfless_ray.types import Sample, Span
from rlhfless_ray.waits import STOP

SLACK_S = 30.0  # beyond the time limits of all samples of a share: the worker's own start


class RewardActor:
    """The scoring function's process."""

    def __init__(self, source: RewardSource, timeout_s: float) -> None:
        start = time.time()
        self.worker = RewardWorker(source, timeout_s)
        self.imported = Span("start", "load reward function", start, time.time())

    def open(self, threads: int) -> dict[str, Any]:
        import psutil

        return {"memory_mb": psutil.Process().memory_info().rss / 2**20, "spans": [self.imported]}

    def score(self, items: list[tuple[int, str, str, dict[str, Any]]]) -> tuple[list[Score], list[Span]]:
        start = time.time()
        return self.worker.score(items), [Span("work", "score", start, time.time())]


def score_samples(pool: Pool, samples: list[Sample], timeout_s: float) -> int:
    """Give every sample its reward, or its error; returns how many failed.

    Each working instance gets an equal share. A share is one call; its deadline is what its samples may take together. A
    worker past it hangs where no signal reaches (in foreign code): it is killed and replaced, and the samples it was not
    heard of are scored one by one, so that the one at fault can be named.
    """
    items = [(i, s.prompt.text, s.text, s.prompt.row) for i, s in enumerate(samples)]
    workers = pool.working
    shares = [(w, items[k :: len(workers)]) for k, w in enumerate(workers)]
    asked = [(w, share, w.actor.score.remote(share)) for w, share in shares if share]
    for worker, share, ref in asked:
        scores = _wait(pool, worker, ref, timeout_s * len(share) + SLACK_S)
        if scores is None:
            scores = _one_by_one(pool, pool.replace(worker), share, timeout_s)
        for score in scores:
            samples[score.key].reward, samples[score.key].error = score.reward, score.error
    return sum(sample.error is not None for sample in samples)


def _wait(pool: Pool, worker: Instance, ref: Any, seconds: float) -> list[Score] | None:
    """The scores, or None when the worker hangs or died."""
    end = time.monotonic() + seconds
    while not ray.wait([ref], timeout=0.1)[0]:
        STOP.check()
        if time.monotonic() > end:
            return None
    try:
        scores, spans = ray.get(ref)
    except RayActorError:
        return None
    except ray.exceptions.RayTaskError as error:
        raise RunError(f"the reward worker failed: {error.cause or error}") from error
    pool.ledger.spans([lease.id for lease in worker.leases], spans)
    return scores


def _one_by_one(pool: Pool, worker: Instance, share: list[Any], timeout_s: float) -> list[Score]:
    scores: list[Score] = []
    for item in share:
        found = _wait(pool, worker, worker.actor.score.remote([item]), timeout_s + SLACK_S)
        if found is None:
            worker = pool.replace(worker)
            found = [Score(item[0], None, f"the reward process hung past {timeout_s:g} s or died, and was replaced")]
        scores += found
    return scores


def check_failures(samples: list[Sample], failed: int, max_failed_share: float) -> None:
    """Raise RunError, showing the first sample that could not be scored, when too many could not."""
    if failed <= max_failed_share * len(samples):
        return
    first = next(s for s in samples if s.error is not None)
    raise RunError(
        f"{failed} of {len(samples)} samples could not be scored (reward.max_failed_share = {max_failed_share:g}); the first: "
        f"{first.error}; prompt row {first.prompt.index} {_short(first.prompt.text)}, response {_short(first.text)}"
    )


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
