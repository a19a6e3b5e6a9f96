"""Shipped recipes with models and data sets by name train, with a tiny policy and data of our own in the hub's layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat_policy import chat_policy
from tests.conftest import command_here, samples
from tests.hub_folders import CODE, GSM8K, PAIRS, write_hub_folder

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

SMALL = ("run.steps=1", "watch.wandb=off")
ROLLOUT = ("prompts.batch_prompts=2", "rollout.samples_per_prompt=2", "rollout.max_actors=1", "evaluate.prompts=0")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    texts = folder / "texts.txt"
    texts.write_text(str([GSM8K, CODE, PAIRS]))
    return chat_policy(texts, folder / "model", context=1024)


def test_code_and_tool_use_train(policy: Path, tmp_path: Path) -> None:
    code = write_hub_folder(tmp_path / "code", CODE, inside="primeintellect")
    gsm8k = write_hub_folder(tmp_path / "gsm8k", GSM8K, inside="main")
    common = (*SMALL, *ROLLOUT, f"policy.path={policy}", f"run.root={tmp_path / 'runs'}")
    done = command_here("train", "code", f"prompts.path={code}@primeintellect", "rollout.max_tokens=16", "reward.timeout_s=60", *common)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(one["error"] is None and one["reward"] == 0.0 for one in samples(tmp_path / "runs" / "code", 1))
    done = command_here("train", "tool_use", f"prompts.path={gsm8k}@main", "agent.max_tokens=400", "agent.turn_tokens=16", *common)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(one["error"] is None and one["reward"] in (0.0, 1.0) for one in samples(tmp_path / "runs" / "tool_use", 1))


@pytest.mark.learner
def test_preferences_train(policy: Path, tmp_path: Path) -> None:
    pairs = write_hub_folder(tmp_path / "pairs", PAIRS)
    common = (*SMALL, f"policy.path={policy}", f"data.path={pairs}", f"evaluate.path={pairs}", "data.batch_rows=4")
    done = command_here("train", "preferences_dpo", *common, f"run.root={tmp_path / 'runs'}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "runs" / "preferences_dpo" / "model" / "config.json").is_file()
