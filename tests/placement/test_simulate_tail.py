from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.simulate.learner_queue import LearnerCosts, LearnerDevices, LearnerWork, run_learner

PREPARE, GRADIENT = 1.0, 3.0  # device-seconds per token


def costs(batch: int = 10**9, early: int = 1, resize: float = 0.0, finish: float = 0.0) -> LearnerCosts:
    return LearnerCosts(
        lambda tokens, m: PREPARE * tokens / m,
        lambda tokens, m: GRADIENT * tokens / m,
        lambda before, after: resize if before != after else 0.0,
        lambda tokens, m: finish,
        batch,
        lambda m: early,
    )


def test_a_learner_that_starts_afterwards_works_phase_after_phase() -> None:
    work = LearnerWork(np.array([1.0, 5.0, 3.0]), np.array([10.0, 20.0, 30.0]), np.array([0, 0, 1]), 1.0)
    done = run_learner(work, LearnerDevices(4, 4, 5.0, 5.0), costs(finish=2.0))
    assert done.end_s == pytest.approx(5.0 + 60 * (PREPARE + GRADIENT) / 4 + 2.0)
    assert done.busy == pytest.approx(60 * (PREPARE + GRADIENT) + 2.0 * 4)


def test_a_group_is_learned_from_when_its_last_response_is_prepared() -> None:
    """By hand, one device: a (1 token) ends at 0 and is prepared till 1; b, of the same group, ends at 10, prepared till 11,
    then both give gradients for 6 s. c is alone: ends at 2, prepared till 3, its gradients till 6. The rollout ends at
    10."""
    work = LearnerWork(np.array([0.0, 10.0, 2.0]), np.ones(3), np.array([0, 0, 1]), 1.0)
    done = run_learner(work, LearnerDevices(1, 1, 0.0, 10.0), costs())
    assert done.end_s == pytest.approx(17.0)
    assert run_learner(work, LearnerDevices(1, 1, 0.0, 10.0), costs(finish=0.5)).end_s == pytest.approx(17.5)


def test_without_early_gradients_only_the_preparing_overlaps() -> None:
    work = LearnerWork(np.array([0.0, 10.0]), np.ones(2), np.array([-1, -1]), 0.0)
    assert run_learner(work, LearnerDevices(1, 1, 0.0, 10.0), costs(finish=7.0)).end_s == pytest.approx(18.0)


def test_small_batches_wait_for_more_until_the_rollout_is_over() -> None:
    work = LearnerWork(np.array([0.0, 1.0, 2.0]), np.ones(3), np.array([-1, -1, -1]), 0.0)
    assert run_learner(work, LearnerDevices(1, 1, 0.0, 100.0), costs(early=3)).early_busy == pytest.approx(3.0)
    assert run_learner(work, LearnerDevices(1, 1, 0.0, 100.0), costs(early=4)).early_busy == 0.0


def test_a_gang_grows_when_the_rollout_is_over_and_pays_for_it() -> None:
    work = LearnerWork(np.zeros(4), np.full(4, 10.0), np.full(4, -1), 0.0)
    done = run_learner(work, LearnerDevices(1, 4, 0.0, 10.0), costs(early=10, resize=1.5))
    assert done.early_busy == pytest.approx(10.0) and done.grown_s == pytest.approx(11.5)
    assert done.end_s == pytest.approx(11.5 + 30.0 / 4)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 3))
def test_all_work_is_done_once_and_never_before_it_is_there(n: int, seed: int, m: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    finish, tokens = rng.exponential(5.0, n) * spread, rng.integers(1, 50, n).astype(float)
    group = rng.integers(-1, 4, n)
    over = float(finish.max())
    done = run_learner(
        LearnerWork(finish, tokens, group, 1.0), LearnerDevices(m, m, 0.0, over), costs(batch=64, early=int(rng.integers(1, 30)))
    )
    total = tokens.sum() * (PREPARE + GRADIENT)
    assert done.busy == pytest.approx(total)
    last = tokens[np.argmax(finish)]
    assert done.end_s >= max(over + last * (PREPARE + GRADIENT) / m, total / m) - 1e-9
    assert done.end_s <= over + total / m + 1e-9  # never later than starting when all is over


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_against_a_walk_through_time_in_small_steps(n: int, seed: int) -> None:
    """One device, one token per response and per batch: replayed with a clock of 10 ms that knows nothing of event jumps."""
    rng = np.random.default_rng(seed)
    finish = np.round(rng.uniform(0, 30, n), 2)
    tokens, group = np.ones(n), np.arange(n) // 2
    mine = run_learner(
        LearnerWork(finish, tokens, group, 1.0), LearnerDevices(1, 1, 0.0, float(finish.max())), costs(batch=1, early=1)
    ).end_s
    order = np.argsort(finish, kind="stable").tolist()
    left = {int(g): int((group == g).sum()) for g in group}
    clock, free, pending, waiting, running = 0.0, 0.0, [], 0.0, None
    while order or pending or waiting > 0 or running is not None:
        if running is not None and clock >= free - 1e-9:
            kind, i = running
            running = None
            if kind == "p":
                left[int(group[i])] -= 1
                if not left[int(group[i])]:
                    waiting += float(tokens[group == group[i]].sum())
        while order and finish[order[0]] <= clock + 1e-9:
            pending.append(order.pop(0))
        if running is None:
            if waiting > 0:
                running, free, waiting = ("g", -1), clock + GRADIENT, waiting - 1
            elif pending:
                i = pending.pop(0)
                running, free = ("p", i), clock + tokens[i] * PREPARE
        clock = round(clock + 0.01, 2)
    assert mine == pytest.approx(free, abs=0.02 * n)


def test_responses_without_tokens_of_their_own_end_the_learners_work_too() -> None:
    """A response that an earlier step decoded to its end brings no tokens, and the last ones to be prepared may all be such."""
    work = LearnerWork(np.array([1.0, 2.0, 3.0]), np.array([4.0, 0.0, 0.0]), np.array([0, 1, 1]), 1.0)
    some = LearnerWork(work.finish_s[:1], work.tokens[:1], work.group[:1], 1.0)
    devices = LearnerDevices(1, 1, 0.0, 10.0)
    assert run_learner(work, devices, costs()).end_s == pytest.approx(run_learner(some, devices, costs()).end_s)
