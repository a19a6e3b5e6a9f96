"""Images in the exact engine: log-probabilities of the learner, and token identity after a cut."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.engine.vllm_engine import VllmEngine
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.image_inputs import PaddedWithImages
from rlhfless_ray.learn.policy_model import TokenLogprobs, load_model
from rlhfless_ray.types import Request
from rlhfless_ray.vision.image_processor import FAMILIES, ImageProcessor, image_files
from rlhfless_ray.weights.saved_names import saved_state
from tests.vision_policy import PLACE, drawn, vision_policy, vision_tokenizer

pytestmark = pytest.mark.engine
TEXTS = (f"{PLACE}How many?", [0]), (f"Compare {PLACE} and {PLACE}", [1, 2]), (f"{PLACE}How many?", [2]), ("no image here", [])


def generated(engine: VllmEngine, requests: list[Request]) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    logprobs: dict[int, list[float]] = {request.key: [] for request in requests}
    for deltas in engine.generate(requests):
        at = 0
        for key, count in zip(deltas.keys.tolist(), deltas.counts.tolist(), strict=True):
            tokens[key] += deltas.token_ids[at : at + count].tolist()
            logprobs[key] += deltas.logprobs[at : at + count].tolist()
            at += count
    return tokens, logprobs


@pytest.mark.parametrize("family", list(FAMILIES))
def test_engine_and_learner_agree_and_a_cut_changes_no_token(family, tmp_path):
    policy = vision_policy(family, tmp_path)
    processor = ImageProcessor(json.loads((policy / "config.json").read_bytes()), image_files(policy))
    pictures = [processor.read(drawn(width, height, k)) for k, (width, height) in enumerate([(80, 60), (120, 40), (30, 90)])]
    requests = []
    for key, (text, numbers) in enumerate(TEXTS * 2):
        ids, placed = processor.place(vision_tokenizer()(text)["input_ids"], [pictures[k] for k in numbers])
        requests.append(Request(key, tuple(ids), seed=key, max_tokens=12, temperature=1.0, pictures=placed))
    settings = EngineSettings(max_model_len=256, max_running=8, block_size=32, kv_cache_mb=16, gpu_memory_share=0.5)
    engine = VllmEngine(policy, settings)
    model = load_model(policy, "float32", False).eval()
    for version in (0, 1):  # the second one has another vision tower too
        if version:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        state = {name: x for name, x in model.state_dict().items() if name != "lm_head.weight"}
        engine.load(version, {name: x.detach().numpy() for name, x in saved_state(model, state).items()})
        tokens, logprobs = generated(engine, requests)
        sequences = [(r.token_ids, np.array(tokens[r.key], np.int32), np.array(logprobs[r.key], np.float32), 0.0, r.key) for r in requests]
        batch = Batch.of(sequences, pictures=[r.pictures for r in requests])
        tensors = PaddedWithImages(policy)(batch, np.arange(len(requests)), torch.device("cpu"))
        with torch.no_grad():
            ours = TokenLogprobs(model)(1.0, **tensors)[0].numpy()
        assert np.abs(ours - batch.logprobs).max() < 1e-4
        assert tokens[0] != tokens[2], "the same text with another image"
        cut = [replace(r, generated=tuple(tokens[r.key][:5])) for r in requests if len(tokens[r.key]) > 5]
        again, _ = generated(engine, cut)
        assert all(again[r.key] == tokens[r.key][5:] for r in cut)
