"""Checks that engines and learner compute the same policy: the same log-probabilities of the same tokens under the same weights.

A tensor that an engine takes in a wrong form is not an error to vLLM. It samples from another policy, and importance weights hide how
wrong that is. So the first samples under the first weight version, and those under the first one that an update made, are scored by
the learner before it learns from them. Every step then compares all of its tokens at no cost, see `mismatch_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError, describe_failure
from rlhfless_ray.functions.instance import GONE
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample, UpdateStats, WeightVersion
from rlhfless_ray.weights.checksum import listed

# Mean |difference of log-probabilities| per token, in nats, up to which engine and learner agree. Measured on small random policies of ten
# families against vLLM 0.32 on CPU: 4e-7 to 1e-6 in float32, 0.004 to 0.03 in bfloat16; wrong experts 0.01 to 0.8.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
# Rounding moves a sharp or badly conditioned policy further. Above the tolerance the learner scores the tokens again, with noise as large
# as rounding behind every layer: engines were 0.8 to 2.8 times as far off as that moved it, wrong weights 30 times and more.
ROUNDING = 8.0
FARTHEST = 1.0  # nats that a token counts at most where top-p is used: rounding decides whether a token at its edge is in it
SAMPLES = 8  # spread over the step
TOKENS = 32  # of each; few enough for one call of the output head, which ZeRO 3 needs to be the same on every rank
NAMING_S = 180.0  # to find out which tensors differ, once it is known that some do


def mismatch_metrics(stats: UpdateStats, tolerance: float, top_p: float) -> dict[str, Any]:
    """For the step's row: the tolerance of its mean mismatch, and whether that is above it (1) or not (0). Sampling with top-p raises
    log-probabilities by -log(top_p) at most. Nothing where the learner trained on no token, and so compared none."""
    if not stats.trained_tokens:
        return {}
    limit = tolerance - math.log(top_p)
    return {"learn/mismatch_tolerance": limit, "learn/mismatch_warning": int(not stats.mismatch_mean <= limit)}


class Agreement:
    """Checks the first samples of two weight versions: the one that the process begins with, and the first that it made by an update."""

    def __init__(self, context: RunContext, worker_groups: ColocatedGroups, engines: WorkerPool) -> None:
        self.context, self.worker_groups, self.engines = context, worker_groups, engines
        self.is_due, self.has_updated = True, False
        self.tolerance = TOLERANCE[context.recipe.policy.dtype]

    def updated(self, stats: UpdateStats) -> None:
        """The learner has made a step's update. The weights that come of the first one are checked, too, and so are the next samples
        after a step that trained on no token, as while the policy is frozen: there the update compares nothing."""
        if stats.applied and not self.has_updated:
            self.is_due = self.has_updated = True
        elif not stats.trained_tokens:
            self.is_due = True

    def check(self, samples: Sequence[Sample], weights: WeightVersion, temperature: float, *, parks: bool) -> None:
        """Compare some of these samples with what the learner, which holds `weights`, says of them. Does nothing if none is due.

        Args:
            temperature: that the samples were drawn with; 0 is greedy.
            parks: whether the learner gives its leases back afterwards.

        Raises RunError when they differ by more than the tolerance; with `rollout.agreement=warn` it is a message instead.
        """
        batch = sample_batch([s for s in samples if s.completion.versions == ((weights.version, len(s.completion.token_ids)),)])
        if not self.is_due or batch is None:
            return
        self.is_due = False
        recipe, learner = self.context.recipe, self.worker_groups.learner
        drawn_from = (temperature, recipe.rollout.top_p) if temperature else (1.0, 1.0)
        if not learner.working:
            learner.slots = learner.ranks
            self.context.broker.staff(learner)
        found = learner.passed("agreement", batch, *drawn_from)["agreement"]
        apart = distances(found, batch.logprobs, drawn_from[1])
        if not apart.mean() <= self.tolerance:
            moved = distances(found, learner.passed("agreement", batch, *drawn_from, True)["agreement"], drawn_from[1])
            self.tolerance = float(np.nanmax([self.tolerance, ROUNDING * moved.mean()]))
        if not apart.mean() <= self.tolerance:
            told = (
                f"engines and learner do not agree under weight version {weights.version}: log-probabilities of the same "
                f"{len(apart)} tokens differ by {apart.mean():.2g} nats in the mean, {apart.max():.2g} at most (tolerance of the mean "
                f"in {recipe.policy.dtype}: {self.tolerance:.2g})"
            )
            if recipe.rollout.agreement == "end":
                raise RunError(f"{told}; {self._which(weights)}")
            self.context.record.progress.message(told)
        if parks:
            self.context.broker.put(learner.park())

    def _which(self, weights: WeightVersion) -> str:
        """Which tensors differ, for the message."""
        try:
            model = self.worker_groups.learner.model()
            unknown = False
            for engine in [*self.engines.working, *self.engines.parked]:
                if engine.version != weights.version or not engine.memory_mb:
                    continue
                published, held = get(engine.actor.differing.remote(model, weights.digests), NAMING_S, "the names of tensors that differ")
                if published:
                    return f"these tensors were not published as the learner has them: {listed(published)}"
                if held:
                    return f"engine {engine.id} does not hold these tensors as they were published: {listed(held)}"
                unknown |= held is None
        except (RunError, *GONE) as error:
            return describe_failure("finding the tensors that differ", error)
        if unknown:
            return (
                "the tensors were published as the learner has them; what an engine made of them is not known, as it has left its "
                "device. rollout.agreement=warn goes on all the same"
            )
        return (
            "every tensor is as in a new engine that loads the model from a folder, so vLLM and transformers compute this "
            f"architecture differently{_of_dtype(self.context.recipe)}; take another model, or go on all the same with "
            "rollout.agreement=warn"
        )


def distances(a: np.ndarray, b: np.ndarray, top_p: float) -> np.ndarray:
    """|a - b| (tokens,) float64 of log-probabilities; where top-p is used a token counts at most FARTHEST."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.float64) - b)
    if top_p < 1:
        apart = np.where(np.isneginf(a) & np.isneginf(b), 0.0, np.minimum(apart, FARTHEST))
    return apart


def _of_dtype(recipe: Recipe) -> str:
    return "" if recipe.policy.dtype == "float32" else f" or {recipe.policy.dtype} is too coarse for it"


def sample_batch(samples: Sequence[Sample]) -> Batch | None:
    """The first tokens of a few of these samples, spread over all of them; None where the policy wrote no token."""
    written = [sample for sample in samples if _count(sample)]
    if not written:
        return None
    chosen = [written[i] for i in np.unique(np.linspace(0, len(written) - 1, min(SAMPLES, len(written))).astype(int))]
    masks = [None if s.action_mask is None else s.action_mask[: _end(s)] for s in chosen]
    rows: list[Any] = [
        (s.prompt.token_ids, s.completion.token_ids[: _end(s)], s.completion.logprobs[: _end(s)], 0.0, i) for i, s in enumerate(chosen)
    ]
    return Batch.of(rows, masks)


def _count(sample: Sample) -> int:
    """Tokens of the policy."""
    return len(sample.completion.token_ids) if sample.action_mask is None else int(np.sum(sample.action_mask))


def _end(sample: Sample) -> int:
    """Where its first TOKENS tokens of the policy end."""
    if sample.action_mask is None:
        return min(TOKENS, len(sample.completion.token_ids))
    return int(np.flatnonzero(sample.action_mask)[:TOKENS][-1]) + 1
