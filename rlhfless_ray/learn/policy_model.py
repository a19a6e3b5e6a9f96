"""The policy as the learner runs it: token ids in, log-probabilities of the response tokens out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.learn.image_inputs import seen_images
from rlhfless_ray.learn.logprobs import chunked_distillation, chunked_logprobs, nucleus_logprobs, tokens_per_chunk
from rlhfless_ray.learn.micro_batch_tensors import attention_mask
from rlhfless_ray.learn.router_replay import RouterReplay
from rlhfless_ray.vision.image_processor import reads_images
from rlhfless_ray.weights.model_folder import DividedFiles, as_folder, stored_dtype, stored_tensors
from rlhfless_ray.weights.quantized_base import has_4_bits
from rlhfless_ray.weights.saved_names import unconverted_names
from rlhfless_ray.weights.tensor_file import Files

WANTED_DTYPE = "wanted_dtype"  # attribute of a parameter that is to be converted when it is copied


class TokenLogprobs(nn.Module):
    """A causal LM whose forward pass returns log-probabilities of given next tokens, at the sampling temperature.

    The head runs on the response positions only, a few at a time: with a large vocabulary the logits would be the largest tensor.
    """

    def __init__(self, model: nn.Module, balances: bool = False, replays: bool = False) -> None:
        """`balances`: whether training passes return the routers' auxiliary loss too, see `router_loss`. `replays`: whether routers choose
        the experts of `tensors`."""
        super().__init__()
        self.model: Any = model
        self.balances = balances
        self.replay = RouterReplay(model) if replays else None

    def forward(self, temperature: float, top_p: float = 1.0, top_k: int = 0, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropies, both (tokens,) float32. With `top_p` below 1 or `top_k` log-probabilities are those of
        the tokens that are left, without gradient, and there are no entropies (0). `tensors`: see `micro_batch_tensors.padded`."""
        balances = self.balances and torch.is_grad_enabled()
        if self.replay is not None:
            self.replay.begin_pass(tensors.get("experts"))
        outputs = base_outputs(self.model, tensors, **({"output_router_logits": True} if balances else {}))
        hidden, head, targets = at_tokens(outputs, tensors), output_head(self.model), tensors["targets"]
        if top_p < 1 or top_k:
            logprobs = nucleus_logprobs(head, hidden, targets, temperature, top_p, top_k)
            return logprobs, torch.zeros_like(logprobs)
        size, calls = head_chunks(self.model, len(targets))
        log = chunked_logprobs(head, hidden, targets, size, temperature, calls)
        return (*log, router_loss(self.model, outputs.router_logits, tensors["seen"])) if balances else log


class TokenDistillation(nn.Module):
    """A causal LM and a teacher with the same vocabulary. The teacher's weights are not parameters of this module."""

    def __init__(self, model: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.teachers: tuple[Any, ...] = (teacher,)  # a tuple hides it from parameters()

    def forward(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, and cross-entropies between the teacher's and the model's distribution, both (tokens,) float32."""
        (teacher,) = self.teachers
        with torch.no_grad():
            taught = hidden_states(teacher, tensors)
        hidden, targets = hidden_states(self.model, tensors), tensors["targets"]
        chunks = head_chunks(self.model, len(targets))
        return chunked_distillation(output_head(self.model), hidden, targets, output_head(teacher), taught, *chunks)


class TokenLogits(nn.Module):
    """A causal LM whose forward pass returns logits of some tokens at given positions."""

    def __init__(self, model: nn.Module, tokens: list[int] | None) -> None:
        """`tokens`: token ids whose logits are returned; None: all."""
        super().__init__()
        self.model: Any = model
        self.tokens = tokens

    def forward(self, **tensors: Tensor) -> Tensor:
        """Return logits (tokens, reward tokens) float32."""
        logits = output_head(self.model)(hidden_states(self.model, tensors))
        return (logits if self.tokens is None else logits[:, self.tokens]).float()


def hidden_states(model: Any, tensors: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states (tokens, width) from which a micro-batch's response tokens are predicted."""
    return at_tokens(base_outputs(model, tensors), tensors)


def at_tokens(outputs: Any, tensors: dict[str, Tensor]) -> Tensor:
    return outputs.last_hidden_state[tensors["rows"], tensors["columns"]]


def base_outputs(model: Any, tensors: dict[str, Tensor], **more: object) -> Any:
    """Return the outputs of the model without its head for the rows of a micro-batch. `more`: further arguments.

    Without segments there is no attention mask: a causal model never looks at the padding, on the right, from a real token. With
    `lengths` its attention must be that of `packed_attention`.
    """
    segments, mask = tensors.get("segments"), None
    if "lengths" in tensors:
        lengths = more["row_lengths"] = tensors["lengths"].tolist()
        if segments is not None:
            more["row_masks"] = [attention_mask(part, model.dtype) for part in segments.split(lengths, dim=1)]
    elif segments is not None:
        mask = attention_mask(segments, model.dtype)
    positions, base = tensors.get("positions"), without_head(model)
    with seen_images(base, tensors) as images:
        return base(input_ids=tensors["ids"], attention_mask=mask, position_ids=positions, use_cache=False, **images, **more)


def without_head(model: Any) -> Any:
    """Return the part of a model below its head. Llama 4's class names another attribute for it than it has."""
    return model.model if model.base_model is model else model.base_model


def router_loss(model: Any, router_logits: tuple[Tensor, ...], seen: Tensor) -> Tensor:
    """Return the load-balancing loss of a mixture of experts, as transformers computes it (arXiv 2101.03961, eq. 4).

    `seen` (rows, length): False for padding.
    """
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    return balance(router_logits, experts, config.num_experts_per_tok, seen)


def head_chunks(model: Any, tokens: int) -> tuple[int, int]:
    """Return for how many tokens the output head computes at once, and how often each rank calls it. `tokens`: of this rank.

    With ZeRO 3 each call gathers the head's weights from all ranks, so every rank makes as many as the one with the most tokens.
    """
    size = tokens_per_chunk(model.config.get_text_config().vocab_size)
    calls = torch.tensor(-(-tokens // size))
    if any(hasattr(parameter, "ds_id") for parameter in model.get_output_embeddings().parameters()):
        calls = calls.to(model.device)
        torch.distributed.all_reduce(calls, torch.distributed.ReduceOp.MAX)
    return size, int(calls)


def output_head(model: Any) -> Callable[[Tensor], Tensor]:
    """Return hidden states → logits: the model's output head, and the scale and soft cap that some families apply after it.

    Gemma 2 caps logits, c·tanh(x/c) (arXiv 2408.00118, section 2); Granite divides them and Cohere multiplies them by a constant.
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    if cap is None and scale == divisor == 1:
        return head

    def changed(hidden: Tensor) -> Tensor:
        logits = head(hidden) * (scale / divisor)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return changed


class TokenValues(nn.Module):
    """A critic: the value before each response token, from a model with a scalar head."""

    def __init__(self, model: nn.Module, mean: float = 0.0, deviation: float = 1.0) -> None:
        """`model`: a model for sequence classification with one label, whose head is called on the requested tokens only.

        A value is (head - mean) / deviation, in passes and in training alike, so the loss is in units of normalized rewards.
        """
        super().__init__()
        self.model: Any = model
        self.mean, self.deviation = mean, deviation

    def forward(self, **tensors: Tensor) -> Tensor:
        """Return values (tokens,) float32."""
        return (self.model.score(hidden_states(self.model, tensors)).float().squeeze(-1) - self.mean) / self.deviation


def load_model(folder: Path, dtype: str, trust_remote_code: bool, setting: str = "policy.path", *, maps: bool = False) -> Any:
    """Load a causal LM from a Hugging Face folder, without dropout, because sampler and learner must compute the same policy.

    `maps`: parameters stay views of the mapped files, in their dtype, and have the attribute WANTED_DTYPE if it is another one.

    Raises UserError, which names `setting`, if transformers cannot, or if weights are missing.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    refusal = f"{setting}: it cannot be loaded as a causal language model"
    kind = AutoModelForImageTextToText if reads_images(json.loads((folder / "config.json").read_bytes())) else AutoModelForCausalLM
    model, missing, mismatched = _load(kind, folder, dtype, trust_remote_code, refusal, maps=maps)
    if wrong := sorted(missing | mismatched):
        raise UserError(
            f"{setting}: its weights do not fit its config.json: {wrong[0]} is missing or has another shape for "
            f"{type(model).__name__}; take the folder of a causal language model"
        )
    return as_sampled(model)


@contextmanager
def in_wanted_dtype(model: nn.Module) -> Iterator[None]:
    """Give parameters with WANTED_DTYPE this dtype inside the block, without their values, for what looks at their dtype and shape only."""
    mapped = {p: p.data for p in model.parameters() if hasattr(p, WANTED_DTYPE)}
    for parameter in mapped:
        parameter.data = torch.zeros((), dtype=getattr(parameter, WANTED_DTYPE)).expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, data in mapped.items():
            parameter.data = data


def _load(
    kind: Any, folder: Path, dtype: str, trust_remote_code: bool, refusal: str, *, maps: bool = False, **options: Any
) -> tuple[Any, set[str], set[str]]:
    """Return a model of one of transformers' Auto classes, and the names of its weights that the folder lacks or has in another shape.

    `maps`: see `load_model`. Raises UserError, which begins with `refusal`, if transformers cannot read the folder.
    """
    has_packed = has_4_bits(json.loads((folder / "config.json").read_bytes()))
    if maps and not has_packed and (stored := stored_dtype(folder)) not in (None, dtype):
        assert stored is not None
        model, *wrong = _load(kind, folder, stored, trust_remote_code, refusal, **options)
        wanted, *_ = _load(kind, folder, dtype, trust_remote_code, refusal, device_map="meta", **options)
        for parameter, like in zip(model.parameters(), wanted.parameters(), strict=True):
            setattr(parameter, WANTED_DTYPE, like.dtype)
        model.config.dtype = wanted.config.dtype
        return model, *wrong
    if has_packed:
        from transformers import CompressedTensorsConfig

        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    try:
        model, loading = kind.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except (MemoryError, RuntimeError):
        raise
    except Exception as error:  # libraries raise many types for folders that they cannot read
        raise UserError(f"{refusal}: {one_line(error, 300)}") from None
    missing, mismatched = (
        {key if isinstance(key, str) else key[0] for key in loading[f"{which}_keys"]} for which in ("missing", "mismatched")
    )
    if has_packed:  # scales and shapes stay beside the weights that were computed from them
        for module in model.modules():
            for name in ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"):
                module._parameters.pop(name, None)
    return model, missing, mismatched


def load_divided(model: Files | Path | DividedFiles, load: Callable[[Path], Any]) -> Any:
    """Load a model from its folder or files, from this rank's parts of its tensors if it has them as the files do.

    Experts, for example, are several tensors in a file and one in the model. Others have the same name there and are transposed.
    """
    if isinstance(model, DividedFiles):
        with model.folder() as folder:
            loaded, stored = load(folder), stored_tensors(folder)
        same = unconverted_names(loaded)
        found = {name: name in same and stored.get(name, {}).get("shape") == list(x.shape) for name, x in loaded.named_parameters()}
        found["score.weight"] = True  # see `load_critic`
        if all(found.values()) and not stored.keys() & dict(loaded.named_buffers()):
            return loaded
    with model.folder(whole=True) if isinstance(model, DividedFiles) else as_folder(model) as folder:
        return load(folder)


def load_critic(
    folder: Path, dtype: str, trust_remote_code: bool, value_head: str, seed: int, setting: str = "critic.path", *, maps: bool = False
) -> Any:
    """Load a critic from the folder of any causal LM, reward model or critic. `maps`: see `load_model`.

    The result is a model for sequence classification with one label, whose head gives values. The head's weights have the name in
    config.json's `value_head_prefix`, as OpenRLHF writes it, or else `value_head`. If the folder has none, they are drawn from a
    normal distribution of deviation 1 / (width + 1). Raises UserError, which names `setting`, if the architecture has no such class, or
    if weights are missing or the head gives several values.
    """
    from transformers import AutoModelForSequenceClassification

    model, missing, mismatched = _load(
        AutoModelForSequenceClassification, folder, dtype, trust_remote_code, setting, maps=maps, num_labels=1
    )
    if not isinstance(getattr(model, "score", None), nn.Module):
        raise UserError(f"{setting}: {type(model).__name__} has no scalar head called `score`, so it cannot be a critic yet")
    value_head = getattr(model.config, "value_head_prefix", None) or value_head
    if "score.weight" in mismatched:
        raise UserError(f"{setting}: its head `score` gives several values, but a critic or reward model has one; take another folder")
    others = mismatched | missing - {"score.weight", "score.bias"}
    if others:
        raise UserError(f"{setting}: the folder has no weights for {sorted(others)[0]}, or in another shape than its config.json says")
    if value_head != "score" or "score.weight" in missing:
        head, weight = model.score.weight, _stored(folder, f"{value_head}.weight")
        if weight is None:
            deviation = 1 / (head.shape[1] + 1)
            weight = torch.empty(head.shape).normal_(0, deviation, generator=torch.Generator().manual_seed(seed))
        elif weight.shape != head.shape:
            shape = " × ".join(map(str, weight.shape))
            raise UserError(f"{setting}: its `{value_head}.weight` has the shape {shape}, so it is no scalar head; name another")
        head.data = weight.to(getattr(head, WANTED_DTYPE, head.dtype), copy=True)
    return as_sampled(model)


def scalar_config(model: Any, **scale: float) -> bytes:
    """Return config.json of a model with a scalar head. The head is always named `score`, whatever its name was before.

    `scale`: `mean` and `std` of its outputs, which `output_scale` reads.
    """
    own = {"architectures": [type(model).__name__], "value_head_prefix": "score", **scale}
    return json.dumps({**model.config.to_dict(), **own}, indent=1, default=str).encode()


def _stored(folder: Path, name: str) -> Tensor | None:
    """Return one tensor of a model folder, or None if it has no such tensor."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118, it is no dict
                return tensors.get_tensor(name)
    return None


def as_sampled(model: Any) -> Any:
    """Change a model in place so that it computes the same as engines: without dropout, and with soft caps of attention scores.

    transformers' SDPA attention silently omits such a cap (Gemma 2); its eager attention applies it.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # attention modules keep their own copy of the config's number
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(module, name, 0.0)
    return model


@contextmanager
def rounding_noise(model: Any) -> Iterator[None]:
    """Add relative noise of the size of the dtype's rounding to every decoder layer's output, inside the block.

    This shows how far rounding alone may change the result. The noise is the same in every pass.
    """
    layers: Any = next((module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)), ())
    hooks = []
    for number, layer in enumerate(layers):

        def disturbed(module: nn.Module, inputs: Any, output: Any, number: int = number) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(hidden.device)
            hidden = (hidden.double() * (1 + noise * torch.finfo(hidden.dtype).eps / 2)).to(hidden.dtype)
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        hooks.append(layer.register_forward_hook(disturbed))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


AMPLIFIED = 256.0  # a power of two: exact in every type


def check_head(model: Any) -> None:
    """Raise UserError if the model changes its logits more than `output_head` does.

    `TokenLogprobs` would otherwise train another policy than the sampled one. The check amplifies the head's outputs, because a soft
    cap does not change the small logits of a nearly uniform policy.
    """
    ids = (torch.arange(8)[None] % model.config.get_text_config().vocab_size).to(model.device)
    head, training = model.get_output_embeddings(), model.training
    model.eval()
    hook = head.register_forward_hook(lambda module, inputs, output: output * AMPLIFIED)
    try:
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits.float()
            ours = output_head(model)(without_head(model)(input_ids=ids, use_cache=False).last_hidden_state).float()
    finally:
        hook.remove()
        model.train(training)
    if whole.shape != ours.shape or not torch.allclose(whole, ours, rtol=0.02, atol=0.02 * float(whole.std())):
        raise UserError(
            f"policy.path: {type(model).__name__} changes its logits after the output head in a way that the learner does not "
            "know; take another model"
        )
