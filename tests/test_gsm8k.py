"""The recipe for real text: GSM8K-style JSONL, a chat template, the `math` reward, and any local causal LM."""

import json
import random

import pytest

from tests.conftest import command_here, samples

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Sixteen problems of our own in GSM8K's form."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("problems") / "train.jsonl"
    with path.open("w") as file:
        for _ in range(16):
            a, b = draw.randrange(2, 90), draw.randrange(2, 90)
            row = {
                "question": f"Tom picks {a} apples and Ann picks {b} apples. How many apples do they have together?",
                "answer": f"Together they have {a}+{b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
            }
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def policy(problems, tmp_path_factory):
    """A small random Qwen2 and a tokenizer trained on the problems' text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    core.train([str(problems)], trainer)
    trained = json.loads(core.to_str())["model"]
    merges = [tuple(merge) for merge in trained["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=trained["vocab"], merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
    )
    folder = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_it_trains_on_any_local_causal_lm(problems, policy, tmp_path):
    done = command_here(
        "train",
        "recipes/gsm8k.yaml",
        f"prompts.path={problems}",
        f"policy.path={policy}",
        f"run.root={tmp_path}",
        "run.steps=1",
        "prompts.batch_prompts=4",
        "evaluate.prompts=4",
        "rollout.max_tokens=16",
        "rollout.samples_per_prompt=2",
        "rollout.max_actors=1",
        "watch.wandb=off",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "gsm8k"
    written = samples(run, 1)
    assert len(written) == 8 and all(s["error"] is None and s["reward"] in (0.0, 1.0) for s in written)
    assert all(s["prompt"].startswith("<|im_start|>") and s["prompt"].endswith("<|im_start|>assistant\n") for s in written)
    assert all("####" in s["answer"] for s in written)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run / "model").config.tie_word_embeddings


def test_a_model_without_chat_template_is_refused(problems, policy, tmp_path):
    import shutil

    bare = shutil.copytree(policy, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    done = command_here(
        "train",
        "recipes/gsm8k.yaml",
        f"prompts.path={problems}",
        f"policy.path={bare}",
        f"run.root={tmp_path}",
        "prompts.batch_prompts=4",
        "evaluate.prompts=4",
    )
    assert done.returncode == 2 and "chat template" in done.stderr and "Traceback" not in done.stderr
