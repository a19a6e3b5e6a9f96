"""A drafter's fused layers compute what transformers' modules compute, also after new weights, for sequences that come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

VOCABULARY, LONGEST = 50, 64
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {
        "num_key_value_heads": 2,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "MistralConfig": {"num_key_value_heads": 1, "sliding_window": None},
    "Qwen2Config": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_fused_layers_equal_the_modules(tmp_path: Path, kind: str) -> None:
    import torch
    import transformers

    from rlhfless_ray.engine.model_drafts import Ask, ModelSource

    config = getattr(transformers, kind)(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LONGEST, initializer_range=0.3, **CONFIGS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    models: list[Any] = [transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    for model in models:
        for parameter in model.parameters():  # also those that are born as zeros or ones
            torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.2)
    models[0].save_pretrained(tmp_path)
    source = ModelSource(tmp_path, VOCABULARY, LONGEST, torch.device("cpu"))
    assert source.fused is not None
    computed: list[Any] = []
    compute = source._compute
    source._compute = lambda *given: computed.append(compute(*given)) or computed[-1]  # type: ignore[method-assign, func-returns-value]

    rng, tokens = np.random.default_rng(0), {name: list(range(1, 4 + name)) for name in range(5)}
    for turn in range(12):
        if turn == 6:
            source.load({name: parameter.detach().numpy() for name, parameter in models[1].named_parameters()})
        batch = [name for name in tokens if rng.random() < 0.7]
        asks = [Ask(name, np.array(tokens[name]), rng.random(3), 3, 1.0, (1.0, 0)) for name in batch]
        computed.clear()
        drafts = source.propose(asks, 3)
        for row, (ask, draft) in enumerate(zip(asks, drafts, strict=True)):
            whole = torch.tensor([[*ask.tokens.tolist(), *draft.tokens[:2]]])
            with torch.inference_mode():
                wanted = models[turn >= 6](whole).logits[0, -3:]
            assert torch.allclose(torch.stack([logits[row] for logits in computed]), wanted, atol=1e-4)
            tokens[ask.name] += [*draft.tokens[: rng.integers(0, 3)], int(rng.integers(VOCABULARY))]


@pytest.mark.engine
@pytest.mark.parametrize("truncation", [(1.0, 0), (0.9, 5)])
def test_a_draft_waits_once_for_the_device(tmp_path: Path, truncation: tuple[float, int]) -> None:
    """Whatever its number of tokens. Every way for the host to see a tensor is counted."""
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhfless_ray.engine.model_drafts import Ask, ModelSource

    seen = {getattr(torch.Tensor, name) for name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")}

    class Device(TorchFunctionMode):
        waits = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.waits += func in seen
            return func(*args, **(kwargs or {}))

    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    source = ModelSource(tmp_path, VOCABULARY, LONGEST, torch.device("cpu"))
    for passes in (1, 6):
        asks = [Ask(name, np.arange(2, 6 + name), np.full(9, 0.4), 8, float(name), truncation) for name in range(3)]
        with Device() as device:
            drafts = source.propose(asks, passes)
        assert device.waits == 1 and [len(draft.tokens) for draft in drafts] == [passes] * 3


@pytest.mark.slow
def test_other_models_keep_their_modules(tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

    from rlhfless_ray.engine.fused_layer import can_be_fused
    from rlhfless_ray.engine.model_drafts import Ask, ModelSource

    assert can_be_fused(LlamaConfig()) and not can_be_fused(LlamaConfig(hidden_act="gelu"))
    assert not can_be_fused(LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}))
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=32, n_layer=1, n_head=2)).eval()
    model.save_pretrained(tmp_path)
    source = ModelSource(tmp_path, VOCABULARY, LONGEST, torch.device("cpu"))
    tokens = np.array([3, 7, 5])
    (draft,) = source.propose([Ask(0, tokens, np.zeros(1), 1, 0.0, (1.0, 0))], 1)
    assert source.fused is None and draft.tokens == [int(model(torch.tensor(tokens)[None]).logits[0, -1].argmax())]
