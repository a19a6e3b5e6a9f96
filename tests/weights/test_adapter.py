"""Merged LoRA adapters give the outputs that peft's model with the adapter gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.cli import lora_combiner
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.weights.adapter import SERVED_FAMILIES, Adapter, choose_publish, not_served
from rlhfless_ray.weights.model_folder import write_folder
from tests.reward.reward_models import WORDS, tokenizer_files

peft = pytest.importorskip("peft")
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model(kind: str, shard: str = "5GB", folder: Path | None = None, inner: int = 96, words: int = len(WORDS)) -> Any:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        num_labels=1,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = getattr(transformers, kind)(config).eval()
    if folder is not None:
        made.save_pretrained(folder, max_shard_size=shard)
        write_folder(folder, tokenizer_files())
    return made


def adapter(base: Any, folder: Path, **settings: Any) -> Any:
    """peft's model, its adapter random and saved."""
    import torch

    made = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": EVERYWHERE, **settings})).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)
    made.save_pretrained(folder)
    return made


def outputs(made: Any) -> Any:
    import torch

    with torch.no_grad():
        return made(torch.tensor([[3, 7, 1, 9, 30]])).logits


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8}, "alpha_pattern": {"v_proj": 3}},
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "embeddings", "saved modules"],
)
@pytest.mark.parametrize("shard", ["5GB", "60KB"])
def test_the_merged_model_is_the_adapted_one(tmp_path: Path, settings: dict[str, Any], shard: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = model("LlamaForCausalLM", shard, tmp_path / "base")
    before = outputs(base)
    expected = outputs(adapter(base, tmp_path / "lora", **settings))
    assert (expected - before).abs().max() > 0.1
    assert (len(list((tmp_path / "base").glob("*.safetensors"))) > 1) is (shard == "60KB")
    lora_combiner.combine(tmp_path / "base", tmp_path / "lora", tmp_path / "out", False, "float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), expected, atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()["w5"] == 5


def test_reward_models_and_their_dtype(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    base = model("LlamaForSequenceClassification", folder=tmp_path / "base")
    expected = outputs(adapter(base, tmp_path / "lora", task_type="SEQ_CLS"))  # peft saves the head `score` with it
    lora_combiner.combine(tmp_path / "base", tmp_path / "lora", tmp_path / "out", True, "float32")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(merged), expected, atol=1e-4, rtol=1e-4)
    lora_combiner.combine(tmp_path / "base", tmp_path / "lora", tmp_path / "small", True, "bfloat16")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "small").dtype == torch.bfloat16
    causal = model("LlamaForCausalLM", folder=tmp_path / "causal")
    lora_combiner.combine(tmp_path / "causal", tmp_path / "lora", tmp_path / "headed", True, "float32")
    adapter(causal, tmp_path / "no_head")
    with pytest.raises(UserError, match="neither the base model nor the adapter has a scalar head `score`"):
        lora_combiner.combine(tmp_path / "causal", tmp_path / "no_head", tmp_path / "out2", True, "float32")


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    base, lora, out = tmp_path / "base", tmp_path / "lora", tmp_path / "out"
    adapter(model("LlamaForCausalLM", folder=base), lora)

    def refused(words: str, **changes: Any) -> None:
        config = json.loads((lora / "adapter_config.json").read_text())
        changed = tmp_path / "changed"
        write_folder(changed, {file.name: file.read_bytes() for file in lora.iterdir()})
        (changed / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=words):
            Adapter.read(changed)

    refused("the adapter uses use_dora", use_dora=True)
    refused("the adapter is IA3, not LORA", peft_type="IA3")
    refused(r"trains biases \(bias = all\)", bias="all")
    with pytest.raises(UserError, match=r"adapter_config.json is missing or not readable"):
        lora_combiner.combine(base, base, out, False, "float32")
    with pytest.raises(UserError, match=r"--output_path .* is the folder of the model"):
        lora_combiner.combine(base, lora, base, False, "float32")
    other = model("LlamaForSequenceClassification", folder=tmp_path / "other")
    adapter(other, tmp_path / "headed", task_type="SEQ_CLS", target_modules=["q_proj"])
    with pytest.raises(UserError, match=r"the base model has no weight `score.weight`"):
        lora_combiner.combine(base, tmp_path / "headed", out, False, "float32")
    model("LlamaForCausalLM", folder=tmp_path / "wider", inner=128)
    with pytest.raises(UserError, match=r"the adapter has shape .*, but the base model's weight has"):
        lora_combiner.combine(tmp_path / "wider", lora, out, False, "float32")
    narrow = model("LlamaForCausalLM", folder=tmp_path / "narrow", words=30)
    adapter(narrow, tmp_path / "resized", modules_to_save=["lm_head"])
    with pytest.raises(UserError, match=r"^lm_head.weight: the adapter's has shape \(30, 64\), but the base model's weight has"):
        lora_combiner.combine(base, tmp_path / "resized", out, False, "float32")
    assert not out.exists()


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.conftest import ROOT, command_here, environment

    module = "rlhfless_ray.cli.lora_combiner"
    adapter(model("LlamaForCausalLM", folder=tmp_path / "base"), tmp_path / "lora")
    flags = ["--model_path", str(tmp_path / "base"), "--lora_path", str(tmp_path / "lora"), "--output_path", str(tmp_path / "out")]
    command = [sys.executable, "-m", module, *flags, "--ds.param_dtype", "bf16"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"merged 14 weights; the model is in {tmp_path / 'out'}" in done.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    done = command_here(*flags[:2], *flags[4:], "--lora_path", str(tmp_path / "nowhere"), module=module)
    assert done.returncode == 2 and "error:" in done.stderr and "adapter_config.json is missing" in done.stderr
    assert command_here("--model_path", "x", module=module).returncode == 2


def test_adapters_that_engines_cannot_hold_are_named() -> None:
    assert all(not_served(family, 16, ["all-linear"]) is None for family in SERVED_FAMILIES)
    assert "engines hold adapters of llama" in str(not_served("gpt2", 16, ["all-linear"]))
    assert "lora.target_modules has embed_tokens" in str(not_served("qwen2", 16, ["q_proj", "embed_tokens"]))
    assert "lora.rank is 1024" in str(not_served("qwen2", 1024, ["self_attn.q_proj"]))


def test_auto_takes_the_adapter_where_it_is_quicker() -> None:
    def auto(served: bool = True, device: str = "cpu", parameters: int = 494_000_000, tokens: int = 64) -> str:
        return choose_publish("auto", served, device, parameters, tokens)

    assert auto() == "adapter"
    assert {auto(served=False), auto(device="gpu"), auto(parameters=11_000_000), auto(tokens=4096)} == {"merged"}
    assert choose_publish("adapter", True, "gpu", 1, 4096) == "adapter" and choose_publish("merged", True, "cpu", 10**9, 1) == "merged"
