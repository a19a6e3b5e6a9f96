"""`rlhfless generate` and `evaluate`: responses without a learner, resumed by response, and what is computed from them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.generation import GenerationRecipe
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.reward.reward_functions import RewardSource
from rlhfless_ray.run import find_model as finding
from rlhfless_ray.run.find_model import find_model
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.run.responses import NO_REWARD, RECORD, RESPONSES, ResponseRecord, best_responses, preference_pairs, write_rows
from rlhfless_ray.runtime.evaluate_models import Evaluation, ModelScore, _check_same_rows, _labels, best_of_k, with_own_folder
from rlhfless_ray.runtime.generation import Generation
from rlhfless_ray.types import Completion, Prompt, SampleId, Scored
from rlhfless_ray.weights.layout import padded_share
from rlhfless_ray.weights.load_policy import warm_start_key
from rlhfless_ray.weights.model_folder import AVERAGE, INDEX, read_folder, stored_weights
from rlhfless_ray.weights.shards import save_slices, shard_name
from rlhfless_ray.weights.tensor_file import write_file
from rlhfless_ray.weights.tensor_slice import TensorSlice
from tests.conftest import command_here, small_recipe


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the recipe ---------------------------------------------------------------------------------------------------


def test_a_training_recipe_is_read_without_what_only_learning_needs(tmp_path: Path) -> None:
    tree = small_recipe(tmp_path, rollout__max_lag_steps=1, algorithm__epochs=2, critic__learning_rate=1e-3)
    recipe = GenerationRecipe.of(tree)
    assert recipe.scores and recipe.run.episodes == 1 and not recipe.prompts.shuffle
    assert recipe.rollout.max_lag_steps == 0 and recipe.algorithm.epochs == 1
    assert recipe.prompts.batch_prompts == 8  # the recipe's
    assert not GenerationRecipe.of({"prompts": {"task": "chain"}}).scores
    trained = {"speculation": "auto", "drafter_train": "on"}
    assert GenerationRecipe.of({**tree, "rollout": trained}).rollout.drafter_train == "off", "nothing trains it, so it would stay random"
    supervised = {"task": "kd", "data": {"task": "chain"}, "teacher": {"path": "t"}, "run": {"min_ranks": 1}, "evaluate": {"rows": 8}}
    assert GenerationRecipe.of({**supervised, "prompts": {"task": "chain"}}).evaluate.prompts == 256


@pytest.mark.parametrize("section", ["prompts", "run", "rollout", "reward"])
def test_a_section_that_is_a_value_is_refused(section: str) -> None:
    with pytest.raises(UserError, match=f"^recipe: `{section}`: expected a section with keys such as"):
        GenerationRecipe.of({"prompts": {"task": "chain"}, section: 3})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "prompts.task=chain", "rolout.top_p=1"], "did you mean `rollout`"),
        (["generate", "prompts.task=chain", "agent.path=a.py"], "have no agents"),
        (["generate", "prompts.path=none.jsonl", "policy.path=none"], "none"),
        (["generate", "prompts.task=chain", "warm_start.steps=3"], "has not had its warm start"),
        (["generate", "prompts.task=chain", "run.name=never", "--resume"], "no run with responses"),
        (["generate", "prompts.task=chain", "--out", "docs"], "--out docs: it is a folder; name a file"),
        (["evaluate", "prompts.task=chain", "reward.function=task"], "name a model or run folder"),
        (["evaluate", "reward.function=task", "--model", "docs"], "--data: name a data set, or give a recipe"),
        (["evaluate", "prompts.task=chain", "--model", "docs"], "an evaluation needs one"),
        (["evaluate", "prompts.task=chain", "reward.function=task", "--model", "docs"], "neither a model folder nor a run folder"),
        (["evaluate", "prompts.task=chain", "reward.function=task", "--model", "docs", "--k", "2"], "of 1 responses"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = command_here(*arguments, f"run.root={tmp_path}")
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


def test_an_evaluation_gets_a_folder_beside_the_run_of_its_recipe(tmp_path: Path) -> None:
    recipe = GenerationRecipe.of(small_recipe(tmp_path, run__name="quick"))
    root = Path(recipe.run.root)
    (root / "quick").mkdir(parents=True)
    (root / "quick" / "recipe.yaml").touch()  # a training run
    assert [with_own_folder(recipe, resume=resume).run.name for resume in (False, True)] == ["quick-2", "quick-2"]
    (root / "quick-2").mkdir()
    assert [with_own_folder(recipe, resume=resume).run.name for resume in (False, True)] == ["quick-3", "quick-2"]


# ---- pass@k, pairs ------------------------------------------------------------------------------------------------


def test_best_of_k_is_the_mean_over_all_subsets() -> None:
    rng = np.random.default_rng(0)
    for rewards in (rng.integers(0, 2, 6).astype(float), rng.normal(size=5), np.zeros(3)):
        for k in range(1, len(rewards) + 1):
            each = [max(subset) for subset in itertools.combinations(rewards, k)]
            assert best_of_k(rewards, k) == pytest.approx(np.mean(each))


def test_pairs_and_best_responses(tmp_path: Path) -> None:
    rewards: dict[int, list[float | None]] = {0: [0.0, 1.0, 1.0, -1.0], 1: [1.0, 1.0, 1.0], 2: [None, 0.5, 0.0], 3: [None, None, None]}
    path = tmp_path / RESPONSES
    write_rows(
        path,
        (
            {"prompt_index": p, "sample": n, "prompt": f"p{p}", "response": f"{p}{n}" if n < 3 else "", "reward": r}
            for p, group in rewards.items()
            for n, r in enumerate(group)
        ),
    )
    assert [row["response"] for row in best_responses(path)] == ["01", "10", "21"]
    pairs = [(pair["prompt"], pair["chosen"], pair["rejected"]) for pair in preference_pairs(path)]
    assert pairs == [("p0", "01", "00"), ("p2", "21", "22")]  # not prompt 1, whose responses are all right
    write_rows(path, [{"prompt_index": 0, "sample": 0, "prompt": "p", "response": "r"}])
    with pytest.raises(UserError, match="have no reward"):
        list(best_responses(path))


# ---- the record ---------------------------------------------------------------------------------------------------


def sample(prompt: Prompt, number: int, reward: float | None = None) -> Scored:
    done = Completion(number, np.array([7, 9], np.int32), np.array([-0.1, -1 / 3], np.float32), "stop", 0)
    return Scored(prompt, SampleId(prompt.index, 1, number), done, f"r{number}", reward=reward)


def test_a_torn_record_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    prompts = [Prompt(i, f"p{i}", (i,), {"answer": i}) for i in range(3)]
    record = ResponseRecord(tmp_path, {"model": ["a"], "run.seed": 0}, "answer")
    record.add([sample(prompts[2], 0), sample(prompts[0], 1), sample(prompts[0], 0)])
    record.add_scores([sample(prompts[0], 0, 1.0), sample(prompts[0], 1, 0.0)])
    with (tmp_path / RECORD).open("ab") as file:
        file.write(b'{"prompt_index":1,"sam')  # a process that was killed here
    again = ResponseRecord(tmp_path, {"model": ["a"], "run.seed": 0}, "answer")
    assert again.missing(prompts, 2, scored=False) == prompts[1:]
    assert again.missing(prompts, 1, scored=False) == [prompts[1]]
    assert again.missing(prompts, 1, scored=True) == prompts[1:]
    found = again.samples(prompts[2], 2)[0]
    assert found.completion.logprobs.tobytes() == np.array([-0.1, -1 / 3], np.float32).tobytes() and found.text == "r0"
    again.add([sample(prompts[1], 0)])
    again.write(tmp_path / "out" / RESPONSES, prompts, 1)
    written = rows_of(tmp_path / "out" / RESPONSES)
    assert [(row["prompt_index"], row["answer"], row.get("reward")) for row in written] == [(0, 0, 1.0), (1, 1, None), (2, 2, None)]
    with pytest.raises(UserError, match=r"another run.seed \(0 before, 1 now\)"):
        ResponseRecord(tmp_path, {"model": ["a"], "run.seed": 1})
    with pytest.raises(UserError, match="another model; set"):
        ResponseRecord(tmp_path, {"model": ["b"], "run.seed": 0})


def test_rewards_of_two_functions_are_not_mixed_and_one_may_be_added_later(tmp_path: Path) -> None:
    def opened(**reward: str) -> ResponseRecord:
        run = Generation.__new__(Generation)
        run.recipe = GenerationRecipe.of({"prompts": {"task": "chain"}, "reward": reward})
        run.inputs = SimpleNamespace(files={}, prompts=SimpleNamespace(train=[]), reward_source=None)  # type: ignore[assignment]
        return ResponseRecord(tmp_path, run._settings())

    opened()
    for _ in range(2):
        opened(function="a.py:score")
    with pytest.raises(UserError, match=r"another reward.function \(a.py:score before, b.py:score now\)"):
        opened(function="b.py:score")
    opened()
    lines = rows_of(tmp_path / RECORD)
    assert len(lines) == 2 and all("settings" in line for line in lines)
    opened(function="a.py:score", contract="openrlhf")
    assert len(rows_of(tmp_path / RECORD)) == 3, "the function is called with other arguments"


def test_a_corrected_reward_function_scores_again(tmp_path: Path) -> None:
    prompt = Prompt(0, "p", (1,), {"answer": "right"})
    settings = {"run.seed": 0, "scored_by": "first"}
    record = ResponseRecord(tmp_path, settings, "answer")
    record.add([sample(Prompt(0, "p", (1,), {"answer": "wrong"}), 0)])
    record.add_scores([sample(prompt, 0, 0.0)])
    assert not ResponseRecord(tmp_path, settings).missing([prompt], 1, scored=True)
    assert not ResponseRecord(tmp_path, {"run.seed": 0}).missing([prompt], 1, scored=True), "a resume without a reward keeps the scores"
    for _ in range(2):  # also after a kill before the first new score
        record = ResponseRecord(tmp_path, {**settings, "scored_by": "second"}, "answer")
        assert record.missing([prompt], 1, scored=True) and not record.missing([prompt], 1, scored=False)
    record.add_scores([sample(prompt, 0, 1.0)])
    record = ResponseRecord(tmp_path, {**settings, "scored_by": "second"}, "answer")
    record.write(tmp_path / RESPONSES, [prompt], 1)
    assert [(row["reward"], row["answer"]) for row in rows_of(tmp_path / RESPONSES)] == [(1.0, "right")]


def test_a_resume_without_the_reward_keeps_scores(tmp_path: Path) -> None:
    """Also for a later resume with it, and beside responses that have none."""
    prompt, settings = Prompt(0, "p", (1,)), {"run.seed": 0, "scored_by": "first"}
    record = ResponseRecord(tmp_path, settings)
    record.add([sample(prompt, 0)])
    record.add_scores([sample(prompt, 0, 0.5)])
    record = ResponseRecord(tmp_path, {"run.seed": 0})
    record.add([sample(prompt, 1)])
    record.write(tmp_path / RESPONSES, [prompt], 2)
    assert [(row["reward"], row["error"]) for row in rows_of(tmp_path / RESPONSES)] == [(0.5, None), (None, NO_REWARD)]
    assert [row["sample"] for row in best_responses(tmp_path / RESPONSES)] == [0]
    again = ResponseRecord(tmp_path, settings)
    assert not again.missing([prompt], 1, scored=True) and again.missing([prompt], 2, scored=True)


def test_scores_depend_on_every_column_that_a_function_reads(tmp_path: Path) -> None:
    run = Generation.__new__(Generation)
    run.recipe = GenerationRecipe.of({"prompts": {"path": "a.jsonl"}, "policy": {"path": "m"}})

    def digest(**row: Any) -> str:
        prompts = SimpleNamespace(train=[Prompt(0, "p", (1,), row)])
        run.inputs = SimpleNamespace(prompts=prompts, reward_source=RewardSource("file", "score"))  # type: ignore[assignment]
        return run._digest_of_scoring()

    assert digest(answer="a", tests=["b"]) == digest(answer="a", tests=["b"]) != digest(answer="a", tests=["c"])


def test_a_table_shows_responses_without_a_reward() -> None:
    whole = ModelScore("a", "d", 4, 1, 0.5, 0.1, {1: 0.5}, 0.0, 0.0, 3.0, 0.25, 0)
    assert Evaluation([whole]).rows() == [
        ["model", "data", "prompts", "mean", "pass@1", "difference", "length", "cut", "slot-s"],
        ["a", "d", "4", "0.500 ± 0.100", "0.500", "", "3.0", "25%", ""],
    ]
    head, first, second = Evaluation([whole, replace(whole, model="b", unscored=2)]).rows()
    assert (head[-2], first[-2], second[-2]) == ("unscored", "0", "2")


def test_models_of_an_evaluation_have_names_of_their_own() -> None:
    assert _labels(["runs/sft", "other/sft/model", "runs/sft-2"]) == ["sft", "sft-2", "sft-2-2"]
    assert _labels(["runs/sft-2", "runs/sft", "other/sft"]) == ["sft-2", "sft", "sft-3"]


def test_an_evaluation_tells_of_rows_that_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfless_ray.prompts.task_tokenizer import build_tokenizer
    from rlhfless_ray.runtime import evaluate_models

    monkeypatch.setattr(evaluate_models, "initial_policy", lambda _: ({}, None))
    monkeypatch.setattr(evaluate_models, "policy_tokenizer", lambda *_: build_tokenizer(task("chain")))
    monkeypatch.setattr(evaluate_models, "context_tokens", lambda _: None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{text}="}) + "\n" for text in ("1+2", "3+4", "1+2+3+4+5+6")))
    columns = {"prompt_column": "prompt", "answer_column": ""}
    prompts = {"path": str(file), "max_prompt_tokens": 6, "overlong": "leave_out", "rows": 2, **columns}
    recipe = GenerationRecipe.of({"policy": {"path": "m"}, "prompts": prompts, "evaluate": {"prompts": 1}})
    found, _, notes = evaluate_models._load(recipe, [str(file)])
    assert len(found) == 2
    assert notes[0] == f"{file}: prompts.rows (2) is for built-in tasks, so all 3 rows are used; prompts.max_rows limits a data set"
    assert notes[1].startswith(f"{file}: 1 prompts of more than 6 tokens") and "line 3" in notes[1]
    assert "line 3" in evaluate_models._load(recipe, [])[2][-1]


def test_models_whose_tokenizers_leave_out_other_rows_are_not_compared() -> None:
    long, short = Prompt(0, "long", (1,), {"n": 0}), Prompt(0, "short", (1,), {"n": 1})
    _check_same_rows({"a": [long], "b": [Prompt(0, "long", (5, 6), {"n": 0})]})
    _check_same_rows({label: [Prompt(0, "long", (1,), {"n": float("nan")})] for label in "ab"})
    with pytest.raises(UserError, match="a answers 1 prompts and b answers 1, because their tokenizers leave out others"):
        _check_same_rows({"a": [long], "b": [short]})


def test_a_command_without_resume_continues_the_run_whose_responses_it_would_draw(tmp_path: Path) -> None:
    """Unless it has written them out, or another process is at it. A run with another seed draws others."""
    tree = {"prompts": {"task": "chain", "rows": 4}, "run": {"root": str(tmp_path / "runs")}, "policy": {"hidden_size": 64, "layers": 1}}
    prompts, output = [Prompt(0, "1A1=", (3, 4, 5), {})], tmp_path / "out.jsonl"

    def continues(**run: Any) -> bool:
        return Generation(GenerationRecipe.of({**tree, "run": {**tree["run"], **run}}), prompts=prompts).continue_unwritten(output)

    assert not continues()
    killed = Generation(GenerationRecipe.of(tree), prompts=prompts)
    folder = RunFolder.create(killed.recipe)
    ResponseRecord(folder.path, killed._settings())
    folder.write_status(status="running")
    assert continues() and not continues(seed=5)
    assert killed.continue_unwritten(output) and killed._folder_to_resume().path == folder.path
    with folder.locked():
        assert not continues()
    output.write_text("")
    assert not continues(), "it was written after the run had ended"
    folder.write_status(status="done")
    os.utime(output, (0, 0))
    assert continues(), "killed before it had written them out"


def test_a_run_that_goes_on_after_its_end_is_not_its_old_model(tmp_path: Path) -> None:
    run, found = tmp_path / "run", tmp_path / "found" / "run-step_4"
    for folder, file in ((run / "model", "config.json"), (run / "checkpoints" / "step_4", "learner.json"), (found, "config.json")):
        folder.mkdir(parents=True)
        (folder / file).write_text("{}")
    (run / "recipe.yaml").write_text("{}")
    for status, model in (("done", run / "model"), ("running", found), ("stopped", found), ("failed", found)):
        (run / "status.json").write_text(json.dumps({"status": status}))
        assert find_model(run, "--model", found.parent) == model


def test_a_checkpoint_is_found_with_settings_that_an_older_version_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "initial_policy", lambda recipe: ({"key": warm_start_key(recipe)}, False))
    tree = small_recipe(tmp_path, policy__layers=2, warm_start__steps=5, run__seed=3, prompts__input_template="{}+1=")
    (tmp_path / "recipe.yaml").write_text(Recipe.parse(tree).to_yaml())
    old = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    old["reward"]["normalize"], old["learner"]["min_rate_share"], old["learner"]["gone"] = True, 0.1, 1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(old))
    assert finding._first_model(tmp_path) == {"key": warm_start_key(Recipe.parse(tree))}

    monkeypatch.setattr(finding, "first_supervised_policy", lambda recipe: recipe.model_dump(include={"policy": True, "run": {"seed"}}))
    stage = SupervisedRecipe.parse({"task": "dpo", "data": {"task": "sort"}, "policy": {"layers": 2}, "run": {"seed": 3}})
    stored = yaml.safe_load(stage.to_yaml())
    stored["learner"]["min_rate_share"] = 0.1
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(stored))
    assert finding._first_model(tmp_path) == stage.model_dump(include={"policy": True, "run": {"seed"}})


def test_a_checkpoint_s_parts_become_a_model_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of ZeRO 3 saved their part of each tensor."""
    import torch

    from rlhfless_ray.weights.tiny_model import scratch_policy

    monkeypatch.setattr(finding, "_first_model", lambda run: files)
    monkeypatch.setattr(finding, "MAX_FILE_BYTES", 30_000)
    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    whole = dict(stored_weights(files))
    for rank in range(2):
        shares = {name: padded_share(tensor.numel(), 2, rank) for name, tensor in whole.items()}
        parts = {TensorSlice(name, tuple(whole[name].shape), *own): whole[name].reshape(-1)[slice(*own)] for name, own in shares.items()}
        write_file(tmp_path / shard_name("model", rank, 2), save_slices(parts))
    finding._write_model(tmp_path, tmp_path, tmp_path / "written")
    written = read_folder(tmp_path / "written")
    assert INDEX in written and sum(name.endswith(".safetensors") for name in written) > 2
    found = dict(stored_weights(written))
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


# ---- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.engine
def test_a_resumed_generation_samples_the_same_tokens(tmp_path: Path, ray_cluster: None) -> None:
    """Half of the record is lost; then more responses to each prompt are wanted than before. Two engines, batches of another size."""
    from rlhfless_ray.runtime.generation import Generation, generate

    tree = small_recipe(
        tmp_path, prompts__rows=18, rollout__samples_per_prompt=3, rollout__max_actors=2, run__name="gen", functions__slot="cpu"
    )
    tree["rollout"] |= {"stop": ["7", "a3"], "top_k": 12}
    done = generate(GenerationRecipe.of(tree), out=tmp_path / "copy.jsonl")
    whole = rows_of(done)
    assert (tmp_path / "copy.jsonl").read_bytes() == done.read_bytes()
    assert [(row["prompt_index"], row["sample"]) for row in whole] == [(p, n) for p in range(18) for n in range(3)]
    for row in whole:
        assert row["reward"] == pytest.approx(-len(row["response"]) / 10)
        assert len(row["token_ids"]) == len(row["logprobs"]) and all(value <= 0 for value in row["logprobs"])
        ended = row["response"].endswith(("7", "a3"))
        assert ended == ("7" in row["response"] or "a3" in row["response"]) and (row["finish"] == "stop" or not ended)
    assert any(row["response"].endswith("7") for row in whole)
    lines = (done.parent / RECORD).read_bytes().splitlines(keepends=True)
    (done.parent / RECORD).write_bytes(b"".join(lines[: len(lines) // 2]) + lines[-1][:9])
    kept = sum(b'"response"' in line for line in lines[: len(lines) // 2])
    assert 0 < kept < len(whole)

    others = GenerationRecipe.of({**tree, "rollout": {**tree["rollout"], "stop": []}})
    with pytest.raises(UserError, match=r"another rollout.stop \(\['7', 'a3'\] before, \[\] now\)"), Generation(others, resume=True):
        pass
    tree["prompts"]["batch_prompts"], tree["rollout"]["samples_per_prompt"] = 5, 4
    with Generation(GenerationRecipe.of(tree), resume=True) as run:
        steps = list(run)
    again = rows_of(done)
    before = {(row["prompt_index"], row["sample"]): row for row in whole}
    shared = [row for row in again if (row["prompt_index"], row["sample"]) in before]
    assert len(again) == 72 and len(shared) == 54
    for row in shared:
        old = before[row["prompt_index"], row["sample"]]
        assert row["token_ids"] == old["token_ids"] and row["reward"] == old["reward"]
        assert row["logprobs"] == pytest.approx(old["logprobs"], abs=1e-5)
    made = (done.parent / RECORD).read_bytes().count(b'"response"')
    assert made == 72, "responses that were there were generated again"
    assert [step.number for step in steps] == [4, 5, 6, 7]  # the first three are in the metrics already
    status = json.loads((done.parent / "status.json").read_text())
    assert status["status"] == "done" and status["steps_done"] == 7
    assert {row.kind for row in read_ledger(done.parent / "ledger.csv")} >= {"rollout", "score"}
    assert (done.parent / "report.html").stat().st_size > 100_000


@pytest.mark.ray
@pytest.mark.engine
def test_a_run_and_its_checkpoint_are_evaluated_side_by_side(uninterrupted: Path, tmp_path: Path, ray_cluster: None) -> None:
    from rlhfless_ray import evaluate

    data = tmp_path / "data.jsonl"
    write_rows(data, ({"question": row["prompt"], "answer": row["answer"]} for row in task("chain").rows(6, 9, "heldout")))
    tree = small_recipe(tmp_path, policy__path=str(uninterrupted / "model"), run__name="eval", evaluate__samples_per_prompt=2)
    tree |= {"prompts": {"path": str(data)}, "functions": {"slot": "cpu"}}
    models = [uninterrupted / "checkpoints" / "step_2", uninterrupted]
    found = evaluate(GenerationRecipe.of(tree), models, [str(data), str(data)])
    assert [(s.model, s.data) for s in found.scores] == [(m, d) for m in ("step_2", "small") for d in (str(data), f"{data}-1")]
    first, _, run, _ = found.scores
    assert first.prompts == 6 and first.samples_per_prompt == 2 and set(first.pass_at) == {1, 2}
    assert first.difference == 0 and run.mean != first.mean and run.difference == pytest.approx(run.mean - first.mean)
    assert run.mean == pytest.approx(run.pass_at[1]) and run.mean <= run.pass_at[2] and found.costs["small"]["slot_s"] > 0
    assert "step_2" in str(found) and "<table>" in found._repr_html_()
    assert json.loads((tmp_path / "runs" / "eval" / "evaluation.json").read_text())["scores"][0]["model"] == "step_2"
    with pytest.raises(UserError, match="exists already"):
        evaluate(GenerationRecipe.of(tree), models)


def test_the_newest_checkpoint_of_a_run_is_its_model(uninterrupted: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    found = find_model(uninterrupted / "checkpoints" / "step_4", "--model", tmp_path)
    assert find_model(uninterrupted, "--model", tmp_path) == uninterrupted / "model"
    mine, final = (load_file(folder / "model.safetensors") for folder in (found, uninterrupted / "model"))
    assert mine.keys() == final.keys() and all(np.array_equal(mine[name], final[name]) for name in mine)
    assert {file.name for file in found.iterdir()} == {file.name for file in (uninterrupted / "model").iterdir()}


def test_an_average_of_the_weights_is_the_model_of_an_unfinished_run_wherever_it_is(uninterrupted: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    run = tmp_path / "average"
    shutil.copytree(uninterrupted, run, ignore=shutil.ignore_patterns("model"))
    checkpoint = run / "checkpoints" / "step_4"
    weights = load_file(checkpoint / "model.safetensors")
    for rank in range(2):
        doubled = {name: 2 * weights[name] for name in sorted(weights)[rank::2]}
        save_file(doubled, checkpoint / shard_name(AVERAGE, rank, 2), {"format": "pt"})
    found = load_file(find_model(run, "--model", tmp_path / "found") / "model.safetensors")
    assert found.keys() == weights.keys() and all(np.array_equal(found[name], 2 * weights[name]) for name in found)
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").rename(tmp_path / "elsewhere" / "_actor")
    (tmp_path / "elsewhere" / "_actor" / "step_4").rename(tmp_path / "elsewhere" / "_actor" / "global_step4")
    tree = yaml.safe_load((run / "recipe.yaml").read_text())
    (run / "recipe.yaml").write_text(yaml.safe_dump({**tree, "checkpoint": {**tree["checkpoint"], "path": str(tmp_path / "elsewhere")}}))
    assert find_model(run, "--model", tmp_path / "found").name == "average-global_step4"
