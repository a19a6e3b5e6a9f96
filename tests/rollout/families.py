"""Small random policies of several families, and the processes that serve and train them. Not collected by pytest."""

from __future__ import annotations

import json
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.engine.engine_settings import EngineSettings
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.rank_settings import RankSettings
from rlhfless_ray.types import Request
from rlhfless_ray.weights.tensor_slice import HeldSlices, whole_slices

VOCABULARY, EOS = 96, 1
ORDER = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "llama", "gemma3")  # a mixture first: vLLM makes the groups it needs only then
DENSE = ("mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "granite", "smollm3", "gpt2", "gpt_neox")
DENSE += ("gemma", "cohere", "ernie4_5", "exaone4", "falcon", "glm4", "gptj", "nemotron", "olmo", "olmo3", "opt", "stablelm", "starcoder2")
MORE = {  # options of their configurations beside the usual ones, which these families all have
    "arcee": {},
    "bitnet": {},
    "exaone_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1},
        **{"head_dim": 32, "sliding_window": 16, "sliding_window_pattern": 2},
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe_swa": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "granitemoehybrid": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
        **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 32},
    "mellum": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
    "ministral3": {"head_dim": 32},
    "nanochat": {"head_dim": 32},
    "nemotron_h": {
        **{"hybrid_override_pattern": "M*", "head_dim": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16},
        **{"n_groups": 1, "chunk_size": 16},
    },
}
DENSE += tuple(MORE)
# Those that differ in kind: experts of three kinds, layers with other names in a checkpoint, transposed matrices, sliding windows. The
# others have other options of the same layers: `make test-long` runs them.
ALWAYS = ("qwen3_moe", "qwen2_moe", "mixtral", "llama", "gemma3", "gpt2", "gpt_neox")


def config(family: str, kv_heads: int = 1, **wider: int) -> Any:
    import transformers as t

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
        **wider,
    }
    if family in MORE:
        return t.models.auto.configuration_auto.CONFIG_MAPPING[family](**shape, **MORE[family])
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2}
    made = {
        "llama": lambda: t.LlamaConfig(**shape),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(**shape, **of_experts, moe_intermediate_size=32, shared_expert_intermediate_size=32),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(**shape, **of_experts, moe_intermediate_size=32, head_dim=32),
        "mixtral": lambda: t.MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2),
        "olmoe": lambda: t.OlmoeConfig(**{**shape, "intermediate_size": 32}, **of_experts),
        "gemma3": lambda: t.Gemma3TextConfig(
            **{**shape, "tie_word_embeddings": True},
            head_dim=32,
            sliding_window=16,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"],
        ),
    }
    tied = {**shape, "tie_word_embeddings": True}
    made |= {
        "mistral": lambda: t.MistralConfig(**shape, head_dim=32),
        "qwen2": lambda: t.Qwen2Config(**tied),
        "qwen3": lambda: t.Qwen3Config(**shape, head_dim=32),
        "gemma2": lambda: t.Gemma2Config(
            **tied, head_dim=32, sliding_window=16, query_pre_attn_scalar=32, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
        ),
        "phi3": lambda: t.Phi3Config(**shape),
        "olmo2": lambda: t.Olmo2Config(**shape),
        "granite": lambda: t.GraniteConfig(**tied, logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=3.0),
        "smollm3": lambda: t.SmolLM3Config(**tied, no_rope_layers=[1, 0]),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=EOS, pad_token_id=EOS
        ),
        "gpt_neox": lambda: t.GPTNeoXConfig(**{k: v for k, v in shape.items() if k != "num_key_value_heads"}),
    }
    small = {key: value for key, value in shape.items() if key not in ("num_key_value_heads", "intermediate_size")}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    made |= {  # with options that the ones above lack: partial rotation, biases, three queries per key, a head wider than its share, YaRN
        "gemma": lambda: t.GemmaConfig(**tied, head_dim=64),
        "cohere": lambda: t.CohereConfig(**tied, logit_scale=0.5, use_qk_norm=True),
        "ernie4_5": lambda: t.Ernie4_5Config(**shape),
        "exaone4": lambda: t.Exaone4Config(**shape, sliding_window=16, sliding_window_pattern=2),
        "falcon": lambda: t.FalconConfig(
            **small | {"tie_word_embeddings": True}, alibi=True, parallel_attn=False, multi_query=False, bias=True
        ),
        "glm4": lambda: t.Glm4Config(**shape, head_dim=32, attention_bias=True),
        "gptj": lambda: t.GPTJConfig(
            **{"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 16},
            **{"bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": EOS, "tie_word_embeddings": False},
        ),
        "nemotron": lambda: t.NemotronConfig(**shape, head_dim=32),
        "olmo": lambda: t.OlmoConfig(**shape, clip_qkv=0.5),
        "olmo3": lambda: t.Olmo3Config(
            **{**shape, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "opt": lambda: t.OPTConfig(**small | {"tie_word_embeddings": True}, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False),
        "stablelm": lambda: t.StableLmConfig(**shape, use_qkv_bias=True, partial_rotary_factor=0.25),
        "starcoder2": lambda: t.Starcoder2Config(**tied, sliding_window=16, rope_parameters=yarn),
    }
    return made[family]()


def policy(family: str, seed: int = 0, dtype: str = "float32", kv_heads: int = 1, **wider: int) -> dict[str, bytes]:
    """A model folder's files, as `save_pretrained` writes them. Matrices are four times as large as transformers draws them: nearly
    uniform policies would hide a wrong layer."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(family, kv_heads, **wider))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def pack_4_bits(files: dict[str, bytes]) -> dict[str, bytes]:
    """The policy with linear layers in 4 bits, as compressed-tensors writes them: a scale for each 32 inputs, no zero points."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from safetensors.torch import load, save

    tensors = {}
    for name, weight in load(files["model.safetensors"]).items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = weight
            continue
        groups = weight.float().view(len(weight), -1, 32)
        scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
        values = (groups / scale.float()[..., None]).round().clamp(-8, 7).view(weight.shape).to(torch.int8)
        tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"] = pack_to_int32(values, 4), scale
        tensors[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"]}
    section["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = json.dumps({**json.loads(files["config.json"]), "quantization_config": section}).encode()
    return {**files, "config.json": config, "model.safetensors": save(tensors, {"format": "pt"})}


def requests(count: int = 16, seed: int = 0) -> list[Request]:
    """Some prompts are longer than the sliding windows of these families."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(2, VOCABULARY, rng.integers(1, 50)).tolist()) for _ in range(count)]
    return [Request(k, prompt, 100 * seed + k, 40, 1.0) for k, prompt in enumerate(prompts)]


def batch_of(asked: list[Request], answers: dict[int, Any], replays: bool = False) -> Batch:
    """Of whole responses; short ones were good. `replays`: with the experts that the engine chose."""
    lengths = [len(answers[one.key].token_ids) for one in asked]
    good = (np.mean(lengths) - np.array(lengths)) / (np.std(lengths) + 1)
    return Batch.of(
        [(one.token_ids, answers[one.key].token_ids, answers[one.key].logprobs, float(good[one.key]) + 0.3, one.key // 4) for one in asked],
        experts=[answers[one.key].experts for one in asked] if replays else (),
    )


def replaying(settings: RankSettings) -> RankSettings:
    algorithm = settings.algorithm
    return replace(settings, algorithm=algorithm.model_copy(update={"loss": algorithm.loss.model_copy(update={"router_replay": True})}))


class LearnerHost:
    """Learners of several families in one process, a gang of one rank each."""

    def __init__(self) -> None:
        self.learners: dict[str, Any] = {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def open(self, name: str, files: dict[str, bytes], settings: RankSettings) -> tuple[dict[str, np.ndarray], bytes, bytes]:
        """Return the untrained weights as they are published, and in the files of a checkpoint and of a model folder."""
        from rlhfless_ray.learn.learner_rank import LearnerRank

        self.learners[name] = LearnerRank(settings)
        self.learners[name].open(files, ("127.0.0.1", self.port))
        trainer = self.learners[name].trainer
        kept, exported = (bytes(found["model.safetensors"]) for found in (trainer.state_files(), trainer.model_files(trained=True)))
        return self.weights(name), kept, exported

    def weights(self, name: str) -> dict[str, np.ndarray]:
        return dict(HeldSlices.of(self.learners[name].trainer.weights()))

    def update(self, name: str, batch: Any) -> Any:
        learner = self.learners[name]
        return learner.update(learner.cutter.of_update(batch)[0])

    def logprobs(self, name: str, batch: Any, top_p: float = 1.0) -> np.ndarray:
        learner = self.learners[name]
        return learner.agreement(learner.cutter.of_pass(batch)[0], 1.0, top_p)

    def model(self, name: str) -> dict[str, bytes]:
        return {file: bytes(content) for file, content in self.learners[name].trainer.model_files().items()}


class EngineHost:
    """Engines of several families in one process."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}

    def open(self, name: str, files: dict[str, bytes], settings: EngineSettings) -> None:
        from rlhfless_ray.engine.exact_actor import ExactEngineActor
        from rlhfless_ray.weights.model_folder import without_weights

        self.actors[name] = ExactEngineActor(without_weights(files), settings)
        self.actors[name].open(1)

    def answer(
        self, name: str, version: int, weights: dict[str, np.ndarray], expected: Any, requests: list[Any], garbled: str = ""
    ) -> dict[int, Any]:
        """Completions under these weights, by an engine that was parked before. `garbled`: a tensor that it gets wrong after the check."""
        from rlhfless_ray.rollout.token_log import TokenLog

        actor = self.actors[name]
        load = actor.engine.load

        def spoiled(version: int, weights: dict[str, np.ndarray], base: Any = None) -> None:
            load(version, {key: array[..., ::-1] + np.float32(0.25) if key == garbled else array for key, array in weights.items()})

        actor.engine.park()
        actor.engine.load = spoiled
        try:
            actor.load(version, whole_slices(weights), expected)
        finally:
            actor.engine.load = load
        token_log = TokenLog(requests)
        token_log.assign(np.arange(len(requests)), 0)
        for progress, _, _ in actor.rollout(version, requests, float("inf"), 1):
            token_log.accept(0, "engine", progress)
        return token_log.completions

    def differing(self, name: str, model: bytes, published: Any) -> tuple[list[str], list[str]]:
        actor = self.actors[name]
        return actor.differing(actor.engine.version, published, model)
