"""The multi-turn loop, over any `generate`: observation → action → feedback → action …"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhfless_ray.reward.values import unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# parameters that define the sampling distribution, with the values that leave it unchanged
SAMPLING_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
# parameters that engines do not support here, with the values that have no effect
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "n": (None, 1),
    "ignore_eos": (None, False),
    "logits_processors": (None, []),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "trace_decode_token_ids": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "watermarking": (None, False),
}


class AgentError(Exception):
    """An agent's violation of the contract. Its message becomes the sample's error."""


async def play(
    agent: Any,
    prompt: str,
    label: object,
    sampling_params: Any,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
    llm_engine: Any,
    *,
    max_turns: int | None = None,
) -> dict[str, Any]:
    """Play one episode of an agent with `reset` and `step`. Returns the dict of OpenRLHF's executors.

    Each turn may use the rest of `max_length` tokens. The episode ends when the agent is done or tokens or turns are used up.
    Rewards of the turns are added; of scores and extra_logs the last ones are kept. Feedback is tokenized separately and
    appended.

    Raises AgentError for a first observation that leaves no room (it is never truncated), an invalid result, and sampling
    parameters that change the distribution that is trained.
    """
    text = await _first_observation(agent, prompt, label)
    tokens = _tokens(tokenizer, text)
    if not 0 < len(tokens) < max_length:
        raise AgentError(f"the first observation has {len(tokens)} tokens, which leaves no room for an action within {max_length}")
    given, sampling_params = sampling_params, deepcopy(sampling_params)
    transcript = _Transcript(text, tokens, logprobs=None if sampling_params.logprobs is None else [0.0] * len(tokens))
    while len(transcript.tokens) < max_length and (max_turns is None or len(transcript.ranges) < max_turns):
        turn = f"turn {len(transcript.ranges) + 1}"
        sampling_params.max_tokens = max_length - len(transcript.tokens)
        answer = await llm_engine.generate(transcript.tokens, deepcopy(sampling_params))
        action = answer.outputs[0]
        state = {"observation_text": transcript.text, "action_text": action.text, "label": label, "sampling_params": sampling_params}
        result = await _awaited(agent.step(state))
        feedback, done = _check_result(result, turn)
        transcript.add_rewards(result, turn)
        transcript.add_turn(action, feedback, _tokens(tokenizer, feedback) if feedback else [])
        if result.get("sampling_params") is not None:
            sampling_params = deepcopy(result["sampling_params"])
        _check_distribution(given, sampling_params, turn)
        sampling_params.logprobs = given.logprobs
        if done:
            break
    return {
        "prompt": prompt,
        "label": label,
        "observation_tokens": transcript.tokens,
        "action_ranges": transcript.ranges,
        "rollout_log_probs": transcript.logprobs,
        "truncated": transcript.truncated,
        "reward": transcript.reward,
        "scores": transcript.score,
        "extra_logs": transcript.logs,
    }


@dataclass
class _Transcript:
    """The text and tokens of an episode so far, and what the agent said of them."""

    text: str
    tokens: list[int]
    logprobs: list[float] | None  # of every token, 0 for those that the policy has not written
    ranges: list[tuple[int, int]] = field(default_factory=list)  # of each action's tokens
    reward: float = 0.0
    score: float | None = None
    logs: Any = field(default_factory=dict)
    truncated: bool = False

    def add_rewards(self, result: Mapping[str, object], turn: str) -> None:
        self.reward += _number(result["rewards"], "rewards", turn)
        self.score = self.reward if result.get("scores") is None else _number(result["scores"], "scores", turn)
        self.logs = result.get("extra_logs") or {}

    def add_turn(self, action: Any, feedback: str, feedback_ids: list[int]) -> None:
        written = [int(token) for token in action.token_ids]
        self.ranges.append((len(self.tokens), len(self.tokens) + len(written)))
        self.truncated = action.finish_reason == "length"
        self.text = self.text + action.text + feedback
        self.tokens = [*self.tokens, *written, *feedback_ids]  # another list, because the engine may still hold the last one
        if self.logprobs is not None:
            self.logprobs += [at[token].logprob for token, at in zip(written, action.logprobs, strict=True)]
            self.logprobs += [0.0] * len(feedback_ids)


async def _first_observation(agent: Any, prompt: str, label: Any) -> str:
    reset = await _awaited(agent.reset({"observation": prompt, "label": label}))
    if not isinstance(reset, Mapping) or not isinstance(reset.get("observation"), str):
        raise AgentError("`reset` must return a dict with the text `observation`")
    return reset["observation"]


async def _awaited(result: object) -> Any:
    """Await a coroutine, and return plain values as they are."""
    return await result if inspect.isawaitable(result) else result


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _check_result(result: object, turn: str) -> tuple[str, bool]:
    if not isinstance(result, Mapping):
        raise AgentError(f"{turn}: `step` returned {type(result).__name__}, not a dict")
    for key in ("rewards", "environment_feedback", "done"):
        if key not in result:
            raise AgentError(f"{turn}: `step` returned a dict without `{key}` (its keys: {', '.join(f'`{k}`' for k in result)})")
    if result.get("environment_images"):
        raise AgentError(f"{turn}: `step` returned images, which this runtime does not support")
    feedback = result["environment_feedback"] or ""
    if not isinstance(feedback, str):
        raise AgentError(f"{turn}: `environment_feedback` is {type(feedback).__name__}, not text")
    return feedback, bool(unwrap(result["done"]))


def _number(value: object, name: str, turn: str) -> float:
    value = unwrap(value)
    if not isinstance(value, (int, float)):
        raise AgentError(f"{turn}: `{name}` is {type(value).__name__} {value!r:.100}, not a number")
    return float(value)


def _check_distribution(given: object, changed: object, turn: str) -> None:
    """Raise AgentError if the sampling distribution changed. Limits and stop strings may change between turns."""
    for name, defaults in SAMPLING_DEFAULTS.items():
        before, after = (None if (k := getattr(one, name, None)) in defaults else k for one in (given, changed))
        if before != after:
            raise AgentError(
                f"{turn}: `sampling_params` with another {name} ({after} instead of {before}); keep the recipe's, which the policy is "
                "trained with"
            )


def check_sampling(given: object, requested: object) -> None:
    """Check an agent's sampling parameters.

    Raises AgentError for another distribution than the recipe's, and for parameters that engines do not support. No parameter
    is ignored.
    """
    _check_distribution(given, requested, "generate")
    for name, defaults in UNSUPPORTED.items():
        if (value := getattr(requested, name, None)) not in defaults:
            raise AgentError(f"generate: `sampling_params` with {name}={value!r:.100}, which is not supported here; leave it out")


def stop_conditions(requested: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return stop strings and stop token ids. Raises AgentError if they are invalid."""
    words, tokens = getattr(requested, "stop", None) or (), getattr(requested, "stop_token_ids", None) or ()
    words = (words,) if isinstance(words, str) else tuple(words)
    if not all(isinstance(word, str) and word for word in words):
        raise AgentError(f"generate: `sampling_params` with stop={words!r:.100}, which must be strings")
    try:
        return words, tuple(int(token) for token in tokens)
    except (TypeError, ValueError):
        raise AgentError(f"generate: `sampling_params` with stop_token_ids={tokens!r:.100}, which must be token ids") from None


def min_tokens_of(requested: object) -> int:
    """Return the minimum length of a turn in tokens. Raises AgentError if it is not a count."""
    value = getattr(requested, "min_tokens", None) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise AgentError(f"generate: `sampling_params` with min_tokens={value!r:.100}, which must be a number of tokens")
    return value
