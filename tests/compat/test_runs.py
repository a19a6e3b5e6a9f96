"""Commands of two dialects, run for two or three steps on a tiny model with a reward file: what OpenRLHF's users find afterwards."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from rlhfless_ray.functions.ledger import read_ledger
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.model_folder import read_folder, write_folder
from rlhfless_ray.weights.tiny_model import scratch_policy
from tests.conftest import command_here, samples
from tests.run_files import rows

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

REWARD = """
def reward_func(queries, prompts, labels, **kwargs):
    import torch

    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts)) and all(label.isdigit() for label in labels)
    rewards = torch.tensor([float(len(set(query)) % 5) / 5 for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"letters": rewards}}
"""
OLD = """--pretrain model --save_path out --remote_rm_url reward.py --prompt_data data.jsonl --input_key prompt --label_key label
--advantage_estimator reinforce --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 4 --num_episodes 1
--prompt_max_len 64 --generate_max_len 16 --vllm_num_engines 1 --init_kl_coef 0 --zero_stage 2 --bf16
--actor_num_nodes 1 --actor_num_gpus_per_node 1 --micro_rollout_batch_size 2 --micro_train_batch_size 2 --elastic.cluster.cpus 2"""
NEW = """--actor.model_name_or_path model --ckpt.output_dir out --reward.remote_url reward.py --data.prompt_dataset data.jsonl,more.csv
--data.input_key prompt --data.label_key label --algo.advantage.estimator group_norm --rollout.batch_size 4 --train.batch_size 8
--rollout.n_samples_per_prompt 2 --data.max_len 64 --vllm.num_engines 1 --algo.kl.init_coef 0.1 --ds.zero_stage 2 --ds.param_dtype bf16
--actor.num_nodes 1 --actor.num_gpus_per_node 1 --rollout.micro_batch_size 2 --train.micro_batch_size 2
--eval.dataset eval.jsonl --eval.steps 2 --eval.n_samples_per_prompt 2 --ckpt.path ckpt --ckpt.save_steps 1 --ckpt.max_num 1
--ckpt.save_hf --ckpt.load_enable --logger.tensorboard_dir tb --logger.wandb.run_name mine --elastic.cluster.cpus 2"""
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
import torch

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        right = torch.tensor(float(states["label"] in states["action_text"]))
        return {"rewards": right, "scores": right, "environment_feedback": f"{states['label']};", "done": self.turn == 3,
                "sampling_params": states["sampling_params"], "extra_logs": {"turn": torch.tensor(self.turn)}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
TRAIN = {  # OpenRLHF's names, of a run without reference and critic
    "policy_loss",
    "actor_lr",
    "actor_grad_norm",
    "ppo_clip_ratio",
    "ppo_kl",
    "reward",
    "return",
    "kl",
    "logprobs_diff",
    "response_length",
    "total_length",
    "truncated",
    "response_clip_ratio",
    "score",
    "group_reward_std",
    "entropy_loss",
    "vllm_kl",
    "is_filter_ratio",
    "letters",
    "rollout/reward_mean",
    "rollout/reward_std",
    "rollout/response_length_mean",
    "rollout/truncated_rate",
    "rollout/num_samples",
    "timing/make_experience",
    "timing/ppo_train",
    "timing/broadcast",
    "timing/generation",
    "timing/step_total",
}
EVAL = {
    "a_pass1",
    "a_pass2",
    "b_pass1",
    "b_response_length_mean",
    "b_truncated_rate",
    "response_length_mean",
    "truncated_rate",
    "num_samples",
}
TURNS = """--actor.model_name_or_path model --ckpt.output_dir out --train.agent_func_path agent.py --data.prompt_dataset data.jsonl
--data.input_key prompt --data.label_key label --algo.advantage.estimator reinforce_baseline --rollout.batch_size 4
--train.batch_size 8 --rollout.n_samples_per_prompt 2 --data.max_len 64 --vllm.num_engines 1 --algo.kl.init_coef 0.01
--ds.zero_stage 2 --ds.param_dtype bf16 --actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_nodes 1 --ref.num_gpus_per_node 1
--rollout.micro_batch_size 2 --train.micro_batch_size 2 --eval.dataset eval.jsonl --eval.steps 2 --eval.n_samples_per_prompt 1
--logger.wandb.run_name turns --elastic.cluster.cpus 2 --elastic.agent.turn_tokens 6"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"hidden_size": 32, "layers": 1}})
    write_folder(tmp_path / "model", scratch_policy(recipe, task("chain")))
    asked = [{"prompt": row["prompt"], "label": row["answer"]} for row in task("chain").rows(14, 0, "train")]
    jsonl = lambda part: "".join(json.dumps(row) + "\n" for row in part)  # noqa: E731
    (tmp_path / "data.jsonl").write_text(jsonl(asked[:6]))
    (tmp_path / "more.csv").write_text("prompt,label\n" + "".join(f"{row['prompt']},{row['label']}\n" for row in asked[6:10]))
    (tmp_path / "eval.jsonl").write_text(jsonl([{**row, "datasource": "ab"[i % 2]} for i, row in enumerate(asked[10:])]))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def run(folder: Path, line: str) -> list[tuple[int, dict]]:
    """The steps that the log tells."""
    done = command_here(*line.split(), module="rlhfless_ray.cli.train_ppo_ray", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^Global step (\d+): (\{.*\})$", done.stdout, re.MULTILINE)
    return [(int(step), ast.literal_eval(values)) for step, values in found]


def test_a_dotted_command_saves_evaluates_and_goes_on(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert [step for step, _ in run(folder, NEW)] == [1, 2, 3]  # ten rows
    actor = folder / "ckpt" / "_actor"
    assert (actor / "latest").read_text() == "global_step3" and len(list(actor.glob("global_step*"))) == 1
    assert len(list(actor.glob("best_global_step*"))) == 1
    assert json.loads((actor / "global_step3" / "metric.json").read_text())["metric_key"] == "eval_a_pass1"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (folder / "ckpt" / "global_step2_hf").iterdir()}
    evaluated = rows(folder / "runs" / "mine")[2]
    assert {"eval/a/pass1", "eval/b/pass2"} <= evaluated.keys() and evaluated["eval/b/pass1"] <= evaluated["eval/b/pass2"]
    logged = EventAccumulator(str(folder / "tb" / "mine"))
    logged.Reload()
    wanted = {f"train/{name}" for name in TRAIN} | {f"eval/eval_{name}" for name in EVAL}
    assert not wanted - set(logged.Tags()["scalars"])
    (first, *_) = logged.Tensors("train/generated_samples/text_summary")
    assert first.step == 1 and first.tensor_proto.string_val[0].startswith(b"Sample:\n")
    assert [step for step, _ in run(folder, NEW + " --train.num_episodes 2 --actor.num_gpus_per_node 2")] == [4, 5, 6]
    resumed = yaml.safe_load((folder / "runs" / "mine" / "recipe.yaml").read_text())
    assert resumed["learner"]["ranks"] == 2, "on more GPUs, from the same checkpoint"
    assert [path.name for path in (folder / "runs").iterdir()] == ["mine"]
    asked = [row for row in read_ledger(folder / "runs" / "mine" / "ledger.csv") if row.kind == "reference" and row.activity == "work"]
    assert {row.step for row in asked} == set(range(1, 7)) and min(row.money for row in asked) > 0
    start = read_folder(folder / "runs" / "mine" / "reference")["model.safetensors"]
    assert start == read_folder(folder / "model")["model.safetensors"], "the resumed run's reference is the first one's"


def test_an_agent_plays_several_turns_and_only_the_policys_are_learned(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    (folder / "agent.py").write_text(AGENT)
    steps = run(folder, TURNS)
    assert [step for step, _ in steps] == [1, 2]
    assert all({"policy_loss", "kl", "score", "turn"} <= values.keys() and values["turn"] == 3 for _, values in steps)
    done = folder / "runs" / "turns"
    told = rows(done, 1)
    for row in told:
        written = samples(done, row["step"])
        assert {tuple(who for who, _ in sample["turns"]) for sample in written} == {("policy", "agent") * 2 + ("policy",)}
        assert all(sample["turns"][1][1] == f"{sample['answer']};" and sample["error"] is None for sample in written)
        assert row["tokens/trained"] == row["tokens/generated"] == sum(sample["tokens"] for sample in written)
        assert row["agent/feedback_tokens"] == 2 * 2 * len(written) and row["agent/turns_mean"] == 3
        assert row["learn/mismatch_mean"] < 0.05, "the learner sees the agent's words where the sampler saw them"
        assert row["cost/agent_core_s"] > 0
    assert [row["step"] for row in told] == [1, 2] and told[-1]["eval/samples"] == 4 and "eval/a/pass1" in told[-1]
    assert read_folder(folder / "out")["model.safetensors"] != read_folder(folder / "model")["model.safetensors"]
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.hidden_size == 32


def test_a_bad_agent_file_ends_the_command_before_anything_starts(folder: Path) -> None:
    (folder / "agent.py").write_text(AGENT.replace('"done"', '"over"'))
    done = command_here(*TURNS.split(), module="rlhfless_ray.cli.train_ppo_ray", cwd=folder)
    assert done.returncode == 2 and "without `done`" in done.stderr, done.stderr
    assert "usage: train_ppo_ray.py [-h]" in done.stderr, "that of the dialect, as for a mistake that argparse finds"
    assert "\ntrain_ppo_ray.py: error: --train.agent_func_path: agent.path agent.py: " in done.stderr
    assert not (folder / "runs").exists()


def test_adapters_of_policy_and_critic_on_filtered_groups(folder: Path) -> None:
    """The episode ends with its prompts, also where filtering uses them up early; what is saved is the adapter, merged in the run
    folder."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    line = OLD.replace("--advantage_estimator reinforce", "--advantage_estimator gae --save_value_network --use_tensorboard tb")
    line += """ --lora_rank 4 --lora_alpha 8 --target_modules q_proj v_proj score --lora_dropout 0.05 --critic_num_nodes 1
    --critic_num_gpus_per_node 1 --dynamic_filtering --dynamic_filtering_reward_range 0.05 0.7 --elastic.run.name adapted"""
    steps = run(folder, line)
    done = folder / "runs" / "adapted"
    told = [row for row in rows(done) if "filter/prompts" in row]
    assert sum(row["filter/prompts"] for row in told) == 6 == sum(row["filter/dropped_prompts"] + row["tokens/samples"] / 2 for row in told)
    assert [values["dynamic_filtering_pass_rate"] for _, values in steps] == [row["filter/pass_percent"] for row in told]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16), folder / "out")
    assert adapted.peft_config["default"].target_modules >= {"q_proj", "v_proj"}
    merged, ids = AutoModelForCausalLM.from_pretrained(done / "model"), torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits.float(), merged(ids).logits.float(), rtol=0.02, atol=0.02)
    for critic in (done / "critic", folder / "out_critic"):
        AutoModelForSequenceClassification.from_pretrained(critic)
    names = {"policy_loss", "reward", "letters", "actor_lr", "critic_loss", "values", "critic_lr", "critic_grad_norm"}
    assert all(names <= values.keys() for _, values in steps)
