"""Models that cannot fit are refused before they are read, with the sizes and what may help; what might fit is not."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from placement import memory
from rlhfless_ray import Recipe, Runtime
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local import machine_memory as machine
from rlhfless_ray.preflight import memory_check
from rlhfless_ray.preflight.memory_check import DoesNotFit, check, check_ahead, shortage
from rlhfless_ray.preflight.memory_needs import Lengths, Need, Room
from rlhfless_ray.preflight.model_size import ModelSize, models_of
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.weights import load_policy as policy_files
from tests.conftest import command, command_here, small_recipe
from tests.placement.test_memory import LLAMA_70B, MIXTRAL, QWEN_05B, QWEN_7B, config

H100 = Room("gpu", 8, 85_520_809_984)
LAPTOP = Room("cpu", 2, 24_000_000_000, 24_000_000_000, has_driver=True)
UNREAD = Lengths()
ENORMOUS = {**LLAMA_70B, "num_hidden_layers": 4000}  # 3.4 T parameters: more than any machine that runs this


def folder(path: Path, model: dict[str, Any]) -> Path:
    """A model folder without weights: the size is in its configuration."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model))
    (path / "tokenizer.json").write_text("{}")
    return path


def sparse_weights(path: Path, tensors: dict[str, list[int]], dtype: str = "BF16") -> int:
    """A whole safetensors file of these shapes that takes no room on the disk. Returns its size."""
    entries, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * shape[0] * shape[1]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return path.stat().st_size


def recipe(path: Path, **sections: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {
        "policy": {"path": str(path), "dtype": "bfloat16"},
        "prompts": {"path": "rows.jsonl"},
        "reward": {"function": "math"},
        "learner": {"zero_stage": 2},
        "rollout": {"kv_cache_mb": 256},
    }
    for section, fields in sections.items():
        tree[section] = {**tree.get(section, {}), **fields}
    return Recipe.parse(tree)


def refusal(room: Room, wanted: Recipe, lengths: Lengths = UNREAD) -> str:
    with pytest.raises(DoesNotFit) as error:
        check(RunMemory.of(wanted, lengths), lambda: room)
    assert "\n" not in str(error.value)
    return str(error.value)


def fits(room: Room, wanted: Recipe) -> bool:
    return shortage(RunMemory.of(wanted), room) is None


def device_needs(wanted: Recipe, lengths: Lengths = UNREAD) -> list[Need]:
    return RunMemory.of(wanted, lengths).least(Room("gpu", 1, None))


# ---- sizes of folders -------------------------------------------------------------------------------------------


def test_every_family_counts_as_transformers_builds_it():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        "vocab_size": 1000,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    experts = {"moe_intermediate_size": 56, "shared_expert_intermediate_size": 72}
    for family, rules in memory.FAMILIES.items():
        variants = [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"mlp_bias": True}]
        variants += [{"head_dim": 32}]
        if "experts" in rules:
            name = "num_local_experts" if family == "mixtral" else "num_experts"
            variants = [{name: 4, **experts, **variant} for variant in variants]
            variants += [{name: 4, **experts, **({"decoder_sparse_step": 2} if "qwen" in family else {})}]
            variants += [{name: 4, **experts, **({"mlp_only_layers": [0]} if "qwen" in family else {})}]
        for variant in variants:
            described = AutoConfig.for_model(family, **small, **variant)
            with torch.device("meta"):
                counts = {name: p.numel() for name, p in AutoModelForCausalLM.from_config(described).named_parameters()}
            built = sum(counts.values())
            routed = sum(count for name, count in counts.items() if ".experts." in name)
            assert memory.expert_parameters(described.to_dict()) == routed, (family, variant)
            assert memory.parameter_count({"model_type": family, **small, **variant}) == built, (family, variant)
            assert memory.parameter_count(described.to_dict()) == built, (family, variant)


def test_families_whose_head_is_the_embeddings_are_those_of_transformers():
    from transformers import AutoConfig

    for family in {*memory.TIED, *memory.FAMILIES}:
        assert memory.ties_ends({"model_type": family}) == AutoConfig.for_model(family).tie_word_embeddings, family


def test_a_folder_s_size_is_in_its_headers_and_configuration(tmp_path):
    path = folder(tmp_path / "own", {"model_type": "of-my-own"})
    assert ModelSize.of(path, "policy.path") is None  # neither says
    shards = {"a.weight": [1000, 500], "lm_head.weight": [1000, 100]}
    stored = sum(sparse_weights(path / f"model-{i}.safetensors", {name: shape}) for i, (name, shape) in enumerate(shards.items()))
    assert ModelSize.of(path, "policy.path") == ModelSize("policy.path", {"model_type": "of-my-own"}, 600_000, 500_000, stored)
    sparse_weights(path / "consolidated.safetensors", shards)  # another library's copy of the same
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, name in enumerate(shards)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelSize.of(path, "policy.path").parameters == 600_000
    for torn in (b"", b"\x00" * 5, struct.pack("<Q", 10**15) + b"{", struct.pack("<Q", 2) + b"[]"):
        (path / "model.safetensors").write_bytes(torn)
        assert ModelSize.of(path, "policy.path") is None  # whoever reads it says that it is torn


def test_of_headers_and_configuration_the_smaller_count_is_believed(tmp_path):
    """A folder may hold more than the causal LM that is loaded from it."""
    path = folder(tmp_path / "model", QWEN_05B)
    sparse_weights(path / "model.safetensors", {"model.embed_tokens.weight": [151_936, 896], "extra.weight": [500_000, 1000]})
    assert ModelSize.of(path, "policy.path").parameters == 494_032_768
    sparse_weights(path / "model.safetensors", {"model.embed_tokens.weight": [151_936, 896]})
    assert ModelSize.of(path, "policy.path").parameters == 151_936 * 896


# ---- GPUs -------------------------------------------------------------------------------------------------------


def test_an_engine_that_one_device_cannot_hold(tmp_path):
    said = refusal(H100, recipe(folder(tmp_path / "70b", LLAMA_70B), rollout={"max_tokens": 8191}))
    assert said.startswith(
        "policy.path: an engine needs at least 143.8 GB (141.1 GB weights, 2.7 GB KV cache of one sequence of 8192 tokens) on one "
        "device, and a GPU here has 85.5 GB, of which 72.7 GB may be used (rollout.gpu_memory_share=0.85); "
    )
    assert said.endswith("learner.ranks=2 and learner.zero_stage=3 and learner.optimizer_offload=true and rollout.tensor_parallel=2")
    wide = recipe(folder(tmp_path / "wide", LLAMA_70B), rollout={"max_tokens": 8191, "tensor_parallel": 2})
    needed = next(need for need in device_needs(wide) if need.is_engine)
    assert str(needed).startswith("at least 71.9 GB (70.6 GB weights, 1.3 GB KV cache"), "two devices share weights and KV heads"


@pytest.mark.parametrize(("kind", "experts_bytes"), [("int8", 2), ("fp8", 1)])
def test_in_8_bits_the_ends_keep_their_dtype_and_in_int8_experts_too(tmp_path, kind, experts_bytes):
    mixture = {
        **QWEN_05B,
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "moe_intermediate_size": 1000,
        "shared_expert_intermediate_size": 64,
    }
    for model in (QWEN_05B, mixture):
        path = folder(tmp_path / model["model_type"], model)
        chosen = recipe(path, rollout={"quantization": kind})
        parameters, ends, experts = ModelSize.of(path, "policy.path").parameters, 151_936 * 896, 24 * 4 * 3 * 896 * 1000
        experts *= model is mixture
        engine = next(need for need in device_needs(chosen) if need.is_engine)
        assert dict(engine.parts)["weights"] == parameters + ends + (experts_bytes - 1) * experts


def test_an_engine_is_told_of_shorter_responses_and_a_larger_share(tmp_path):
    small, model = Room("gpu", 8, 24 * 2**30), folder(tmp_path / "7b", QWEN_7B)
    adapters = {"lora": {"rank": 8}}
    long = recipe(model, rollout={"max_tokens": 500_000, "gpu_memory_share": 0.95}, **adapters)
    assert refusal(small, long).endswith("it may fit with rollout.tensor_parallel=2")
    chosen = {"max_tokens": 500_000, "gpu_memory_share": 0.95, "tensor_parallel": "auto"}
    auto = recipe(model, rollout=chosen, **adapters)
    assert check(RunMemory.of(auto), lambda: small) == "", "an automatic width takes what fits"
    assert refusal(Room("gpu", 1, small.bytes), long).endswith("it may fit with rollout.max_tokens=125000")
    tight = Room("gpu", 8, int(15.3e9 / 0.9))
    assert refusal(tight, recipe(model, **adapters)).endswith("it may fit with rollout.gpu_memory_share=0.95")
    whole = recipe(model, policy={"dtype": "float32"}, **adapters)
    assert refusal(small, whole).endswith("it may fit with policy.dtype=bfloat16")


def test_a_learner_rank_is_told_of_what_shards_and_offloads(tmp_path):
    model = folder(tmp_path / "7b", QWEN_7B)
    said = refusal(H100, recipe(model))
    assert "a learner rank needs at least 137.1 GB (15.2 GB weights, 91.4 GB optimizer state, 30.5 GB gradients) on one" in said
    assert said.endswith("and a GPU here has 85.5 GB; it may fit with learner.ranks=2") and fits(H100, recipe(model, learner={"ranks": 2}))
    alone = Room("gpu", 1, H100.bytes)
    assert refusal(alone, recipe(model)).endswith("it may fit with learner.optimizer_offload=true")
    l4 = Room("gpu", 8, 24 * 2**30)
    assert refusal(l4, recipe(model)).endswith("it may fit with learner.ranks=8 and learner.zero_stage=3")
    ranks = {"learner": {"ranks": 8, "zero_stage": 3}}
    assert fits(l4, recipe(model, **ranks)) and fits(l4, recipe(model, lora={"rank": 8}))


def test_critic_reference_and_reward_model_are_sized_too(tmp_path):
    seven, half, large = (folder(tmp_path / name, model) for name, model in (("7", QWEN_7B), ("h", QWEN_05B), ("8x7", MIXTRAL)))
    gae = {"algorithm": {"advantage": {"estimator": "gae"}}}
    said = refusal(H100, recipe(half, critic={"path": str(seven)}, **gae))
    assert said.startswith("critic.path: a critic rank needs at least 127.3 GB")  # 18 bytes of 7,070,619,136 parameters
    assert said.endswith("it may fit with critic.ranks=2")
    said = refusal(H100, recipe(half, reward={"function": "", "model_path": str(large)}))
    assert said.startswith("reward.model_path: a reward model rank needs at least 93.1 GB on one device")
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}}
    wide = recipe(large, rollout={"gpu_memory_share": 1.0}, learner={"ranks": 8, "zero_stage": 3}, **kl)
    needs = {need.who: need for need in device_needs(wide)}
    assert needs["a reference rank"].bytes == 2 * 46_702_792_704
    assert "a reference rank" not in {n.who for n in device_needs(recipe(large))}


def test_a_model_larger_than_any_device_may_be_trained_and_be_the_reference(tmp_path):
    cluster, model = Room("gpu", 32, H100.bytes), folder(tmp_path / "70b", LLAMA_70B)
    divided = {"rollout": {"tensor_parallel": 4}, "learner": {"ranks": 24, "zero_stage": 3}}
    assert fits(cluster, recipe(model, **divided))
    kl = {"algorithm": {"kl": {"coefficient": 0.1}}}
    said = refusal(cluster, recipe(model, **divided, **kl))
    assert "a reference rank needs at least 141.1 GB on one device" in said
    assert said.endswith("it may fit with reference.ranks=2 and reference.tensor_parallel=2")
    assert fits(cluster, recipe(model, **divided, **kl, reference={"ranks": 2, "tensor_parallel": 2}))
    reward = recipe(model, **divided, reward={"function": "", "model_path": str(model)})
    assert refusal(cluster, reward).endswith("it may fit with reward.tensor_parallel=2")


def test_a_drafter_is_sized_beside_an_engine_and_where_it_is_trained(tmp_path):
    large, half = folder(tmp_path / "large", QWEN_7B), folder(tmp_path / "half", QWEN_05B)
    wanted = recipe(large, rollout={"speculation": "auto", "drafter": str(half), "max_tokens": 1000, "gpu_memory_share": 0.99})
    needs = {need.who: need for need in device_needs(wanted, Lengths(24, 24))}
    width = memory.VALUE_BYTES[wanted.policy.dtype]
    kv = 16 * 1024 * 2 * 24 * 2 * 64 * width  # sequences, tokens, keys and values, layers, heads, their width
    assert needs["the drafter beside an engine"].bytes == width * 494_032_768 + kv
    assert refusal(H100, wanted).startswith("rollout.drafter: the drafter beside an engine needs at least")
    trained = recipe(half, rollout={"speculation": "auto", "drafter_train": "on"})
    needs = {need.who: need for need in RunMemory.of(trained).least(Room("cpu", 1, None))}
    (size,) = (size for what, size in needs["the drafter's training beside the rollout"].parts if what == "in the drafter's training")
    layer = 4 * 64 * 64 + 3 * 64 + 3 * 64 * 192 + 2 * 64
    assert size == 16 * (151_936 * 64 + layer + 64)


def test_prompts_as_long_as_they_are_count_once_they_are_read(tmp_path):
    model = folder(tmp_path / "7b", QWEN_7B)
    wanted = recipe(model, lora={"rank": 8})
    tight = Room("gpu", 1, int((15.24e9 + 0.1e9) / 0.85))
    assert fits(tight, wanted)
    assert "KV cache of one sequence of 20256 tokens" in refusal(tight, wanted, Lengths(20_000, 10))


# ---- cores: the memory of nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_a_billion_parameters_are_not_refused_on_a_laptop(tmp_path, dtype):
    model = folder(tmp_path / "05b", QWEN_05B)
    for stage in range(4):
        if stage or dtype == "float32":
            plain = recipe(model, policy={"dtype": dtype}, learner={"zero_stage": stage}, rollout={"kv_cache_mb": 2048})
            assert fits(LAPTOP, plain)
    gae = {"advantage": {"estimator": "gae"}, "kl": {"coefficient": 0.1}}
    assert fits(LAPTOP, recipe(model, algorithm=gae))


def test_what_must_be_in_a_node_at_once_is_added_up(tmp_path):
    path = folder(tmp_path / "3b", config("qwen2", 2048, 11_008, 36, 16, 2, 151_936, tie_word_embeddings=True))
    sparse_weights(path / "model.safetensors", {"model.weight": [3_085_938_688 // 2048, 2048]})
    said = refusal(LAPTOP, recipe(path))
    assert said.startswith(
        f"policy.path: the learner's update needs at least {18 * 3_085_938_688 / 1e9:.1f} GB (6.2 GB "
        "weights, 37.0 GB optimizer state, 12.3 GB gradients) of memory at once, and this machine has 24.0 GB; "
    )
    assert said.endswith("it may fit with lora.rank=16")
    adapters = {"lora": {"rank": 16}}
    assert fits(LAPTOP, recipe(path, **adapters))
    said = refusal(LAPTOP, recipe(path, rollout={"kv_cache_mb": 12288}, **adapters))
    assert "the rollout needs at least 25.2 GB (6.2 GB in the learner, 6.2 GB in engine weights, 12.9 GB in" in said
    assert re.search(r"it may fit with rollout.kv_cache_mb=\d+$", said)
    said = refusal(LAPTOP, recipe(path, rollout={"min_actors": 3, "max_actors": 3}, **adapters))
    assert "18.5 GB in engine weights of 3" in said and said.endswith("it may fit with rollout.min_actors=1")


def test_moments_count_for_the_rollout_only_after_an_update(tmp_path):
    model = folder(tmp_path / "05b", QWEN_05B)
    tight = Room("cpu", 2, int(9.5e9), int(9.5e9))  # an update takes 18 bytes a parameter, 8.9 GB
    once, twice = (recipe(model, run={"steps": steps}, rollout={"kv_cache_mb": 2048}) for steps in (1, 2))
    assert fits(tight, once) and "the rollout needs at least 10.1 GB" in refusal(tight, twice)
    assert fits(Room("cpu", 2, int(7e9), int(7e9)), recipe(model, run={"steps": 0}))


def test_nodes_share_what_one_cannot_hold(tmp_path):
    model = folder(tmp_path / "7b", QWEN_7B)
    nodes = Room("cpu", 64, int(100e9), int(400e9))
    said = refusal(nodes, recipe(model))
    assert "a learner rank needs at least 137.1 GB" in said and "the largest node has 100.0 GB" in said
    assert said.endswith("it may fit with learner.ranks=2") and fits(nodes, recipe(model, learner={"ranks": 2}))
    said = refusal(nodes, recipe(model, learner={"zero_stage": 2, "ranks": 24}))
    assert "the nodes have 400.0 GB together" in said


# ---- where the memory is known from -----------------------------------------------------------------------------


def test_small_models_ask_nobody_and_unknown_memory_refuses_nothing(tmp_path):
    tiny = recipe(folder(tmp_path / "tiny", config("qwen2", 64, 128, 2, 2, 2, 100)))
    assert check(RunMemory.of(tiny), lambda: pytest.fail("asked")) == ""
    large = recipe(folder(tmp_path / "70b", LLAMA_70B))
    note = check(RunMemory.of(large), lambda: Room("gpu", 4, None))
    assert "memory of a GPU is not known here" in note and "an engine 141.2 GB" in note and "a learner rank 1,270.0 GB" in note
    assert check(RunMemory.of(Recipe.parse(small_recipe(tmp_path))), lambda: pytest.fail("asked")) == ""


def test_a_local_machine_tells_its_memory(monkeypatch, tmp_path):
    physical = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (str(tmp_path / "limit"),))
    read = machine.host_memory_bytes.__wrapped__  # without its cache
    swap = read() - physical
    assert swap >= 0
    (tmp_path / "limit").write_text("2000000000\n")
    assert read() == 2_000_000_000 + swap
    (tmp_path / "limit").write_text("max\n")
    assert read() == physical + swap
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 23034\necho 81559\n")
    script.chmod(0o755)
    monkeypatch.setattr(machine, "NVIDIA_SMI", (str(script),))
    assert machine.gpu_memory_bytes() == 81_559 * 2**20
    script.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert machine.gpu_memory_bytes() is None
    monkeypatch.setattr(machine, "NVIDIA_SMI", (str(tmp_path / "none"),))
    assert machine.gpu_memory_bytes() is None
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 2)
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: 7 if gpu else 5)
    plain = Recipe.parse(small_recipe(tmp_path))
    cores = Recipe.parse(small_recipe(tmp_path, functions__slot="cpu", cluster__cpus=3))
    assert memory_check.local_room(plain) == Room("gpu", 2, 7, 7, host_bytes=5)
    assert memory_check.local_room(cores) == Room("cpu", 3, 5, 5, has_driver=True)


def test_a_run_is_refused_before_weights_are_read(unjoined, tmp_path, monkeypatch):
    path = folder(tmp_path / "70b", LLAMA_70B)
    sparse_weights(path / "model.safetensors", {"model.weight": [70_553_706_496 // 8192, 8192]})  # 141 GB, none of it on the disk
    monkeypatch.setattr(policy_files, "read_folder", lambda *a: pytest.fail("the weights are read"))
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: 24_000_000_000)
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 0)
    tree = small_recipe(tmp_path, policy__path=str(path), policy__dtype="bfloat16", learner__zero_stage=3)
    with pytest.raises(DoesNotFit, match=r"loading the learner needs at least 282.2 GB \(141.1 GB in the object store, 141.1 GB in the"):
        Runtime(Recipe.parse(tree))
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 1)
    with pytest.raises(DoesNotFit, match=r"an engine needs at least 141.1 GB on one device, and a GPU here has 24.0 GB"):
        Runtime(Recipe.parse(tree))
    assert not (tmp_path / "runs").exists()


def test_passes_over_the_prompts_are_one_step_at_least(unjoined, tmp_path, monkeypatch):
    """Their number of steps is not known before the prompts are read."""
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 0)
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: int(9.5e9))
    model = folder(tmp_path / "05b", QWEN_05B)
    check_ahead(recipe(model, run={"episodes": 2, "steps": 100}, rollout={"kv_cache_mb": 2048}))
    with pytest.raises(DoesNotFit, match="the rollout needs"):
        check_ahead(recipe(model, run={"steps": 100}, rollout={"kv_cache_mb": 2048}))


def test_what_depends_on_the_slots_of_this_machine_is_checked_ahead(unjoined, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 0)
    model = folder(tmp_path / "05b", QWEN_05B)
    with pytest.raises(UserError, match="vLLM on CPU cannot quantise weights to fp8"):
        check_ahead(recipe(model, rollout={"quantization": "fp8"}))
    with pytest.raises(UserError, match="the 512 slots of a reward model must be on one node"):
        check_ahead(recipe(model, reward={"function": "", "model_path": "elsewhere", "tensor_parallel": 512}))


def test_of_a_model_on_the_hub_the_configuration_alone_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path / "70b")

    folder(tmp_path / "70b", LLAMA_70B)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    wanted = recipe(Path("org/seventy"))
    assert models_of(wanted)["policy"].parameters == 70_553_706_496 and asked == [("org/seventy", ["config.json"])]
    assert models_of(wanted, fetch=False) == {}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / "70b" / file))
    assert models_of(wanted, fetch=False)["policy"].parameters == 70_553_706_496 and len(asked) == 1


def test_a_train_command_exits_with_two(unjoined, tmp_path):
    (tmp_path / "small.yaml").write_text(json.dumps(small_recipe(tmp_path, policy__path=str(folder(tmp_path / "big", ENORMOUS)))))
    done = command_here("train", str(tmp_path / "small.yaml"))
    assert done.returncode == 2 and re.match(r"error: policy.path: .* needs at least [\d,]+\.\d GB", done.stderr), done.stderr
    assert not (tmp_path / "runs").exists() and "Traceback" not in done.stderr


@pytest.mark.ray
def test_nodes_of_a_cluster_tell_their_memory(ray_cluster, tmp_path):
    import ray

    room = memory_check.ray_room("cpu", 4)
    assert room == Room("cpu", 4, machine.host_memory_bytes(), machine.host_memory_bytes())
    there = machine.gpu_memory_bytes()  # its GPUs are logical: nobody knows their memory, unless the machine has some
    assert memory_check.ray_room("gpu", 4) == Room("gpu", 4, there, there)
    tree = small_recipe(tmp_path, policy__path=str(folder(tmp_path / "big", ENORMOUS)), functions__slot="cpu")
    with pytest.raises(DoesNotFit, match=r"loading the learner needs at least 13,698.9 GB of memory at once, and the nodes have"):
        check_ahead(Recipe.parse(tree))
    assert ray.is_initialized()  # it was looked at, not left
    (tmp_path / "small.yaml").write_text(json.dumps(tree))
    address = ray.get_runtime_context().gcs_address
    done = command("train", str(tmp_path / "small.yaml"), f"cluster.address={address}")
    assert done.returncode == 2 and "and the nodes have" in done.stderr, done.stderr
