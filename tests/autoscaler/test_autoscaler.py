"""The step's plan: forecast → frontier → choice → decision, without Ray or an engine."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement import frontier
from placement.market import Bid
from placement.measurements.term import Term
from placement.planning.objective import Objective, in_words
from placement.scaling.learner_ranks import RestOfStep
from placement.scaling.resize_policy import Decision, Hold
from placement.speed.decode_speed import Speed
from rlhfless_ray import Recipe
from rlhfless_ray.autoscaler.autoscaler import Autoscaler
from rlhfless_ray.autoscaler.initial_speed import ExpectedEngine
from rlhfless_ray.autoscaler.market_bids import MarketBids
from rlhfless_ray.autoscaler.predictor import response_tokens
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.pending import Pending
from rlhfless_ray.functions.demand import NoDemand
from rlhfless_ray.functions.lease import Lease, Slot
from rlhfless_ray.functions.limits import Limits
from rlhfless_ray.functions.pool_view import view_of
from rlhfless_ray.runtime.runtime import Runtime
from rlhfless_ray.session.rollout_session import RolloutSession
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.step.rollout_plan import RolloutPlan
from rlhfless_ray.step.step import Step
from rlhfless_ray.types import Completion, EngineStep, Prompt, Sample, SampleId
from tests.autoscaler.test_market_bids import FRONTIER, Pool, as_they_are
from tests.functions.test_pool_state import pool

SPEED = Speed(0.01, 1e-4)


@pytest.fixture(scope="module", autouse=True)
def same_frontiers() -> Iterator[None]:
    """Search each frontier once. Most tests begin with the same six steps, and so with the same forecast and speed."""
    known: dict[bytes, list[Any]] = {}

    def once(*arguments: Any, **options: Any) -> list[Any]:
        key = pickle.dumps((arguments, options))
        if key not in known:
            known[key] = frontier(*arguments, **options)
        return [*known[key]]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rlhfless_ray.autoscaler.rollout_frontiers.frontier", once)
        yield


def recipe(**sections) -> Recipe:
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "rollout": {"samples_per_prompt": 4, "max_tokens": 200}}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Recipe.parse(tree)


def prompts(count: int = 16) -> list[Prompt]:
    return [Prompt(i, "x", tuple(range(5 + i))) for i in range(count)]


def answers(asked: list[Prompt], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    found = []
    for prompt in asked:
        for j in range(4):
            length = int(np.clip(rng.lognormal(2 + 0.15 * prompt.index, 0.4), 1, 200))
            found.append(
                Sample(
                    prompt, SampleId(prompt.index, 1, j), Completion(0, np.zeros(length, np.int32), np.zeros(length, np.float32), "stop", 0)
                )
            )
    return found


def trained(auto: Autoscaler, steps: int = 6) -> Autoscaler:
    for step in range(steps):
        auto.predictor.observe_samples(prompts(), answers(prompts(), step))
        auto.predictor.observe_rollout(EngineSteps(EngineStep(n, n, 20 * n, SPEED.step_s(n)) for n in range(1, 65)), 0.05)
    auto.predictor.learn()
    return auto


def test_every_sequence_is_in_one_share_whatever_the_number_of_engines():
    auto = trained(Autoscaler(recipe(objective={"prefer": 1.0}), SPEED))
    scenarios = auto.predictor.forecast(prompts(), 7)
    plan = auto.plan(scenarios, prompts(), 4, step=7, warm=4)
    assert plan.actors > 1
    expected, groups = scenarios.lengths.mean(1), np.repeat(np.arange(16), 4)
    for engines in range(1, 6):
        shares = plan.shares(engines, expected, groups)
        assert 1 <= len(shares) <= engines
        assert sorted(np.concatenate(shares).tolist()) == list(range(64))


def test_preferring_speed_takes_more_engines_than_preferring_cost_and_the_likely_long_sit_in_smaller_company():
    sizes = {}
    for prefer in (0.0, 1.0):
        auto = trained(Autoscaler(recipe(objective={"prefer": prefer}), SPEED))
        scenarios = auto.predictor.forecast(prompts(), 7)
        plan = auto.plan(scenarios, prompts(), 4, step=7, warm=4)
        sizes[prefer] = plan.actors
        assert plan.decision.plan is not None and plan.reason.startswith(in_words(plan.decision.plan))
    assert sizes[0.0] == 1 < sizes[1.0]
    longest = np.argsort(-scenarios.lengths.mean(1))[:4]
    company = {int(i): len(group) for group in plan.decision.plan.groups for i in group}
    assert np.mean([company[int(i)] for i in longest]) < np.mean(list(company.values()))


def test_a_deadline_that_cannot_be_met_is_said_and_the_nearest_plan_taken():
    auto = trained(Autoscaler(recipe(objective={"deadline_s": 1e-3}), SPEED))
    plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
    assert "no plan takes 0.001 s or less; the nearest deadline that can be met is" in plan.reason
    assert plan.decision.time_s == min(p.time_s for p in plan.frontier)


def test_a_deadline_and_a_budget_cover_what_surrounds_decoding():
    auto = trained(Autoscaler(recipe(objective={"prefer": 1}), SPEED))
    fastest = auto.plan(auto.predictor.forecast(prompts(), 9), prompts(), 4, step=9, warm=4)
    whole_s = fastest.predicted_s
    decoding_s = (whole_s - auto.terms.around.predict()) / (1 + auto.engines.fit.overhead)
    assert whole_s == pytest.approx(fastest.frontier[0].time_s) and whole_s > 1.02 * decoding_s
    between = Objective(deadline_s=(decoding_s + whole_s) / 2)
    auto.criteria.objective = between
    plan = auto.plan(auto.predictor.forecast(prompts(), 9), prompts(), 4, step=9, warm=4)
    assert "no plan takes" in plan.reason, "decoding alone would end by then, the rollout would not"
    for goal in (Objective(deadline_s=1.3 * whole_s), Objective(budget=1.3 * fastest.frontier[-1].cost)):
        auto.criteria.objective, auto.actors = goal, 0
        plan = auto.plan(auto.predictor.forecast(prompts(), 9), prompts(), 4, step=9, warm=4)
        assert "no plan" not in plan.reason
        assert plan.predicted_s <= (goal.deadline_s or np.inf) and plan.cost.corrected <= (goal.budget or np.inf) * (1 + 1e-9)


def test_a_deadline_that_the_engines_held_miss_brings_more_of_them():
    auto = trained(Autoscaler(recipe(objective={"prefer": 1.0}), SPEED))
    fastest = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
    auto.criteria.objective, auto.actors = Objective(deadline_s=1.001 * fastest.predicted_s), 1
    plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
    assert plan.actors > 1 and plan.predicted_s <= auto.criteria.objective.deadline_s


def test_a_planner_that_fails_keeps_the_last_good_size_and_says_so(monkeypatch):
    auto = trained(Autoscaler(recipe(objective={"prefer": 1.0}), SPEED))
    good = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
    auto.actors = good.actors
    monkeypatch.setattr("rlhfless_ray.autoscaler.rollout_frontiers.frontier", lambda *a, **k: 1 / 0)
    bad = auto.plan(auto.predictor.forecast(prompts(), 8), prompts(), 4, step=8, warm=4)
    assert bad.has_failed and bad.actors == good.actors and bad.decision.time_s == good.decision.time_s
    assert bad.reason == f"the planner failed; the last good plan is kept: {good.reason}"
    assert "planning engines failed (ZeroDivisionError: division by zero)" in auto.troubles
    assert bad.decision.plan is None, "the groups were of other sequences"
    again = auto.plan(auto.predictor.forecast(prompts(), 9), prompts(), 4, step=9, warm=4)
    assert again.reason.count("the planner failed") == 1, "reasons do not pile up"
    shares = bad.shares(2, np.ones(64), np.repeat(np.arange(16), 4))
    assert sorted(np.concatenate(shares).tolist()) == list(range(64))


def test_a_planner_that_fails_before_any_plan_keeps_the_engines_within_the_limits(monkeypatch):
    monkeypatch.setattr("rlhfless_ray.autoscaler.rollout_frontiers.frontier", lambda *a, **k: 1 / 0)
    for last, fewest, engines in ((0, 1, 1), (0, 2, 2), (3, 1, 3), (9, 1, 4)):
        auto = Autoscaler(recipe(rollout={"min_actors": fewest}), SPEED)
        auto.actors = last
        plan = auto.plan(auto.predictor.forecast(prompts(), 1), prompts(), 4, step=1, warm=4)
        assert plan.has_failed and plan.actors == engines
        assert plan.reason == f"the planner failed; no plan before it, {engines} engines"


def test_stopping_is_not_a_failed_plan():
    def stop() -> None:
        raise KeyboardInterrupt

    auto = Autoscaler(recipe(), SPEED)
    with pytest.raises(KeyboardInterrupt):
        auto.safely("planning engines", stop, lambda: None)
    assert not auto.troubles


def test_what_does_not_fit_an_engine_waits_for_room_or_gets_another_engine():
    plans = {}
    for capacity in (None, 400):
        auto = Autoscaler(recipe(objective={"prefer": 0.0}), SPEED)
        auto.expect({1: ExpectedEngine(SPEED, capacity)}, "")
        trained(auto)
        plans[capacity] = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4).decision
    free, tight = plans[None], plans[400]
    assert free.actors == 1 and tight.time_s * tight.actors > 1.3 * free.time_s, "one engine cannot hold all of it at once"
    auto.expect({1: ExpectedEngine(SPEED, 1)}, "")  # less than any sequence: a forecast beyond the cache must not end the planning
    assert "the planner failed" not in auto.plan(auto.predictor.forecast(prompts(), 8), prompts(), 4, step=8, warm=4).reason


def test_fixed_pools_hold_every_engine_and_plan_nothing():
    auto = Autoscaler(recipe(functions={"elastic": False}), SPEED)
    plan = auto.plan(auto.predictor.forecast(prompts(), 1), prompts(), 3, step=1, warm=0)
    assert plan.actors == 3 and plan.frontier == () and "functions.elastic is off" in plan.reason


def test_a_cold_engine_must_pay_back_and_a_warm_one_is_taken_at_once():
    chosen = {}
    for warm in (1, 2):
        auto = trained(Autoscaler(recipe(objective={"prefer": 1.0}), SPEED))
        auto.actors = 1
        auto.terms.warm_start.observe(0.0, np.full(8, 0.005))
        plan = auto.plan(auto.predictor.forecast(prompts(), 2), prompts(), 2, step=2, warm=warm)
        chosen[warm] = plan.actors
    assert chosen == {1: 1, 2: 2}


def test_what_was_learned_survives_a_resume_exactly():
    auto = trained(Autoscaler(recipe(), SPEED))
    again = Autoscaler(recipe(), SPEED)
    again.restore(auto.state())
    a, b = auto.predictor.forecast(prompts(), 9), again.predictor.forecast(prompts(), 9)
    assert np.array_equal(a.lengths, b.lengths)
    one, two = (x.plan(s, prompts(), 4, step=9, warm=4) for x, s in ((auto, a), (again, b)))
    assert one.reason == two.reason and one.predicted_s == pytest.approx(two.predicted_s)


def test_what_learn_phases_take_before_the_policys_update_is_a_term_of_the_step_and_survives_a_resume():
    auto, asked = trained(Autoscaler(recipe(), SPEED)), prompts()
    scenarios = auto.predictor.forecast(asked, 7)
    without = auto.plan(scenarios, asked, 4, step=7, warm=4).step.corrected
    for seed in range(8):
        samples = answers(asked, seed)
        auto.predictor.observe_passes(samples, 0.2 + 0.001 * response_tokens(samples).sum())
        auto.predictor.observe_update(1, samples, 1.0)
        auto.predictor.observe_step({"rollout": 1.0}, 3.5 + auto.predictor.passes_s, 64)
    again = Autoscaler(recipe(), SPEED)
    again.restore(auto.state())
    tokens = scenarios.lengths.mean(1).sum()
    for one in (auto, again):
        assert one.terms.passes.predict(tokens) == pytest.approx(0.2 + 0.001 * tokens, rel=0.1)
        assert one.terms.outside.predict() == pytest.approx(1.5, rel=0.2), "it is counted once"
        told = one.plan(scenarios, asked, 4, step=7, warm=4).step.corrected
        assert told - without > 0.9 * one.terms.passes.predict(tokens)


def test_a_checkpoint_names_the_ranks_and_an_older_one_has_the_times_of_one_number_only() -> None:
    auto = trained(Autoscaler(recipe(), SPEED))
    auto.predictor.observe_update(1, answers(prompts()), 1.0)
    state = auto.state()
    assert state["learner_ranks"] == 1
    older = {key: value for key, value in state.items() if key != "learner_by_ranks"} | {"learner": state["learner_by_ranks"]["1"]}
    again = Autoscaler(recipe(), SPEED)
    again.restore(older)
    assert again.learner.is_measured and again.learner.state() == auto.learner.state()


def test_a_step_has_what_its_update_did_not_take() -> None:
    auto = Autoscaler(recipe(), SPEED)
    auto.predictor.observe_update(1, answers(prompts()), 0.5)
    auto.predictor.beside_calls = 0.5
    auto.predictor.observe_step({"rollout": 1.0}, 2.0, 64, 3.0)
    assert auto.predictor.rest_of_step == RestOfStep(1.5, 2.25, 0.5)
    auto.predictor.observe_step({"rollout": 1.0, "eval": 20.0}, 22.0, 64, 40.0)
    assert auto.predictor.rest_of_step == RestOfStep(1.5, 2.25, 0.5), "an evaluation's slots are not a step's"


def test_evaluation_is_no_part_of_a_steps_time() -> None:
    auto = Autoscaler(recipe(), SPEED)
    auto.predictor.observe_step({"rollout": 1.0, "learn": 0.5, "eval": 20.0}, 22.0, 64)
    assert auto.predictor.step_s == pytest.approx(2.0)


def finished(plan: RolloutPlan, rollout: float, step: float, cost: float = 1.0, eval_s: float = 0.0) -> dict[str, float]:
    """Return the metrics of a step that took so many times what was planned."""
    took = {"phase/rollout_s": rollout * plan.rollout.by_model, "cost/rollout_slot_s": cost * plan.cost.by_model}
    return {**took, "step_s": step * plan.step.by_model, "phase/eval_s": eval_s}


def test_predictions_are_corrected_by_what_they_missed_and_survive_a_resume() -> None:
    auto, asked = trained(Autoscaler(recipe(), Speed(0.001, 0.0001))), prompts()
    scenarios = auto.predictor.forecast(asked, 7)
    first = auto.plan(scenarios, asked, 4, step=7, warm=4)
    assert first.rollout.corrected == first.rollout.by_model, "nothing was missed yet"
    for turn in range(20):
        plan, noise = auto.plan(scenarios, asked, 4, step=7, warm=4), 0.05 * (-1) ** turn
        auto.steps.observe_plan(plan, finished(plan, 1.3 + noise, 1.2 + noise))
        auto.steps.observe_plan(plan, finished(plan, 9.0, 9.0, eval_s=1.0))  # an evaluation is in no plan
    plan = auto.plan(scenarios, asked, 4, step=7, warm=4)
    assert plan.rollout.by_model == pytest.approx(first.rollout.by_model)
    assert plan.predicted_s == pytest.approx(1.3 * first.predicted_s, rel=0.03) and plan.predicted_s == plan.decision.time_s
    assert plan.step.corrected == pytest.approx(1.2 * plan.step.by_model, rel=0.03)
    assert plan.rollout.low < plan.predicted_s < plan.rollout.high
    assert plan.decision.actors == first.decision.actors, "one factor for all plans changes no order among them"
    other = Autoscaler(recipe(), Speed(0.001, 0.0001))
    other.restore(json.loads(json.dumps(auto.state())))
    again = other.plan(scenarios, asked, 4, step=7, warm=4)
    assert again.step.by_model > 0 and other.terms.rollout.factor(1.0) == auto.terms.rollout.factor(1.0)


@pytest.mark.parametrize("worth", [0.8, 1.2])
def test_what_is_on_trial_is_taken_only_if_steps_with_it_are_cheaper(worth: float) -> None:
    auto, asked = trained(Autoscaler(recipe(), Speed(0.001, 0.0001))), prompts()
    scenarios, taken = auto.predictor.forecast(asked, 7), []
    for _ in range(60):
        plan = auto.plan(scenarios, asked, 4, step=7, warm=4)
        taken.append(auto.steps.takes("moves"))
        assert auto.steps.takes("moves") == taken[-1], "one answer a step"
        factor = worth if taken[-1] else 1.0
        auto.steps.observe_plan(plan, finished(plan, factor, factor, factor))
    assert np.mean(taken[20:]) > 0.8 if worth < 1 else np.mean(taken[20:]) < 0.2
    ahead = Autoscaler(
        recipe(rollout={"ahead": True, "max_lag_steps": 1, "partial": "continue"}, algorithm={"importance_cap": 2.0}), Speed(0.001, 0.0001)
    )
    assert ahead.steps.takes("moves"), "steps that overlap are not compared"


def test_the_prediction_counts_what_surrounds_decoding_and_slots_held_for_the_learner():
    auto = trained(Autoscaler(recipe(objective={"prefer": 1.0}, learner={"max_slots_per_rank": 4}), SPEED))
    plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
    assert auto.predictor.engine_speed.prefill_s > 0, "and prompts are part of the plan's own time"
    assert auto.terms.around.predict() > 0 and plan.predicted_s == plan.decision.time_s, "one prediction a quantity"
    assert f"{plan.predicted_s:.3g} s" in plan.reason and "cold starts" not in plan.reason
    cold = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=0)
    assert f"; {cold.predicted_s:.4g} s with {auto.terms.cold_start.predict():.3g} s of cold starts before" in cold.reason
    assert plan.step.corrected > plan.predicted_s
    assert plan.cost.corrected == pytest.approx(plan.actors * plan.predicted_s)  # all are wanted next: nobody lets go


def test_quality_compares_with_the_clairvoyant_plan_and_the_bounds():
    auto = trained(Autoscaler(recipe(objective={"prefer": 1.0}), SPEED))
    auto.actors = 3
    row = auto.quality(auto.predictor.forecast(prompts(), 7), answers(prompts(), 7), prompts(), 4)
    assert row["plan/bound_s"] <= row["plan/clairvoyant_s"] * (1 + 1e-9)
    assert row["plan/bound_cost_slot_s"] <= row["plan/clairvoyant_cost_slot_s"] * (1 + 1e-9)
    assert 0.7 < row["forecast/coverage_90"] <= 1 and row["forecast/spearman"] > 0.5 and row["pool/rollout_actors"] == 3


def test_a_pool_shrinks_where_idle_engines_bring_no_time():
    auto = trained(Autoscaler(recipe(objective={"prefer": 0.0}), SPEED))
    auto.actors, auto.terms.warm_start = 8, Term(1.0)
    found = [auto.plan(auto.predictor.forecast(prompts(), step), prompts(), 8, step=step, warm=8) for step in (7, 8, 9, 10)]
    assert found[-1].decision.action == "Shrink" and found[-1].actors < 8, found[-1].reason


def test_metrics_hold_a_thinned_frontier():
    auto = trained(Autoscaler(recipe(), SPEED))
    plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
    row = plan.metrics()
    assert len(row["plan/frontier_time_s"]) == len(row["plan/frontier_cost_slot_s"]) == len(row["plan/frontier_actors"]) <= 24
    assert row["pool/decision"] in ("Grow", "Shrink", "Hold") and isinstance(plan, RolloutPlan)


def test_nothing_that_concerns_planning_only_ends_a_run(monkeypatch):
    auto = Autoscaler(recipe(), SPEED)
    for broken in ("predict", "forecast", "observe"):
        monkeypatch.setattr(auto.predictor.forecaster, broken, lambda *_: 1 / 0)
    monkeypatch.setattr(auto.engines.fit, "observe", lambda *_: 1 / 0)
    monkeypatch.setattr("rlhfless_ray.autoscaler.rollout_frontiers.forecast_quality", lambda *_: 1 / 0)
    for broken in ("predict", "decide", "settle"):
        monkeypatch.setattr(auto.learner, broken, lambda *_, **__: 1 / 0)
    for broken in ("hold_slot", "keep_alive", "prewarm"):
        monkeypatch.setattr(f"rlhfless_ray.autoscaler.step_predictor.{broken}", lambda *_: 1 / 0)
    scenarios = auto.predictor.forecast(prompts(), 1)
    assert scenarios.lengths.shape == (64, 64) and (scenarios.lengths == 100).all()
    assert auto.predictor.expected(prompts()).shape == (16,)
    auto.predictor.observe_samples(prompts(), answers(prompts()))
    auto.predictor.observe_rollout(EngineSteps([EngineStep(1, 1, 1, 0.01)]), 0.01)
    assert auto.quality(scenarios, answers(prompts()), prompts(), 2) == {"pool/rollout_actors": 0}
    assert auto.plan(scenarios, prompts(), 2, step=1, warm=2).actors >= 1
    assert auto.size_learner(answers(prompts())).actors == auto.predictor.learner_slots
    assert auto.steps.drained(1.0, needed_next=True).action == "Release"
    assert auto.steps.keep_warm_s([1.0], 0.1) == 0.0 and not auto.steps.prewarm_now(1.0, 1.0, 0.1)
    auto.predictor.settle()
    told = [
        "the forecast", "learning from lengths", "fitting the speed", "judging the plan", "weighing an idle slot",
        "predicting the step", "sizing the learner", "weighing parked processes", "timing a start ahead",
        "fitting what was observed",
    ]  # fmt: skip
    assert [trouble.split(" failed")[0] for trouble in auto.troubles] == told
    assert all("ZeroDivisionError: division by zero" in trouble for trouble in auto.troubles)


WIDTHS = {1: ExpectedEngine(SPEED), 2: ExpectedEngine(Speed(0.006, 6e-5)), 4: ExpectedEngine(Speed(0.004, 4e-5))}
OTHERS = {2: (2, 2), 4: (1, 1)}  # (engines, warm ones) on four slots


def test_the_width_that_is_faster_is_taken_named_and_kept_by_a_checkpoint():
    auto = Autoscaler(recipe(objective={"prefer": 0.9}, rollout={"tensor_parallel": "auto"}, run={"steps": 50}), SPEED)
    auto.expect(WIDTHS, "")
    trained(auto)
    widths = []
    for step in range(7, 12):
        most = {1: (4, 4), **OTHERS}
        others = {width: one for width, one in most.items() if width != auto.engines.width}
        plan = auto.plan(
            auto.predictor.forecast(prompts(), step), prompts(), *most[auto.engines.width][:1], step=step, warm=4, others=others
        )
        if not widths:
            assert plan.width != 1 and f"engines of {plan.width} slots instead of 1" in plan.reason and "once" in plan.reason
            assert auto.engines.fit.speed.base_s == pytest.approx(WIDTHS[plan.width].speed.base_s, rel=0.05), "measured where it was 1"
        else:
            assert f"engines of {plan.width} slots;" in plan.reason
        widths.append(plan.width)
        auto.actors = plan.actors
    assert len(set(widths)) == 1 and plan.metrics()["plan/width"] == widths[0]
    again = Autoscaler(auto.recipe, SPEED)
    again.expect(WIDTHS, "")
    again.restore(json.loads(json.dumps(auto.state())))
    assert again.engines.width == auto.engines.width and again.engines.fit.state() == auto.engines.fit.state()
    assert again.engines.state() == auto.engines.state(), "with the measured speeds of widths that engines had before"
    assert 1 in again.engines.fits and again.state().keys() == auto.state().keys()


def test_a_fixed_width_plans_and_saves_as_before():
    found = []
    for width in (1, "auto"):
        auto = trained(Autoscaler(recipe(rollout={"tensor_parallel": width}), SPEED))
        auto.expect({1: WIDTHS[1]}, "" if width == 1 else "auto takes 1")
        plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4)
        assert plan.width is None and "plan/width" not in plan.metrics() and "width" not in auto.state()
        found.append(plan)
    assert found[1].reason == f"auto takes 1; {found[0].reason}"
    assert (found[0].actors, found[0].predicted_s) == (found[1].actors, found[1].predicted_s)
    again = auto.plan(auto.predictor.forecast(prompts(), 8), prompts(), 4, step=8, warm=4)
    assert "auto takes 1" not in again.reason, "said once"


def test_the_objective_can_be_changed_between_steps():
    run = Runtime.__new__(Runtime)
    run.recipe = recipe(objective={"prefer": 0.0}, rollout={"max_actors": 4})
    run.autoscaler = trained(Autoscaler(run.recipe, SPEED))
    scenarios = run.autoscaler.predictor.forecast(prompts(), 7)
    cheap = run.autoscaler.plan(scenarios, prompts(), 4, step=7, warm=4)
    run.objective = {"prefer": 1.0}
    fast = run.autoscaler.plan(scenarios, prompts(), 4, step=8, warm=4)
    assert cheap.actors == 1 < fast.actors
    run.objective = run.objective.model_copy(update={"prefer": 0.0})
    assert run.autoscaler.plan(scenarios, prompts(), 4, step=9, warm=4).decision.plan.actors <= fast.actors
    assert run.recipe.objective.prefer == run.autoscaler.criteria.objective.prefer == 0.0
    with pytest.raises(UserError, match=r"run\.objective: unknown key `objective.prefr`"):
        run.objective = {"prefr": 1.0}
    with pytest.raises(UserError, match="a plan has one goal"):
        run.objective = {"deadline_s": 1.0, "knee": True}
    assert run.objective.prefer == 0.0


def test_bids_follow_an_objective_that_is_changed():
    autoscaler = Autoscaler(recipe(objective={"prefer": 0.0}), SPEED)
    bids = autoscaler.criteria.bids = MarketBids(Pool(pool(4), "x"), autoscaler.criteria.objective, 1)
    bids.divide({1: FRONTIER}, 0, as_they_are)
    assert bids.most == 1
    autoscaler.set_objective(recipe(objective={"prefer": 0.8}).objective)
    bids.divide({1: FRONTIER}, 0, as_they_are)
    assert bids.most == 4


def test_a_rollout_bids_for_as_many_engines_as_what_is_left_has_work_for():
    autoscaler = Autoscaler(recipe(objective={"prefer": 0.8}), Speed(0.01, 1e-2))
    assert autoscaler.renew_rollout(np.full(64, 100.0), np.full(64, 20), 4, 0, 4) == 4, "on no pool"
    bids = autoscaler.criteria.bids = MarketBids(Pool(pool(4), "x"), autoscaler.criteria.objective, 1)
    bids.divide({1: FRONTIER}, 0, as_they_are)
    bids.begin_rollout(4, 11.0, True, 4.0)
    left = np.linspace(50.0, 150.0, 64)  # engines may take different shares, so a number of them has several plans
    engines = [autoscaler.renew_rollout(left[-count:], np.full(count, 20), 4, 0, 4) for count in (64, 4, 2, 1)]
    assert engines == [4, 4, 2, 1] and bids.running.slots == (1,)
    assert autoscaler.renew_rollout(np.zeros(0), np.zeros(0, int), 4, 0, 4) == 4 and not autoscaler.troubles


def test_a_running_rollout_bids_for_further_engines_by_what_is_left_once_they_have_started():
    autoscaler = Autoscaler(recipe(objective={"prefer": 0.8}), Speed(0.01, 1e-2))
    bids = autoscaler.criteria.bids = MarketBids(Pool(pool(4), "x"), autoscaler.criteria.objective, 1)
    bids.divide({1: FRONTIER}, 0, as_they_are)
    bids.begin_rollout(4, 11.0, True, 4.0)
    left, context = np.linspace(50.0, 150.0, 64), np.full(64, 20)

    def bid(working: int, warm: int, start_s: float) -> Bid:
        autoscaler.terms.cold_start, bids.running = Term(start_s), None
        assert autoscaler.renew_rollout(left, context, working, warm, 4) == bids.running.most and not autoscaler.troubles
        return bids.running

    whole = bid(4, 0, 22.0)
    assert whole.slots[-1] == 4
    assert bid(1, 3, 22.0).worth[-1] == pytest.approx(whole.worth[-1], rel=0.01), "parked engines wake at once"
    cold = bid(1, 0, 22.0)
    assert cold.most == 4 and 0.5 * whole.worth[-1] < cold.worth[-1] < 0.9 * whole.worth[-1]
    assert bid(2, 0, 22.0).worth[-1] > cold.worth[-1], "two of the four are there"
    assert bid(1, 0, 600.0).slots == (1,), "the rollout ends before they have started"
    assert bid(4, 0, 600.0) == whole


def planned(
    actors: int, warm: int, cold_s: float, shared: bool = True, steps: tuple[int, ...] = (7,), **objective: float
) -> tuple[int, int]:
    """Plan steps, the first of them after one with so many engines. Returns the engines of the last plan and of its bid."""
    auto = Autoscaler(recipe(objective=objective or {"prefer": 0.8}, run={"steps": 100}), Speed(0.01, 1e-2))
    auto.terms.cold_start, auto.actors = Term(cold_s), actors
    auto.criteria.bids = MarketBids(Pool(pool(8), "x"), auto.criteria.objective, 1) if shared else None
    for step in steps:
        plan = auto.plan(auto.predictor.forecast(prompts(), step), prompts(), 8, step=step, warm=warm)
    assert not auto.troubles
    return plan.actors, plan.actors if auto.criteria.bids is None else auto.criteria.bids.most


@pytest.mark.parametrize(("cold_s", "engines"), [(0.1, 8), (8.0, 8), (22.0, 1), (60.0, 1)])
def test_a_bid_counts_the_starts_of_engines_as_a_decision_alone_does(cold_s: float, engines: int):
    """A bid for 8 engines would keep slots from others if a step of 11 instead of 56 s does not pay for the starts."""
    assert planned(1, 1, cold_s) == planned(1, 1, cold_s, shared=False) == (engines, engines)
    assert planned(1, 8, cold_s) == (8, 8), "no engine has to start"


@pytest.mark.parametrize("shared", [False, True])
def test_parked_engines_are_taken_where_the_starts_of_further_ones_do_not_pay(shared: bool):
    """A run kept its one engine, because it weighed only the eight of its plan."""
    assert planned(1, 3, 60.0, shared) == (3, 3)


def test_a_budget_does_not_cover_the_starts_of_engines_in_a_bid_either():
    """A run bid for no plan within the budget whose engines had to start, and planned for less than alone."""
    assert planned(1, 1, 22.0, steps=(7, 60), budget=60.0) == planned(1, 1, 22.0, shared=False, steps=(7, 60), budget=60.0) == (3, 3)


def test_engines_of_the_last_step_whose_devices_other_runs_hold_must_pay_back_their_starts_again():
    assert planned(8, 8, 60.0) == planned(8, 2, 0.1) == (8, 8)
    assert planned(8, 2, 60.0) == (2, 2)
    assert planned(8, 0, 60.0) == (1, 1), "one has to start in any case"
    assert planned(8, 2, 60.0, shared=False) == (8, 8)


def test_a_decision_names_the_engines_of_the_last_step_whose_devices_other_runs_hold():
    auto = Autoscaler(recipe(objective={"prefer": 0.8}, run={"steps": 100}), Speed(0.01, 1e-2))
    auto.terms.cold_start, auto.actors = Term(60.0), 8
    auto.criteria.bids = MarketBids(Pool(pool(8), "x"), auto.criteria.objective, 1)
    decision = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 8, step=7, warm=2).decision
    assert (decision.action, decision.actors) == ("Shrink", 2)
    assert decision.reason.startswith("2 of the last step's 8 engines need no start; 2 engines, ") and not auto.troubles


def test_a_rollout_works_with_one_slot_where_two_cost_no_more():
    """Two engines without a fixed time per step take half as long, so no plan has one engine. The other run still gets its slot."""
    auto, state = Autoscaler(recipe(objective={"prefer": 0.8}), Speed(0.0, 1e-3)), pool(2)
    auto.terms.around = Term(0.0)
    scenarios = auto.predictor.forecast(prompts(), 1)
    assert min(plan.actors for plan in auto.plan(scenarios, prompts(), 2, step=1, warm=2).frontier) == 2
    auto.criteria.bids, other = (MarketBids(Pool(state, name), auto.criteria.objective, 1) for name in "xy")
    other.divide({1: FRONTIER}, 0, as_they_are)
    other.begin_rollout(2, 9.0, True, 4.0)
    plan = auto.plan(scenarios, prompts(), 2, step=1, warm=2)
    assert plan.actors == 1 and "its share is 1" in plan.reason and not auto.troubles
    auto.begin_rollout(plan, grows=True)
    auto.renew_rollout(np.full(64, 100.0), np.full(64, 20), 2, 0, 2)
    assert auto.criteria.bids.running.slots == (1, 2) and state.clearing().slots == {"x": 1, "y": 1}
    state.set_nodes({"a": (8, {})}, 0.0)
    assert min(one.actors for one in auto.plan(scenarios, prompts(), 4, step=1, warm=2).frontier) > 1, "a dominated plan decides nothing"


def test_a_failed_plan_is_told_before_its_rollout_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told after the rollout, so never in a run that ended there."""
    monkeypatch.setattr("rlhfless_ray.autoscaler.rollout_frontiers.frontier", lambda *a, **k: 1 / 0)
    session, said, autoscaler = RolloutSession.__new__(RolloutSession), list[str](), Autoscaler(recipe(), SPEED)
    record = SimpleNamespace(progress=SimpleNamespace(message=said.append))
    limits = Limits({"spot": 4}, {1: 4})
    session.context = SimpleNamespace(limits=lambda: limits, autoscaler=autoscaler, record=record, demand=NoDemand())  # type: ignore[assignment]
    session.mode, session.stage = recipe().rollout.mode, SimpleNamespace(warm=lambda width: 0)  # type: ignore[assignment]
    step = Step(3)
    step.prompts, step.forecast = prompts(), autoscaler.predictor.forecast(prompts(), 3)
    assert session._plan(step).has_failed
    assert said == ["step 3: planning engines failed (ZeroDivisionError: division by zero); the run continues"]
    session._plan(step)
    assert len(said) == len(step.troubles) == 1, "a step tells each failure once"


def test_engines_beside_the_update_are_planned_for_what_the_learner_leaves_of_their_own_nodes():
    spot, most, told = {"market": "spot"}, list[int](), list[object]()
    session = RolloutSession.__new__(RolloutSession)
    session.mode, session.update = recipe(rollout={"max_lag_steps": 1, "nodes": spot}).rollout.mode, Pending(lambda: None)
    ranks = [SimpleNamespace(leases=[Lease("a", Slot("spot", 0)), Lease("b", Slot("spot", 1))])]
    session.learn = SimpleNamespace(worker_group=SimpleNamespace(by_rank=ranks))  # type: ignore[assignment]
    session.stage = SimpleNamespace(warm=lambda width: 0)  # type: ignore[assignment]

    def plan(scenarios, prompts, max_actors, *, learner_slots, rooms, **_):
        most.append(max_actors)
        told.append((learner_slots, rooms))
        return SimpleNamespace(decision=Hold(1, ""))

    learner = SimpleNamespace(counts=[1, 2, 4])
    autoscaler = SimpleNamespace(engines=SimpleNamespace(width=1), plan=plan, learner=learner, troubles=[])
    leases, limits = SimpleNamespace(resource="cpu"), Limits({"spot": 4}, {1: 4})
    session.context = SimpleNamespace(limits=lambda: limits, autoscaler=autoscaler, leases=leases, demand=NoDemand())  # type: ignore[assignment]
    step = Step(1)
    step.prompts, step.forecast = prompts(), None  # type: ignore[assignment]
    session._plan(step)
    ranks[0].leases += [Lease("c", Slot("spot", 2)), Lease("d", Slot("spot", 3))]
    session._plan(step)
    assert most == [2, 1], "it waits for rollout.min_actors in any case"
    assert told == [(2, {1: {1: 3}, 2: {1: 2}, 4: {1: 0}}), (4, {1: {1: 3}, 2: {1: 2}, 4: {1: 0}})]


def lagging(prefer: float, update_s: dict[int, float]) -> Autoscaler:
    """One step off, after updates of so many seconds on one, two and four slots."""
    auto = trained(Autoscaler(recipe(objective={"prefer": prefer}, rollout={"max_lag_steps": 1}, learner={"max_slots_per_rank": 4}), SPEED))
    for slots, seconds in update_s.items():
        for seed in range(3):
            samples = answers(prompts(), seed)
            auto.predictor.observe_update(slots, samples, seconds * float(response_tokens(samples).sum()) / 2000)
    return auto


ROOMS = {1: {1: 7}, 2: {1: 6}, 4: {1: 4}}  # engines on eight slots


def test_engines_beside_an_update_are_sized_with_it() -> None:
    found = {}
    for update_s in (0.01, 60.0):
        auto = lagging(1.0, dict.fromkeys((1, 2, 4), update_s))
        auto.size_learner(answers(prompts()), is_beside_rollout=True)
        scenarios = auto.predictor.forecast(prompts(), 7)
        alone = auto.plan(scenarios, prompts(), 7, step=7, warm=7)
        auto.actors = 0
        plan = auto.plan(scenarios, prompts(), 7, step=7, warm=7, learner_slots=1)
        found[update_s] = plan.actors
        assert "beside an update of " in plan.reason and " s on 1 slot: " in plan.reason and "beside" not in alone.reason
        assert plan.predicted_s == plan.decision.time_s
        assert plan.step.corrected > max(plan.predicted_s, 0.8 * auto.predictor.expected_update_s)
    assert found[60.0] == 1 < found[0.01], "a rollout that ends long before the update needs one engine"


def test_the_learners_slots_are_chosen_together_with_the_engines() -> None:
    auto = lagging(0.5, {1: 60.0, 2: 30.0, 4: 15.0})
    reason = auto.size_learner(answers(prompts()), is_beside_rollout=True).reason
    assert reason == "as before: learner and engines were not sized together yet"
    auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4, learner_slots=4, rooms=ROOMS)
    decision = auto.size_learner(answers(prompts()), is_beside_rollout=True)
    assert decision.actors == 4 == auto.predictor.learner_slots and "4 slots for an update of " in decision.reason
    assert " s beside 1 engine for a rollout of " in decision.reason and "1 slot beside " in decision.reason
    short = lagging(0.9, {1: 0.02, 2: 0.019, 4: 0.018})
    short.plan(short.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4, learner_slots=4, rooms=ROOMS)
    assert short.size_learner(answers(prompts()), is_beside_rollout=True).actors == 1
    untried = lagging(0.5, {4: 1.0})
    untried.plan(untried.predictor.forecast(prompts(), 7), prompts(), 4, step=7, warm=4, learner_slots=4, rooms=ROOMS)
    assert untried.size_learner(answers(prompts()), is_beside_rollout=True).reason == "trying 2: not measured yet"


def test_a_partial_rollout_counts_on_all_slots_after_the_update_beside_it() -> None:
    """Where few engines fit beside a large learner, the rest of the rollout makes up for it."""
    auto = lagging(1.0, {1: 1.0, 2: 0.55, 4: 0.3})
    auto.predictor.recipe = recipe(
        objective={"prefer": 1.0}, rollout={"max_lag_steps": 1, "partial": "continue", "ahead": True}, learner={"max_slots_per_rank": 4}
    )
    auto.terms.pause.observe(0.0, [0.01] * 64)
    scenarios = auto.predictor.forecast(prompts(), 7)
    ends = auto.plan(scenarios, prompts(), 2, step=7, warm=8, learner_slots=4)
    goes_on = auto.plan(scenarios, prompts(), 2, step=7, warm=8, learner_slots=4, rest_actors=8, rooms=ROOMS)
    assert goes_on.update is not None and goes_on.update.rest is not None and goes_on.update.rest.slots > 2
    assert goes_on.step.corrected < ends.step.corrected and not auto.troubles
    assert auto.sizing.sizes is not None and ", the rest on 8 slots: step of " in auto.sizing.sizes.reason
    alone = auto.plan(scenarios, prompts(), 8, step=7, warm=8)  # the rest itself, after its update
    assert alone.update is None and alone.step.corrected > alone.predicted_s + auto.predictor.expected_update_s


def test_the_rest_of_a_rollout_counts_on_no_slots_of_other_runs() -> None:
    rollout = {"max_lag_steps": 1, "partial": "continue", "ahead": True}
    auto = lagging(1.0, {1: 1.0, 2: 0.55, 4: 0.3})
    auto.predictor.recipe = recipe(objective={"prefer": 1.0}, rollout=rollout, learner={"max_slots_per_rank": 4})
    state = pool(8)
    bids = auto.criteria.bids = MarketBids(Pool(state, "x"), auto.criteria.objective, 1)

    def engines() -> tuple[int, int]:
        bids.pool.view = view_of(state, "x", 0.0)
        plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 2, step=7, warm=8, learner_slots=4, rest_actors=8)
        auto.begin_rollout(plan, True)
        assert plan.update is not None and plan.update.rest is not None and not auto.troubles
        return plan.update.rest.slots, auto.most_after_update(8)

    alone, most = engines()
    assert alone > 5 and most == 8
    Pool(state, "y").bid(Bid("y", (1, 3), (0.0, 1e6)))
    assert engines() == (5, 5), "the learner's slots are engines' by then"
    auto.criteria.bids = None
    assert auto.most_after_update(8) == 8


def test_the_overhead_of_a_rollout_that_goes_on_after_the_update_is_in_its_pause_only() -> None:
    auto = lagging(1.0, {1: 1.0, 2: 0.55, 4: 0.3})
    auto.terms.pause.observe(0.0, [0.5] * 64)
    found = []
    for overhead_s in (0.0, 0.4):
        auto.terms.around = Term(overhead_s)
        update = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 2, step=7, warm=8, learner_slots=4, rest_actors=8).update
        assert update is not None
        found.append(update.rest)
    assert found[0].slots == found[1].slots and found[0].pause_s == found[1].pause_s
    assert (found[0].seconds, found[0].cost) == pytest.approx((found[1].seconds, found[1].cost))


def test_a_run_bids_for_the_slots_that_its_step_needs_beside_an_update() -> None:
    wanted = {}
    for update_s in (0.01, 60.0):
        auto = lagging(0.95, dict.fromkeys((1, 2, 4), update_s))
        bids = auto.criteria.bids = MarketBids(Pool(pool(8), "x"), auto.criteria.objective, 1)
        auto.size_learner(answers(prompts()), is_beside_rollout=True)
        plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 7, step=7, warm=7, learner_slots=1)
        wanted[update_s] = bids.most
        assert plan.actors <= bids.most and not plan.decision.reason.startswith("the planner failed")
    assert wanted[60.0] == 1 < wanted[0.01]


def sized(auto: Autoscaler) -> Decision:
    """Plan a rollout beside an update on one slot, and size the next update."""
    auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 7, step=7, warm=7, learner_slots=1, rooms=ROOMS)
    assert not auto.troubles
    return auto.size_learner(answers(prompts()), is_beside_rollout=True)


def test_the_learner_grows_on_a_shared_pool_if_the_step_waits_for_its_update() -> None:
    """Its room was what the engines beside the present update could use."""
    auto = lagging(0.9, {1: 20.0, 2: 10.0, 4: 5.0})
    state = pool(8)
    bids = auto.criteria.bids = MarketBids(Pool(state, "x"), auto.criteria.objective, 1)
    assert sized(auto).actors == 4, "alone"
    assert view_of(state, "x", 0.0).target == 5, "the bid for the update and an engine beside it stands"
    other = Pool(state, "y")
    other.bid(Bid("y", (1, 4), (0.0, 1e6)))
    bids.pool.view = view_of(state, "x", 0.0)
    assert sized(auto).actors == 2, "its share is 4, of which an engine needs one"
    other.bid(Bid("y", (1,), (0.0,)))
    bids.pool.view = view_of(state, "x", 0.0)
    assert sized(auto).actors == 4


@pytest.mark.parametrize(("warm", "most"), [(7, 8), (1, 2)])
def test_the_bid_for_an_update_and_the_rollout_beside_it_counts_starts(warm: int, most: int) -> None:
    many = recipe(objective={"prefer": 0.8}, run={"steps": 100}, rollout={"max_lag_steps": 1}, learner={"max_slots_per_rank": 4})
    auto = Autoscaler(many, Speed(0.01, 1e-2))
    for slots in (1, 2, 4) * 2:
        auto.predictor.observe_update(slots, answers(prompts()), 1.0)
    auto.terms.cold_start, auto.actors = Term(60.0), 1
    bids = auto.criteria.bids = MarketBids(Pool(pool(8), "x"), auto.criteria.objective, 1)
    auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 7, step=7, warm=warm, learner_slots=1, rooms=ROOMS)
    assert bids.pair is not None and bids.pair.most == most and not auto.troubles


def test_a_budget_of_the_rollout_does_not_keep_the_learner_small() -> None:
    auto = lagging(0.9, {1: 20.0, 2: 10.0, 4: 5.0})
    auto.set_objective(recipe(objective={"budget": 15.0}).objective)
    state = pool(8)
    bids = auto.criteria.bids = MarketBids(Pool(state, "x"), auto.criteria.objective, 1)
    Pool(state, "y").bid(Bid("y", (1,), (0.0,)))
    bids.pool.view = view_of(state, "x", 0.0)
    assert sized(auto).actors == 4 and bids.pair is not None and bids.pair.most == 5


def test_a_rollout_beside_an_update_bids_for_no_engine_that_the_step_would_not_gain_from() -> None:
    auto = lagging(0.9, dict.fromkeys((1, 2, 4), 60.0))
    bids = auto.criteria.bids = MarketBids(Pool(pool(8), "x"), auto.criteria.objective, 1)
    auto.size_learner(answers(prompts()), is_beside_rollout=True)
    plan = auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 7, step=7, warm=7, learner_slots=1)
    auto.begin_rollout(plan, True)
    left, context = np.full(64, 150.0), np.full(64, 20)
    assert (plan.actors, auto.renew_rollout(left, context, 1, 6, 7)) == (1, 1)
    auto.update_ends_s = 0.0
    assert auto.renew_rollout(left, context, 1, 6, 7) > 1, "the update should have ended"
    auto.begin_rollout(RolloutPlan(Hold(1, ""), 1), True)
    assert auto.renew_rollout(left, context, 1, 6, 7) > 1 and bids.besides == 1 and not auto.troubles


def test_counts_that_seem_worse_are_tried_again_beside_a_rollout_too_but_only_where_no_other_run_is() -> None:
    auto = lagging(0.9, {4: 20.0, 2: 20.2, 1: 19.9})
    for seed in range(12):
        auto.predictor.observe_update(1, answers(prompts(), seed), 19.9 * float(response_tokens(answers(prompts(), seed)).sum()) / 2000)
    assert auto.predictor.learner_slots == 1 and sized(auto).reason.startswith("trying ")
    bids = auto.criteria.bids = MarketBids(Pool(pool(8), "x"), auto.criteria.objective, 1)
    assert sized(auto).reason.startswith("trying ")
    Pool(bids.pool.state, "y")
    bids.pool.view = view_of(bids.pool.state, "x", 0.0)
    assert sized(auto).reason.startswith("1 slot for an update")
    auto.predictor.recipe = recipe()
    auto.criteria.value_per_s = 100.0
    assert " again" not in auto.size_learner(answers(prompts())).reason
    auto.criteria.bids = None
    assert auto.size_learner(answers(prompts())).reason.startswith("trying ")


def test_predictions_are_for_the_slots_that_the_update_got() -> None:
    auto = lagging(0.9, {1: 20.0, 2: 10.0, 4: 5.0})
    state = pool(4)
    auto.criteria.bids = MarketBids(Pool(state, "x"), auto.criteria.objective, 1)
    Pool(state, "y").bid(Bid("y", (1, 4), (0.0, 1e6)))
    auto.predictor.recipe = recipe(learner={"max_slots_per_rank": 4})
    assert auto.size_learner(answers(prompts())).actors == 2 == auto.predictor.learner_slots
    auto.plan(auto.predictor.forecast(prompts(), 7), prompts(), 3, step=7, warm=3, learner_slots=1)
    assert auto.predictor.learner_slots == 1
    auto.predictor.observe_update(4, answers(prompts()), 5.0)
    assert auto.predictor.learner_slots == 4


def test_a_fixed_learner_says_that_engines_are_sized_for_it() -> None:
    auto = Autoscaler(recipe(rollout={"max_lag_steps": 1}), SPEED)
    for _ in range(2):
        auto.predictor.observe_update(1, answers(prompts()), 1.0)
    reason = auto.size_learner(answers(prompts()), is_beside_rollout=True).reason
    assert reason == "1 slot a rank, as learner.max_slots_per_rank says; engines are sized for an update on them"


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"faults/replaced": 2}, "processes were lost and replaced"),
        ({"phase/lease_s": 1.0}, "the step waited 1 s for slots"),
        ({"length/mean": 100.0, "forecast/bias_tokens": -40.0}, "responses had 100 tokens on average, and 60 were forecast"),
    ],
)
def test_forecasts_that_stay_far_off_name_what_the_step_knows_of_the_cause(row: dict[str, float], cause: str) -> None:
    auto = Autoscaler(recipe(), SPEED)
    for k in range(12):
        auto.terms.step.observe(1.0, 2.0 * 1.5**k)
    (sentence,) = auto.steps.far_off({"step_s": 2.0, "length/mean": 100.0, **row})
    assert sentence.startswith("step time: the last 10 forecasts were off") and cause in sentence
    assert auto.steps.far_off({"step_s": 2.0}) == [], "said once"


def test_a_step_shows_how_good_its_predictions_were() -> None:
    auto = Autoscaler(recipe(), SPEED)
    assert auto.steps.accuracy() == {}
    for _ in range(6):
        auto.terms.rollout.observe(2.0, 2.0)
    found = auto.steps.accuracy()
    assert found["accuracy/rollout/records"] == 6 and found["accuracy/rollout/median_error"] == pytest.approx(0.0, abs=1e-9)
    assert set(found) == {
        f"accuracy/rollout/{name}" for name in ("records", "bias", "median_error", "coverage_50", "coverage_90", "deciles")
    }
