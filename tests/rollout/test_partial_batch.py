"""Which groups a step trains when responses outlive steps, and the bound on their age."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.forecast.forecaster import Scenarios
from placement.scaling.partial_rollout import choose_groups, find_late, settled_groups
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.prompts.cursor import Cursor
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.rollout.staleness import check_lag
from rlhfless_ray.session.dynamic_sampling import DynamicSampling
from rlhfless_ray.session.groups_in_flight import GroupsInFlight
from rlhfless_ray.session.prompt_source import PromptSource
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.rollout_batch import RolloutBatch
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import UNFINISHED, Completion, Group, Prompt, Sample, SampleId, Scored

pytestmark = pytest.mark.pure


def recipe(**rollout: object) -> Recipe:
    tree = {"samples_per_prompt": 2, "partial": "continue", "max_lag_steps": 2, "oversample": 2, **rollout}
    return Recipe.parse({"prompts": {"task": "chain", "batch_prompts": 3}, "reward": {"function": "task"}, "rollout": tree})


@given(st.data())
def test_groups_are_chosen_as_early_as_the_rest_stays_feasible(data: st.DataObject) -> None:
    step, quota = 5, data.draw(st.integers(1, 3))
    per_step = data.draw(st.integers(quota, 3))  # more than the quota in a step that lacks some groups only
    until = data.draw(st.lists(st.integers(5, 8), min_size=quota, max_size=7))
    completed = data.draw(st.permutations(range(len(until))))[: data.draw(st.integers(0, len(until)))]

    def is_feasible(chosen: tuple[int, ...]) -> bool:
        return not find_late([last for g, last in enumerate(until) if g not in chosen], step + 1, per_step)

    if not any(is_feasible(chosen) for chosen in combinations(range(len(until)), quota)):
        return
    found = choose_groups(until, completed, step, quota, per_step)
    possible = [c for c in combinations(sorted(completed), quota) if is_feasible(c)]
    assert (found is not None) == bool(possible)
    if found is not None:
        assert tuple(found) in possible
        first = sorted(completed[:quota])
        assert found == first or not is_feasible(tuple(first))


@given(st.data())
def test_a_settled_group_is_trained_whatever_becomes_complete_later(data: st.DataObject) -> None:
    step, quota = 5, data.draw(st.integers(1, 3))
    per_step = data.draw(st.integers(quota, 3))
    until = data.draw(st.lists(st.integers(5, 8), min_size=quota, max_size=7))
    order = data.draw(st.permutations(range(len(until))))
    chosen = next((found for n in range(len(order) + 1) if (found := choose_groups(until, order[:n], step, quota, per_step))), None)
    if chosen is None:
        return
    settled = [set(settled_groups(until, order[:n], step, quota, per_step)) for n in range(len(order) + 1)]
    assert all(before <= after for before, after in pairwise(settled)) and settled[-1] == set(chosen)
    first = sum(last == step for last in until)
    if set(until) <= {step, step + 1} and first <= quota:  # known as soon as it is complete
        done = [g for g in order if g in chosen]
        assert all(settled[order.index(g) + 1] >= {g} for g in done)


def drawing(draw: Callable[[int], list[Prompt]], missing: int | None = None) -> Any:
    """A source of prompts. `missing`: groups that the step lacks."""
    return SimpleNamespace(draw=lambda count, has_groups: draw(count), missing=missing)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_token_exceeds_the_lag_bound(data: st.DataObject) -> None:
    """Random progress, engines lost with what they had not reported, groups dropped by a filter, resumes, and a lowered bound."""
    mode, ahead = data.draw(st.sampled_from([("continue", False), ("restart", False), ("continue", True)]))
    filters = data.draw(st.booleans())
    most, share = data.draw(st.sampled_from([(1, 1.0), (1, 1.5), (1, 2.0), (2, 3.0), (3, 1.67), (3, 4.0)]))
    rng, last, drawn = np.random.default_rng(data.draw(st.integers(0, 2**32))), 9, 0
    share, lowered = min(share, most + (not ahead)), False
    prompts = [Prompt(i, "", (1, 2)) for i in range(999)]
    run = GroupsInFlight(recipe(partial=mode, max_lag_steps=most, oversample=share, ahead=ahead))

    def draw(count: int) -> list[Prompt]:
        nonlocal drawn
        drawn += count
        return prompts[drawn - count : drawn]

    def roll_out(batch: RolloutBatch, versions_of: tuple[int, ...]) -> tuple[RolloutBatch, list[Sample]]:
        for version in versions_of:
            beside_update, before, made = version < step - 1, dict(batch.samples), batch.made.copy()
            finished = [key for key in range(len(made)) if not batch.unfinished[key]]
            versions = {key: list(before[key].completion.versions) if made[key] else [] for key in range(len(made))}
            while not batch.is_enough(finished) and not (beside_update and rng.random() < 0.4):
                for key in rng.permutation(np.flatnonzero(batch.unfinished)):
                    if key in finished:
                        continue
                    if new := int(rng.integers(0, 4)):
                        versions[key].append((version, new))
                        made[key] += new
                    if made[key] and rng.random() < 0.3:
                        finished.append(int(key))
            new, cut = [], []
            for key in range(len(made)):
                tokens = np.zeros(made[key], np.int32), np.zeros(made[key], np.float32)
                done = Completion(key, *tokens, "stop" if key in finished else UNFINISHED, version, tuple(versions[key]))
                if key not in finished:
                    cut.append(done)
                elif batch.unfinished[key]:
                    new.append(Sample(batch.groups[key // 2].prompt, batch.ids[key], done))
            joined = batch.join(new, cut)
            run.count(batch, joined, beside_update)
            if batch.chosen is not None:
                break
            batch = batch.after(joined)
        return batch, joined

    ended: list[int] = []
    for step in range(1, last + 1):
        if rng.random() < 0.3:  # a resume
            state = run.state(run.in_flight)
            if step > 5 and most > 1:
                most, lowered = most - 1, True
                share = min(share, most + (not ahead))
            run = GroupsInFlight(recipe(partial=mode, max_lag_steps=most, oversample=share, ahead=ahead))
            run.restore(state, prompts)
        kept, missing, versions_of = [], None, (step - 2, step - 1) if ahead and step > 1 else (step - 1,)
        while len(kept) < 3:
            batch = run.begin(step, last - step + 1, drawing(draw, missing), refills=missing is not None)
            batch, joined = roll_out(batch, versions_of)
            samples, metrics = run.take(batch, joined)
            assert [s.id.number for s in samples] == [0, 1] * (missing or 3) and len({s.id for s in samples}) == len(samples)
            assert all(s.completion.finish_reason == "stop" for s in samples)
            check_lag(samples, step - 1, most)  # raises if a token is too old
            ended += [s.prompt.index for s in samples[::2]]
            kept += [s for s in samples[::2] if not filters or rng.random() < 0.6]
            missing, versions_of = 3 - len(kept), (step - 1,)
        assert mode == "continue" or not metrics["partial/recomputed_tokens"]
        assert mode == "restart" or lowered or not metrics["partial/restarted"], "groups are waited for in time"
    assert not run.in_flight and sorted(ended) == list(range(drawn)) and (filters or drawn == 27)


@pytest.mark.parametrize(("prompts", "share", "groups"), [(100, 1.1, 110), (3, 1.5, 5), (8, 1.0, 8)])
def test_a_share_of_groups_is_rounded_up_once(prompts: int, share: float, groups: int) -> None:
    tree = recipe(oversample=share).model_dump(exclude_unset=True)
    run = GroupsInFlight(Recipe.parse({**tree, "prompts": {**tree["prompts"], "batch_prompts": prompts}}))
    assert run.at_work == groups


def test_a_group_that_cannot_be_trained_in_time_restarts() -> None:
    run, prompts = GroupsInFlight(recipe()), [Prompt(i, "", (1,)) for i in range(9)]
    old = Sample(
        prompts[0], SampleId(prompts[0].index, 1, 0), Completion(0, np.arange(4, dtype=np.int32), np.zeros(4, np.float32), "stop", 0)
    )
    run.in_flight = [Group(prompts[0], 1, 0, (old, old))]
    batch = run.begin(4, 5, drawing(lambda count: prompts[1 : count + 1]))
    assert batch.groups[0].begun == 4 and run.counts["restarted"] == 2 and run.counts["restarted_tokens"] == 8
    assert not batch.made.any() and batch.unfinished.all() and len(batch.groups) == 6


def test_groups_that_begin_again_leave_their_places_to_others() -> None:
    """A resume with a bound of 1 instead of 3 once dropped the tokens of groups that the next step could train."""
    assert find_late([3, 3, 5, 4, 5, 6], step=5, quota=2) == [0, 1, 3]
    assert find_late([5, 5, 5, 6], step=5, quota=2) == [2]


@pytest.mark.parametrize(("limit", "kept"), [(5, 2), (4, 0)])
def test_groups_that_are_too_long_for_a_resumed_recipe_begin_again(limit: int, kept: int) -> None:
    """An engine could not add a token to the unfinished response, and would fail."""
    prompts = [Prompt(0, "", (1, 2))]
    tokens = np.arange(4, dtype=np.int32), np.zeros(4, np.float32)
    begun, done = (Completion(0, *tokens, reason, 0) for reason in (UNFINISHED, "stop"))
    group = Group(
        prompts[0],
        1,
        0,
        (Sample(prompts[0], SampleId(prompts[0].index, 1, 0), begun), Sample(prompts[0], SampleId(prompts[0].index, 1, 1), done)),
    )
    run = GroupsInFlight(recipe(max_tokens=limit))
    run.restore(run.state([group]), prompts)
    assert len(run.in_flight[0].samples) == kept and run.in_flight[0].begun == 1


@pytest.mark.parametrize("settings", [{"ahead": True}, {"partial": "off", "oversample": "auto", "max_lag_steps": 1}])
def test_a_row_drawn_again_after_a_resume_gets_another_name(settings: dict[str, Any]) -> None:
    """With three rows the next epoch begins within a step. Both groups once had one name, and one response was trained for the other."""
    run, prompts = GroupsInFlight(recipe(**settings)), [Prompt(0, "", (1,))]
    (first, *_) = run.begin(2, 5, drawing(lambda count: prompts[:count], missing=3)).groups
    resumed = GroupsInFlight(recipe(**settings))
    resumed.restore(run.state([first]), prompts)
    before, drawn = resumed.begin(2, 5, drawing(lambda count: prompts[:count], missing=3)).groups
    assert before.ids(2) == first.ids(2) and not {*before.ids(2)} & {*drawn.ids(2)}


def test_a_last_step_whose_groups_are_all_dropped_gets_others() -> None:
    """The rows of the last epoch are used up then, and nothing is in flight: without others there would be no sample to learn from."""
    tree = {"path": "rows.jsonl", "batch_prompts": 3}
    partial = {"samples_per_prompt": 2, "partial": "continue", "max_lag_steps": 2}
    own = Recipe.parse(
        {"prompts": tree, "reward": {"function": "math"}, "policy": {"path": "model"}, "run": {"episodes": 1}, "rollout": partial}
        | {"algorithm": {"filter_range": (0, 1)}}
    )
    groups, cursor = GroupsInFlight(own), Cursor(4, 3, False, 0)
    source = PromptSource([Prompt(i, "", (1,)) for i in range(4)], cursor, DynamicSampling(own, cursor), 1)
    cursor.next(4)
    batch = groups.begin(2, 1, source, refills=True)
    assert [group.prompt.index for group in batch.groups] == [0, 1, 2]
    assert not source.draw(3, True), "a group in flight is left for the step"


def test_groups_that_a_stop_repeats_stay_as_the_rollout_beside_the_update_left_them() -> None:
    own = recipe(ahead=True)
    session = RolloutSession.__new__(RolloutSession)
    session.groups, session.update, session.stage = GroupsInFlight(own), Pending(lambda: None), SimpleNamespace(kept=None)  # type: ignore[assignment]
    autoscaler = SimpleNamespace(terms=SimpleNamespace(prefill=SimpleNamespace(per_unit_s=0.0)))
    record = SimpleNamespace(completion_order=lambda *_: None)
    session.context = SimpleNamespace(record=record, autoscaler=autoscaler)  # type: ignore[assignment]
    groups = [Group(Prompt(g, "", (1,)), 1) for g in range(4)]
    batch = RolloutBatch(groups, step=2, quota=3, max_lag=2, count=2)
    samples = [
        Sample(groups[key // 2].prompt, batch.ids[key], Completion(key, np.zeros(3, np.int32), np.zeros(3, np.float32), "stop", 1))
        for key in range(8)
    ]
    assert batch.is_enough([2, 3, 4, 5, 6, 7])
    step = Step(2, batch=batch, forecast=Scenarios.from_matrix(np.ones((8, 1))))
    trained = session._take_groups(step, samples)
    with pytest.raises(FrozenInstanceError):
        trained[0].text = "changed"  # type: ignore[misc]
    assert session.begun is not None
    left = [sample for group in session.begun for sample in group.samples]
    assert [sample.id for sample in left] == batch.ids and not any(isinstance(sample, Scored) for sample in left)


def test_the_forecast_of_the_work_ends_with_the_quota() -> None:
    prompts = [Prompt(i, "", (1,)) for i in range(3)]
    half = Completion(0, np.zeros(10, np.int32), np.zeros(10, np.float32), UNFINISHED, 0)
    done = Completion(0, np.zeros(30, np.int32), np.zeros(30, np.float32), "stop", 0)
    groups = [
        Group(
            prompts[0],
            1,
            0,
            (Sample(prompts[0], SampleId(prompts[0].index, 1, 0), half), Sample(prompts[0], SampleId(prompts[0].index, 1, 1), done)),
        ),
        Group(prompts[1], 2),
        Group(prompts[2], 2),
    ]
    batch = RolloutBatch(groups, 2, 2, 1, 2)
    work = batch.forecast_work(Scenarios.from_matrix(np.array([[20.0], [30], [40], [50], [300], [5]])))
    assert work.shape == (6, 1) and work[1] == 1 and 0 < work[0] < 60 and work[4] == work.max() < 300


def test_the_groups_that_a_step_will_train_on_are_known_before_it_has_enough() -> None:
    """The first of three has waited for a step already, so one of the two others is trained with it: the first complete one."""
    groups = [Group(Prompt(i, "", (1,)), 1 if i == 0 else 2) for i in range(3)]
    batch, finished = RolloutBatch(groups, 2, 2, 1, 2), list[int]()
    for key, settled in ((4, []), (2, []), (5, [2]), (3, [2]), (0, [2]), (1, [0, 2])):
        finished.append(key)
        assert batch.is_enough(finished) == (key == 1) and batch.settled() == settled
    assert batch.chosen == [0, 2] and batch.forced == 1


def test_a_rollout_takes_until_its_quota_and_the_groups_that_are_due_are_complete() -> None:
    left = np.array([10.0, 40, 30, 0, 7, 5])
    for begun, tokens in ((2, 30.0), (1, 40.0)):
        groups = [Group(Prompt(i, "", (1,)), begun if i == 0 else 2) for i in range(3)]
        assert RolloutBatch(groups, 2, 2, 1, 2).until_enough(left) == tokens


def test_a_prompt_that_occurs_twice_in_a_step_gets_different_samples() -> None:
    run, prompt = GroupsInFlight(recipe()), Prompt(7, "", (1, 2))
    requests = run.begin(1, 9, drawing(lambda count: [prompt] * count)).requests(recipe())
    assert len({request.seed for request in requests}) == len(requests) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_lag_steps": 0, "oversample": "auto"}, "rollout.partial: responses that outlive a step need a bound"),
        ({"oversample": 3.5}, "rollout.oversample: 3.5 is not between 1 and rollout.max_lag_steps + 1 = 3"),
        ({"oversample": 0.5}, "rollout.oversample: 0.5 is not between 1"),
        ({"partial": "off"}, "rollout.max_lag_steps: more than 1 needs responses that outlive a step"),
        ({"partial": "off", "max_lag_steps": 1}, "rollout.oversample: rollout.partial is off"),
        ({"algorithm": {"importance_cap": 0}}, "rollout.max_lag_steps: responses of older weights need importance weights"),
        ({"ahead": True, "oversample": 3}, "rollout.oversample: 3 is not between 1 and rollout.max_lag_steps = 2"),
        ({"ahead": True, "partial": "restart"}, "rollout.ahead: with restart each update would discard"),
        ({"ahead": True, "partial": "off", "max_lag_steps": 1, "oversample": "auto"}, "rollout.ahead: rollout.partial is off"),
    ],
)
def test_invalid_settings_of_partial_rollouts_are_named(settings: dict[str, Any], message: str) -> None:
    tree: dict[str, Any] = recipe().model_dump(exclude_unset=True)
    tree["rollout"] |= {key: value for key, value in settings.items() if key in (*tree["rollout"], "ahead")}
    for section in ("algorithm", "run"):
        tree[section] = tree.get(section, {}) | settings.get(section, {})
    with pytest.raises(UserError) as caught:
        Recipe.parse(tree)
    assert message in str(caught.value)
