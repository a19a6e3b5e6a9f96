"""The recipe for real text: GSM8K-style JSONL, a chat template, the `math` reward, and any local causal LM."""

import json
import random

import pytest

from tests.chat_policy import chat_policy
from tests.conftest import command_here, samples

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.usefixtures("private_ray")]


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
    return chat_policy(problems, tmp_path_factory.mktemp("policy"))


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
