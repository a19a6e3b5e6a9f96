"""The policy as the learner runs it: token ids in, log-probabilities of the response tokens out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.logprobs import chunked_logprobs, nucleus_logprobs
from rlhfless_ray.learn.packing import Rows

INPUTS = ("ids", "rows", "columns", "segments", "targets")  # of `padded`'s tensors, the first arguments of `TokenLogprobs`


def hidden_states(model: Any, ids: Tensor, segments: Tensor | None) -> Tensor:
    """Return a causal LM's last hidden states, (rows, length, width).

    Args:
        ids: (rows, length), padded on the right.
        segments: (rows, length): 0 for a row's prompt, k for its k-th response, which sees the prompt and itself, and whose positions
            follow the prompt's, -1 for padding. None: every row is one sequence. Then there is no mask: a causal model never looks
            at padding on the right from a real token.
    """
    if segments is None:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    places = torch.arange(ids.shape[1], device=ids.device)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = torch.where(begins, places, 0).cummax(1).values  # of each token's segment
    prompts = (segments == 0).sum(1, keepdim=True)
    positions = places - starts + torch.where(segments > 0, prompts, 0)
    seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    seen &= places[None, None, :] <= places[None, :, None]
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=ids.device).masked_fill_(~seen, torch.finfo(model.dtype).min)
    # of the model's type: from a bool mask every layer would make one of its own, and keep it for the backward pass
    return model.base_model(input_ids=ids, attention_mask=mask[:, None], position_ids=positions, use_cache=False).last_hidden_state


class TokenLogprobs(nn.Module):
    """A causal LM whose forward pass gives log-probabilities of given next tokens, at the sampling temperature.

    The head runs on the response positions only, a few at a time: over a large vocabulary the logits are the largest tensor
    there is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(
        self, ids: Tensor, rows: Tensor, columns: Tensor, segments: Tensor | None, targets: Tensor, temperature: float, top_p: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """ids (rows, length), padded on the right; rows, columns, targets (tokens,): the position before each
        response token and the token itself; segments: see `hidden_states`. Returns log-probabilities and entropies, both (tokens,)
        float32. With `top_p` below 1 log-probabilities are those of the nucleus, without gradient, and there are no entropies (0).
        """
        hidden = hidden_states(self.model, ids, segments)[rows, columns]
        head, vocabulary = output_head(self.model), self.model.config.get_text_config().vocab_size
        if top_p < 1:
            logprobs = nucleus_logprobs(head, hidden, targets, temperature, top_p)
            return logprobs, torch.zeros_like(logprobs)
        return chunked_logprobs(head, hidden, targets, vocabulary, temperature)


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
        """`model`: of a class for sequence classification with one label; its head is called on the tokens asked for. A value is
        (head - mean) / deviation, in passes and in training alike, so the loss is in the units of normalized rewards."""
        super().__init__()
        self.model: Any = model
        self.mean, self.deviation = mean, deviation

    def forward(self, ids: Tensor, rows: Tensor, columns: Tensor, segments: Tensor | None = None) -> Tensor:
        """Arguments as in `TokenLogprobs`. Values (tokens,) float32."""
        hidden = hidden_states(self.model, ids, segments)[rows, columns]
        return (self.model.score(hidden).float().squeeze(-1) - self.mean) / self.deviation


def load_model(folder: Path, dtype: str, trust_remote_code: bool) -> Any:
    """A causal LM from a Hugging Face folder, dropout off (sampler and learner must compute the same policy)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, local_files_only=True
    )
    return as_sampled(model)


def load_critic(folder: Path, dtype: str, trust_remote_code: bool, value_head: str, seed: int) -> Any:
    """A model for sequence classification with one label, whose head gives values, from the folder of any causal LM, reward
    model or critic.

    The head's weights are those the folder has under the name that its config.json calls `value_head_prefix`, as OpenRLHF writes it,
    or else under `value_head`; where it has none they are drawn, from a normal distribution of deviation 1 / (width + 1).
    Raises UserError where the architecture has no such class.
    """
    from transformers import AutoModelForSequenceClassification

    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            num_labels=1,
            output_loading_info=True,
        )
    except ValueError as error:
        raise UserError(f"critic.path: {one_line(error, 200)}") from None
    if not isinstance(getattr(model, "score", None), nn.Module):
        raise UserError(f"critic.path: {type(model).__name__} has no scalar head called `score`, so it cannot be a critic yet")
    value_head = getattr(model.config, "value_head_prefix", None) or value_head
    others = set(found["missing_keys"]) - {"score.weight", "score.bias"}
    if others:
        raise UserError(f"critic.path: the folder has no weights for {sorted(others)[0]}")
    if value_head != "score" or "score.weight" in found["missing_keys"]:
        weight = _stored(folder, f"{value_head}.weight")
        with torch.no_grad():
            if weight is None:
                width = model.score.weight.shape[1]
                drawn = torch.empty(model.score.weight.shape).normal_(0, 1 / (width + 1), generator=torch.Generator().manual_seed(seed))
                model.score.weight.copy_(drawn)
            else:
                model.score.weight.copy_(weight)
    return as_sampled(model)


def _stored(folder: Path, name: str) -> Tensor | None:
    """One tensor of a model folder, None where it has no such tensor."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118, it is no dict
                return tensors.get_tensor(name)
    return None


def as_sampled(model: Any) -> Any:
    """Change a model in place so that it computes what engines do: without dropout, and with caps of attention scores.

    transformers' SDPA attention leaves such a cap (Gemma 2) out without an error; its eager one applies it.
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
    """Inside, what every decoder layer puts out has relative noise as large as its type rounds: what rounding may do to the result.
    The same in every pass."""
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
    """Raises UserError when the model does more to its logits than `output_head`: `TokenLogprobs` would train another policy than the
    one that is sampled.

    The head's outputs are amplified meanwhile: a soft cap leaves the small logits of a policy that is nearly uniform as they are.
    """
    ids = torch.arange(8)[None] % model.config.vocab_size
    head, training = model.get_output_embeddings(), model.training
    model.eval()
    hook = head.register_forward_hook(lambda module, inputs, output: output * AMPLIFIED)
    try:
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits.float()
            ours = output_head(model)(model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
    finally:
        hook.remove()
        model.train(training)
    if whole.shape != ours.shape or not torch.allclose(whole, ours, rtol=0.02, atol=0.02 * float(whole.std())):
        raise UserError(
            f"policy.path: {type(model).__name__} changes its logits after the output head in a way that the learner does not "
            "know; take another model"
        )


def padded(batch: Batch, rows: Sequence[np.ndarray], device: torch.device) -> dict[str, Any]:
    """Tensors of one micro-batch for `TokenLogprobs`, with the flat position of each token in `batch.logprobs`.

    `rows`: indices of each row's sequences, which begin with the same prompt.

    ids (rows, longest), segments (rows, longest) or None, see `hidden_states`; rows, columns, targets, flat (response tokens,),
    sequence (response tokens,): the sequence's index in the batch. Of responses these are the tokens that the policy wrote; all
    others are in `ids` only.
    """
    starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    response_starts = np.concatenate([[0], np.cumsum(batch.response_lengths)])
    written_starts = starts - np.concatenate([[0], np.cumsum(batch.prompt_lengths)])  # in the mask
    longest = max(int(batch.lengths[row].sum() - batch.prompt_lengths[row[1:]].sum()) for row in rows)
    ids, segments = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -1, np.int32)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("rows", "columns", "targets", "flat", "sequence")}
    for number, row in enumerate(rows):
        prompt = int(batch.prompt_lengths[row[0]])
        ids[number, :prompt] = batch.tokens[starts[row[0]] : starts[row[0]] + prompt]
        segments[number, :prompt] = 0
        end = prompt
        for k, i in enumerate(row, 1):
            start, end = end, end + int(batch.lengths[i]) - prompt
            ids[number, start:end] = batch.tokens[starts[i] + prompt : starts[i + 1]]
            segments[number, start:end] = k
            places = np.arange(start, end)
            if batch.mask is not None:
                places = places[batch.mask[written_starts[i] : written_starts[i + 1]]]
            found["rows"].append(np.full(len(places), number))
            # where each token is foreseen: that of every response's first token is the prompt's end
            found["columns"].append(np.where(places == start, prompt, places) - 1)
            found["targets"].append(ids[number, places])
            found["flat"].append(np.arange(response_starts[i], response_starts[i + 1]))
            found["sequence"].append(np.full(len(places), i))
    tensors: dict[str, Any] = {name: torch.from_numpy(np.concatenate(parts)).to(device) for name, parts in found.items()}
    shared = any(len(row) > 1 for row in rows)
    segmented = torch.from_numpy(segments).to(device) if shared else None
    return {**tensors, "ids": torch.from_numpy(ids).to(device), "segments": segmented}


def passed(forward: Callable[[dict[str, Any]], Tensor], batch: Batch, cuts: Sequence[Rows], device: torch.device) -> Tensor:
    """What `forward` says of each response token, for the sequences of these micro-batches; 0 of all others: (Σ response length,)
    float32. It is called once for each of them, also where one is empty: with several ranks the others wait for its collectives."""
    flat = torch.zeros(len(batch.logprobs), device=device)
    with torch.no_grad():
        for cut in cuts:
            tensors = padded(batch, cut or [np.arange(1)], device)
            found = forward(tensors)
            if cut:
                flat[tensors["flat"]] = found
    return flat
