"""Images in the learner: against plain transformers, in shared rows and alone, and which losses an image changes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.image_inputs import PaddedWithImages, prompt_positions
from rlhfless_ray.learn.policy_model import TokenLogprobs, check_head, load_model
from rlhfless_ray.vision.image_processor import ImageProcessor, image_files
from tests.vision_policy import PLACE, drawn, vision_policy, vision_tokenizer

pytestmark = pytest.mark.pure
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request, tmp_path_factory):
    return vision_policy(request.param, tmp_path_factory.mktemp(request.param))


def batch_of_prompts(policy, images):
    """Two responses to each prompt: with one image, with two of other sizes, with the same image, and without any."""
    processor, tokenizer = ImageProcessor(json.loads((policy / "config.json").read_bytes()), image_files(policy)), vision_tokenizer()
    pictures = [processor.read(content) for content in images]
    rng, sequences, seen = np.random.default_rng(0), [], []
    texts = (f"{PLACE}How many?", [0]), (f"Compare {PLACE} and {PLACE}", [1, 2]), (f"again: {PLACE}", [0]), ("none", [])
    for group, (text, numbers) in enumerate(texts):
        ids, placed = processor.place(tokenizer(text)["input_ids"], [pictures[k] for k in numbers])
        for _ in range(2):
            response = rng.integers(0, len(tokenizer), rng.integers(3, 9)).astype(np.int32)
            response[0] = processor.config["image_token_id"]  # a policy may write it
            sequences.append((tuple(ids), response, np.zeros(len(response), np.float32), 1.0, group))
            seen.append(placed)
    return processor, Batch.of(sequences, pictures=seen)


IMAGES = [drawn(80, 60, 0), drawn(120, 40, 1), drawn(30, 90, 2)]


def logprobs_of(model, tensors_of, batch, rows):
    tensors = tensors_of(batch, rows, CPU)
    found = np.zeros(len(batch.logprobs))
    with torch.no_grad():
        found[tensors["flat"].numpy()] = TokenLogprobs(model)(1.0, **tensors)[0].double().numpy()
    return found


def test_log_probabilities_are_those_of_plain_transformers(policy):
    processor, batch = batch_of_prompts(policy, IMAGES)
    model = load_model(policy, "float64", False).eval()
    check_head(model)
    shared = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5]), np.array([6, 7])]
    together = logprobs_of(model, PaddedWithImages(policy), batch, shared)
    alone = logprobs_of(model, PaddedWithImages(policy), batch, np.arange(8))
    one_by_one = sum(logprobs_of(model, PaddedWithImages(policy), batch, [np.array([i])]) for i in range(8))
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(one_by_one, alone, atol=1e-6)
    starts, first = np.concatenate([[0], np.cumsum(batch.lengths)]), 0
    for i in range(8):
        ids = torch.from_numpy(batch.tokens[starts[i] : starts[i + 1]])[None]
        prompt, pictures = int(batch.prompt_lengths[i]), batch.pictures[i]
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        images = {}
        for picture in pictures:
            kinds[0, picture.offset : picture.offset + picture.tokens] = 1
        if pictures:
            pixels = [processor.pixels(picture) for picture in pictures]
            images["pixel_values"] = torch.from_numpy(np.concatenate([values for values, _ in pixels])).double()
            images["image_grid_thw"] = torch.from_numpy(np.stack([grid for _, grid in pixels]))
        plain = ids.clone()
        plain[:, prompt] = 5 if pictures else plain[:, prompt]  # transformers counts a written image token as an image's
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=plain, mm_token_type_ids=kinds if pictures else None, use_cache=False, **images).logits[0]
        wanted = logits[prompt - 1 : -1].log_softmax(-1)[range(ids.shape[1] - prompt), ids[0, prompt:]]
        count = len(wanted)
        compared = slice(0, 1) if pictures else slice(0, count)  # after the written image token the contexts differ
        np.testing.assert_allclose(together[first : first + count][compared], wanted.numpy()[compared], atol=1e-6)
        if pictures:
            changed = replace(
                batch, tokens=np.concatenate([batch.tokens[: starts[i] + prompt], [5], batch.tokens[starts[i] + prompt + 1 :]])
            )
            own = logprobs_of(model, PaddedWithImages(policy), changed, [np.array([i])])[first : first + count]
            np.testing.assert_allclose(own[1:], wanted.numpy()[1:], atol=1e-6)
        first += count


def test_an_image_changes_the_losses_of_its_own_responses_only(policy):
    model = load_model(policy, "float64", False).eval()
    found = []
    for second in (1, 7):
        _, batch = batch_of_prompts(policy, [IMAGES[0], drawn(120, 40, second), IMAGES[2]])
        found.append(logprobs_of(model, PaddedWithImages(policy), batch, np.arange(8)))
    ends = np.cumsum(batch.response_lengths)
    changed = [not np.array_equal(*(x[end - n : end] for x in found)) for end, n in zip(ends, batch.response_lengths, strict=True)]
    assert changed == [False, False, True, True, False, False, False, False]


def test_positions_are_those_of_transformers(policy):
    processor, batch = batch_of_prompts(policy, IMAGES)
    model = load_model(policy, "float32", False)
    for i in (0, 2):
        end = int(batch.prompt_lengths[:1].sum()) if i == 0 else int(batch.lengths[:2].sum() + batch.prompt_lengths[2])
        ids = torch.from_numpy(batch.tokens[end - int(batch.prompt_lengths[i]) : end])[None]
        grids = torch.from_numpy(np.stack([processor.pixels(picture).grid for picture in batch.pictures[i]]))
        kinds = (ids == processor.config["image_token_id"]).int()
        wanted, _ = model.model.get_rope_index(ids, image_grid_thw=grids, mm_token_type_ids=kinds)
        assert np.array_equal(prompt_positions(ids.shape[1], batch.pictures[i]), wanted[:, 0].numpy())
