"""Every mistake of a user gets one clear sentence and exit code 2, before Ray starts."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import ROOT, command, command_here, environment, small_recipe, write_recipe


def sentence(done: subprocess.CompletedProcess) -> str:
    """The one line that was said; no stack trace."""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "run failed:"))]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_help_takes_less_than_half_a_second_of_a_processor():
    def taken_s() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "rlhfless_ray", "--help"], check=True, capture_output=True, cwd=ROOT, env=environment())
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert any(taken_s() < 0.5 for _ in range(8)), "at least once: work beside it on the same core makes it slower"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "merged"),
    [
        ("rlhfless_ray explain --flags", False),  # more than a pipe holds
        ("rlhfless_ray.cli.train_ppo_ray --help", False),
        ("rlhfless_ray explain --json -- python -m openrlhf.cli.train_ppo_ray --no_such_flag", True),
    ],
)
def test_output_that_nobody_reads_ends_a_command_without_a_message(arguments, merged):
    read, write = os.pipe()
    os.close(read)  # before the command writes, whichever of the two is faster
    try:
        command = [sys.executable, "-m", *arguments.split()]
        stderr = write if merged else subprocess.PIPE
        done = subprocess.run(command, stdout=write, stderr=stderr, text=True, cwd=ROOT, env=environment())
    finally:
        os.close(write)
    assert (done.returncode, done.stderr or "") == (141, "")


def test_an_unknown_key_on_the_command_line(tmp_path):
    done = command("train", write_recipe(tmp_path), "rollout.temprature=1")
    assert done.returncode == 2
    assert "unknown key `rollout.temprature`; did you mean `rollout.temperature`?" in sentence(done)


def test_an_adapter_that_engines_cannot_hold(tmp_path):
    done = command_here("train", write_recipe(tmp_path), "lora.rank=4", "lora.publish=adapter", "lora.target_modules=[embed_tokens]")
    assert done.returncode == 2 and "lora.publish: engines adapt linear layers only" in sentence(done)
    assert not (tmp_path / "runs").exists()


@pytest.mark.ray
def test_a_quantisation_that_the_device_cannot_do(private_ray, tmp_path):
    done = command_here("train", write_recipe(tmp_path), "rollout.quantization=fp8")
    assert done.returncode == 2 and "rollout.quantization: vLLM on CPU cannot quantise weights to fp8" in sentence(done)
    assert not (tmp_path / "runs").exists()


def test_a_workflow_is_no_recipe(tmp_path):
    done = command_here("train", "recipes/workflow.yaml", f"run.root={tmp_path}")
    assert done.returncode == 2 and "`stages` makes it a workflow; run it with `rlhfless workflow`" in sentence(done)


def test_a_recipe_that_is_not_there(tmp_path):
    done = command_here("train", str(tmp_path / "nothing.yaml"))
    assert done.returncode == 2 and "no such file" in sentence(done)


def test_resuming_what_never_ran(tmp_path):
    done = command_here("train", write_recipe(tmp_path), "--resume")
    assert done.returncode == 2 and "no run with a checkpoint" in sentence(done)
    assert not (tmp_path / "runs").exists()


def test_a_report_of_a_folder_that_is_no_run(tmp_path):
    done = command_here("report", str(tmp_path))
    assert done.returncode == 2 and "not a run folder" in sentence(done)
    assert list(tmp_path.iterdir()) == []


def policy_folder(tmp_path, **config) -> str:
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(json.dumps(config).encode())
    return str(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts__task": "", "prompts__path": "rows.jsonl"}, "name a local Hugging Face model folder"),
        ({"prompts__path": "rows.jsonl"}, "set exactly one of `task`"),
        ({"rollout__samples_per_prompt": 1}, "must be at least 2"),
        ({"rollout__temperature": -1}, "`rollout.temperature`: input should be greater than 0"),
        ({"learner__zero_stage": 4}, "`learner.zero_stage`"),
        ({"prompts__task": "chess"}, "no built-in task is called `chess`"),
        ({"prompts__rows": 4}, "too few"),
        ({"reward__function": "nowhere.py:f"}, "no such file `nowhere.py`"),
        ({"prompts__max_prompt_tokens": 3}, "max_prompt_tokens"),
        ({"rollout__max_tokens": 1000}, "512"),
        ({"policy__path": "/nowhere"}, "is not a folder"),
        ({"run__root": "/proc/nowhere"}, "run.root /proc/nowhere: cannot make a run folder there"),
        ({"run__root": __file__}, "cannot make a run folder there: Not a directory"),
    ],
)
def test_mistakes_in_a_recipe(unjoined, tmp_path, change, said):
    with pytest.raises(UserError) as caught:
        Runtime(Recipe.parse(small_recipe(tmp_path, **change)))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (3, "rollout.tensor_parallel: 3 slots cannot share the heads and layers of a policy made from scratch evenly; set it to 1, 2"),
        (2, "the 2 slots of an engine must be on one node, but the largest node has 1 (CPU cores); lower it"),
    ],
)
def test_a_width_that_cannot_be_is_refused_before_ray_starts(unjoined, tmp_path, width, said):
    tree = small_recipe(tmp_path, rollout__tensor_parallel=width, cluster__cpus=4 if width == 3 else 1)
    with pytest.raises(UserError) as error:
        Runtime(Recipe.parse(tree))
    assert said in str(error.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [("config.json", "has no config.json"), ("tokenizer.json", "has no tokenizer"), ("model.safetensors", "has no *.safetensors")],
)
def test_model_folders_that_are_none(tmp_path, missing, said):
    folder = policy_folder(tmp_path)
    (tmp_path / "policy" / missing).unlink()
    with pytest.raises(UserError, match=said.replace("*", r"\*")):
        Runtime(Recipe.parse(small_recipe(tmp_path, policy__path=folder)))


def test_model_folders_that_cannot_be_loaded(tmp_path):
    from rlhfless_ray.weights.tiny_model import scratch_policy

    files = scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain"))
    for number, (name, content, said) in enumerate([
        ("config.json", b"[]", "names no model_type"), ("config.json", b"{}", "names no model_type"),
        ("config.json", b'{"model_type": "alien"}', "no models of the type `alien`, so it cannot be trained"),
        ("config.json", b"{", "is not valid JSON"), ("tokenizer.json", b"{", "its tokenizer cannot be loaded"),
        ("tokenizer.json", None, "encodes the prompt as no tokens"),
        ("generation_config.json", b"[]", "generation_config.json is no JSON object with numbers as `eos_token_id`"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "generation_config.json is no JSON object with numbers"),
        ("config.json", b'{"model_type": "qwen2", "architectures": 5}', "`architectures` must be a list of names, not 5"),
        ("model.safetensors", b"version https://git-lfs", "not a complete safetensors file"),
        ("model.safetensors", files["model.safetensors"][:-1], "not a complete safetensors file"),
    ]):  # fmt: skip
        changed = {**{k: v for k, v in files.items() if k != name}, **({} if content is None else {name: content})}
        folder = write_folder(tmp_path / str(number), changed)
        with pytest.raises(UserError, match=said) as caught:
            Runtime(Recipe.parse(small_recipe(tmp_path, policy__path=str(folder))))
        assert str(caught.value).startswith(("policy.path", "prompts.task")) and "\n" not in str(caught.value)


UNRELIABLE = """
import pathlib

def often(prompt, response, row):
    if (file := pathlib.Path(r"{metrics}")).exists() and file.read_text().count("\\n") > 0:  # a step is over
        return 1 / (len(response) - len(response))
    return float("nan") if len(response) % 2 else -len(response) / 10
"""


@pytest.mark.engine
@pytest.mark.ray
def test_rewards_that_fail_seldom_are_left_out_and_shown_and_too_often_end_the_run(private_ray, tmp_path):
    recipe = write_recipe(tmp_path, reward__function=f"{tmp_path / 'some.py'}:often", reward__max_failed_share=0.9)
    run = tmp_path / "runs" / "small"
    (tmp_path / "some.py").write_text(UNRELIABLE.format(metrics=run / "metrics.jsonl"))
    done = command_here("train", recipe, "evaluate.prompts=0")
    assert done.returncode == 1
    row, *_ = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [json.loads(line) for line in (run / "samples" / "step_1.jsonl").read_text().splitlines()]
    failed = [s for s in kept if s["error"]]
    assert row["step"] == 1 and row["reward/failed"] == len(failed) > 0
    assert all(s["reward"] is None and s["advantage"] is None and len(s["response"]) % 2 for s in failed)
    assert row["tokens/trained"] == sum(s["tokens"] for s in kept if not s["error"])
    assert "could not be scored and are left out" in done.stdout
    assert yaml.safe_load((run / "recipe.yaml").read_text())["reward"]["max_failed_share"] == 0.9
    said = sentence(done)
    assert "of 32 samples could not be scored" in said and "ZeroDivisionError" in said and "line 6" in said
    status = json.loads((run / "status.json").read_text())
    assert status["status"] == "failed" and "ZeroDivisionError" in status["reason"]
