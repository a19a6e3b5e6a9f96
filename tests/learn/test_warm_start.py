"""The policy from scratch and its warm start: folders that load, results that repeat, a loss on responses only."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless_ray.common.errors import RunError
from rlhfless_ray.learn.warm_start import IGNORE, _batches, _schedule, warm_start
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.prompts.task_tokenizer import build_tokenizer
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.load_policy import warm_start_key
from rlhfless_ray.weights.tiny_model import scratch_policy


def recipe(seed: int = 0, name: str = "chain", **warm: Any) -> Recipe:
    return Recipe.parse(
        {
            "run": {"seed": seed},
            "policy": {"hidden_size": 32, "layers": 1},
            "prompts": {"task": name},
            "reward": {"function": "task"},
            "warm_start": {"steps": 30, "batch_size": 16, **warm},
        }
    )


def loaded(files: dict[str, bytes], folder: Path) -> tuple[Any, Any]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["chain", "sort"])
def test_a_policy_from_scratch_loads_and_follows_from_the_seed(tmp_path: Path, name: str) -> None:
    files = scratch_policy(recipe(name=name), task(name))
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    model, tokenizer = loaded(files, tmp_path)
    assert model.config.max_position_embeddings == 512
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer)
    made = build_tokenizer(task(name))
    for row in task(name).rows(100, 0, "heldout"):
        ids = tokenizer(row["prompt"])["input_ids"]  # nothing is added, even when it is not told so
        assert ids == made(row["prompt"], add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == row["prompt"]
    state = torch.random.get_rng_state()
    assert scratch_policy(recipe(name=name), task(name)) == files
    assert torch.equal(torch.random.get_rng_state(), state)
    assert scratch_policy(recipe(1, name), task(name))["model.safetensors"] != files["model.safetensors"]


def test_the_dtype_is_the_recipes(tmp_path: Path) -> None:
    settings = recipe(steps=2)
    settings.policy.dtype = "bfloat16"
    files = warm_start(scratch_policy(settings, task("chain")), settings, 1)
    assert loaded(files, tmp_path)[0].dtype == torch.bfloat16


def test_warm_start_lowers_the_loss_and_repeats_exactly(tmp_path: Path) -> None:
    settings, seen = recipe(), []
    start = scratch_policy(settings, task("chain"))
    threads = torch.get_num_threads()
    first = warm_start(start, settings, 1, lambda step, steps, loss: seen.append((step, steps, loss)))
    assert torch.get_num_threads() == threads
    assert [s[:2] for s in seen] == [(i + 1, 30) for i in range(30)]
    assert seen[-1][2] < 0.85 * seen[0][2]
    assert warm_start(start, settings, 1) == first
    one, other = (warm_start(start, recipe(seed=seed, steps=3), 1)["model.safetensors"] for seed in (0, 1))
    assert one != other
    assert first.keys() == start.keys()
    # The first loss is the cross-entropy of the start's weights on the first batch's responses, computed another way.
    model, tokenizer = loaded(start, tmp_path)
    tokens, labels = next(_batches(recipe(steps=1), tokenizer))
    with torch.no_grad():
        chances = model(input_ids=tokens).logits.log_softmax(-1)
    losses = [-chances[i, j - 1, labels[i, j]] for i, j in (labels != IGNORE).nonzero().tolist()]
    assert seen[0][2] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_the_loss_is_on_the_response_and_its_end_only() -> None:
    chain = task("chain")
    tokenizer = build_tokenizer(chain)
    tokens, labels = next(_batches(recipe(5), tokenizer))
    held = {row["prompt"] for row in chain.rows(3000, 5, "heldout")}
    for ids, marks in zip(tokens, labels, strict=True):
        text = tokenizer.decode(ids[ids != tokenizer.pad_token_id])
        prompt, equals, response = text.partition("=")
        assert tokenizer.decode(marks[marks != IGNORE]) == response
        assert response.endswith(tokenizer.eos_token) and prompt + equals not in held
        assert torch.equal(marks[marks != IGNORE], ids[marks != IGNORE])


def test_some_batches_have_the_template_and_nothing_else_changes() -> None:
    tokenizer = build_tokenizer(task("chain"))
    plain = recipe(5)
    filled = plain.model_copy(update={"prompts": plain.prompts.model_copy(update={"input_template": "1A2=a3#3;{}"})})
    pairs = itertools.islice(zip(_batches(plain, tokenizer), _batches(filled, tokenizer), strict=True), 32)
    with_template = 0
    for (tokens, labels), (others, marks) in pairs:
        assert torch.equal(tokens[labels != IGNORE], others[marks != IGNORE])
        if others.shape != tokens.shape:
            with_template += 1
            header = tokenizer("1A2=a3#3;")["input_ids"]
            assert torch.equal(others[:, : len(header)], torch.tensor([header] * len(others)))
            assert torch.equal(others[:, len(header) :], tokens)
        else:
            assert torch.equal(others, tokens)
    assert with_template == 7


def test_no_steps_change_nothing() -> None:
    start = scratch_policy(recipe(), task("chain"))
    assert warm_start(start, recipe(steps=0), 1) == start


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    settings = recipe(learning_rate=1e30)
    with pytest.raises(RunError, match=r"warm start: the loss is \w+ at step \d+ of 30; lower warm_start.learning_rate"):
        warm_start(scratch_policy(settings, task("chain")), settings, 1)


def test_the_schedule_warms_up_and_ends_near_zero() -> None:
    rates = [_schedule(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0 and rates == rates[:10] + sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5) and 0 < rates[-1] < 0.01
    assert all(math.isfinite(_schedule(step, steps)) for steps in (1, 2, 3) for step in range(steps))


def test_the_key_names_all_that_determines_the_result_and_nothing_else() -> None:
    base = recipe()
    keys = {warm_start_key(base)}
    for section, field, value in [
        ("run", "seed", 1), ("policy", "hidden_size", 64), ("policy", "layers", 2), ("policy", "dtype", "bfloat16"),
        ("prompts", "task", "sort"), ("warm_start", "steps", 31), ("warm_start", "batch_size", 8),
        ("warm_start", "learning_rate", 1e-3),
    ]:  # fmt: skip
        other = recipe()
        setattr(getattr(other, section), field, value)
        keys.add(warm_start_key(other))
    assert len(keys) == 9
    for section, field, value in [("run", "steps", 3), ("learner", "learning_rate", 1.0), ("prompts", "rows", 64)]:
        other = recipe()
        setattr(getattr(other, section), field, value)
        assert warm_start_key(other) == warm_start_key(base)
