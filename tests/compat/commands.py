"""Command lines in the shapes and flag combinations that OpenRLHF's documentation and examples use, version by version.

(versions that accept the line, the line, newest names and the values it must come to). Paths and models are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhfless_ray.compat.openrlhf.command import LaunchCommand, check_starts_shell, launch_in


class Example(NamedTuple):
    name: str
    first: str
    last: str
    line: str
    means: dict[str, Any]


BOTH_SLEEP = "--vllm_enable_sleep --deepspeed_enable_sleep"
SIZES = "--ref_num_nodes 1 --ref_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8"
CRITIC_SIZES = "--reward_num_nodes 1 --reward_num_gpus_per_node 8 --critic_num_nodes 1 --critic_num_gpus_per_node 8"
BATCHES = "--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 128 --max_epochs 1"
OLD_LENGTHS = "--prompt_max_len 1024 --generate_max_len 2048"
DATA = "--prompt_data org/prompts --input_key messages --apply_chat_template"

EXAMPLES = [
    Example(
        "ppo with critic and reward model, 70B, not colocated", "0.8.5", "0.8.9",
        f"{SIZES} {CRITIC_SIZES} --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_critic_reward --colocate_actor_ref "
        f"--pretrain org/sft --reward_pretrain org/rm --save_path /out/ppo {BATCHES} {OLD_LENGTHS} --zero_stage 3 --bf16 --flash_attn "
        f"--actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 {DATA} --normalize_reward --adam_offload "
        "--gradient_checkpointing --max_samples 100000 --save_steps -1 --ckpt_path /out/ckpt --use_wandb {wandb_token} "
        "--lr_scheduler constant",
        {"data.max_len": 3072, "rollout.max_new_tokens": 2048, "data.prompt_max_len": 1024, "ds.param_dtype": "bf16",
         "ds.attn_implementation": "flash_attention_2", "critic.adam.lr": 9e-6, "actor.adam.lr": 5e-7, "critic.lr_scheduler": "constant",
         "reward.normalize_enable": True, "critic.value_clip": 0.5, "ckpt.save_steps": -1},
    ),
    Example(
        "grpo with a reward function", "0.8.10", "0.9.1",
        f"{SIZES} --vllm_num_engines 8 --colocate_all_models --vllm_gpu_memory_utilization 0.6 --init_kl_coef 1e-3 --gamma 1.0 "
        f"--use_kl_loss --kl_estimator k3 --advantage_estimator group_norm --pretrain org/sft --remote_rm_url /r/reward.py "
        f"--save_path /out --n_samples_per_prompt 8 {BATCHES} {OLD_LENGTHS} --bf16 {DATA} --packing_samples --enforce_eager {BOTH_SLEEP} "
        "--attn_implementation flash_attention_2 --vllm_sync_backend nccl --label_key answer",
        {"algo.kl.use_loss": True, "algo.kl.estimator": "k3", "algo.advantage.estimator": "group_norm", "ds.param_dtype": "bf16",
         "rollout.n_samples_per_prompt": 8, "reward.remote_url": "/r/reward.py", "algo.advantage.gamma": 1.0,
         "actor.eps_clip_low_high": None, "train.colocate_all": True, "data.label_key": "answer"},
    ),
    Example(
        "dapo", "0.9.3", "0.9.7",
        f"{SIZES} --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 "
        "--advantage_estimator group_norm --dynamic_filtering --dynamic_filtering_reward_range 0 1 --eps_clip_low_high 0.2 0.27 "
        "--overlong_buffer_len 512 --overlong_penalty_factor 1.0 --dual_clip 3 --pretrain org/sft --remote_rm_url /r/reward.py "
        f"--n_samples_per_prompt 8 {BATCHES} {OLD_LENGTHS} --param_dtype bf16 {DATA} --enable_vllm_is_correction "
        "--vllm_is_correction_type icepop --vllm_is_truncated_threshold 0.5 5.0",
        {"algo.dynamic_filtering_range": [0.0, 1.0], "actor.eps_clip_low_high": [0.2, 0.27], "reward.overlong_buffer_len": 512.0,
         "algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "mask",
         "algo.advantage.is_correction_gating": "ratio", "algo.advantage.is_correction_threshold": [0.5, 5.0], "actor.dual_clip": 3.0},
    ),
    Example(
        "truncated importance sampling with one threshold", "0.8.10", "0.9.0",
        f"{SIZES} --vllm_num_engines 8 --colocate_all_models --pretrain org/sft --remote_rm_url "
        "http://a:5000/get_reward,http://b:5000/get_reward "
        f"--advantage_estimator rloo --n_samples_per_prompt 4 {OLD_LENGTHS} --bf16 {DATA} --enable_vllm_is_correction "
        "--vllm_is_truncated_threshold 2 --attn_implementation eager",
        {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip",
         "algo.advantage.is_correction_threshold": [0.0, 2.0], "ds.attn_implementation": "eager", "train.micro_batch_size": 4,
         "rollout.micro_batch_size": 8},
    ),
    Example(
        "prorl: evaluation, stop properly, icepop by its own flag", "0.9.2", "0.9.2",
        f"{SIZES} --vllm_num_engines 8 --colocate_all_models --init_kl_coef 1e-4 --use_kl_loss --kl_estimator k2 "
        "--advantage_estimator reinforce_baseline --dynamic_filtering --pretrain org/sft --remote_rm_url /r/math.py --use_dynamic_batch "
        "--train_batch_size 1024 --rollout_batch_size 512 --n_samples_per_prompt 16 --num_episodes 100 --prompt_max_len 1024 "
        f"--generate_max_len 8192 --zero_stage 3 --param_dtype bf16 {DATA} --eval_dataset org/aime --eval_steps 5 --eval_temperature 1.0 "
        "--eval_n_samples_per_prompt 4 --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5.0 --use_icepop "
        "--train_max_tokens_per_gpu 32768 --stop_properly_penalty_coef 0.0 --save_hf_ckpt --save_steps 5",
        {"algo.advantage.is_correction_mode": "mask", "reward.stop_properly_penalty_coef": 0.0, "eval.steps": 5, "data.max_len": 9216,
         "train.num_episodes": 100, "ckpt.best_metric_key": "none", "algo.dynamic_filtering_range": [0.0, 1.0]},
    ),
    Example(
        "asynchronous with partial rollout and an agent", "0.9.8", "0.10.1",
        f"{SIZES} --vllm_num_engines 8 --async_train --async_queue_size 2 --partial_rollout "
        "--agent_func_path /a/agent.py --pretrain org/sft "
        f"--advantage_estimator reinforce --max_len 8192 --max_new_tokens 4096 {DATA} --param_dtype bf16 --ring_attn_size 2 "
        "--ring_head_stride 2 --load_checkpoint --use_tensorboard /out/runs --vllm_generate_batch_size 2048",
        {"train.async_enable": True, "train.async_queue_size": 2, "train.partial_rollout_enable": True, "ds.ring_attn_head_stride": 2,
         "train.agent_func_path": "/a/agent.py", "data.max_len": 8192, "rollout.max_new_tokens": 4096, "data.prompt_max_len": None,
         "rollout.vllm_generate_batch_size": 2048, "logger.tensorboard_dir": "/out/runs", "ckpt.load_enable": True},
    ),
    Example(
        "images", "0.10.0", "0.10.1",
        f"{SIZES} --vllm_num_engines 8 --colocate_all_models --pretrain org/vlm --remote_rm_url /r/math.py --image_key images "
        f"--max_images_per_prompt 1 --freeze_visual_encoder --advantage_estimator group_norm --n_samples_per_prompt 4 {DATA}",
        {"data.max_images_per_prompt": 1, "actor.freeze_visual_encoder": True, "train.micro_batch_size": 1},
    ),
    Example(
        "dotted ppo with importance correction", "0.10.2", "0.11.1",
        "--ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 --critic.num_gpus_per_node 8 "
        "--reward.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all "
        "--actor.model_name_or_path org/sft --reward.model_name_or_path org/rm --ckpt.output_dir /out --actor.adam.lr 5e-7 "
        "--critic.adam.lr 9e-6 --algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis "
        "--algo.advantage.is_correction_threshold 0.99 1.01 --data.prompt_dataset org/prompts --data.input_key messages "
        "--data.apply_chat_template --data.max_len 2048 --rollout.max_new_tokens 1024 --train.dynamic_batch_enable --vllm.enable_sleep "
        "--ds.enable_sleep --actor.max_norm 0.5 --critic.adam.betas 0.9 0.99",
        {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_mode": "mask", "actor.max_norm": 0.5,
         "critic.max_norm": 1.0, "critic.adam.betas": [0.9, 0.99], "actor.adam.betas": [0.9, 0.95],
         "algo.advantage.is_correction_threshold": [0.99, 1.01]},
    ),
    Example(
        "dotted flash_reinforce with a divergence gate", "0.11.2", "0.11.2",
        "--actor.num_gpus_per_node 8 --vllm.num_engines 8 --train.colocate_all --actor.model_name_or_path org/sft "
        "--reward.remote_url /r/reward.py --algo.advantage.estimator flash_reinforce --algo.advantage.is_correction_level seq "
        "--algo.advantage.is_correction_mode mask --algo.advantage.is_correction_gating binary_kl "
        "--algo.advantage.is_correction_threshold 0.01 --actor.loss_agg_mode seq-mean-token-mean --algo.kl.unbiased_gradient "
        "--algo.kl.use_loss --data.prompt_dataset org/prompts --rollout.n_samples_per_prompt 8 --actor.optim muon --ds.zero_stage 1",
        {"algo.advantage.is_correction_gating": "binary_kl", "algo.advantage.is_correction_threshold": [0.0, 0.01],
         "actor.loss_agg_mode": "seq-mean-token-mean", "actor.optim": "muon"},
    ),
]  # fmt: skip

MIXTURES = [
    Example(
        "the README's own mixture: dotted with the old length flags", "0.11.2", "0.11.2",
        "--actor.model_name_or_path org/sft --reward.remote_url /r/reward.py --data.prompt_dataset org/prompts --vllm.num_engines 8 "
        "--algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 --prompt_max_len 1024 --generate_max_len 512 "
        "--actor.loss_agg_mode token-mean",
        {"data.max_len": 1536, "rollout.max_new_tokens": 512, "data.prompt_max_len": 1024},
    ),
    Example(
        "a 0.8 script half moved to 0.9", "0.9.1", "0.9.1",
        f"{SIZES} --pretrain org/sft --remote_rm_url /r/reward.py --prompt_data org/prompts --flash_attn --bf16 --async_queue_size 3 "
        "--async_train --vllm_num_engines 2 --advantage_estimator rloo --n_samples_per_prompt 2 --use_icepop --enable_vllm_is_correction",
        {"ds.attn_implementation": "flash_attention_2", "ds.param_dtype": "bf16", "train.async_queue_size": 3,
         "algo.advantage.is_correction_mode": "mask"},
    ),
    Example(
        "last flat names with the new correction", "0.10.1", "0.10.1",
        f"{SIZES} --pretrain org/sft --remote_rm_url /r/reward.py --prompt_data org/prompts --max_new_tokens 100 --best_metric_key none "
        "--dataloader_num_workers 2 --vllm_num_engines 2 --advantage_estimator rloo --n_samples_per_prompt 2 "
        "--algo.advantage.is_correction_level token --algo.advantage.is_correction_threshold 4 --algo.advantage.is_correction_mode clip",
        {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip",
         "algo.advantage.is_correction_threshold": [0.0, 4.0]},
    ),
]  # fmt: skip


def find(argv: Sequence[str]) -> LaunchCommand:
    """Return the launch in a command that no shell has to read."""
    launch = launch_in(argv)
    if launch is None:
        check_starts_shell(argv)
        raise AssertionError("a shell reads it")
    return launch
