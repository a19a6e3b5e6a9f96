"""A rollout that ends when enough groups are complete. Unfinished responses continue in the next one, under newer weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from placement.simulate.phase_times import PhaseTimes
from placement.simulate.rollout import make_policy
from placement.simulate.rollout.decoding import VirtualEngines
from placement.simulate.rollout.run_policy import MAX_DECISIONS, Result, make_view, result_of, undecoded
from placement.simulate.rollout.view import RolloutJob, RolloutPolicy
from placement.simulate.simulate_step import SimulatedRollout, StepInput, after_prefill, rollout_job, start_up_s

LONGER = 0.25  # of its tokens: how much longer a response is expected to be that has outlived every scenario


@dataclass(frozen=True)
class InFlight:
    """The responses of groups that are not trained yet, also those that have ended. Arrays have one row per response.

    lengths (n,): true tokens of the whole response. prompts (n,): prompt tokens. group (n,): number of the prompt.
    scenarios (n, S): forecast before the first token. drawn (n, K): tokens by the weight version that drew them, the
    latest first. age (n,): steps since the group was begun. quota: groups to train. outlives: steps that a response may
    outlive.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    group: np.ndarray
    scenarios: np.ndarray
    drawn: np.ndarray
    age: np.ndarray
    quota: int
    outlives: int

    @classmethod
    def empty(cls, given: StepInput, outlives: int, versions: int) -> InFlight:
        """Return the state before the first group. versions: of the weights that may draw tokens of one response."""
        none, whole = np.zeros(0), np.zeros(0, int)
        scenarios, drawn = np.zeros((0, given.scenarios.shape[1])), np.zeros((0, versions))
        return cls(none, none, whole, scenarios, drawn, whole, len(np.unique(given.group)), outlives)

    def begin(self, given: StepInput, groups: int | None = None) -> InFlight:
        """Add the groups of a step, or its first ones."""
        new = given.group < (self.quota if groups is None else groups)
        first = int(self.group.max(initial=-1)) + 1
        return replace(
            self,
            lengths=np.r_[self.lengths, given.lengths[new]],
            prompts=np.r_[self.prompts, given.prompts[new]],
            group=np.r_[self.group, given.group[new] + first],
            scenarios=np.r_[self.scenarios, given.scenarios[new]],
            drawn=np.r_[self.drawn, np.zeros((int(new.sum()), self.drawn.shape[1]))],
            age=np.r_[self.age, np.zeros(int(new.sum()), int)],
        )

    @property
    def generated(self) -> np.ndarray:
        return self.drawn.sum(1)

    @property
    def live(self) -> np.ndarray:
        """(n,) whether the response is unfinished."""
        return self.generated < self.lengths - 1e-6

    def step_input(self, given: StepInput, limit: int) -> StepInput:
        """Return the live responses as a step's input: what is left of each, after the context that it has. limit: of a response."""
        live, made = self.live, self.generated
        context, left = self.prompts[live] + made[live], (self.lengths - made)[live]
        return replace(
            given,
            lengths=left,
            prompts=context,
            group=self.group[live],
            scenarios=_remaining(self.scenarios[live], made[live], limit),
            cache={},
        )

    def seen(self, given: StepInput) -> InFlight:
        """Return the same with the lengths that `given` has for the live responses, which may be those of a scenario."""
        lengths, live = self.lengths.copy(), self.live
        lengths[live] = self.generated[live] + given.lengths
        return replace(self, lengths=lengths)

    def with_tokens(self, made: np.ndarray) -> InFlight:
        """Return the same after the live responses got `made` more tokens from the newest version."""
        drawn = self.drawn.copy()
        drawn[self.live, 0] += made
        return replace(self, drawn=drawn)

    def with_version(self) -> InFlight:
        """Return the same under a newer version, of which no token is drawn yet."""
        return replace(self, drawn=np.c_[np.zeros(len(self.drawn)), self.drawn[:, :-1]])

    def must_end(self) -> np.ndarray:
        """(groups,) numbers of the groups that may not outlive another step."""
        return np.unique(self.group[self.age >= self.outlives])


def _remaining(scenarios: np.ndarray, made: np.ndarray, limit: int) -> np.ndarray:
    """Return (n, S) forecasts of the tokens that are left after `made` (n,) tokens."""
    left = scenarios - made[:, None]
    for row in np.flatnonzero((left <= 0).any(1)):
        longer = left[row][left[row] > 0]
        left[row] = np.resize(longer, left.shape[1]) if len(longer) else LONGER * made[row]
    return np.clip(left, 1, np.maximum(1, limit - made)[:, None])


@dataclass(frozen=True)
class PartialRollout(SimulatedRollout):
    """A rollout that ended early. after: the responses in flight at its end.

    lag: share of the batch's tokens by the version that drew them, the latest first. rest: what is left of its input if
    it ended before the batch was complete; it has no batch then.
    """

    after: InFlight | None = None
    lag: tuple[float, ...] = (1.0,)
    rest: StepInput | None = None


class PartialGeneration:
    """Generates until the quota of groups is complete, and all that must be. Keeps its last rollout."""

    def __init__(self, state: InFlight) -> None:
        self.state = state
        self.last: PartialRollout | None = None

    def __call__(
        self,
        times: PhaseTimes,
        given: StepInput,
        policy: str,
        *,
        engines: int,
        prefer: float,
        capacity: int | None = None,
        transfer_s: float | None = None,
        wake_s: float | None = None,
        least_s: float = 0.0,
        until_s: float = np.inf,
    ) -> PartialRollout:
        """Simulate the rollout, as `roll_out` does, under a new version of the weights.

        given: the live responses, as `InFlight.step_input` makes them, or a scenario of them. least_s: go on at least
        until then, if there is something to generate. until_s: an update ends then. The rollout works beside it, so it
        has the version of the rollout before it, and ends then even if the batch is not complete.
        """
        start = start_up_s(times, transfer_s, wake_s)
        key = (policy, times.width, engines, prefer, capacity, start, least_s, until_s)
        if key not in given.cache:
            job = rollout_job(times, given, given.scenarios, engines, prefer, start, capacity)
            given.cache[key] = self._made(times, given, job, make_policy(policy, job), start, (least_s, until_s))
        found = given.cache[key]
        assert isinstance(found, PartialRollout)
        self.last = found
        return found

    def _made(
        self, times: PhaseTimes, given: StepInput, job: RolloutJob, policy: RolloutPolicy, start_s: float, within_s: tuple[float, float]
    ) -> PartialRollout:
        least_s, until_s = within_s
        beside = until_s < np.inf
        state, live = self.state.seen(given), self.state.live
        if not beside:
            state = state.with_version()
        prefill = min(times.prefill_s(self._prefilled(given), job.max_actors), until_s)
        numbers, at = np.unique(state.group, return_inverse=True)
        must = np.isin(numbers, state.must_end())

        def completed(finish_s: np.ndarray) -> np.ndarray:
            """(groups,) when each is complete, infinite if it is not yet."""
            each, all_s = np.zeros(len(state.lengths)), np.zeros(len(numbers))
            each[live] = np.where(np.isnan(finish_s), np.inf, finish_s)
            np.maximum.at(all_s, at, each)
            return all_s

        def batch_s(all_s: np.ndarray) -> float:
            """When the batch is complete, from when each group is."""
            return max(float(all_s[must].max(initial=0.0)), float(np.sort(all_s)[state.quota - 1]))

        def enough(finish_s: np.ndarray) -> float:
            return min(max(batch_s(completed(finish_s)), least_s - prefill), until_s - prefill)

        result, generated = run_until(given.lengths, job, policy, enough)
        ended = generated >= given.lengths - 1e-6  # a rollout may end within the last token's rounding
        all_s = completed(np.where(ended, np.fmin(result.finish_s, result.time_s), np.nan))
        leases = after_prefill(result.leases, prefill)
        state = state.with_tokens(generated)
        if batch_s(all_s) == np.inf:
            forecast = np.zeros((len(live), given.scenarios.shape[1]))
            forecast[live] = (
                given.scenarios + self.state.generated[live][:, None]
            )  # a trial's input lacks the scenario that it takes for the truth
            rest = replace(state, scenarios=forecast).step_input(given, times.setting.response_limit)
            return PartialRollout(result, prefill, start_s, leases, None, state, (), rest)
        if beside:  # it is trained under the update's version
            state = state.with_version()
        order = np.lexsort((all_s, ~must))
        batch = np.isin(at, order[: state.quota])
        finish = all_s[at]  # of its group: before that, it is not certain that the step trains the response
        trained = replace(
            given,
            lengths=state.lengths[batch],
            prompts=state.prompts[batch],
            group=np.unique(state.group[batch], return_inverse=True)[1],
            cache={},
        )
        kept = replace(
            state,
            **{name: getattr(state, name)[~batch] for name in ("prompts", "group", "scenarios", "drawn")},
            lengths=self.state.lengths[~batch],
            age=state.age[~batch] + 1,
        )
        by_lag = state.drawn[batch].sum(0) / state.drawn[batch].sum()
        return PartialRollout(
            replace(result, finish_s=finish[batch]), prefill, start_s, leases, trained, kept, tuple(float(share) for share in by_lag)
        )

    def _prefilled(self, given: StepInput) -> float:
        """Return the tokens to prefill: the prompt of each new group once, and the whole context of each response that continues.

        The KV of older weights is not used: every context is computed again.
        """
        begun = self.state.generated[self.state.live] > 0
        first = np.unique(given.group[~begun], return_index=True)[1]
        return float(given.prompts[begun].sum() + given.prompts[~begun][first].sum())


def run_until(
    lengths: np.ndarray, job: RolloutJob, policy: RolloutPolicy, enough: Callable[[np.ndarray], float]
) -> tuple[Result, np.ndarray]:
    """Run a rollout until it is enough. Returns its outcome and the tokens (n,) of each sequence.

    enough: when the rollout may end, from the end of each sequence (NaN: unfinished). Infinite if that is not known yet.
    """
    engine = VirtualEngines(lengths, job.prompts, job.speed, job.start_s, job.migrate_s, job.capacity)
    for _ in range(MAX_DECISIONS):
        at = engine.time_s
        action = policy.decide(make_view(engine, job))
        if action is not None:
            engine.place(action.actor, action.hold)
        before = copy.deepcopy(engine)
        engine.advance(at + job.interval_s)
        end = enough(engine.finish_s)
        if end <= engine.time_s:
            engine = before
            engine.advance(end)
        if end <= engine.time_s or engine.finished.all():
            return result_of(engine), engine.generated
    raise undecoded(engine)
