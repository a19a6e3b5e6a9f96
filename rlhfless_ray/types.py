"""The data types that stages and processes exchange, in the order in which they pass through the loop.

    Prompt → Forecast → Plan → Request → Completion → Sample → Scored → Trained → Batch → UpdateStats → WeightVersion

The `Step` that collects them, its plan and its prefix KV are in the folder `step/`. All of them are frozen: a stage returns new values.
Arrays are numpy. Nothing here imports ray, torch or vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlhfless_ray.common.json_types import JsonObject

UNFINISHED = "cut"  # finish reason of a response that goes on in the next step


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt. It travels as a reference to its encoded bytes, and who needs its pixel values makes them once."""

    digest: str  # of its encoded bytes
    grid: tuple[int, int]  # rows and columns of its tokens
    content: Any = field(compare=False, repr=False)  # its encoded bytes, or from the start of a run on the ray.ObjectRef of them
    offset: int = 0  # place of its first token in the prompt

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """What its pixel values depend on."""
        return self.digest, self.grid


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be answered."""

    index: int  # row in the data set: stable over epochs, key of the length history
    text: str  # what the policy sees, with the template applied
    token_ids: tuple[int, ...]
    row: JsonObject = field(default_factory=dict)  # the raw columns, for the reward function
    cut_tokens: int = 0  # tokens cut off its left, which `text` still has
    pictures: tuple[PromptImage, ...] = ()  # in the order of their places


class SampleId(NamedTuple):
    """The name of a response, from its request to the end of its training. It says where the response belongs, never where it is."""

    row: int  # of its prompt in the data set
    begun_step: int
    number: int  # among the responses to this row that began in this step
    branch: int = 0  # of an agent's episode that has several

    def group(self, count: int) -> SampleId:
        """Return the name that the responses of a group share: that of its first one. `count`: responses of a group."""
        return self._replace(number=self.number - self.number % count, branch=0)


UNNAMED = SampleId(-1, -1, -1)


@dataclass(frozen=True)
class Request:
    """One response to generate. The sampled tokens depend only on these fields and the weights, not on engines or cuts.

    `generated` holds the tokens so far; every other field describes the whole response.
    """

    key: int  # position in the rollout, by which driver and engines name it
    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    generated: tuple[int, ...] = ()  # the response's first tokens, if another engine or step began it
    awaited: bool = False  # whether its end is reported at once instead of with the next interval
    stop: tuple[str, ...] = ()  # stop words: the token that completes one in the text ends the response
    stop_token_ids: tuple[int, ...] = ()  # in addition to those that end every response
    top_p: float = 1.0  # total probability of the most likely tokens that are sampled from; not used for greedy requests
    top_k: int = 0  # number of the most likely tokens that are sampled from, before top_p; 0: all; not used for greedy requests
    min_tokens: int = 0  # nothing ends the response before this many tokens
    cache_version: int | None = None  # weight version that names the KV of its context; None: the engine's
    id: SampleId = UNNAMED  # of the response, or of the episode of which it is a turn
    pictures: tuple[PromptImage, ...] = ()  # of its prompt


@dataclass(frozen=True)
class Completion:
    """What an engine generated for one request."""

    key: int  # of its request in the rollout that ended it
    token_ids: np.ndarray  # (length,) int32, with the end-of-sequence token if it was sampled
    logprobs: np.ndarray  # (length,) float32, of the sampling distribution: temperature, top-k and top-p applied, before the sampling noise
    finish_reason: str  # "stop": it ended by itself; "length": it reached max_tokens; UNFINISHED: it goes on in the next step
    version: int  # weight version of the last token
    versions: tuple[tuple[int, int], ...] = ()  # (version, tokens) in order; () means a single version
    # of an agent's unfinished episode: context, number of tokens and finish reason of each turn of the policy so far
    turns: tuple[tuple[tuple[int, ...], int, str], ...] = ()
    # (tokens of prompt and response, less the last one, routers, experts per token) uint8: the experts that the routers of the last engine
    # chose for each token; None if they are not recorded
    experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.versions:
            object.__setattr__(self, "versions", ((self.version, len(self.token_ids)),))


@dataclass(frozen=True)
class Sample:
    """A completion with its prompt and its text.

    Examples:
        >>> done = Completion(0, np.array([7, 2], np.int32), np.array([-0.1, -0.2], np.float32), "stop", 4)
        >>> Sample(Prompt(5, "1+1=", (3, 9, 3)), SampleId(5, 1, 0), done, "2").total_tokens
        5
    """

    prompt: Prompt
    id: SampleId
    completion: Completion
    text: str = ""
    action_mask: np.ndarray | None = None  # (length,) bool: True for tokens of the policy, False for feedback; None: all are the policy's
    turns: tuple[tuple[str, str], ...] = ()  # of an agent's sample: ("policy" or "agent", text); () without an agent

    @property
    def written_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return len(self.completion.token_ids) if self.action_mask is None else int(self.action_mask.sum())

    @property
    def total_tokens(self) -> int:
        """Number of tokens of prompt and response together."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class Scored(Sample):
    """A sample with its reward."""

    reward: float | None = None  # None: it could not be computed, see `error`
    error: str | None = None
    score: float | None = None  # in [0, 1], for dynamic filtering; None: the reward serves as the score
    extra_logs: Mapping[str, float] = field(default_factory=dict)  # values that the reward function adds to the log
    branches: tuple[Scored, ...] = ()  # further sequences of an agent's episode, which are learned with its advantage


@dataclass(frozen=True)
class Trained(Scored):
    """A scored sample with its advantage."""

    advantage: float | None = None  # None: the sample has no reward, so it is not part of the update
    earned: float | None = None  # reward after penalties, baseline and clip, with the tokens' KL if it is part of the reward
    penalized: float | None = None  # reward after length penalties only


@dataclass(frozen=True)
class Group:
    """The responses to one prompt, which may outlive a step with `rollout.partial`."""

    prompt: Prompt
    begun: int  # step
    first_sample: int = 0  # number of its first sample: not 0 if the prompt was begun twice in that step
    samples: tuple[Sample, ...] = ()  # those that have begun, unfinished ones with the tokens so far

    def ids(self, count: int) -> list[SampleId]:
        """Return the names of its `count` responses."""
        return [SampleId(self.prompt.index, self.begun, self.first_sample + n) for n in range(count)]


@dataclass(frozen=True)
class EngineStep:
    """One decode step of an engine, to which the speed model is fitted."""

    running: int  # sequences in the step
    new_tokens: int  # tokens computed in the step, prompt tokens included, drafted tokens not
    context_tokens: int  # tokens in the contexts of the running sequences
    seconds: float
    drafted: int = 0  # drafted tokens that the step verified
    accepted: int = 0  # of these, the tokens that were drawn
    draft_s: float = 0.0  # of `seconds`: for looking up drafts
    by_model: tuple[int, int] = (0, 0)  # the part of `drafted` and of `accepted` that a drafter model has drafted
    work_s: float = 0.0  # without `draft_s`: of the processor, where an engine is one thread on CPU, else of the clock

    @property
    def token_s(self) -> float:
        """Average seconds per token of a sequence in this step. Without drafts this is the step's duration."""
        return self.seconds * self.running / (self.running + self.accepted) if self.accepted else self.seconds


@dataclass(frozen=True)
class Span:
    """An interval of an instance's activity, on its wall clock (seconds since the epoch)."""

    activity: str  # "start", "work", "transfer", "idle"
    what: str
    from_s: float
    to_s: float


@dataclass(frozen=True)
class Fetched:
    """The result of fetching bundles: loaded pages, failures by reason, and the time it took."""

    pages: int = 0
    bytes: int = 0
    lost: int = 0  # bundles whose owner or node is gone, whose computation failed, or that arrived too late
    foreign: int = 0  # pages of another model, dtype, block size or version
    damaged: int = 0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Prefilled:
    """The result of a prefill job: tokens computed, pages returned, and seconds spent copying pages in (`load_s`) and out (`save_s`)."""

    tokens: int
    pages: int
    page_bytes: int
    prefill_s: float
    load_s: float
    save_s: float
    fetched: Fetched
    spans: list[Span]


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of one learner update, averaged over the trained tokens of the whole step."""

    loss: float = 0.0
    policy_loss: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clip_share: float = 0.0  # share of tokens whose ratio was clipped
    importance_mean: float = 0.0  # truncated importance weight learner / sampler
    importance_capped_share: float = 0.0  # share of tokens (or of sequences, if whole ones are masked) with a capped weight or left out
    mismatch_mean: float = 0.0  # mean |log p_learner - log p_sampler| over tokens, both at the sampler's weights
    mismatch_max: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    trained_tokens: int = 0
    skipped: int = 0  # optimizer steps skipped because loss or gradient was not finite
    reason: str = ""  # why an optimizer step was skipped
    applied: int = 0  # optimizer steps that were not skipped
    skipped_last: int = 0  # skipped optimizer steps after the last applied one
    ppo_kl: float = 0.0  # log p_old - log p of the policy; p_old: before the step's first optimizer step
    sampler_kl: float = 0.0  # log p_sampler - log p_old
    reference_gap: float = 0.0  # log p - log p_reference, or log p_old - log p_reference if the KL is part of the reward
    next_learning_rate: float = 0.0  # of the optimizer step that follows this update
    last_grad_norm: float = 0.0  # before clipping, of the last optimizer step
    router_balance: float = 0.0  # the routers' auxiliary loss before its weight, where there is one
    effective_share: float = 0.0  # effective sample size of the tokens' importance weights p_old / p_sampler, as a share of the tokens
    kl_by_lag: dict[int, float] = field(default_factory=dict)  # KL(version that drew a token ‖ weights before the update), by lag


@dataclass(frozen=True)
class CriticStats:
    """Statistics of one update of the critic, averaged over the trained tokens."""

    loss: float = 0.0
    value_mean: float = 0.0  # before each optimizer step
    return_mean: float = 0.0
    clip_share: float = 0.0  # share of tokens whose clipped error was larger
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    trained_tokens: int = 0
    skipped: int = 0  # as in UpdateStats
    reason: str = ""
    applied: int = 0
    skipped_last: int = 0


BASE = -1  # version number of the weights below adapters, which do not change


@dataclass(frozen=True)
class WeightVersion:
    """The weights of one version, checked by checksum when they are loaded."""

    version: int
    shards: tuple[Any, ...]  # ray.ObjectRef of each shard, a `Slices`; return values owned by the driver outlive their ranks
    checksum: int = 0
    nodes: tuple[str, ...] = ()  # id of each shard's node, empty for the driver's; none: all shards are there
    copies: tuple[Any, ...] = ()  # shards on the driver's node, which survive the loss of `nodes`
    digests: Any = None  # ray.ObjectRef of {name: digest}, by which a receiver names a damaged tensor
    base: Any = None  # ray.ObjectRef of the files of the model that the weights adapt, or of where to map them; None: they are whole
    others: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # {node id: all shards once more, for receivers on this node}

    def shards_for(self, node: str) -> tuple[Any, ...]:
        """Return the shards that a receiver on this node pulls."""
        return self.others.get(node, self.shards)
