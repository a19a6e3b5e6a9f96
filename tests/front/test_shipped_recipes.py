"""Recipes with models and data sets by name read data in the hub's layout, and score it; `tests/test_shipped_runs.py` trains with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfless_ray.prompts.load_prompts import load_prompts
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.reward.reward_functions import RewardSource, RewardWorker
from rlhfless_ray.runtime.load_reward import load_reward
from rlhfless_ray.supervise.load_rows import load_rows
from tests.chat_policy import chat_tokenizer
from tests.hub_folders import CHATS, CODE, GSM8K, MATH, PAIRS, write_hub_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    texts = tmp_path_factory.mktemp("texts") / "texts.txt"
    texts.write_text(str([MATH, GSM8K, CODE, PAIRS, CHATS]))
    return chat_tokenizer(texts)


@pytest.mark.parametrize(
    ("name", "rows", "inside", "right", "wrong"),
    [
        ("math", MATH, "data", "So it is $\\boxed{4}$.", "So it is $\\boxed{5}$."),
        ("gsm8k", GSM8K, "main", "2+2 is\n#### 4", "#### 5"),
        ("code", CODE, "primeintellect", "```python\nprint(int(input()) + 4)\n```", "```python\nprint(5\n```"),
    ],
)
def test_a_right_response_earns_one(name: str, rows: list[dict], inside: str, right: str, wrong: str, tokenizer, tmp_path: Path) -> None:
    folder = write_hub_folder(tmp_path / "set", rows, inside=inside)
    path = f"{folder}@{inside}" if inside != "data" else str(folder)
    held = [f"evaluate.path={path}"] if Recipe.load(name).evaluate.path else ["evaluate.prompts=2"]
    recipe = Recipe.load(name, [f"prompts.path={path}", *held, "prompts.batch_prompts=4"])
    prompts = load_prompts(recipe, tokenizer)
    assert len(prompts.train) >= 6 and prompts.heldout
    first = prompts.train[0]
    assert first.text.startswith("<|im_start|>system\n") and first.text.endswith("<|im_start|>assistant\n")
    source = load_reward(recipe)
    assert isinstance(source, RewardSource)
    worker = RewardWorker(source, 60.0)
    scores = worker.score([(0, first.text, right, dict(first.row)), (1, first.text, wrong, dict(first.row))])
    assert [(score.reward, score.error) for score in scores] == [(1.0, None), (0.0, None)]


def test_tool_use_has_an_agent_that_is_shipped(tokenizer, tmp_path: Path) -> None:
    folder = write_hub_folder(tmp_path / "set", GSM8K, inside="main")
    recipe = Recipe.load("tool_use", [f"prompts.path={folder}@main", "evaluate.prompts=2", "prompts.batch_prompts=4"])
    assert len(load_prompts(recipe, tokenizer).train) == 6
    assert recipe.rollout.stop == ["</tool>"] and load_reward(recipe).pool_kind == "agent"


@pytest.mark.parametrize(("name", "rows"), [("preferences_rm", PAIRS), ("preferences_dpo", PAIRS), ("sft_chat", CHATS)])
def test_rows_of_stages_are_read(name: str, rows: list[dict], tokenizer, tmp_path: Path) -> None:
    folder = write_hub_folder(tmp_path / "set", rows)
    found = load_rows(SupervisedRecipe.load(name, [f"data.path={folder}", f"evaluate.path={folder}"]), tokenizer)
    assert len(found.train) == len(found.heldout) == len(rows)
