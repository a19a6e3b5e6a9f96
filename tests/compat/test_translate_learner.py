"""What a line says of the learner: its types, shards and divisions, also by what is in the model's folder."""

import json

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.resources import fit
from tests.compat.lines import BASE, DOTTED, GAE, of, status


@pytest.mark.parametrize(
    ("config", "weights", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "F32", "bfloat16"), ({"dtype": "float32"}, "BF16", "float32"), ({}, "BF16", "bfloat16"),
        ({"torch_dtype": None}, "F32", "float32"), ({"torch_dtype": "float16"}, "F32", None), ({}, None, None),
    ],
)  # fmt: skip
def test_without_bf16_the_dtype_is_that_of_the_checkpoint(tmp_path, config, weights, dtype):
    """As --bf16's absence meant until 0.9.1; where nobody tells, or it is one that is not trained in, the line is refused."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weights:
        header = json.dumps({"__metadata__": {}, "ids": {"dtype": "I64"}, "w": {"dtype": weights}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = of(f"{BASE.replace('/m', str(tmp_path), 1)} --elastic.dialect 0.8.5")
    assert found.settings.get("policy.dtype") == dtype
    assert [outcome.flag for outcome in found.refused] == ([] if dtype else ["--bf16 (default checkpoint)"])
    assert bool(weights) or "give --bf16" in found.refused[0].why
    assert status(of(f"{BASE} --bf16 --flash_attn"), "--bf16") == "honoured"


@pytest.mark.parametrize(
    ("flag", "since"),
    [("--adam_offload", "0.8.0"), ("--adam_offload", "0.9.5"), ("--adam_offload", "0.10.1"), ("--ds.adam_offload", "0.11.2")],
)
def test_the_optimizer_is_offloaded_in_every_dialect(flag, since):
    line = DOTTED if "." in flag else BASE
    found = of(f"{line} {flag} --elastic.dialect {since}")
    assert found.settings["learner.optimizer_offload"] is True and found.problem() is None
    assert of(line).settings["learner.optimizer_offload"] is False
    (told,) = [outcome for outcome in found.flags if outcome.flag == flag]
    assert told.status == "hint" and "host memory" in told.why
    stage = "--ds.zero_stage" if "." in flag else "--zero_stage"
    assert of(f"{line} {flag} {stage} 0").settings["learner.zero_stage"] == 1, "DeepSpeed offloads shards only"
    with pytest.raises(UserError, match=r"optimizer_offload: needs a learner.zero_stage of 1, 2 or 3"):
        of(f"{line} {flag} --elastic.learner.zero_stage 0").recipe()


@pytest.mark.parametrize(("line", "stage"), [("--bf16 --zero_stage 0", 1), ("--bf16 --zero_stage 3", 3), ("--bf16", 2)])
def test_bfloat16_without_a_zero_stage_runs_at_stage_1(line, stage):
    found = of(f"{BASE} --flash_attn {line}")
    assert found.settings["learner.zero_stage"] == stage and found.problem() is None


@pytest.mark.parametrize("flag", ["--ring_attn_size 2 --packing_samples", "--ds_tensor_parallel_size 2"])
def test_a_divided_learner_is_a_hint(flag):
    assert status(of(BASE + f" {flag}"), flag.split()[0]) == "hint" and not of(BASE + f" {flag}").refused


LLAMA = {"model_type": "llama", "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("line", "config", "why"),
    [
        (BASE, LLAMA, ""),
        (DOTTED, LLAMA, ""),
        (GAE, LLAMA, ""),
        (BASE, None, "is not on this machine"),
        (BASE, {**LLAMA, "model_type": "gemma2"}, "models of type gemma2 are not tested with it"),
        (BASE, {**LLAMA, "num_attention_heads": 6}, "4 does not divide the model's 6 attention heads"),
        (BASE + " --actor_num_gpus_per_node 6", LLAMA, "4 does not divide the number of ranks, 6"),
        (BASE + " --aux_loss_coef 0.1", LLAMA, "routers would see a slice"),
        (BASE + " --lora_rank 4 --lora_dropout 0.1", LLAMA, "dropout of adapters"),
        (BASE + " --ring_attn_size 1", LLAMA, "divides the work on a sequence"),
    ],
)
def test_sequence_parallelism_is_honoured_where_the_model_allows_it(tmp_path, line, config, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    dotted = line == DOTTED
    flag = "--ds.ring_attn_size" if dotted else "--ring_attn_size"
    text = line.replace(" /m ", f" {tmp_path} ").replace(
        "--advantage_estimator gae", f"--advantage_estimator gae --critic_pretrain {tmp_path}"
    )
    found = of(text + ("" if flag in line else f" {flag} 4") + (" --ds.packing_samples" if dotted else " --packing_samples"))
    (outcome,) = [one for one in found.flags if one.flag == flag]
    assert outcome.status == ("hint" if why else "honoured") and why in outcome.why and not found.refused
    keys = {"learner.sequence_parallel", *({"critic.sequence_parallel"} if line == GAE else ())}
    assert {key: x for key, x in found.settings.items() if key.endswith("sequence_parallel")} == ({} if why else dict.fromkeys(keys, 4))


LLAMA_MATRICES = {**LLAMA, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("line", "config", "why"),
    [
        (BASE, LLAMA_MATRICES, ""),
        (GAE, LLAMA_MATRICES, ""),
        (BASE, None, "is not on this machine"),
        (BASE, {**LLAMA_MATRICES, "model_type": "olmo2"}, "models of type olmo2 are not tested with it"),
        (BASE, {**LLAMA_MATRICES, "num_key_value_heads": 2}, "4 does not divide the model's 2 KV heads"),
        (BASE + " --actor_num_gpus_per_node 6", LLAMA_MATRICES, "4 does not divide the number of ranks, 6"),
        (BASE + " --zero_stage 3", LLAMA_MATRICES, "ZeRO stages 0 to 2"),
        (BASE + " --ring_attn_size 2 --packing_samples", LLAMA_MATRICES, "ranks share sequences instead"),
    ],
)
def test_tensor_parallelism_is_honoured_where_the_model_allows_it(tmp_path, line, config, why):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    text = line.replace(" /m ", f" {tmp_path} ").replace(
        "--advantage_estimator gae", f"--advantage_estimator gae --critic_pretrain {tmp_path}"
    )
    found = of(text + " --ds_tensor_parallel_size 4" + ("" if "zero_stage" in line else " --zero_stage 2"))
    (outcome,) = [one for one in found.flags if one.flag == "--ds_tensor_parallel_size"]
    assert outcome.status == ("hint" if why else "honoured") and why in outcome.why and not found.refused
    keys = {"learner.tensor_parallel", *({"critic.tensor_parallel"} if line == GAE else ())}
    made = {key: x for key, x in found.settings.items() if key in ("learner.tensor_parallel", "critic.tensor_parallel")}
    assert made == ({} if why else dict.fromkeys(keys, 4))


@pytest.mark.parametrize("flag", ["--ring_attn_size", "--ds_tensor_parallel_size"])
def test_own_settings_of_ranks_take_precedence_over_flags_that_divide_them(tmp_path, flag):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_MATRICES))
    text = f"{BASE.replace(' /m ', f' {tmp_path} ')} {flag} 4 --packing_samples"
    for own in ("learner.ranks 3", "learner.tensor_parallel 2"):
        found = of(f"{text} --elastic.{own}")
        (outcome,) = [one for one in found.flags if one.flag == flag]
        assert outcome.status == "hint" and f"--elastic.{own.split()[0]} decides here" in outcome.why and not found.refused


@pytest.mark.parametrize("flag", ["--ring_attn_size", "--ds_tensor_parallel_size"])
def test_fewer_slots_share_a_copy_or_sequences_among_a_divisor(tmp_path, flag):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_MATRICES))
    shared = f"{flag} 4 --packing_samples --elastic.cluster.cpus 6 --elastic.functions.slot cpu"
    fit(found := of(f"{BASE.replace(' /m ', f' {tmp_path} ')} {shared}"), {})
    key = "learner.sequence_parallel" if "ring" in flag else "learner.tensor_parallel"
    assert (found.settings["learner.ranks"], found.settings[key]) == (6, 2)
