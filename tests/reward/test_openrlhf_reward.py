"""OpenRLHF's reward function contract, one small file per form and mistake."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.reward.openrlhf_reward import BadReturn, QuerySource, QueryWorker, scores_of
from rlhfless_ray.reward.source import Score
from rlhfless_ray.reward.user_file import UserFile
from rlhfless_ray.types import Completion, Prompt, Sample, SampleId

FORMS = {
    "0.8.0, tensor": "import torch\ndef reward_func(q, prompts, labels):\n    return torch.tensor([float(len(x)) for x in q])",
    "0.8.0, list": "def reward_func(queries, prompts, labels):\n    return [len(q) for q in queries]",
    "rows of one": "import numpy as np\ndef reward_func(queries, prompts, labels):\n    return np.array([[len(q)] for q in queries])",
    "dict": """
import torch
def reward_func(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(len(q)) for q in queries], dtype=torch.bfloat16)
    return {"rewards": rewards, "scores": rewards / 8, "extra_logs": {"length": rewards, "bias": 0.5, "one": torch.tensor(2.0)}}
""",
    "scores are None": "def reward_func(*l, **kw):\n    return {'rewards': [len(q) for q in l[0]], 'scores': None, 'extra_logs': None}",
    "keys that nobody reads": "def reward_func(q, p, l, **kw):\n    return {'rewards': [len(x) for x in q], 'comment': 'x'}",
}


def source(text: str, batch_samples: int = 3) -> QuerySource:
    return QuerySource(UserFile("rewards.py", text), "reward_func", "answer", batch_samples)


def worker(text: str, timeout_s: float = 30.0, batch_samples: int = 3) -> QueryWorker:
    return pickle.loads(pickle.dumps(source(text, batch_samples))).worker(timeout_s)


def items(*responses: str) -> list[Any]:
    return [(10 + i, response, "", "label") for i, response in enumerate(responses)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch_samples", [1, 3])
def test_every_form_gives_each_sample_its_own(form: str, batch_samples: int) -> None:
    scores = worker(FORMS[form], batch_samples=batch_samples).score(items("a", "bb", "cccc", "dddddddd"))
    assert [(s.key, s.reward, s.error) for s in scores] == [(10, 1.0, None), (11, 2.0, None), (12, 4.0, None), (13, 8.0, None)]
    if form == "dict":
        assert [s.score for s in scores] == [0.125, 0.25, 0.5, 1.0]
        assert scores[2].extra_logs == {"length": 4.0, "bias": 0.5, "one": 2.0}
    else:
        assert all(s.score is None and s.extra_logs == {} for s in scores)


def test_what_the_function_is_given() -> None:
    text = """
def reward_func(queries, prompts, labels, **kwargs):
    assert not kwargs and type(queries) is type(prompts) is type(labels) is list
    assert all(q.startswith(p) for q, p in zip(queries, prompts))
    return [float(f"{len(queries)}{q[len(p):]}{label}") for q, p, label in zip(queries, prompts, labels)]
"""
    given = source(text)
    completion = Completion(0, np.array([7, 9], np.int32), np.zeros(2, np.float32), "stop", 0)
    made = []
    for i, row in enumerate([{"answer": 5}, {"answer": "6"}, {}]):
        sample = Sample(Prompt(i, "<1>", (1,), row), SampleId(i, 1, 0), completion, text="without special tokens")
        made.append(given.item(i, sample, lambda ids: "<1>" + "".join(str(token) for token in ids[1:])))
    assert [score.reward for score in given.worker(30.0).score(made)] == [3795.0, 3796.0, 379.0], "batch of 3, tokens 7 and 9, label"
    assert QuerySource(given.file, "reward_func", "").item(0, Sample(Prompt(0, "", ()), SampleId(0, 1, 0), completion), str)[3] == ""


BAD_SAMPLE = """
import sys, time
def reward_func(queries, prompts, labels):
    for query in queries:
        if query == "raise":
            {}["key"]
        if query == "exit":
            sys.exit(2)
        if query == "slow":
            time.sleep(30)
        if query == "swallow":
            for _ in range(15):
                try:
                    time.sleep(0.1)
                except:
                    pass
    return [float("nan") if q == "nan" else None if q == "none" else len(q) for q in queries]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "error", "timeout_s"),
    [
        ("raise", "KeyError: 'key' (rewards.py, line 6)", 30.0),
        ("exit", "SystemExit: 2 (rewards.py, line 8)", 30.0),
        ("slow", "took longer than reward.timeout_s = 0.2 s", 0.2),
        ("swallow", "took longer than reward.timeout_s = 0.2 s", 0.2),
        ("nan", "`reward_func` returned nan, not a finite number", 30.0),
        ("none", "`reward_func` returned NoneType None, not a number", 30.0),
    ],
)
def test_the_sample_at_fault_is_found_in_its_batch(bad: str, error: str, timeout_s: float) -> None:
    start = time.monotonic()
    scores = worker(BAD_SAMPLE, timeout_s).score(items("a", bad, "ccc", "dddd"))
    assert [(s.key, s.reward) for s in scores] == [(10, 1.0), (11, None), (12, 3.0), (13, 4.0)]
    assert scores[1].error == error and time.monotonic() - start < 25


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"reward": [1, 1]}, "a dict with the key `reward`: write `rewards`"),
        ({"rewards": [1, 1], "extra_log": {}}, "a dict with the key `extra_log`: write `extra_logs`"),
        ({"values": [1, 1]}, "a dict without `rewards` (its keys: `values`)"),
        ({}, "a dict without `rewards` (its keys: none)"),
        (None, "NoneType, neither rewards nor a dict with `rewards`"),
        ("12", "`rewards` of type str, not numbers"),
        (1.0, "one value as `rewards` for 2 queries"),
        (torch.zeros(3), "3 values in `rewards` for 2 queries"),
        ([1.0], "1 values in `rewards` for 2 queries"),
        ({"rewards": [1, 1], "scores": [1]}, "1 values in `scores` for 2 queries"),
        ({"rewards": [1, 1], "extra_logs": {"n": [1, 2, 3]}}, "3 values in `extra_logs['n']` for 2 queries"),
        ({"rewards": [1, 1], "extra_logs": [1, 2]}, "`extra_logs` of type list, not a dict of name → values"),
    ],
)
def test_returns_outside_of_the_contract_are_named(value: Any, words: str) -> None:
    with pytest.raises(BadReturn) as caught:
        scores_of(value, [0, 1], "`reward_func`")
    assert str(caught.value) == words


def test_logs_may_be_nan_but_must_be_numbers() -> None:
    made = scores_of({"rewards": [1, 2], "extra_logs": {"n": float("nan")}}, [0, 1], "it")
    assert made[1].reward == 2.0 and np.isnan(made[1].extra_logs["n"])
    made = scores_of({"rewards": [1, 2], "extra_logs": {"n": [1, "x"]}}, [0, 1], "it")
    assert made == [Score(0, 1.0, extra_logs={"n": 1.0}), Score(1, None, "it returned, in `scores` or `extra_logs`, str 'x', not a number")]


def test_time_over_ends_between_batches_only() -> None:
    text = "def reward_func(q, p, l):\n    if len(q) > 1 and 'bad' in q: raise ValueError\n    return [1.0] * len(q)"
    assert len(worker(text).score(items(*"abcdefg"), 0.0)) == 3
    assert len(worker(text).score(items("a", "bad", "b", "c"), 0.0)) == 3, "the batch that failed is scored to its end"


def test_mistakes_are_named_when_the_file_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"

    def refused(text: str) -> str:
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            QuerySource.load(str(file), "reward_func", "answer", 1)
        return str(caught.value)

    contract = "write `def reward_func(queries, prompts, labels, **kwargs)`"
    assert f"`reward_func(queries)` cannot take three arguments; {contract}" in refused("def reward_func(queries): 0")
    assert f"`reward_func` is async; {contract}" in refused("async def reward_func(q, p, l): 0")
    assert "no function `reward_func`; it defines `reward`" in refused("def reward(q, p, l): 0")
    assert "line 1 imports `nowhere`, which is not installed" in refused("import nowhere")
    with pytest.raises(UserError, match="no such file"):
        QuerySource.load(str(tmp_path / "none.py"), "reward_func", "answer", 1)
    file.write_text(FORMS["dict"])
    assert QuerySource.load(str(file), "reward_func", "answer", 1).worker(30.0).score(items("abc"))[0].reward == 3.0


def test_responses_to_a_prompt_do_not_share_a_label_that_the_function_changes() -> None:
    label = ["a", "b"]
    text = "def reward_func(queries, prompts, labels, **kwargs):\n    return [len(label.pop()) + len(label) for label in labels]"
    scores = worker(text, batch_samples=2).score([(k, "q", "p", label) for k in range(2)])
    assert [score.reward for score in scores] == [2, 2]
