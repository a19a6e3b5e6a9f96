"""Check that engines and learner compute the same policy: equal log-probabilities of the same tokens under the same weights.

vLLM raises no error for a tensor that it loads in a wrong form. It then samples from another policy, and importance weights hide the
difference. Therefore the learner also computes the log-probabilities of the first samples before it trains on them. It does so under the
first weight version, under the first updated one, and after each change of the engines' width. Later steps compare all their tokens at no
cost, see `compare_mismatch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlhfless_ray.common.deadlines import get
from rlhfless_ray.common.errors import RunError, describe_failure
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.instance import GONE
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.colocation import ColocatedGroups
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.types import Sample, UpdateStats, WeightVersion
from rlhfless_ray.weights.checksum import listed

# Tolerance of the mean |difference of log-probabilities| per token, in nats. Measured with small random policies of ten families and
# vLLM 0.32 on CPU: 4e-7 to 1e-6 in float32, 0.004 to 0.03 in bfloat16; 0.01 to 0.8 with wrong experts.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
# The same for engines with 8-bit weights. int8 measured: 0.03 to 0.04 with small random policies in both dtypes. fp8 has three bits of
# fraction where int8 has six of a row's largest weight; not measured.
QUANTIZED = {"off": 0.0, "int8": 0.1, "fp8": 0.2}
# Rounding changes a sharp or badly conditioned policy more. Above the tolerance the learner therefore scores the tokens again, with noise
# of the size of rounding after every layer. Correct engines differed by 0.8 to 2.8 times what that changed, wrong weights by 30 or more.
ROUNDING = 8.0
MAX_CUT_NATS = 1.0  # limit of a token's difference with top-p or top-k: rounding decides whether a token at the edge is included
SAMPLES = 8  # number of samples that are compared, spread over the step
TOKENS = 32  # tokens of each; few enough for one call of the output head, see `nucleus_logprobs`
NAMING_S = 180.0  # timeout for finding the tensors that differ


def tolerance(dtype: str, quantization: str) -> float:
    """Return the largest mean mismatch, in nats, that these dtypes of the learner's and the engines' weights explain."""
    return max(TOLERANCE[dtype], QUANTIZED[quantization])


def compare_mismatch(stats: UpdateStats, tolerance: float, top_p: float, min_tokens: int = 0, top_k: int = 0) -> JsonObject:
    """Return the tolerance of a step's mean mismatch, and 1 if the mismatch is above it, else 0.

    Sampling with top-p raises log-probabilities by at most -log(top_p). Empty if the learner trained on no token. Empty also with
    `min_tokens` and `top_k`, which leave tokens out and so raise the others' log-probabilities without such a bound.
    """
    if not stats.trained_tokens or min_tokens or top_k:
        return {}
    limit = tolerance - math.log(top_p)
    return {"learn/mismatch_tolerance": limit, "learn/mismatch_warning": int(not stats.mismatch_mean <= limit)}


class Agreement:
    """Check the first samples under two weight versions, and of engines of a new width.

    The versions are the process's first, and the first one after an update.
    """

    def __init__(self, context: RunContext, worker_groups: ColocatedGroups, engines: WorkerPool) -> None:
        self.context, self.worker_groups, self.engines = context, worker_groups, engines
        self.is_due, self.has_updated = True, False
        self.width = engines.width  # of the engines whose samples were checked last
        self.had_old_tokens = False  # whether older weights drew some of the previous step's tokens
        self.tolerance = tolerance(context.recipe.policy.dtype, context.recipe.rollout.quantization)

    def updated(self, stats: UpdateStats) -> None:
        """Record an update. The next check is due after the first one, and after updates without trained tokens, which compare nothing."""
        if stats.applied and not self.has_updated:
            self.is_due = self.has_updated = True
        elif not stats.trained_tokens:
            self.is_due = True

    def compare(self, stats: UpdateStats, has_old_tokens: bool) -> JsonObject:
        """Return the result of `compare_mismatch` for a step's update.

        Empty if older weights drew some of its tokens: the difference is then that between two versions. The step before may have carried
        such samples over to this one.
        """
        recipe, had_old_tokens = self.context.recipe, self.had_old_tokens and self.context.recipe.algorithm.remainder == "carry"
        self.had_old_tokens = has_old_tokens
        if has_old_tokens or had_old_tokens:
            return {}
        rollout = recipe.rollout
        return compare_mismatch(stats, self.tolerance, rollout.top_p, rollout.min_tokens, rollout.top_k)

    def check(self, samples: Sequence[Sample], weights: WeightVersion, temperature: float, *, parks: bool) -> None:
        """Compare some of the samples' log-probabilities with the learner's, which holds `weights`, if a check is due.

        Args:
            temperature: Sampling temperature; 0 is greedy.
            parks: Whether the learner gives its leases back afterwards.

        Raises:
            RunError: They differ by more than the tolerance. With `rollout.agreement=warn` this is only a message.
        """
        fresh = [s for s in samples if s.completion.versions == ((weights.version, len(s.completion.token_ids)),)]
        batch = select_batch(fresh, self.context.recipe.rollout.min_tokens)
        if batch is None or not (self.is_due or self.width != self.engines.width):
            return
        self.is_due, self.width = False, self.engines.width
        recipe, learner = self.context.recipe, self.worker_groups.learner
        drawn_from = (temperature, recipe.rollout.top_p, recipe.rollout.top_k) if temperature else (1.0, 1.0, 0)
        is_cut = drawn_from[1] < 1 or drawn_from[2] > 0
        if not learner.working:
            learner.slots = learner.ranks
            self.context.broker.staff(learner)
        logprobs = learner.compute("agreement", batch, *drawn_from)["agreement"]
        apart = compute_distances(logprobs, batch.logprobs, is_cut)
        if not apart.mean() <= self.tolerance:
            moved = compute_distances(logprobs, learner.compute("agreement", batch, *drawn_from, True)["agreement"], is_cut)
            self.tolerance = float(np.nanmax([self.tolerance, ROUNDING * moved.mean()]))
        if not apart.mean() <= self.tolerance:
            message = (
                f"engines and learner do not agree under weight version {weights.version}: log-probabilities of the same "
                f"{len(apart)} tokens differ by {apart.mean():.2g} nats in the mean, {apart.max():.2g} at most (tolerance of the mean "
                f"in {recipe.policy.dtype}: {self.tolerance:.2g})"
            )
            if recipe.rollout.agreement == "end":
                raise RunError(f"{message}; {self._find_cause(weights)}")
            self.context.record.progress.message(message)
        if parks:
            self.context.broker.put(learner.park())

    def _find_cause(self, weights: WeightVersion) -> str:
        """Find the tensors that differ, and return a sentence about them for the message."""
        if self.context.recipe.rollout.engine == "stock":
            return "stock engines do not compare their tensors; set rollout.engine=exact to find those that differ"
        if weights.base is not None:
            return "engines hold an adapter on its base, where tensors cannot be compared; set lora.publish=merged to find them"
        try:
            model = self.worker_groups.learner.storage.model()
            compared = False
            for engine in [*self.engines.working, *self.engines.parked]:
                if engine.version not in (None, weights.version) or not engine.memory_mb:
                    continue
                answer = engine.actor.differing.remote(weights.version, weights.digests, *model)
                published, held = get(answer, NAMING_S, "the names of tensors that differ")
                if published:
                    return f"these tensors were not published as the learner has them: {listed(published)}"
                if held:
                    return f"engine {engine.id} does not hold these tensors as they were published: {listed(held)}"
                compared = True
        except (RunError, *GONE) as error:
            return describe_failure("finding the tensors that differ", error)
        if not compared:
            return "no engine is left whose tensors could be compared; set rollout.agreement=warn to continue anyway"
        dtype = self.context.recipe.policy.dtype
        coarse = "" if dtype == "float32" else f" or {dtype} is too coarse"
        return (
            "every tensor equals that of a new engine that loads the model from a folder, so vLLM and transformers compute this "
            f"architecture differently{coarse}; use another model, or set "
            "rollout.agreement=warn to continue anyway"
        )


def compute_distances(a: np.ndarray, b: np.ndarray, is_cut: bool) -> np.ndarray:
    """Return |a - b| (tokens,) float64 of log-probabilities. With top-p or top-k (`is_cut`) each is limited to MAX_CUT_NATS."""
    with np.errstate(invalid="ignore"):
        apart: np.ndarray = np.abs(a.astype(np.float64) - b)
    if is_cut:
        apart = np.where(np.isneginf(a) & np.isneginf(b), 0.0, np.minimum(apart, MAX_CUT_NATS))
    return apart


def select_batch(samples: Sequence[Sample], min_tokens: int = 0) -> Batch | None:
    """Return the first tokens of a few samples, spread over all of them, or None if there are none to compare.

    They are one group: samples with the same prompt share a row, as in training. `min_tokens`: so many tokens of a response, or of an
    agent's turn, are left out. They were drawn without the tokens that would end it, so their log-probabilities are others.
    """
    known = [(sample, mask) for sample in samples if (mask := _comparable(sample, min_tokens)).any()]
    if not known:
        return None
    chosen = [known[i] for i in np.unique(np.linspace(0, len(known) - 1, min(SAMPLES, len(known))).astype(int))]
    masks: list[np.ndarray | None] = []
    experts: list[np.ndarray | None] = []
    rows: list[tuple[tuple[int, ...], np.ndarray, np.ndarray, float | np.ndarray, int]] = []
    for sample, mask in chosen:
        end, done = int(np.flatnonzero(mask)[:TOKENS][-1]) + 1, sample.completion
        masks.append(None if mask[:end].all() else mask[:end])
        experts.append(done.experts)
        rows.append((sample.prompt.token_ids, done.token_ids[:end], done.logprobs[:end], 0.0, 0))
    return Batch.of(rows, masks, experts, [sample.prompt.pictures for sample, _ in chosen])


def _comparable(sample: Sample, min_tokens: int) -> np.ndarray:
    """Return which tokens the policy has drawn from its whole distribution: (tokens,) bool."""
    written = np.ones(len(sample.completion.token_ids), bool) if sample.action_mask is None else sample.action_mask
    count = np.cumsum(written)
    before_turn = np.maximum.accumulate(np.where(written, 0, count))
    found: np.ndarray = written & (count - before_turn > min_tokens)
    return found
