"""A script written for TRL runs after its import has changed, and its policy can be used at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe import Recipe
from tests.conftest import environment, small_recipe

SCRIPT = """
from datasets import Dataset
from rewards import brief
from transformers import TrainerCallback

from rlhfless_ray.trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([{"prompt": row["prompt"], "answer": str(row)} for row in ROWS])

def starts_well(completions, answer, **kwargs):
    return [float(text[:1] in a) if text else None for text, a in zip(completions, answer)]

class Count(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, "of", state.max_steps, flush=True)

trainer = GRPOTrainer(
    model="policy",
    reward_funcs=[brief, starts_well],
    args=GRPOConfig(
        output_dir="out/mine", max_steps=2, per_device_train_batch_size=16, num_generations=4, max_completion_length=16,
        reward_weights=[0.1, 1.0], learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no",
    ),
    train_dataset=dataset,
    callbacks=[Count],
)
trainer.train()
trainer.save_model("saved")
answers = trainer.run.policy.generate([ROWS[0]["prompt"], ROWS[1]["prompt"]], max_tokens=4, temperature=0)
print("answers", len(answers))
print("rewards", sorted(key for key in trainer.run.metrics[-1] if "brief" in key or "starts_well" in key))
"""


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.learner
def test_a_script_of_trl_trains_saves_and_generates(tmp_path: Path) -> None:
    from rlhfless_ray.weights.tiny_model import scratch_policy

    (tmp_path / "policy").mkdir()
    for name, content in scratch_policy(Recipe.parse(small_recipe(tmp_path)), task("chain")).items():
        (tmp_path / "policy" / name).write_bytes(content)
    (tmp_path / "rewards.py").write_text("def brief(completions, **kwargs):\n    return [-len(text) / 10 for text in completions]\n")
    rows = task("chain").rows(16, 0, "train")
    (tmp_path / "script.py").write_text(f"ROWS = {json.dumps(rows)}\n{SCRIPT}")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 1 of 2" in done.stdout and "step 2 of 2" in done.stdout and "answers 2" in done.stdout
    assert "rewards/brief" in done.stdout and "rewards/starts_well" in done.stdout
    assert (tmp_path / "saved" / "config.json").is_file() and (tmp_path / "out" / "mine" / "report.html").is_file()
    assert "samples_per_prompt: 4" in done.stderr  # the recipe that it makes
