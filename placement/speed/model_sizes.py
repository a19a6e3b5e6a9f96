"""What a decoder weighs, reads and computes, from the fields of its Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from placement.config_sizes import wrong_size
from placement.memory import text_part, ties_ends
from placement.plain_data import JsonObject

BYTES = 2  # bf16
SIZES: dict[str, tuple[str, ...]] = {  # names of sizes in Hugging Face configurations, the common one first
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "expert": ("moe_intermediate_size",),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head": ("head_dim",),
    "vocabulary": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "shared_expert": ("shared_expert_intermediate_size",),
}
OPTIONAL = ("kv_heads", "head", "experts", "expert", "experts_per_token", "shared_expert")
TWO_MATRICES = (  # families whose feed-forward layers have no gate
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "bloom", "mpt", "phi", "falcon", "starcoder2", "nanochat"),
    *("arcee", "nemotron", "apertus", "persimmon", "jais2"),
)
ONE_KV_HEAD = ("falcon", "gpt_bigcode")  # families whose `multi_query` means this, whatever other keys say
QUANTIZATIONS = ("off", "int8", "fp8")  # of an engine's weights, as in the recipe's `rollout.quantization`


@dataclass(frozen=True)
class Model:
    """A decoder, described by the fields of its Hugging Face configuration.

    gated: its feed-forward layers have three matrices instead of two. experts: of a layer, 0 in a dense model;
    `intermediate_size` is then one expert's. experts_per_token of them and shared_size more neurons see each token.

    value_bytes: of a weight, an activation and a value of the KV cache. quantization: engines hold attention and feed-forward
    layers in one byte a parameter ("int8", "fp8"). In fp8 vLLM quantises experts too. Embeddings, output head, norms and routers
    are not quantised. Scales, one for each output of a layer, are not counted.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    vocab_size: int
    tied_embeddings: bool
    head_size: int
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_size: int = 0
    value_bytes: int = BYTES
    quantization: str = "off"

    @classmethod
    def from_config(cls, name: str, config: JsonObject) -> Model:
        """Build from a Hugging Face configuration of a decoder. Raises ValueError naming a missing or wrong field.

        Mixtures of experts are counted as if every layer had experts.
        """
        if wrong := wrong_size(config):
            raise ValueError(f"model {name}: {wrong}")
        config = {**config, **text_part(config)}
        kind = str(config.get("model_type"))

        def size(key: str, default: int = 0) -> int:
            """Return a size, or `default` where the configuration leaves it out and it may. Zero experts are no experts."""
            value = next((config[field] for field in SIZES[key] if config.get(field) is not None), default or None)
            if (value is None and key in OPTIONAL) or (value == 0 and "expert" in key):
                return 0
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ValueError(f"model {name}: `{SIZES[key][0]}` must be a positive integer in its configuration, not {str(value)[:60]}")
            return value

        hidden = size("hidden")
        inner = size("intermediate", 4 * hidden if kind in TWO_MATRICES else 0)
        heads, experts = size("heads"), size("experts")
        shares_kv = kind in ONE_KV_HEAD and config.get("multi_query", True) and not config.get("new_decoder_architecture")
        if not (head_size := size("head")) and hidden < heads:
            raise ValueError(f"model {name}: `hidden_size` {hidden} is smaller than its {heads} `num_attention_heads`")
        return cls(
            name,
            hidden,
            size("expert", inner) if experts else inner,
            size("layers"),
            heads,
            1 if shares_kv else size("kv_heads") or heads,
            size("vocabulary"),
            ties_ends(config),
            head_size or hidden // heads,
            gated=kind not in TWO_MATRICES,
            experts=experts,
            experts_per_token=min(size("experts_per_token", 1), experts),
            shared_size=size("shared_expert") if experts else 0,
        )

    def _products(self, experts: float) -> float:
        """Return the parameters of attention and feed-forward in all layers with this many experts in each (biases left out)."""
        attention = self.hidden_size * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        inner = experts * self.intermediate_size + self.shared_size if self.experts else self.intermediate_size
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden_size * inner)

    def _layers(self, experts: float) -> float:
        """Return the parameters of all layers with this many experts in each (biases of a few thousand left out)."""
        return self._products(experts) + self.layers * self.hidden_size * (self.experts + 2)

    def _quantised(self, experts: float) -> float:
        """Return how many of these parameters engines hold in one byte."""
        if self.quantization == "off":
            return 0
        return self._products(experts if self.quantization == "fp8" else 0)

    def _read_bytes(self, experts: float) -> float:
        """Return the weight bytes that a decode step reads with this many experts in each layer."""
        read = self._layers(experts) + self.vocab_size * self.hidden_size
        return self.value_bytes * read - (self.value_bytes - 1) * self._quantised(experts)

    @cached_property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers: attention, feed-forward, router and norms."""
        return int(self._layers(self.experts))

    @cached_property
    def active_parameters(self) -> int:
        """Return the parameters of all layers that one token is multiplied with."""
        return int(self._layers(self.experts_per_token))

    @cached_property
    def parameters(self) -> int:
        return self.layer_parameters + self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        return self.value_bytes * self.parameters

    @property
    def quantised_parameters(self) -> int:
        """Return the parameters that engines hold in one byte."""
        return int(self._quantised(self.experts))

    @property
    def engine_bytes(self) -> int:
        """Return the bytes of the weights in an engine. `weight_bytes` are those that a trainer holds and sends."""
        return self.weight_bytes - (self.value_bytes - 1) * self.quantised_parameters

    @property
    def read_bytes(self) -> int:
        """Return the weight bytes that a full decode step reads: all but the input embedding, of which it reads a row per sequence."""
        return int(self._read_bytes(self.experts))

    def step_read_bytes(self, running: float) -> float:
        """Return the weight bytes that a decode step with `running` sequences reads: of the experts those that some token is sent to.

        Tokens are taken to choose experts evenly and independently.
        """
        if not self.experts:
            return self.read_bytes
        return self._read_bytes(self.experts * (1 - (1 - self.experts_per_token / self.experts) ** running))

    @property
    def flops_per_token(self) -> float:
        """Return the forward FLOPs of one token without attention over the context: 2 per multiplying parameter (arXiv 2001.08361)."""
        return 2.0 * (self.active_parameters + self.vocab_size * self.hidden_size)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.value_bytes * self.layers * self.kv_heads * self.head_size

    def kv_bytes(self, width: int) -> float:
        """Return the bytes of KV of a token on all of `width` devices. More devices than KV heads hold copies."""
        return self.kv_bytes_per_token * max(1.0, width / self.kv_heads)

    @property
    def activation_bytes_per_token(self) -> float:
        """Return the bytes that one token moves besides weights and KV.

        Each matrix product's input and output count once. The logits count three times in float32: written, read for
        the maximum, read for the probabilities.
        """
        inner = self.experts_per_token * self.intermediate_size + self.shared_size if self.experts else self.intermediate_size
        layer = 2 * self.value_bytes * (2 * self.hidden_size + (self.heads + 2 * self.kv_heads) * self.head_size + 2 * inner)
        return self.layers * layer + 12.0 * self.vocab_size
