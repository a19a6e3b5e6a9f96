"""`rlhfless plan MODEL`: the recipe that it prints passes a run's own checks for those devices, on a machine that has none of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from placement.catalog import catalog
from rlhfless_ray.cli.device_recipe import device_of, device_room
from rlhfless_ray.cli.main import app
from rlhfless_ray.cli.memory_table import load_run
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.preflight.memory_check import check
from rlhfless_ray.recipe import Recipe
from tests.placement.test_memory import QWEN_05B
from tests.test_memory_check import folder


def run(*arguments: object) -> None:
    app([str(a) for a in ("plan", *arguments)], standalone_mode=False)


@pytest.mark.parametrize(
    ("model", "device", "gpus"),
    [
        ("qwen3-0.6b", "L40S", 1),
        ("Qwen/Qwen2.5-7B-Instruct", "H100", 8),
        ("qwen3-8b", "H200", 4),
        ("qwen3-32b", "H100", 16),
        ("llama-2-70b", "H200", 16),
    ],
)
def test_the_printed_recipe_passes_preflight_for_its_devices(model: str, device: str, gpus: int, tmp_path: Path, capsys) -> None:
    run(model, "--gpus", gpus, "--device", device.lower())
    text = capsys.readouterr().out
    assert f"on {gpus} × {device}" in text and "# step: " in text and "# memory: an engine" in text
    assert "$ a step" in text or "no list price" in text
    pasted = tmp_path / "recipe.yaml"
    pasted.write_text(text)
    recipe = Recipe.load(pasted)
    learner = recipe.learner
    assert recipe.policy.path == catalog.described(model).path and recipe.policy.dtype == "bfloat16"
    assert recipe.rollout.max_actors * recipe.rollout.least_width == learner.ranks == gpus and learner.zero_stage >= 1
    room = device_room(device_of(device), gpus)
    job, _, _ = load_run(pasted, [], room)
    assert check(job, lambda: room) == ""
    run(pasted, "--memory", "--gpus", gpus, "--device", device)
    shown = capsys.readouterr().out
    assert "every need fits such a GPU" in shown and f"learner.micro_batch_tokens={learner.micro_batch_tokens}" in shown


def test_settings_of_the_command_stay_and_json_has_the_same_recipe(tmp_path: Path, capsys) -> None:
    """A folder with only a configuration is enough."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN_05B))
    given = ("learner.zero_stage=2", "rollout.max_tokens=512", "prompts.batch_prompts=16")
    run(model, *given, "--gpus", 2, "--device", "L40S", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"]["learner"]["zero_stage"] == 2 and told["recipe"]["policy"]["path"] == str(model)
    assert told["recipe"]["rollout"]["max_tokens"] == 512 and told["recipe"]["prompts"]["batch_prompts"] == 16
    rent, spot = told["predicted"]
    assert rent["cost"] == pytest.approx(rent["time_s"] * 2 * rent["price_per_hour"] / 3600) and spot["cost"] < rent["cost"]
    run(model, *given, "--gpus", 2, "--device", "L40S")
    assert yaml.safe_load(capsys.readouterr().out) == told["recipe"]
    assert (model / "config.json").is_file() and len(list(model.iterdir())) == 1


def test_a_fleet_and_memory_end_with_keys(tmp_path: Path, capsys) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps([[420, 310, 288, 505], [96, 900, 130, 122]]))
    run(lengths, "--model", "qwen3-0.6b", "--device", "H100", "--fleet", 1)
    text = capsys.readouterr().out
    tree = yaml.safe_load(text[text.index("policy:") :])
    assert (tree["prompts"]["batch_prompts"], tree["rollout"]["samples_per_prompt"], tree["rollout"]["max_tokens"]) == (2, 4, 900)
    Recipe.parse(tree)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"policy: {{path: {folder(tmp_path / 'm', QWEN_05B)}}}\nprompts: {{path: p}}\nreward: {{function: math}}")
    run(recipe, "--memory", "--gpus", 8, "--device", "H100")
    text = capsys.readouterr().out
    assert "keys: learner.micro_batch_tokens=8192" in text and "such a GPU of 80.0 GB" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["qwen3-8b"], r"plan qwen3-8b: it names a model, so give its devices with --gpus and --device, one of L40S, H100"),
        (["qwen3-8x", "--gpus", 8, "--device", "h100"], r"unknown model `qwen3-8x`; did you mean `qwen3-8b`"),
        (["nobody/nothing", "--gpus", 8, "--device", "h100"], r"model nobody/nothing: not a folder here and not in .*hub"),
        (["qwen3-8b", "--gpus", 8, "--device", "h1000"], r"unknown device `h1000`; did you mean `H100`"),
        (["qwen3-8b", "--gpus", 12, "--device", "h100"], r"--gpus 12: must be 1 to 1024, and more than 8 must be whole nodes of 8"),
        (["llama-2-70b", "--gpus", 8, "--device", "h100"], r"training llama-2-70b .* needs .* x H100; the cluster has 8"),
        (["qwen3-8b", "--gpus", 8, "--device", "h100", "lora.rank=16"], r"lora\.rank: a plan from a model predicts"),
        (["qwen3-8b", "--gpus", 8, "--device", "h100", "--workload", "gsm"], r"unknown workload `gsm`; did you mean `gsm8k`"),
        (["qwen3-8b", "--gpus", 8, "--device", "h100", "rolout.top_k=1"], r"unknown key `rolout`"),
        (["qwen3-8b", "--gpus", 8, "--device", "h100", "--actors", 2], r"leave out --actors: a plan from a model"),
        (["r.yaml", "--memory", "--gpus", 8], r"--memory: give --gpus and --device together"),
        (["r.yaml", "--memory", "--gpus", 8, "--device", "CPU-core"], r"--device CPU-core: name a GPU"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(*arguments)
