"""The worker: one bad sample harms no other, and says what was wrong with it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from rlhfless_ray.reward.reward_functions import RewardSource, RewardWorker
from rlhfless_ray.reward.source import Score
from rlhfless_ray.reward.user_file import UserFile

CASES = """
import json, sys, time
import numpy as np

def score(prompt, response, row):
    if response == "slow":
        time.sleep(30)
    if response == "loop":
        while True:
            pass
    if response == "swallow":
        for _ in range(20):
            try:
                time.sleep(0.05)
            except:
                pass
        return 1.0
    if response == "swallow Exception":
        try:
            time.sleep(30)
        except Exception:
            return 1.0
    if response == "raise":
        return json.loads("")
    if response == "exit":
        sys.exit(3)
    if response == "mutate":
        row["answer"] = "changed"
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "list": [1], "complex": 1j, "true": True,
            "numpy": np.float32(0.5), "array": np.array(0.5), "numpy bool": np.bool_(True), "int": 3, "huge": 10**400,
            "large": -1e300, "rows": np.eye(2),
            }.get(response, len(row["answer"]) / 4)
"""


SHORT_S, LONG_S = 0.3, 30.0  # limits of samples that take too long, and of those that may need a while on a busy machine


def worker(timeout_s: float = LONG_S) -> RewardWorker:
    return RewardWorker(RewardSource("file", "score", file=UserFile("mine.py", CASES)), timeout_s)


def one(response: str, timeout_s: float = LONG_S) -> Score:
    return worker(timeout_s).score([(5, "p", response, {"answer": "1"})])[0]


@pytest.mark.parametrize(
    ("response", "reward"), [("other", 0.25), ("true", 1.0), ("numpy", 0.5), ("array", 0.5), ("numpy bool", 1.0), ("int", 3.0)]
)
def test_numbers_of_any_kind_become_floats(response: str, reward: float) -> None:
    score = one(response)
    assert score == Score(5, reward) and type(score.reward) is float


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("nan", "`score` returned nan, not a finite number"),
        ("inf", "`score` returned inf, not a finite number"),
        ("none", "`score` returned NoneType None, not a number"),
        ("text", "`score` returned str '1', not a number"),
        ("list", "`score` returned list [1], not a number"),
        ("rows", "`score` returned ndarray array([[1., 0.], [0., 1.]]), not a number"),
        ("complex", "`score` returned complex 1j, not a number"),
        ("huge", "`score` returned a number too large for a float"),
        ("large", "`score` returned -1e+300, too large for a 32-bit float"),
        ("raise", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py, line 24)"),
        ("exit", "SystemExit: 3 (mine.py, line 26)"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_it(response: str, error: str) -> None:
    assert one(response) == Score(5, None, error)


@pytest.mark.parametrize("response", ["slow", "loop", "swallow", "swallow Exception"])
def test_a_slow_sample_ends_in_time(response: str) -> None:
    start = time.monotonic()
    score = one(response, SHORT_S)
    assert score == Score(5, None, f"took longer than reward.timeout_s = {SHORT_S} s")
    assert time.monotonic() - start < 25  # of thirty


OWN_LIMITS = """
import signal, time
def ring(*_):
    raise TimeoutError("own limit")
def score(prompt, response, row):
    if response == "own alarm":
        signal.signal(signal.SIGALRM, ring)
        signal.alarm(60)
    elif response == "own timer":
        signal.setitimer(signal.ITIMER_REAL, 60)
    elif response == "ignored alarm":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    elif response == "rings later":
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return 1.0
    elif response == "quick":
        return 2.0
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            time.sleep(1)
        except Exception:
            pass
    return 1.0
"""


@pytest.mark.parametrize("response", ["own alarm", "own timer", "ignored alarm"])
def test_a_function_with_limits_of_its_own_cannot_take_ours_away(response: str) -> None:
    limited = RewardWorker(RewardSource("file", "score", file=UserFile("own.py", OWN_LIMITS)), 0.3)
    start_s = time.monotonic()
    first, second = limited.score([(1, "", response, {}), (2, "", "quick", {})])
    assert first == Score(1, None, "took longer than reward.timeout_s = 0.3 s") and second == Score(2, 2.0)
    assert time.monotonic() - start_s < 10


def test_a_limit_that_a_function_leaves_behind_rings_no_more() -> None:
    limited = RewardWorker(RewardSource("file", "score", file=UserFile("own.py", OWN_LIMITS)), 30.0)
    assert limited.score([(1, "", "rings later", {})]) == [Score(1, 1.0)]
    time.sleep(0.2)  # the default action of SIGALRM would end this process


def test_a_call_that_blocks_every_signal_fails_when_it_returns() -> None:
    text = (
        "import signal, time\ndef score(prompt, response, row):\n    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "    time.sleep(0.5)\n    return 1.0\n"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        (found,) = RewardWorker(RewardSource("file", "score", file=UserFile("own.py", text)), 0.1).score([(1, "", "", {})])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert found.reward is None and found.error is not None and "took longer" in found.error


@pytest.mark.slow
def test_a_batch_keeps_order_and_keys_around_bad_samples() -> None:
    responses = ["int", "raise", "slow", "nan", "numpy", "swallow Exception", "int"]
    scores = worker(1.0).score([(10 + i, "p", r, {"answer": "1"}) for i, r in enumerate(responses)])
    assert [score.key for score in scores] == list(range(10, 17))
    assert [score.reward for score in scores] == [3.0, None, None, None, 0.5, None, 3.0]
    assert all((score.reward is None) != (score.error is None) for score in scores)


def test_a_function_that_changes_its_row_changes_it_for_nobody_else() -> None:
    row = {"answer": "1"}
    assert [s.reward for s in worker().score([(0, "p", "mutate", row), (1, "p", "other", row)])] == [7 / 4, 1 / 4]


def test_timer_and_handler_are_as_before() -> None:
    before = signal.getsignal(signal.SIGALRM)
    worker(0.05).score([(0, "p", "slow", {"answer": "1"}), (1, "p", "int", {"answer": "1"})])
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_math_and_task_run_under_the_same_limit() -> None:
    scores = RewardWorker(RewardSource("math", "math_reward", answer_column="answer"), LONG_S).score(
        [(0, "", "\\boxed{\\frac{1}{2}}", {"answer": "0.5"}), (1, "", "2", {"answer": "0.5"}), (2, "", "2", {"answer": "?"})]
    )
    assert [score.reward for score in scores] == [1.0, 0.0, None]
    assert scores[2].error == "ValueError: cannot read the reference answer '?': it has neither letters nor digits"
    assert RewardWorker(RewardSource("task", "chain"), LONG_S).score([(0, "5A3=", "#8", {"answer": "8"})]) == [Score(0, 1.0)]


def test_source_lines_in_messages_are_those_of_the_users_file(tmp_path: Path) -> None:
    text = "def deep(x):\n    return {}[x]\n\ndef score(prompt, response, row):\n    return deep(response)\n"
    score = RewardWorker(RewardSource("file", "score", file=UserFile("other.py", text)), LONG_S).score([(0, "", "k", {})])[0]
    assert score.error == "KeyError: 'k' (other.py, line 2)"


def test_responses_to_a_prompt_do_not_share_what_the_function_changes() -> None:
    text = "def score(p, response, row):\n    row['turns'].append(response)\n    return len(row['turns'])"
    mine, row = RewardWorker(RewardSource("file", "score", file=UserFile("mine.py", text)), LONG_S), {"turns": ["question"]}
    scores = mine.score([(key, "p", "r", row) for key in range(3)])
    assert [score.reward for score in scores] == [2, 2, 2] and row == {"turns": ["question"]}
