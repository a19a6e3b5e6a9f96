"""What OpenRLHF and its libraries refuse, the resources that a line asks for, and secrets."""

import json
from importlib.metadata import version

import pytest
import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf import resources
from rlhfless_ray.compat.openrlhf.explain_report import as_data, explanation, summary
from rlhfless_ray.compat.openrlhf.resources import fit, slots_of
from rlhfless_ray.compat.openrlhf.translate import translate
from tests.compat.lines import BASE, DOTTED, GAE, of


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--n_samples_per_prompt 1", "--n_samples_per_prompt: rloo compares responses"),
        ("--dynamic_filtering --dynamic_filtering_reward_range 1 0", "--dynamic_filtering_reward_range: the first value"),
        ("--eval_dataset /e --remote_rm_url= --reward_pretrain /rm", "--eval_dataset: evaluation needs --remote_rm_url"),
        ("--partial_rollout", "--partial_rollout: needs --async_train"),
        ("--vllm_generate_batch_size 4096", "--vllm_generate_batch_size: more than --rollout_batch_size needs --async_train"),
        ("--colocate_all_models --vllm_num_engines 3", "--colocate_all_models: the actor's GPUs (8)"),
        ("--colocate_actor_ref --ref_num_gpus_per_node 4", "--ref_num_gpus_per_node must be equal (8 and 4)"),
        ("--async_train --vllm_enable_sleep --colocate_all_models", "--vllm_enable_sleep: not with --async_train"),
        ("--dual_clip 0.5", "--dual_clip: must be above 1"),
        ("--input_template {}_{}", "--input_template: the template must hold one {}"),
        ("--input_template {x}{}", "--input_template: the template must hold one {}"),
        ("--rollout_batch_size 1 --micro_rollout_batch_size 4", "fewer than the actor's 8 processes"),
        ("--packing_samples --vllm_num_engines 0", "--vllm_num_engines: packed samples"),
        ("--overlong_buffer_len 5000", "--overlong_buffer_len: must not exceed"),
        ("--prompt_data_probs 0.5,x", "--prompt_data_probs: expected numbers"),
        ("--prompt_data_probs 0.5,0.5", "--prompt_data_probs: 2 probabilities for 1 data sets"),
        ("--prompt_data_probs 0.5", "--prompt_data_probs: must be positive and add up to 1 (got 0.5)"),
        ("--ref_num_nodes 0", "--ref_num_nodes: must be at least 1"),
        ("--advantage_estimator gae --critic_num_gpus_per_node 0", "--critic_num_gpus_per_node: must be at least 1"),
        ("--max_len 100 --max_new_tokens 100", "--max_len: no token is left"),
        ("--remote_rm_url=", "there is no reward"),
        ("--pretrain=", "--pretrain: name the model"),
        ("--eval_steps 0", "--eval_steps: must be at least 1, or -1 for never"),
        ("--ring_attn_size 0", "--ring_attn_size: must be at least 1"),
        ("--vllm_num_engines=-2", "--vllm_num_engines: must not be negative"),
        ("--generate_max_len=-4", "--generate_max_len: must be at least 1"),
        ("--micro_train_batch_size 0", "--micro_train_batch_size: must be at least 1"),
        ("--attn_implementation nonsense", "--attn_implementation: `nonsense` is not known; choose from eager, sdpa"),
        ("--grad_accum_dtype fp8", "--grad_accum_dtype: `fp8` is not known"),
        ("--vllm_sync_backend ncl", "--vllm_sync_backend: `ncl` is not known; choose from nccl, gloo"),
    ],
)
def test_their_validations(change, said):
    with pytest.raises(UserError) as caught:
        of(f"{BASE} {change}")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--attn_implementation sdpa",
        "--attn_implementation kernels-community/flash-attn3",
        "--attn_implementation paged|eager",
        "--vllm_sync_backend gloo --grad_accum_dtype fp32",
    ],
)
def test_what_the_libraries_take(flags):
    assert not of(f"{BASE} {flags}").refused


def test_the_tokenizers_class_is_nobodys_choice():
    """transformers 5 drops what --disable_fast_tokenizer hands it."""
    assert int(version("transformers").partition(".")[0]) >= 5
    found = of(f"{BASE} --disable_fast_tokenizer")
    assert not found.refused and [o.status for o in found.flags if o.flag == "--disable_fast_tokenizer"] == ["no effect"]


@pytest.mark.parametrize(
    "flags",
    [
        "--reward_num_nodes 0 --reward_num_gpus_per_node 0",
        "--critic_num_nodes 0 --critic_num_gpus_per_node 0",
        "--ref_num_nodes 0 --ref_num_gpus_per_node 0 --init_kl_coef 0 --colocate_all_models",
        "--async_queue_size 0",
        "--eval_n_samples_per_prompt 0",
        "--max_ckpt_num 0",
        "--max_ckpt_num 0 --save_steps 5 --disable_ds_ckpt",
        "--prompt_data_probs 1.0",
        "--prompt_data_probs 1",
    ],
)
def test_a_count_of_what_is_not_there_may_be_anything(flags):
    found = of(f"{BASE} {flags}")
    assert not found.refused and found.problem() is None


def test_the_dotted_validations():
    with pytest.raises(UserError, match="clip needs --algo.advantage.is_correction_level token".replace(".", r"\.")):
        of(DOTTED + " --algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip")
    with pytest.raises(UserError, match="takes an upper bound only"):
        of(DOTTED + " --algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv")
    with pytest.raises(UserError, match="takes HIGH or LOW HIGH"):
        of(DOTTED + " --algo.advantage.is_correction_threshold 1 2 3")


def test_an_engine_gets_the_devices_that_there_are(monkeypatch):
    line = BASE + " --vllm_tensor_parallel_size 4"
    for gpus, width, told in ((0, 1, "slots are CPU cores"), (2, 2, "GPUs of this machine: 2"), (8, 4, "")):
        monkeypatch.setattr(resources, "visible_gpus", lambda environment, gpus=gpus: gpus)
        said = fit(found := of(line), {})
        assert found.settings["rollout.tensor_parallel"] == width and told in said and bool(told) == ("devices per engine" in said)
    assert fit(found := of(line), {"RAY_ADDRESS": "head:6379"}) == "" and found.settings["rollout.tensor_parallel"] == 4
    own = of(BASE + " --elastic.rollout.tensor_parallel 2 --elastic.functions.slot cpu")
    assert "devices per engine" not in fit(own, {}) and own.settings["rollout.tensor_parallel"] == 2


def test_slots_and_a_machine_with_fewer():
    found = of(BASE + " --elastic.rollout.min_actors 2 --elastic.cluster.cpus 3 --elastic.functions.slot cpu")
    assert slots_of(found).at_most == 8
    assert "the command requests 8 ranks of the learner, and 3 slots exist" in fit(found, {})
    assert found.settings["learner.ranks"] == 3 and slots_of(found).at_least in (2, 3)  # 2 once ranks may shrink by themselves
    assert fit(of(BASE), {"RAY_ADDRESS": "auto"}) == ""
    said = fit(own := of(BASE + " --elastic.learner.ranks 8 --elastic.cluster.cpus 3"), {})
    assert said.startswith("the command requests 8 ranks of the reference, and 3 slots exist") and ";" not in said
    assert own.settings["learner.ranks"] == 8 and own.settings["reference.ranks"] == 3
    small = of(GAE + " --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 2")
    assert [small.settings[f"{name}.ranks"] for name in ("learner", "critic", "reference")] == [1, 2, 1], "8 is only a default"
    adapters = of(BASE + " --lora_rank 4 --ref_num_gpus_per_node 2")
    assert "reference.ranks" not in adapters.settings and "reference.ranks" not in of(BASE + " --init_kl_coef 0").settings
    assert any("without its adapters" in outcome.why for outcome in adapters.flags if outcome.flag == "--ref_num_gpus_per_node")


def test_a_login_key_is_in_no_recipe_and_no_explanation():
    key = "wandb_v1_0123456789abcdef-0123456789abcdef01234567"
    found = of(f"{BASE} --use_wandb {key}")
    assert found.secrets == {"WANDB_API_KEY": key} and found.settings["watch.wandb"] == "online"
    for told in (yaml.safe_dump(found.tree), explanation(found), json.dumps(as_data(found)), "\n".join(summary(found))):
        assert key not in told
    assert of(f"{BASE} --use_wandb True").secrets == {}
    with pytest.raises(UserError) as caught:
        of(f"{BASE} --use_wandb {key} --logger.wandb.key x")
    assert "disagree" in str(caught.value) and key not in str(caught.value)


def test_a_setting_that_the_recipe_refuses_is_named_by_its_flag():
    assert "--lr" not in str(of(BASE).problem())
    found = of(BASE + " --rollout_batch_size 8 --train_batch_size 64 --actor_num_gpus_per_node 1 --use_dynamic_batch")
    assert str(found.problem()).startswith("--rollout_batch_size, --train_batch_size, ")
    found = of(BASE + " --temperature 0.5 --elastic.rollout.min_actors 9")
    assert str(found.problem()).startswith("--elastic.rollout.min_actors, --vllm_num_engines: ")
    several = of(BASE + " --prompt_data /d.jsonl,/e.csv")
    assert str(several.by_flag(UserError("prompts.path /e.csv: no such file"))).startswith("--prompt_data: prompts.path /e.csv")
    resumed = UserError("run.steps: runs/x has done 3 steps already, more than 2; raise it, or start without --resume")
    assert str(translate([*BASE.split(), "--load_checkpoint"], {}).by_flag(resumed)).startswith("--load_checkpoint: run.steps: ")
    small = UserError("rollout.kv_cache_mb: 64 hold no whole sequence")
    assert str(several.by_flag(small)).startswith("--elastic.rollout.kv_cache_mb: rollout.kv_cache_mb: ")
    found = of(BASE + " --elastic.prefer 7")
    assert "--elastic.objective.prefer" in str(found.problem())


def test_other_versions_with_other_defaults_are_said():
    notes = " ".join(of(BASE).notes)
    assert "--param_dtype checkpoint (0.8.0 to 0.9.1)" in notes and "--elastic.dialect VERSION" in notes
    assert "--value_clip" not in notes  # there is no critic
    assert "--critic_pretrain" not in " ".join(of(GAE).notes), "the launcher fills it in, in each version"
    assert "run_name" not in " ".join(of(BASE + " --use_tensorboard /tb").notes)  # each has the time in it
    assert "other versions" not in " ".join(of(BASE + " --elastic.dialect 0.9.10").notes)


def test_a_value_that_nobody_takes_is_not_called_unsupported_yet():
    found = of(BASE + " --actor_learning_rate=-1")
    (why,) = [o.why for o in found.refused if o.flag == "--actor_learning_rate"]
    assert why == "`learner.learning_rate` does not take -1.0"
