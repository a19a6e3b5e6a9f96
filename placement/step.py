"""The whole step: the rollout, and what is scored and learned while its tail still runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from placement.bounds import Bounds, rollout_bounds
from placement.frontier import frontier
from placement.partition import pareto
from placement.plan import Plan, Pool
from placement.speed import Speed
from placement.staggered import staggered
from placement.workload import Kind, Workload, wave_starts

START_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)  # over scenarios, of the start of the gang that wastes nothing
FEW = 9  # sequences up to which single ones are moved between actors
THIN = 0.01  # of the rollout's frontier inside the step's


@dataclass(frozen=True)
class StepWork:
    """What follows a response, in seconds of the learner gang; the gang has `learners` devices and works as one.

    score_per_seq_s (reward) and reference_per_token_s (reference log-probabilities) may be spent on a response as soon as it
    has ended, learn_per_token_s (forward, backward, accumulation) once all samples of its prompt have, because advantages
    compare them. Tokens are those of prompt and response. learn_start_s comes once, before any of it; update_s (optimizer)
    and publish_s (weights) follow the last of it.

    overlap: gradients may be accumulated while other prompts still run. That is exact if one optimizer update takes the whole
    batch (gradients add up) and advantages need no other prompt; where they do (whitening, filtering, batch baselines) it
    is not, and `reason` says so. Scores and reference log-probabilities need neither; score_early=False holds them too.
    """

    score_per_seq_s: float = 0.0
    reference_per_token_s: float = 0.0
    learn_per_token_s: float = 0.0
    learn_start_s: float = 0.0
    update_s: float = 0.0
    publish_s: float = 0.0
    learners: int = 1
    overlap: bool = True
    reason: str = ""
    score_early: bool = True

    def __post_init__(self) -> None:
        for name in ("score_per_seq_s", "reference_per_token_s", "learn_per_token_s", "learn_start_s", "update_s", "publish_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        if self.learners < 1:
            raise ValueError(f"the learner gang needs at least one device, got {self.learners}")
        if not self.overlap and not self.reason:
            raise ValueError("say in `reason` why gradients cannot be accumulated before the rollout has ended")
        if self.overlap and not self.score_early:
            raise ValueError("gradients need scores: with score_early=False set overlap=False, with the reason")


@dataclass(frozen=True)
class StepPlan:
    """One point of the step's frontier. time_s: from the first token to published weights. cost: the rollout's and the
    gang's device-seconds × price. learn_at_s: when the gang starts; gang: actors (of rollout.groups) that work on its
    slots before; early_s: how much of the gang's time lies before the end of the rollout."""

    time_s: float
    cost: float
    rollout: Plan
    learn_at_s: float
    gang: tuple[int, ...]
    early_s: float
    reason: str


def step_frontier(
    lengths: np.ndarray, prompt_ids: np.ndarray, speed: Speed, work: StepWork, *, max_devices: int,
    devices_per_actor: int = 1, capacity: int | None = None, price: float = 1.0, prompts: np.ndarray | float | None = None,
    start_s: float = 0.0, transfer_s: float = 0.0, thin: float = 0.0,
) -> list[StepPlan]:
    """Plans for a whole step that no other found beats on time and cost, by time ascending and cost descending.

    lengths (n,) or (n, S) as for `frontier`; prompt_ids (n,) tell which responses belong to one prompt. There are
    max_devices devices in all, of which the gang uses work.learners once the actors on them have ended: as many actors as
    possible, the last to end, sit elsewhere.

    For rollouts in which nothing moves: the yardstick for what does (docs/simulator.md has the comparison), and the part of the
    step's plan that can be checked against an exhaustive search. The simulator's `ours` searches plans with a moving rollout.

    The gang's work, given the rollout, is one machine with release times: in the order of release it ends at
    F = max(free + start + all work, max over releases r of r + work released at r or later), and no order does better. It
    need not wait for work if it starts at F - start - all work, so that is when it starts: the step then takes F + update +
    publish and the gang is billed only for work. With scenarios one start must serve all, so several are tried, and waiting
    is billed. What is left to search is the partition: the rollout's frontier, and partitions whose actors end one after
    the other, so that the gang has work and slots early (staggered). With up to FEW sequences single ones are moved as well.
    The partition is not exact: on 125 random cases of 2 to 7 sequences within 1.4 % of the best of all partitions on both
    axes; beyond FEW sequences, samples of one prompt are not brought together.

    Raises ValueError as `frontier` does, and where the gang has more devices than there are.
    """
    task = StepTask.of(lengths, prompt_ids, speed, work, max_devices, devices_per_actor, capacity, price, prompts, start_s, transfer_s)
    pool = task.pool
    rollouts = frontier(lengths, pools=[pool], prompts=prompts, transfer_s=transfer_s, thin=max(thin, THIN))
    rollouts += task.early([plan.time_s for plan in rollouts])
    plans = pareto(plan for rollout in rollouts for plan in task.plans(rollout))
    if len(task.rollout.lengths) <= FEW:
        plans = one_by_one(task, plans)
    return pareto(plans, thin)


def one_by_one(task: StepTask, plans: list[StepPlan]) -> list[StepPlan]:
    """From every undominated plan, give one sequence to another actor, or a new one, as long as that finds new ones. With
    few sequences it matters where a single one is: whose samples end together, which actor frees the gang's slots."""
    tried = set()
    while new := [plan for plan in plans if _key(plan.rollout) not in tried]:
        found = list(plans)
        for plan in new:
            tried.add(_key(plan.rollout))
            sets = [frozenset(group.tolist()) for group in plan.rollout.groups]
            for a, b in itertools.permutations(range(len(sets) + 1), 2):
                if a == len(sets) or (b == len(sets) and (len(sets) == task.pool.max_actors or len(sets[a]) == 1)):
                    continue
                for i in sets[a]:
                    moved = [*sets, frozenset()]
                    moved[a], moved[b] = moved[a] - {i}, moved[b] | {i}
                    groups = [np.array(sorted(group)) for group in moved if group]
                    if task.fits(groups):
                        found += task.plans(task.plan(groups))
        plans = pareto(found)
    return plans


def _key(rollout: Plan) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(group.tolist()) for group in rollout.groups)


@dataclass(frozen=True)
class StepTask:
    """Everything a step's plan is judged by."""

    rollout: Workload
    work: StepWork
    pool: Pool
    outside: int  # actors that fit beside the gang
    price: float
    prompt_of: np.ndarray  # (n,) 0 … prompts - 1
    score_s: np.ndarray  # (n, S)
    learn_s: np.ndarray  # (prompts, S)

    @classmethod
    def of(
        cls, lengths: np.ndarray, prompt_ids: np.ndarray, speed: Speed, work: StepWork, max_devices: int, devices_per_actor: int,
        capacity: int | None, price: float, prompts: np.ndarray | float | None, start_s: float, transfer_s: float,
    ) -> StepTask:
        if work.learners > max_devices:
            raise ValueError(f"the learner gang needs {work.learners} devices, there are {max_devices}")
        if devices_per_actor < 1 or max_devices < devices_per_actor:
            raise ValueError(f"an actor needs {devices_per_actor} devices, there are {max_devices}")
        pool = Pool(
            speed, price=price, max_actors=max_devices // devices_per_actor, start_s=start_s, capacity=capacity,
            devices=devices_per_actor,
        )
        rollout = Workload.of(lengths, pools=[pool], prompts=prompts, transfer_s=transfer_s)
        ids = np.asarray(prompt_ids)
        if ids.shape != (len(rollout.lengths),):
            raise ValueError(f"prompt_ids must be one per sequence ({len(rollout.lengths)}), got {ids.shape}")
        prompt_of = np.unique(ids, return_inverse=True)[1]
        tokens = rollout.held_tokens()
        learn_s = np.zeros((int(prompt_of.max()) + 1, tokens.shape[1]))
        np.add.at(learn_s, prompt_of, work.learn_per_token_s * tokens)
        score_s = work.score_per_seq_s + work.reference_per_token_s * tokens
        outside = (max_devices - work.learners) // devices_per_actor
        return cls(rollout, work, pool, outside, price, prompt_of, score_s, learn_s)

    def fits(self, groups: list[np.ndarray]) -> bool:
        held = self.rollout.held_tokens()
        return all(held[group].sum(0).max() <= self.rollout.kinds[0].capacity for group in groups)

    def early(self, times: list[float]) -> list[Plan]:
        """Rollouts whose actors end one after the other. There are many, so with scenarios they are compared on the means of
        the lengths first, and only the undominated are timed on all."""
        lengths = self.rollout.lengths
        groups = staggered(self.rollout, self.outside, times)
        if lengths.shape[1] > 1:
            mean = replace(
                self, rollout=replace(self.rollout, lengths=lengths.mean(1)[:, None]),
                score_s=self.score_s.mean(1)[:, None], learn_s=self.learn_s.mean(1)[:, None],
            )
            groups = [list(plan.rollout.groups) for plan in pareto((p for g in groups for p in mean.plans(mean.plan(g))), THIN)]
        return [self.plan(each) for each in groups]

    def plan(self, groups: list[np.ndarray]) -> Plan:
        pools = (0,) * len(groups)
        return Plan(*self.rollout.evaluate(groups, pools), tuple(groups), pools)

    def plans(self, rollout: Plan) -> list[StepPlan]:
        """What the gang makes of one rollout; several with scenarios."""
        work, kind = self.work, self.rollout.kinds[0]
        ended = np.empty_like(self.rollout.lengths)
        for group in rollout.groups:
            ended[group] = end_times(self.rollout.lengths[group], self.rollout.prompts[group], kind)
        actor_end = np.array([ended[group].max(0) for group in rollout.groups])  # (actors, S)
        by_end = np.argsort(actor_end.mean(1), kind="stable")
        gang = np.sort(by_end[: max(0, len(by_end) - self.outside)])
        free_s = actor_end[gang].max(0) if len(gang) else np.zeros(len(ended[0]))
        release_s, seconds = self.releases(ended)
        total_s, least_s = seconds.sum(0), last_end(release_s, seconds)
        wanted_s = np.maximum(free_s, least_s - total_s - work.learn_start_s)  # starts that neither wait nor delay
        starts = np.unique(np.quantile(wanted_s, START_QUANTILES))
        plans = []
        for start in starts:
            from_s = np.maximum(start, free_s)
            end_s = np.maximum(from_s + work.learn_start_s + total_s, least_s)
            finish_s = work.update_s + work.publish_s
            gang_s = float((end_s - from_s).mean()) + finish_s
            rollout_end_s = actor_end.max(0)
            early_s = float(np.maximum(0.0, np.minimum(end_s, rollout_end_s) - from_s).mean())
            time_s = float(np.maximum(end_s, rollout_end_s).mean()) + finish_s
            cost = rollout.cost + self.price * work.learners * gang_s
            plans.append(StepPlan(
                time_s, cost, rollout, float(from_s.mean()), tuple(gang.tolist()), early_s,
                self._reason(rollout, float(from_s.mean()), early_s, float(rollout_end_s.mean()), time_s),
            ))
        return plans

    def releases(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pieces of the gang's work, (pieces, S) each: when they may start and how long they take, given when each response
        has ended (n, S)."""
        last = ended.max(0)
        score_at = ended if self.work.score_early else np.broadcast_to(last, ended.shape)
        learn_at = np.zeros(self.learn_s.shape)
        if self.work.overlap:
            np.maximum.at(learn_at, self.prompt_of, ended)
        else:
            learn_at[:] = last
        return np.concatenate((score_at, learn_at)), np.concatenate((self.score_s, self.learn_s))

    def _reason(self, rollout: Plan, start_s: float, early_s: float, rollout_s: float, time_s: float) -> str:
        where = f"{rollout.actors} actors until {rollout_s:.4g} s"
        if not self.work.overlap:
            return f"{where}, gradients after that because {self.work.reason}; the gang of {self.work.learners} from {start_s:.4g} s"
        if early_s <= 0:
            return f"{where}, the gang of {self.work.learners} from {start_s:.4g} s: its slots or its work come no earlier"
        return (
            f"{where}, the gang of {self.work.learners} from {start_s:.4g} s on released slots: {early_s:.4g} s of its work lie "
            f"in the rollout's tail, weights at {time_s:.4g} s"
        )


def end_times(lengths: np.ndarray, prompts: np.ndarray, kind: Kind) -> np.ndarray:
    """(m, S) when each of an actor's sequences (m, S) ends; all admitted at once, or in waves where the cache is too small.

    A sequence of length x ends after x steps, in each of which every sequence not yet ended takes its share:
    base · x + Σ over the others of their work up to min(L, x).
    """
    order = np.argsort(-lengths, axis=0, kind="stable")
    down = np.take_along_axis(lengths, order, 0)
    tokens = prompts[order]
    ends = np.empty(down.shape)
    if math.isfinite(kind.capacity) and np.any((down + tokens).sum(0) > kind.capacity):
        for s in range(down.shape[1]):
            at = kind.over_s
            waves = wave_starts(down[:, s] + tokens[:, s], kind.capacity)
            for a, b in itertools.pairwise(waves):
                wave = _ends(down[a:b, s: s + 1], tokens[a:b, s: s + 1], kind)
                ends[a:b, s] = at + wave[:, 0]
                at += wave[0, 0]
    else:
        ends = kind.over_s + _ends(down, tokens, kind)
    out = np.empty(ends.shape)
    np.put_along_axis(out, order, ends, 0)
    return out


def _ends(down: np.ndarray, tokens: np.ndarray, kind: Kind) -> np.ndarray:
    """(m, S) for lengths that fall along the first axis."""
    own = kind.work_s(down, tokens) - kind.prefill_s * tokens
    shorter = np.cumsum(own[::-1], axis=0)[::-1] - own
    running = np.arange(1, len(down) + 1)[:, None]
    seconds = kind.base_s * down + kind.per_seq_s * running * down + shorter
    if kind.per_ctx_s:
        seconds += kind.per_ctx_s * (np.cumsum(tokens, axis=0) * down + running * np.square(down) / 2)
    return seconds + kind.prefill_s * np.sum(np.broadcast_to(tokens, down.shape), axis=0)  # every prompt comes first


def last_end(release_s: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(S,) earliest end of one machine's work: max over releases r of r + all work released at r or later."""
    order = np.argsort(release_s, axis=0)
    later = np.cumsum(np.take_along_axis(seconds, order, 0)[::-1], axis=0)[::-1]
    return (np.take_along_axis(release_s, order, 0) + later).max(0)


def step_bounds(
    lengths: np.ndarray, prompt_ids: np.ndarray, speed: Speed, work: StepWork, *, max_devices: int,
    devices_per_actor: int = 1, capacity: int | None = None, price: float = 1.0, prompts: np.ndarray | float | None = None,
    start_s: float = 0.0, transfer_s: float = 0.0,
) -> Bounds:
    """What no plan for a step beats, each by itself; arguments as for `step_frontier`.

    Time, the largest of: every response ends no earlier than alone on an actor, and the gang's work released from then on
    follows; the rollout's own bound and the work that only its last response releases; all device-seconds over all devices.
    Cost: the rollout's bound and the gang's work.
    """
    task = StepTask.of(lengths, prompt_ids, speed, work, max_devices, devices_per_actor, capacity, price, prompts, start_s, transfer_s)
    kind = task.rollout.kinds[0]
    alone = kind.over_s + kind.base_s * task.rollout.lengths + task.rollout.work_s(kind)
    release_s, seconds = task.releases(alone)
    total_s, finish_s = seconds.sum(0), work.update_s + work.publish_s
    rollout = rollout_bounds(lengths, pools=[task.pool], prompts=prompts, transfer_s=transfer_s)
    gang_s = float(total_s.mean()) + work.learn_start_s + finish_s
    cost = rollout.cost + price * work.learners * gang_s
    last_s = float((task.score_s.min(0) + (task.learn_s.min(0) if work.overlap else task.learn_s.sum(0))).mean())
    times = {
        "responses alone, then the gang": float(np.maximum(last_end(release_s, seconds), work.learn_start_s + total_s).mean()) + finish_s,
        "rollout, then what its end releases": rollout.time_s + last_s + finish_s,
        "work over devices": cost / price / max_devices,
    }
    reason = max(times, key=lambda name: times[name])
    return Bounds(times[reason], cost, reason)
