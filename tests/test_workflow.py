"""A workflow's file, and recipes/workflow.yaml reduced to a few steps: every stage, a stop in between, and the report over all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.workflow_file import Workflow
from rlhfless_ray.run.responses import read_groups
from tests.conftest import ROOT, command_here

SFT = {"name": "sft", "train": {"task": "sft", "data": {"task": "chain"}}}
GENERATE = {"name": "g", "generate": {"prompts": {"task": "chain"}, "policy": {"path": "${sft}"}}}


REWARD = {"name": "r", "train": {"task": "rm", "data": {"task": "chain"}}}


def evaluation(model: str) -> dict[str, Any]:
    return {"name": "e", "evaluate": {"prompts": {"task": "chain"}}, "models": [model]}


def parse(*stages: dict[str, Any], **more: Any) -> Workflow:
    return Workflow.parse({"run": {"name": "w"}, "stages": list(stages), **more})


def test_the_recipe_names_results_of_earlier_stages_and_rounds() -> None:
    planned = {stage.name: stage for stage in Workflow.load(ROOT / "recipes" / "workflow.yaml").plan()}
    folder = "runs/workflow"
    assert [*planned] == ["sft", "judged", "reward", "responses-1", "dpo-1", "responses-2", "dpo-2", "ppo", "evaluation"]
    assert planned["responses-1"].recipe.policy.path == f"{folder}/sft/model"
    assert planned["dpo-2"].recipe.policy.path == planned["responses-2"].recipe.policy.path == f"{folder}/dpo-1/model"
    assert planned["dpo-2"].tree["data"]["path"] == f"{folder}/responses-2/pairs.jsonl"
    assert [planned[f"responses-{n}"].recipe.run.seed for n in (1, 2)] == [21, 22]
    assert planned["ppo"].tree["reward"]["model_path"] == planned["ppo"].tree["critic"]["path"] == f"{folder}/reward/model"
    assert planned["evaluation"].models["dpo-2"] == Path(folder, "dpo-2", "model")
    assert not planned["ppo"].recipe.watch.tensorboard  # of the settings


def test_responses_without_a_reward_are_the_result_themselves() -> None:
    after = {"name": "train", "train": {"task": "sft", "policy": {"path": "${sft}"}, "data": {"path": "${g}"}}}
    assert parse(SFT, GENERATE, after).plan()[-1].tree["data"]["path"] == "runs/w/g/responses.jsonl"


def test_a_reward_of_all_stages_makes_pairs() -> None:
    drawn = {"name": "g", "generate": {"prompts": {"task": "chain"}}}
    after = {"name": "e", "generate": {"prompts": {"path": "${g}"}, "policy": {"path": "m"}, "reward": {"function": "math"}}}
    for reward, result in (({"function": "task"}, "pairs.jsonl"), ({"timeout_s": 5}, "responses.jsonl")):
        planned = parse(drawn, after, settings={"reward": reward}).plan()
        assert planned[0].makes_pairs == (result == "pairs.jsonl")
        assert planned[1].tree["prompts"]["path"] == f"runs/w/g/{result}"


def test_a_recipe_wins_over_the_settings_key_by_key_and_both_name_results() -> None:
    settings = {"algorithm": {"kl": {"coefficient": 0.1, "estimator": "k1"}}, "critic": {"path": "${sft}"}}
    ppo = {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "algorithm": {"kl": {"estimator": "k2"}, "advantage": {"estimator": "gae"}},
    }
    stage = {"name": "ppo", "train": {"policy": {"path": "${sft}"}, **ppo}}
    with pytest.raises(UserError, match=r"stage sft: `\$\{sft\}` is no earlier stage"):
        parse(SFT, stage, settings=settings).plan()
    settings["critic"]["path"] = "m"
    recipe = parse(stage | {"train": ppo}, settings=settings).plan()[0].recipe
    assert isinstance(recipe, Recipe)
    assert (recipe.algorithm.kl.coefficient, recipe.algorithm.kl.estimator, recipe.critic.path) == (0.1, "k2", "m")
    settings["rollout"] = {"nodes": {"zone": "a"}}
    spot = parse(stage | {"train": ppo | {"rollout": {"nodes": {"market": "spot"}}}}, settings=settings).plan()[0].recipe
    assert isinstance(spot, Recipe) and spot.rollout.nodes == {"market": "spot"}, "a value, not a section"


def test_prompts_without_a_pair_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfless_ray.runtime import run_workflow

    file = tmp_path / "responses.jsonl"
    scored = [(0, "a", 1.0), (0, "b", 0.0), (1, "a", 1.0), (1, "b", 1.0)]
    lines = (json.dumps({"prompt_index": i, "prompt": "p", "response": text, "reward": reward}) for i, text, reward in scored)
    file.write_text("".join(f"{line}\n" for line in lines))
    folder = tmp_path / "r"
    monkeypatch.setattr(run_workflow, "generate", lambda *_, **__: [folder.mkdir(), file][1])
    stage = {"name": "r", "generate": {"policy": {"path": "m"}, "prompts": {"task": "chain"}, "reward": {"function": "task"}}}
    (planned,) = Workflow.parse({"run": {"name": "w"}, "stages": [stage]}).plan()
    said: list[str] = []
    run_workflow._run(folder, planned, said.append)
    assert said == ["stage r: 1 pairs of 2 prompts; the others have no two responses of different rewards"]


def test_a_file_that_is_no_workflow_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^workflow .*none\.yaml: no such file"):
        Workflow.load(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(UserError, match=r"^workflow .*list\.yaml: expected the key `stages:` at the top, found list"):
        Workflow.load(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            [SFT, evaluation("sft"), {"name": "after", "train": {"task": "sft", "data": {"path": "${e}"}}}],
            r"stage after: `\$\{e\}` is no earlier stage with a result; there are `sft`",
        ),
        ([GENERATE], r"stage g: `\$\{sft\}` is no earlier stage with a result; there are none yet"),
        ([SFT, SFT], "two stages are called sft"),
        ([{"name": "a", "train": {"task": "sft", "dta": {}}}], "stage a: unknown key `dta`; did you mean `data`"),
        ([{"name": "a", "trian": {"task": "sft"}}], r"unknown key `stages\.0\.trian`; did you mean `train`\?"),
        ([SFT, {"repeat": 2, "stages": [{"nmae": "a"}]}], r"unknown key `stages\.1\.stages\.0\.nmae`; did you mean `name`\?"),
        ([{"name": "a"}], "one of `train`, `generate` and `evaluate`"),
        ([{"name": "a", "evaluate": {"prompts": {"task": "chain"}}}], "`models` names the stages"),
        ([{"repeat": 2, "stages": []}], "has `stages` and nothing else"),
        ([{"name": "a b", "train": {}}], "pattern"),
        ([{"repeat": 2, "stages": [{"repeat": 2, "stages": [SFT]}]}], "holds no other `repeat`"),
        ([SFT, {"repeat": 2, "start": {"x": "sft"}, "stages": [GENERATE]}], "`start`: `x` is none of the repeated stages"),
        ([{"name": "a", "train": {**SFT["train"], "run": "x"}}], r"stage a: `run`: expected a section"),
        ([{"name": "a", "train": {**SFT["train"], "run": {"root": "x"}}}], "stage a: run.root: the workflow decides it"),
        ([{"name": "a", "train": {**SFT["train"], "watch": "x"}}], r"stage a: `watch`: expected a section"),
        ([SFT, GENERATE, evaluation("g")], "stage e: models: g: the result of stage g is a data set, not a policy"),
        ([REWARD, evaluation("r")], "stage e: models: r: the result of stage r is a reward model, not a policy"),
        (
            [SFT, {"name": "p", "train": {"prompts": {"task": "chain"}, "reward": {"model_path": "${sft}"}}}],
            "stage p: reward.model_path: the result of stage sft is a policy, not a reward model",
        ),
        (
            [SFT, {"name": "d", "train": {"task": "dpo", "policy": {"path": "x"}, "data": {"path": "${sft}"}}}],
            "stage d: data.path: the result of stage sft is a policy, not a data set",
        ),
        (
            [REWARD, {**GENERATE, "generate": {"prompts": {"task": "chain"}, "policy": {"path": "${r}"}}}],
            "stage g: policy.path: the result of stage r is a reward model, not a policy",
        ),
    ],
)
def test_a_mistake_names_its_stage(stages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(*stages, settings={"watch": {"tensorboard": False}}).plan()


def test_a_reward_model_may_begin_with_another() -> None:
    again = {"name": "again", "train": {"task": "rm", "policy": {"path": "${r}"}, "data": {"task": "chain"}}}
    assert parse(REWARD, again).plan()[-1].recipe.policy.path == "runs/w/r/model"


def reduced(root: Path) -> dict[str, Any]:
    """recipes/workflow.yaml with a tiny policy and a few rows of everything."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "workflow.yaml").read_text())
    tree["run"] = {"root": str(root / "runs"), "name": "workflow"}
    tree["settings"] = {"watch": {"tensorboard": False, "wandb": "off", "progress": "plain"}}
    every = [inner for stage in tree["stages"] for inner in stage.get("stages", [stage])]
    for stage in every:
        recipe = next(stage[kind] for kind in ("train", "generate", "evaluate") if kind in stage)
        recipe["policy"] = {**recipe.get("policy", {}), "hidden_size": 64, "layers": 2}
        if "data" in recipe:
            recipe["data"] |= {"batch_rows": 4, **({"rows": 64} if "task" in recipe["data"] else {})}
            recipe["evaluate"] = {"rows": 1}
            recipe["run"] = {**recipe.get("run", {}), "epochs": 1, "steps": 4}
        else:
            recipe["prompts"] |= {"batch_prompts": 4, "rows": 16}
            recipe["rollout"] |= {"max_tokens": 24, "kv_cache_mb": 64, "max_actors": 1}
            recipe.setdefault("reward", {})
    generated = [stage["generate"] for stage in every if "generate" in stage]
    (root / "reward_file.py").write_text("def spread(prompt, response, row):\n    return len(response)\n")
    generated[0]["reward"] = {"function": f"{root / 'reward_file.py'}:spread"}  # an untrained policy is never right
    next(stage["train"] for stage in every if stage["name"] == "ppo")["run"]["steps"] = 2
    (evaluation,) = (stage for stage in every if stage["name"] == "evaluation")
    evaluation["evaluate"]["evaluate"] = {"prompts": 4, "samples_per_prompt": 2}
    evaluation["models"] = ["dpo-2", "ppo"]  # of a round and of a stage by itself: each takes an engine
    return tree


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.learner
def test_the_recipe_runs_and_goes_on_after_a_stop(tmp_path: Path, no_ray: None) -> None:
    file = tmp_path / "workflow.yaml"
    file.write_text(yaml.safe_dump(reduced(tmp_path)))
    folder = tmp_path / "runs" / "workflow"
    done = command_here("workflow", str(file))
    assert done.returncode == 0, done.stderr
    pairs = [json.loads(line) for line in (folder / "responses-2" / "pairs.jsonl").read_text().splitlines()]
    assert pairs and all(pair["chosen_reward"] > pair["rejected_reward"] for pair in pairs)
    groups = {group[0]["prompt"]: group for group in read_groups(folder / "responses-2" / "responses.jsonl")}
    for pair in pairs:
        rewards = [row["reward"] for row in groups[pair["prompt"]]]
        assert (pair["chosen_reward"], pair["rejected_reward"]) == (max(rewards), min(rewards))
    scores = json.loads((folder / "evaluation" / "evaluation.json").read_text())["scores"]
    assert [score["model"] for score in scores] == ["dpo-2", "ppo"]
    page = (folder / "report.html").read_text()
    assert all(f'href="{name}/report.html"' in page for name in ("sft", "judged", "reward", "dpo-2", "ppo"))
    assert page.count("<td>done</td>") == 9 and "± 0" in page

    assert command_here("workflow", str(file)).returncode == 2  # it exists already
    before = (folder / "ppo" / "status.json").read_bytes()
    shutil.rmtree(folder / "dpo-2")  # as if it had been stopped there
    (folder / "evaluation" / "evaluation.json").unlink()
    again = command_here("workflow", str(file), "--resume")
    assert again.returncode == 0, again.stderr
    assert [line for line in again.stdout.splitlines() if line.startswith("stage ")] == [
        "stage dpo-2, 7 of 9: train",
        "stage evaluation, 9 of 9: evaluate",
    ]
    assert (folder / "ppo" / "status.json").read_bytes() == before
    tree = reduced(tmp_path)
    tree["stages"][0]["train"]["learner"]["learning_rate"] = 1.0
    file.write_text(yaml.safe_dump(tree))
    changed = command_here("workflow", str(file), "--resume")
    assert changed.returncode == 2 and "stage sft:" in changed.stderr and "made with another recipe" in changed.stderr
