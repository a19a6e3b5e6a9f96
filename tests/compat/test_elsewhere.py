"""Commands for clusters that are not here, dry runs of scripts, and commands of other frameworks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlhfless_ray.compat.openrlhf.explain_report import with_advice
from rlhfless_ray.compat.other_frameworks import OF_BOTH, OF_TRL, OF_TRL_STAGES, OF_VERL, other_framework
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.mistakes import known_keys
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from tests.conftest import command_here

FLAGS = "--pretrain Qwen/Qwen2.5-7B --prompt_data d.jsonl --remote_rm_url r.py --vllm_num_engines 16 --vllm_tensor_parallel_size 2"
FLAGS += " --actor_num_gpus_per_node 32 --ref_num_gpus_per_node 32 --zero_stage 3 --bf16"
FLAGS += " --advantage_estimator group_norm --n_samples_per_prompt 8"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "r.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n")
    (tmp_path / "d.jsonl").write_text('{"input": "1+1="}\n')
    path = tmp_path / "x.sh"
    path.write_text(f"cd {tmp_path}\npython3 -m openrlhf.cli.train_ppo_ray {FLAGS}\n")
    return path


def test_explain_reads_a_script_for_devices_that_are_not_here(script: Path) -> None:
    done = command_here("explain", "--gpus", "16", "--device=h100", "--json", "--", "bash", str(script))
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["runs"], done.stdout + done.stderr
    assert told["recipe"]["learner"]["ranks"] == 16 and told["recipe"]["rollout"]["tensor_parallel"] == 2
    there = "\n".join(told["there"])
    assert "16 × H100" in there and "a learner rank about" in there and "step: " in there and "$ a step" in there
    small = command_here("explain", "--gpus", "1", "--device", "L40S", "--", "bash", str(script))
    assert small.returncode == 2 and "does not run: " in small.stdout and "48.0 GB" in small.stdout
    for options, sentence in (
        (("--gpus", "8"), "give --gpus and --device together"),
        (("--gpus", "x", "--device", "h100"), "--gpus x: expected a number"),
        (("--gpus", "8", "--device", "h1000"), "unknown device `h1000`"),
    ):
        done = command_here("explain", *options, "--", "bash", str(script))
        assert done.returncode == 2 and sentence in done.stderr


def test_a_dry_run_of_a_script_prints_what_would_run(script: Path) -> None:
    done = command_here("run", "--dry-run", "--", "bash", str(script))
    assert done.returncode == 0, done.stderr
    assert f"{script} line 2: " in done.stdout and f"-m rlhfless_ray.cli.train_ppo_ray {FLAGS}" in done.stdout


def test_every_refused_flag_says_what_to_do(script: Path) -> None:
    said = command_here("explain", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *FLAGS.split(), "--use_ms").stdout
    line = next(line for line in said.splitlines() if line.startswith("refused"))
    assert "--use_ms" in line and "leave it out to run the rest here" in line
    assert with_advice("the final model is always written; leave it out").endswith("written; leave it out")


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d.parquet data.train_batch_size=256 "
            "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6 +trainer.x=1",
            {"learner.learning_rate": 1e-6, "prompts.batch_prompts": 256, "algorithm.advantage.estimator": "group_norm"},
        ),
        (
            "trl grpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name d --num_generations 8 --beta=0.01 --use_vllm",
            {"policy.path": "Qwen/Qwen3-0.6B", "rollout.samples_per_prompt": 8, "algorithm.kl.coefficient": 0.01},
        ),
        ("accelerate launch -m verl.trainer.fsdp_sft_trainer x.y=1", {}),
        ("trl dpo --model_name_or_path m --dataset_name d", {"task": "dpo", "data.path": "d"}),
    ],
)
def test_a_command_of_another_framework_is_pointed_to_its_page(command: str, settings: dict) -> None:
    found = other_framework(command.split())
    assert found is not None and settings.items() <= found.settings.items()
    done = command_here("explain", "--", *command.split())
    assert done.returncode == 2 and "docs/trl-verl.md" in done.stderr and "no launcher of OpenRLHF" not in done.stderr
    if settings:
        tree = yaml.safe_load(done.stderr.partition("\n\n")[2].partition("\nnot mapped")[0])
        section, _, key = next(iter(settings)).rpartition(".")
        assert (tree[section][key] if section else tree[key]) == next(iter(settings.values()))


def test_a_script_of_another_framework_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "verl.sh"
    script.write_text(f"touch {tmp_path}/ran\npython3 -m verl.trainer.main_ppo data.train_batch_size=8\n")
    for command in (("explain",), ("run", "--dry-run")):
        done = command_here(*command, "--", "bash", str(script))
        assert done.returncode == 2 and "a command of verl" in done.stderr and not (tmp_path / "ran").exists()


def test_every_mapped_key_exists() -> None:
    keys = {*known_keys(Recipe), *known_keys(SupervisedRecipe)}
    for table in (OF_TRL, OF_TRL_STAGES, OF_BOTH, OF_VERL):
        assert {*table.values()} <= keys
