"""The frontier of a step's rollout, with times and costs as the run measures them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from placement.forecast.forecaster import Scenarios, forecast_quality
from placement.forecast.quality import LengthRanks
from placement.planning.bounds import rollout_bounds
from placement.planning.frontier import frontier
from placement.planning.objective import choose_nearest
from placement.planning.partition import pareto
from placement.planning.plan import Plan, Pool
from placement.pools import OWN, PoolKind
from placement.speed.decode_speed import Speed
from rlhfless_ray.autoscaler.predictor import response_tokens
from rlhfless_ray.autoscaler.step_predictor import StepPredictor
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.demand import Wanted
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.types import Prompt, Sample

MIN_FRONTIER_GAP = 0.005  # relative distance between points of the frontier
MIN_PRICE = 1e-6  # of a slot that costs nothing: among plans of the same time the one with fewer of them is better


class RolloutFrontiers:
    """Frontiers by a run's speeds and corrections."""

    def __init__(self, steps: StepPredictor) -> None:
        self.steps, self.predictor, self.criteria = steps, steps.predictor, steps.criteria
        self.kinds: tuple[PoolKind, ...] = (PoolKind(OWN),)
        self.rooms: Mapping[int, Mapping[str, int]] = {}  # width → pool → engines that it has room for

    def use_pools(self, kinds: Sequence[PoolKind]) -> None:
        """Plan engines in these pools of nodes, `OWN` last, with what a run measures of each."""
        self.kinds = tuple(kinds)
        self.predictor.terms.pools.expect(kinds)

    def set_rooms(self, rooms: Mapping[int, Mapping[str, int]]) -> None:
        """Plan with room for so many engines in each pool from now on, by their width."""
        self.rooms = rooms

    def pools_of(self, plan: Plan | None) -> tuple[str, ...]:
        """Return the pool of each of a plan's engines, or nothing if there is one pool."""
        return tuple(self.kinds[number].name for number in plan.pools) if plan is not None and len(self.kinds) > 1 else ()

    def best(self, lengths: np.ndarray, prompts: list[Prompt], max_actors: int, width: int | None = None) -> list[Plan]:
        """Return the frontier's plans with their predicted time and cost, overhead besides decoding and correction included.

        `lengths`: (n,) known, or (n, S) scenarios. `width`: of the engines, if not the present one.
        """
        width = width or self.predictor.engines.width
        slowdown = self.steps.correction * (1 + self.predictor.engines.fit.overhead)
        overhead_s = self.steps.correction * self.predictor.terms.around.predict()
        return [
            replace(plan, time_s=plan.time_s * slowdown + overhead_s, cost=plan.cost * slowdown + overhead_s * width * self._prices(plan))
            for plan in self.plans(lengths, self.predictor.prompt_tokens(prompts), max_actors, width, self.predictor.speed_of(width))
        ]

    def plans(self, lengths: np.ndarray, tokens: np.ndarray, max_actors: int, width: int, speed: Speed) -> list[Plan]:
        """Return the frontier's plans, with the time and cost of decoding alone. `tokens`: (n,) that each sequence has before.

        On a shared pool there is always one with the fewest actors, even if it is no cheaper: it may be all that others leave. If they
        leave more, `pareto` drops it again.
        """
        longest = float((lengths.reshape(len(tokens), -1).max(1) + tokens).max())  # an engine can hold every single sequence
        holds = self.predictor.engines.capacity_of(width)
        capacity = math.ceil(max(holds, longest)) if math.isfinite(holds) else None
        pool = Pool(speed, max_actors=max_actors, capacity=capacity, devices=width)
        if len(self.kinds) > 1 and width in self.rooms:
            return self._plans_in_pools(lengths, tokens, pool)
        plans = frontier(lengths, pools=[pool], prompts=tokens, thin=MIN_FRONTIER_GAP)
        fewest = max(1, self.criteria.least)
        if self.criteria.bids is not None and min(plan.actors for plan in plans) > fewest:
            plans += frontier(lengths, pools=[replace(pool, max_actors=fewest)], prompts=tokens, thin=MIN_FRONTIER_GAP)
        return plans

    def best_engines(self, lengths: np.ndarray, tokens: np.ndarray, max_actors: int) -> int:
        """Return how many engines the objective chooses for `lengths` (n,) or (n, S). `tokens`: (n,) that each sequence has before."""
        width = self.predictor.engines.width
        plans = self.plans(np.maximum(lengths, 1.0), tokens.astype(float), max_actors, width, self.predictor.engines.fit.speed)
        return choose_nearest(plans, self.criteria.objective).plan.actors

    def wanted(self, lengths: np.ndarray, prompts: list[Prompt], limits: Limits, learner_slots: int) -> Wanted:
        """Return the engines that the objective chooses if nodes come for all that the recipe allows. `lengths`: as in `best`.

        learner_slots: that the learner holds beside them.
        """
        width, rooms = self.predictor.engines.width, self.rooms
        most = limits.most[width]

        def engines() -> Counter[str]:
            caps = {kind.name: most if kind.max_slots is None else min(most, kind.max_slots // width) for kind in self.kinds}
            self.set_rooms({width: caps})
            plan = choose_nearest(self.best(lengths, prompts, most), self.criteria.objective).plan
            return Counter(self.pools_of(plan) or (OWN,) * plan.actors)

        found = self.predictor.safely("planning further nodes", engines, lambda: Counter({OWN: limits.least}))
        self.set_rooms(rooms)
        return Wanted(found, width, learner_slots)

    def _plans_in_pools(self, lengths: np.ndarray, tokens: np.ndarray, engine: Pool) -> list[Plan]:
        """Return the frontier over all pools with room. `engine`: what engines of any pool have in common.

        `Plan.pools` are positions in `kinds`. If there is room for more engines than `engine.max_actors`, each pool in turn is filled
        first, and the plans of all these choices are compared.
        """
        room = {number: self.rooms[engine.devices].get(kind.name, 0) for number, kind in enumerate(self.kinds)}
        pools = {number: self._pool(self.kinds[number], engine, count) for number, count in room.items() if count > 0}
        pools = {number: pool for number, pool in pools.items() if pool.preempt_per_hour * pool.loss_s < 3600}  # others never decode
        if not pools:
            return [replace(plan, pools=(len(self.kinds) - 1,) * plan.actors) for plan in frontier(lengths, pools=[engine], prompts=tokens)]
        plans: list[Plan] = []
        for counts in _choices({number: pool.max_actors for number, pool in pools.items()}, engine.max_actors):
            used = list(counts)
            chosen = [replace(pools[number], max_actors=counts[number]) for number in used]
            found = frontier(lengths, pools=chosen, prompts=tokens, thin=MIN_FRONTIER_GAP)
            plans += [replace(plan, pools=tuple(used[pool] for pool in plan.pools)) for plan in found]
        return pareto(plans)

    def _pool(self, kind: PoolKind, engine: Pool, count: int) -> Pool:
        """Return a pool with what is measured of it. Prices are relative to that of any other slot."""
        measured = self.predictor.terms.pools
        return replace(
            engine,
            speed=replace(engine.speed, **_decoding(self.predictor.engines.speed_in(kind.name, engine.devices))),
            price=max(MIN_PRICE, self._price(kind)),
            max_actors=count,
            start_s=self.predictor.terms.warm_start.predict(),
            restart_s=measured.start_s(kind.name, self.predictor.terms.cold_start),
            preempt_per_hour=measured.preempt_per_hour(kind.name),
            notice_s=kind.notice_s,
            interval_s=self.predictor.recipe.rollout.stream_interval_s,
        )

    def engine_in(self, kind: PoolKind) -> tuple[Speed, float]:
        """Return the speed of a pool's engines at the present width, and the price of its slots relative to that of any other."""
        return self.predictor.engines.speed_in(kind.name, self.predictor.engines.width), self._price(kind)

    def _price(self, kind: PoolKind) -> float:
        own = self.kinds[-1].price_per_hour
        return kind.price_per_hour / own if own else 1.0

    def _prices(self, plan: Plan) -> float:
        """Return the sum of the engines' prices of a slot, relative to that of any other slot."""
        return sum(self._price(self.kinds[number]) for number in plan.pools)

    def judge(self, scenarios: Scenarios, samples: Sequence[Sample], prompts: list[Prompt], max_actors: int) -> JsonObject:
        """Return metrics of the forecast, of the best plan for the true lengths, and of the lower bounds. Calibrates the forecaster."""
        lengths = response_tokens(samples)
        ranks = LengthRanks.of(scenarios.lengths, lengths)
        quality = asdict(forecast_quality(scenarios.lengths, lengths, ranks))
        self.predictor.terms.observe_lengths(scenarios.lengths, lengths)
        self.predictor.forecaster.calibrate(ranks)
        row = {f"forecast/{name}": value for name, value in quality.items() if name != "responses"}
        known = pareto(self.best(lengths, prompts, max_actors))
        best = choose_nearest(known, self.criteria.objective).plan
        bounds = rollout_bounds(
            lengths,
            self.predictor.engine_speed,
            max_actors,
            prompts=self.predictor.prompt_tokens(prompts),
            price=float(self.predictor.engines.width),
        )
        return row | {
            "plan/clairvoyant_s": best.time_s,
            "plan/clairvoyant_cost_slot_s": best.cost,
            "plan/bound_s": bounds.time_s,
            "plan/bound_cost_slot_s": bounds.cost,
            "plan/speed_spread": self.predictor.engines.fit.spread,
        }


def _choices(room: Mapping[int, int], most: int) -> Iterator[dict[int, int]]:
    """Yield the numbers of engines by pool that have room, `most` in all: each pool in turn is filled first, then the others in order."""
    if sum(room.values()) <= most:
        yield dict(room)
        return
    for first in room:
        left, counts = most, dict[int, int]()
        for number in [first, *(other for other in room if other != first)]:
            if count := min(room[number], left):
                counts[number] = count
                left -= count
        yield dict(sorted(counts.items()))


def _decoding(speed: Speed) -> dict[str, float]:
    return {"base_s": speed.base_s, "per_seq_s": speed.per_seq_s, "per_ctx_s": speed.per_ctx_s}
