"""The groups in flight: which ones a step generates, trains, and leaves to the next step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from placement.forecast.forecaster import Scenarios
from placement.scaling.partial_rollout import find_late
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.oversample import StaleCost, choose_oversample
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.rollout_mode import Boundary
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.session.sample_state import as_json, from_json
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import UNFINISHED, Completion, Group, Prompt, Sample, SampleId

COUNTS = ("begun_groups", "forced_groups", "continued", "recomputed_tokens", "restarted", "restarted_tokens")


class GroupsInFlight:
    """The groups in flight: begun, and neither trained nor dropped.

    Call `begin`, roll out, then call `count` and `train`, once per step and again while filtering leaves a step short of groups.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.rollout, self.quota, self.has_agent = recipe.rollout, recipe.prompts.batch_prompts, recipe.agent.is_used
        self.mode = recipe.rollout.mode
        self.at_work = self._groups(recipe.rollout.begun_share)
        self.in_flight: list[Group] = []
        self.counts: Counter[str] = Counter()  # metrics of this step
        self.times: Counter[int] = Counter()  # number of times that each prompt began in this step
        self.stale_cost, self.reason = StaleCost(), ""
        self.refills = 0  # number of this step's rollouts that replaced dropped groups

    def resize(self, autoscaler: Autoscaler, newest: Step) -> None:
        """Choose the number of groups generated at once with `oversample: auto`. `newest`: the planned, unfinished step."""
        if self.rollout.oversample == "auto" and (chosen := choose_oversample(autoscaler, newest, self.stale_cost.per_version)):
            self.at_work, self.reason = self._groups(chosen.share), chosen.reason

    def _groups(self, share: float) -> int:
        """Return the number of groups that is this multiple of those that a step trains, rounded up."""
        return math.ceil(self.quota * share - 1e-9)  # 110 for 1.1 times 100, which is 110.00000000000001

    def observe(self, step: Step) -> None:
        """Record the loss of learning value by the lag of a finished step's tokens."""
        if step.stats is not None and step.metrics.get("lag/mean"):
            self.stale_cost.observe(step.metrics["lag/mean"], step.stats.effective_share)

    def begin(self, step: int, steps_left: int, source: PromptSource, *, refills: bool = False) -> RolloutBatch:
        """Return the groups of a step: those in flight, and new ones up to the number that can be trained in time.

        `steps_left`: number of steps left, this one included. `refills`: the step lacks groups, because earlier ones were dropped.
        """
        self.refills, begun = self.refills + 1 if refills else 0, step - self.mode.switch.in_flight  # beside an update: one version earlier
        if not refills:
            self.counts.clear()
            self.times = Counter(group.prompt.index for group in self.in_flight if group.begun == begun)  # before a resume
        max_lag, count = self.rollout.max_lag_steps, self.rollout.samples_per_prompt
        if not self.mode.boundary.cuts:
            groups = [] if refills else list(self.in_flight)  # those of a rollout before a resume
            if groups and not self.mode.begins_beside_update:  # the recipe had a lag before
                self.times.clear()
                groups = [Group(group.prompt, step, self._first_sample(group.prompt, count)) for group in groups]
            drawn = source.redraw() if refills else source.draw(max(0, source.missing - len(groups)), bool(groups))
            groups += [Group(prompt, step, self._first_sample(prompt, count)) for prompt in drawn]
            return RolloutBatch(groups, step, len(groups), max_lag, count, cuts=False)
        quota = source.missing if refills else self.quota
        late = find_late([group.begun + max_lag for group in self.in_flight], step, self.quota)  # after a resume with a lower bound
        groups = list(self.in_flight)
        for g in late:
            groups[g] = self._begun_again(groups[g], begun, count)
        room = quota + self.quota * min(steps_left - 1, begun + max_lag - step)
        for prompt in source.draw(max(0, min(self.at_work, room) - len(groups)), bool(self.in_flight)):
            groups.append(Group(prompt, begun, self._first_sample(prompt, count)))
        self.counts["begun_groups"] += sum(not group.samples for group in groups)
        return RolloutBatch(groups, step, quota, max_lag, count, self.quota)

    def _first_sample(self, prompt: Prompt, count: int) -> int:
        """Return the number of the first response of a group that begins now."""
        self.times[prompt.index] += 1
        return count * (self.times[prompt.index] - 1)

    def _begun_again(self, group: Group, begun: int, count: int) -> Group:
        """Return a group that is too old as a new one without tokens."""
        again = Group(group.prompt, begun, self._first_sample(group.prompt, count))
        samples = [self._without_tokens(s, name) for s, name in zip(group.samples, again.ids(count), strict=False)]
        return replace(again, samples=tuple(samples))

    def _without_tokens(self, sample: Sample, name: SampleId) -> Sample:
        """Return the sample as it was before its first token, under this name."""
        self.counts["restarted"] += len(sample.completion.token_ids) > 0
        self.counts["restarted_tokens"] += len(sample.completion.token_ids)
        done = sample.completion
        none = Completion(done.key, np.zeros(0, np.int32), np.zeros(0, np.float32), UNFINISHED, done.version)
        return Sample(sample.prompt, name, none)

    def count(self, batch: RolloutBatch, samples: list[Sample], ahead: bool, kept_tokens: int = 0) -> None:
        """Count continued responses for the metrics.

        Args:
            samples: of all groups, by key.
            ahead: whether the rollout was beside an update.
            kept_tokens: tokens of their contexts whose KV was kept.
        """
        continued = batch.unfinished & (batch.made > 0)
        prompts = np.repeat([len(group.prompt.token_ids) for group in batch.groups], batch.count)
        self.counts["continued"] += int(continued.sum())
        self.counts["recomputed_tokens"] += int((prompts + batch.made)[continued].sum()) - kept_tokens
        self.counts["kept_tokens"] += kept_tokens
        if ahead:
            self.counts["ahead_tokens"] += sum(len(sample.completion.token_ids) for sample in samples) - int(batch.made.sum())

    def rollout_name(self, step: int, ahead: bool) -> str:
        """Return the name under which the rollout's order of completion is recorded. A step may have several rollouts."""
        return f"{step}_ahead" if ahead else f"{step}_refill_{self.refills}" if self.refills else f"{step}"

    def train(self, step: Step, batch: RolloutBatch, samples: list[Sample], prefill_s: float) -> list[Sample]:
        """Return the samples that the step trains on, and make their groups its prompts and forecast. `prefill_s`: seconds per token."""
        trained, metrics = self.take(batch, samples)
        assert batch.chosen is not None
        if not batch.cuts:
            return trained
        rows = [g * batch.count + n for g in batch.chosen for n in range(batch.count)]
        step.prompts = [batch.groups[g].prompt for g in batch.chosen]
        step.forecast = Scenarios.from_matrix(step.forecast.lengths[rows])
        step.metrics |= metrics | {"partial/recomputed_s": metrics["partial/recomputed_tokens"] * prefill_s}
        return trained

    def take(self, batch: RolloutBatch, samples: list[Sample]) -> tuple[list[Sample], JsonObject]:
        """Return the samples that the step trains on, and its metrics. The other groups stay in flight.

        `samples`: of all groups, in the order of their keys.
        """
        assert batch.chosen is not None
        count, trained = batch.count, list[Sample]()
        self.counts["forced_groups"] += batch.forced
        self.in_flight = []
        for g, group in enumerate(batch.groups):
            mine = samples[g * count : (g + 1) * count]
            if g in batch.chosen:
                trained += mine
            else:
                if self.mode.boundary is Boundary.CUT_RESTART:
                    mine = [self._without_tokens(s, s.id) if s.completion.finish_reason == UNFINISHED else s for s in mine]
                self.in_flight.append(replace(group, samples=tuple(mine)))
        names = COUNTS + ("kept_tokens",) * self.mode.switch.keep_kv + ("ahead_tokens",) * self.mode.switch.in_flight
        metrics = {
            "partial/oversample": self.at_work / self.quota,
            "partial/oversample_reason": self.reason,
            "partial/in_flight_groups": len(self.in_flight),
            "partial/in_flight_tokens": sum(len(s.completion.token_ids) for group in self.in_flight for s in group.samples),
            **{f"partial/{name}": self.counts[name] for name in names},
        }
        return trained, metrics

    @staticmethod
    def state(groups: Sequence[Group]) -> list[JsonObject]:
        """Return groups in flight as JSON-serialisable values."""
        return [
            {"row": g.prompt.index, "begun": g.begun, "first_sample": g.first_sample, "samples": [as_json(sample) for sample in g.samples]}
            for g in groups
        ]

    def restore_ahead(self, state: list[JsonObject], step: int, cursor: Cursor, prompts: list[Prompt]) -> None:
        """Restore the responses to a step's prompts as older versions saved them, whose cursor draws these prompts again.

        They are dropped if the recipe draws others now.
        """
        count, place = self.rollout.samples_per_prompt, cursor.state()
        drawn = cursor.next(len(state) // count)
        if [row for row in drawn for _ in range(count)] != [sample["row"] for sample in state]:
            cursor.restore(place)
            return
        groups = [
            {"row": row, "begun": step, "first_sample": self._first_sample(prompts[row], count), "samples": state[g * count :][:count]}
            for g, row in enumerate(drawn)
        ]
        self.restore(groups, prompts)

    def restore(self, state: list[JsonObject], prompts: list[Prompt]) -> None:
        """Restore the groups in flight. `prompts`: by row. Groups begin again if their size or a length is not as the recipe has it now."""
        self.in_flight = []
        for row in state:
            group, count = Group(prompts[row["row"]], row["begun"], row["first_sample"]), len(row["samples"])
            samples = tuple(from_json(one, prompts, name) for one, name in zip(row["samples"], group.ids(count), strict=True))
            if count == self.rollout.samples_per_prompt and (self.has_agent or self._have_room(group.prompt, samples)):
                group = replace(group, samples=samples)
            self.in_flight.append(group)

    def _have_room(self, prompt: Prompt, samples: Sequence[Sample]) -> bool:
        """Return whether the responses are no longer than allowed, and the unfinished ones shorter: an engine must add a token to them."""
        most = self.rollout.response_tokens(len(prompt.token_ids))
        return all(len(s.completion.token_ids) < most + (s.completion.finish_reason != UNFINISHED) for s in samples)
