"""Finding, checking and shipping the reward function."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.reward.http_reward import HttpSource
from rlhfless_ray.reward.openrlhf_reward import QuerySource
from rlhfless_ray.reward.reward_functions import RewardSource
from rlhfless_ray.reward.source import Source
from rlhfless_ray.runtime.load_reward import load_reward


def recipe(function: str, **prompts: str) -> Recipe:
    tree = {"prompts": prompts or {"task": "chain"}, "policy": {"path": "model"}, "reward": {"function": function}}
    return Recipe.parse(tree)


def source(folder: Path, text: str, name: str = "score") -> RewardSource:
    file = folder / "mine.py"
    file.write_text(text)
    return load_reward(recipe(f"{file}:{name}"))


def refused(folder: Path, text: str, name: str = "score") -> str:
    with pytest.raises(UserError) as caught:
        source(folder, text, name)
    assert "\n" not in str(caught.value) and "mine.py" in str(caught.value)
    return str(caught.value)


def test_the_built_in_functions() -> None:
    task = pickle.loads(pickle.dumps(load_reward(recipe("task")))).build(10.0)
    assert task("5A3B1=", "a8b9#9", {"prompt": "5A3B1=", "answer": "9"}) == 1.0
    math = load_reward(recipe("math", path="rows.jsonl", answer_column="solution")).build(10.0)
    assert math("", "#### 4", {"solution": "#### 4"}) == 1.0
    assert load_reward(recipe("math")).build(10.0)("", "4", {"answer": "4"}) == 1.0


def test_a_file_is_shipped_as_text(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nOFFSET = 1\n"
        "@dataclass\nclass Parts:\n    n: int\n"
        "def helper(text):\n    return Parts(len(text)).n + OFFSET\n"
        "def score(prompt, response, row):\n    return helper(response) + row['bonus']\n"
    )
    shipped = pickle.dumps(source(tmp_path, text))
    (tmp_path / "mine.py").unlink()
    assert pickle.loads(shipped).build(10.0)("", "abc", {"bonus": 10}) == 14


@pytest.mark.parametrize(
    "text",
    [
        "def score(prompt, response, row): return 1",
        "def score(p, r, row=None, *, strict=False): return 1",
        "def score(*parts): return 1",
        "score = lambda prompt, response, row: 1",
        "import functools\nscore = functools.partial(lambda k, p, r, row: k, 1)",
        "class S:\n    def __call__(self, prompt, response, row): return 1\nscore = S()",
    ],
)
def test_every_way_to_write_the_contract(tmp_path: Path, text: str) -> None:
    assert source(tmp_path, text).build(10.0)("", "", {}) == 1


def test_mistakes_are_named(tmp_path: Path) -> None:
    contract = "write `def score(prompt: str, response: str, row: dict) -> float`"
    assert "syntax error in line 2" in refused(tmp_path, "x = 1\ndef score(:\n")
    assert "no function `score`; it defines `scores`, `other`" in refused(
        tmp_path, "from math import sqrt\ndef scores(p, r, row): 0\ndef other(): 0"
    )
    assert "no function `score`; it defines no function" in refused(tmp_path, "x = 1")
    assert f"`score` is not a function; {contract}" in refused(tmp_path, "score = 3")
    assert f"`score` is not a function; {contract}" in refused(tmp_path, "class score: ...")
    assert f"`score` is async; {contract}" in refused(tmp_path, "async def score(p, r, row): return 1")
    assert f"`score(response)` cannot take three arguments; {contract}" in refused(tmp_path, "def score(response): return 1")
    assert "`score(a, b, c, d)` cannot take three arguments" in refused(tmp_path, "def score(a, b, c, d): return 1")
    assert "line 2 imports `no_such_package`, which is not installed" in refused(tmp_path, "\nimport no_such_package\n")
    assert "line 3 failed when it was loaded: ZeroDivisionError: division by zero" in refused(
        tmp_path, "def f():\n\n    return 1 / 0\nf()\n"
    )
    assert "failed when it was loaded: SystemExit: 3" in refused(tmp_path, "import sys\nsys.exit(3)")


def test_the_file_must_exist_and_be_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file `.*nowhere.py`"):
        load_reward(recipe(f"{tmp_path / 'nowhere.py'}:score"))
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_reward(recipe(f"{tmp_path / 'binary.py'}:score"))
    (tmp_path / "null.py").write_bytes(b"a\x00b")
    with pytest.raises(UserError, match=r"null\.py:score: .*null bytes"):
        load_reward(recipe(f"{tmp_path / 'null.py'}:score"))


@pytest.mark.parametrize("function", ["exact", "file.py", ":score", "file.py:"])
def test_other_spellings_are_refused(function: str) -> None:
    with pytest.raises(UserError, match=r"is none of `task`, `math`, `code` and `path/to/file\.py:name`"):
        load_reward(recipe(function))


def test_math_needs_an_answer_column() -> None:
    with pytest.raises(UserError, match=r"set prompts.answer_column"):
        load_reward(recipe("math", path="rows.jsonl", answer_column=""))


def test_each_source_is_found_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def reward_func(queries, prompts, labels, **kwargs): return [0.0]")
    tree = {"prompts": {"path": "rows.jsonl", "answer_column": "solution"}, "policy": {"path": "model"}}

    def found(**reward: object) -> Source:
        return load_reward(Recipe.parse({**tree, "reward": reward}))

    queries = found(function=f"{tmp_path / 'r.py'}:reward_func", contract="openrlhf", batch_samples=4)
    assert isinstance(queries, QuerySource) and (queries.batch_samples, queries.label_column) == (4, "solution")
    assert queries.call_s(10.0) == 80.0, "a batch of four, then each alone"
    urls = ["http://127.0.0.1:5000/get_reward", "https://host/r"]
    http = found(url=urls, deadline_s=60)
    assert http == HttpSource(tuple(urls), "solution", 60.0) and http.pool_kind == "score" and http.call_s(10.0) == 10.0
    with pytest.raises(UserError, match=r"reward.contract: `openrlhf` is for functions of a file, not for reward.function `math`"):
        found(function="math", contract="openrlhf")
    with pytest.raises(UserError, match=r"cannot take three arguments; write `def reward_func\(prompt: str"):
        (tmp_path / "r.py").write_text("def reward_func(queries): return [0.0]")
        found(function=f"{tmp_path / 'r.py'}:reward_func")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({}, "name one: `task`, `math` or `path/to/file.py:name`; or set reward.url or model_path"),
        ({"function": "math", "url": ["http://host/r"]}, "reward.url: rewards have one source; set it or reward.function"),
        ({"url": ["http://host/r"], "model_path": "folder"}, "reward.model_path: rewards have one source; set it or reward.url"),
        ({"function": "math", "contract": "other"}, "`reward.contract`"),
        ({"function": "math", "batch_samples": 0}, "`reward.batch_samples`"),
        ({"function": "math", "batch_samples": 4}, "reward.batch_samples: only reward.url and reward.contract openrlhf score several"),
        ({"url": ["http://host/r"], "normalize": True}, "reward.normalize: only a reward model has a mean and std"),
    ],
)
def test_a_recipe_names_one_source(reward: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Recipe.parse({"prompts": {"task": "chain"}, "reward": reward})
    assert words in str(caught.value)
