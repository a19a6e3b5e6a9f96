"""Recipe sections of policy, rollout, agent and reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.local_path import InputPath, LocalPath
from rlhfless_ray.recipe.pool_sections import PoolConfig
from rlhfless_ray.recipe.rollout_mode import Admission, Boundary, RolloutMode, WeightSwitch
from rlhfless_ray.recipe.section import CountOrAuto, KvSizeOrAuto, NumberOrAuto, OffIsAWord, Section, StopWords, Texts


class PolicyConfig(Section):
    path: InputPath = ""
    """A Hugging Face folder of a causal LM, its URL, such as `s3://bucket/model`, or its name `org/name` on the hub. Empty: a small
    policy is made from scratch for a built-in task."""
    hidden_size: int = Field(128, ge=32, multiple_of=32)
    """Width of a policy made from scratch. Heads are 32 wide, because vLLM's CPU attention refuses narrower ones."""
    layers: int = Field(3, ge=1)
    """Layers of a policy made from scratch."""
    context_tokens: int = Field(512, ge=16)
    """Longest sequence of a policy made from scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in learner and engines."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Set it only if you trust its author."""


class WarmStartConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps before the first rollout, for a policy made from scratch. The result is cached."""
    batch_size: int = Field(64, ge=1)
    """Supervised responses per step."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak learning rate, with linear warm-up over the first tenth, then cosine to zero."""


AUTO_OVERSAMPLE = 1.5
DEFAULT_KV_MB = 256


class RolloutConfig(Section):
    samples_per_prompt: int = Field(8, ge=1)
    """Responses to each prompt: the group size."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens of a response. It ends earlier at the tokenizer's end-of-sequence token, or at one that the model's
    generation_config.json names, or at a stop word. A response cut at the maximum has finish reason `length`."""
    min_tokens: int = Field(0, ge=0)
    """Minimum tokens of a response (with an agent: of a turn). Before that no token that would end the response is sampled, and no stop
    word ends it. The sampler's log-probabilities there are those of the distribution without these tokens. The trained policy has
    them, so importance weights correct for the difference, as for `top_p`."""
    max_total_tokens: int | None = Field(None, ge=2)
    """Maximum tokens of prompt and response together. A response gets the tokens that its prompt leaves, and at most `max_tokens`.
    None: no such limit."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampling distribution. The policy is trained at the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the most likely tokens that together have this probability. The policy that is trained is still the whole
    distribution; importance weights correct for the difference."""
    top_k: int = Field(0, ge=0)
    """Sample only from this many of the most likely tokens, and of them as `top_p` says; 0: from all. The policy that is trained is still
    the whole distribution. Importance weights correct for the difference, so they must be on."""
    stop: StopWords = Field(default_factory=list)
    """Stop words, such as `</answer>`: the token that completes one in the response's text ends the response, with finish reason `stop`.
    This token and the word stay in the response, so the policy learns to write them. With an agent: of each turn, unless it sets others."""
    agreement: Literal["end", "warn"] = "end"
    """Action if engines and learner compute different log-probabilities of the same tokens under the same weights, beyond rounding in
    `policy.dtype`. This is checked before and after the first update. `end`: the run ends and names the tensors that differ. `warn`:
    the run prints a warning and continues. Later steps only warn."""
    engine: Literal["exact", "stock"] = "exact"
    """What generates responses. `exact`: vLLM with a sampler whose noise depends only on the sample and the position, so that tokens do
    not depend on batches, engines and moves. `stock`: vLLM as it is, with its own sampler, scheduler and processes, for any recent
    version. A response that moves then keeps its distribution, log-probabilities and versions, but not its tokens (docs/backends.md)."""
    min_actors: int = Field(1, ge=1)
    """Minimum number of engines. The rollout waits until each has a slot."""
    max_actors: int = Field(2, ge=1)
    """Maximum number of engines at once. The plan of each step decides how many there are."""
    max_lag_steps: int = Field(0, ge=0, le=8)
    """Maximum number of weight versions that a trained token may be behind. 0: a step trains on responses of its own weights. 1: the
    next step's responses are generated while the learner works, so that engines and learner hold slots at once. With `partial`: the
    number of steps, up to 8, that a response may continue after the one in which it began. Importance weights correct for the older
    weights. Without them a recipe is refused unless its estimator trains on pairs or `algorithm.uncorrected_lag` is on."""
    partial: Annotated[Literal["off", "continue", "restart"], OffIsAWord] = "off"
    """End a step's rollout as soon as `prompts.batch_prompts` groups are complete. `continue`: unfinished responses of other groups
    continue in the next step from their last token, under the new weights (see `partial_kv`). An agent plays its episode again and
    gets the same replies, up to its last whole turn. `restart`: unfinished responses begin again. `off`: a rollout ends with its longest
    response. `continue` and `restart` need `max_lag_steps` of at least 1."""
    oversample: NumberOrAuto = "auto"
    """With `partial`: groups generated at once in a step, as a multiple of `prompts.batch_prompts`; from 1 to `max_lag_steps` + 1, or
    to `max_lag_steps` with `ahead`. `auto`: chosen in each step from forecasts, measured speeds and the measured loss of learning value
    of old tokens; 1.5 in the first step, or that limit if it is lower."""
    partial_kv: Literal["recompute", "keep"] = "recompute"
    """With `partial: continue`: the KV cache of a response that continues under new weights. `recompute`: it is computed again under
    them. `keep`: it stays as the older weights computed it, which saves this time. Each token's log-probability remains that of the
    distribution that drew it, so importance weights correct for the difference. Engines keep KV pages for it, as for `prefix_kv`."""
    ahead: bool = False
    """With `partial: continue`: the next step's responses begin while the learner works, so that engines and learner hold slots at
    once. After the update, unfinished responses continue under the new weights. Without `partial`, a lag always means this."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Ray labels that the engines' nodes must have, such as `{market: spot}`. Engines work on other nodes only while no node with them is
    left. Empty: any node. `pools` is the general form."""
    pools: list[PoolConfig] = Field(default_factory=list)
    """Pools of nodes of different kinds and prices. A node belongs to the first pool whose labels it has. Engines may also work on all
    other nodes, which are the pool `own`. Empty: no node differs from the others."""
    tensor_parallel: CountOrAuto = 1
    """Number of slots of one engine. Each holds a part of the weights and of the KV cache, and all of them compute every token together.
    They are leased on one node, all or none. The number must divide the policy's heads and layers. `auto`: the plan of each step
    chooses the width, and `max_actors` then counts slots."""
    max_running: int = Field(256, ge=1)
    """Maximum number of sequences that one engine decodes at once."""
    kv_cache_mb: KvSizeOrAuto = "auto"
    """KV cache of one engine on CPU, MB. `auto`: what a step's sequences need at their longest if all are in one engine, or as much of
    it as is predicted to fit the memory. Beyond 256 MB each, engines take no more than a tenth of the memory, because other runs may do
    the same."""
    gpu_memory_share: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that one engine takes."""
    quantization: Annotated[Literal["off", "int8", "fp8"], OffIsAWord] = "off"
    """Engines hold the weights of linear layers in 8 bits, quantised whenever they load a version, so decoding reads fewer bytes.
    Importance weights correct for the difference to the learner, so they must be on. On CPU: `int8`; on GPU: `int8` or `fp8`, with
    `policy.dtype` bfloat16."""
    speculation: Annotated[Literal["auto", "on", "off"], OffIsAWord] = "off"
    """Draft tokens from the text of other responses, and verify several in one decode step. In float32 the sampled tokens do not change;
    in bfloat16 rounding may decide near-ties differently. `auto`: each engine step drafts the tokens that are expected to save time.
    `on`: all drafts from text are verified. An engine keeps 400,000 tokens of responses for it, which take about 120 MB."""
    drafter: LocalPath = ""
    """Folder (or Hugging Face hub name) of a small causal language model with the policy's tokenizer, or of an EAGLE-3 head for the policy.
    Each engine loads it, and drafts with it if drafts from text have few expected tokens. It draws with the same random numbers as the
    policy. Needs `speculation`."""
    drafter_train: Annotated[Literal["on", "off"], OffIsAWord] = "off"
    """Train the drafter on the responses, on slots that engines have left at the end of a rollout. Without `drafter` it starts as a
    small model with random weights. Needs `speculation`, `functions.elastic` and a `max_lag_steps` of 0."""
    drafter_hidden_size: int = Field(64, ge=32, multiple_of=32)
    """Width of a drafter with random weights."""
    drafter_layers: int = Field(1, ge=1)
    """Layers of a drafter with random weights."""
    drafter_learning_rate: float = Field(2e-3, gt=0)
    """Learning rate of the drafter's training (AdamW)."""
    block_size: int = Field(32, ge=1)
    """Tokens of a KV block. Prefixes are shared in whole blocks."""
    prefix_kv: Annotated[Literal["auto", "on", "off"], OffIsAWord] = "auto"
    """Compute each distinct prefix of a step's prompts once for all engines. `auto`: in the steps where the planner expects this to
    save prefill, its own costs included. `on`: in every step. `off`: never; engines then keep no pages either, so that a response
    that moves between engines is recomputed."""
    stream_interval_s: float = Field(0.25, gt=0)
    """Interval at which engines stream new tokens to the driver. Tokens that were not streamed are generated again if the engine
    dies. From some hundred engines on it is longer: all together send at most 500 reports a second."""
    migrate: Annotated[Literal["off", "tau", "auto"], OffIsAWord] = "auto"
    """Move responses between engines while they are generated. `auto`: when the planner expects it to save time or leases. `tau`:
    the rule of the RLHFless paper: an engine hands on its other responses once a share `migrate_tau` has finished. `off`: never."""
    migrate_tau: float = Field(0.7, gt=0, le=1)
    """Share of finished responses for `migrate: tau`."""
    deadline_s: float = Field(1800, gt=0)
    """A rollout that takes longer ends the run."""
    silence_s: float = Field(180, gt=0)
    """An engine that has started and sends nothing for this long, while it should load weights or work, counts as hung. It is
    killed, and other engines continue its responses."""

    @property
    def engine_kv_mb(self) -> int:
        """Return the MB of one engine's KV cache on CPU. `auto` counts as 256 until `preflight.memory_fit` has decided."""
        return DEFAULT_KV_MB if self.kv_cache_mb == "auto" else self.kv_cache_mb

    @property
    def least_width(self) -> int:
        """Return the slots of the narrowest engine that the recipe allows."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel

    @property
    def mode(self) -> RolloutMode:
        """Return what the keys `max_lag_steps`, `oversample`, `partial`, `ahead` and `partial_kv` mean together."""
        boundary = {"off": Boundary.DRAIN, "continue": Boundary.CUT_CONTINUE, "restart": Boundary.CUT_RESTART}[self.partial]
        admission = Admission(self.max_lag_steps, self.begun_share if boundary.cuts else 1.0)
        return RolloutMode(admission, boundary, WeightSwitch(self.ahead, self.partial_kv == "keep"))

    @property
    def rolls_out_ahead(self) -> bool:
        """Return whether the next step's responses are generated while the learner works."""
        return self.mode.begins_beside_update

    @property
    def most_begun_share(self) -> int:
        """Return the limit of `begun_share`, beyond which some groups could not be trained in time."""
        return self.max_lag_steps + (not self.ahead)

    @property
    def begun_share(self) -> float:
        """Return the groups generated at once in a step, as a multiple of those that it trains."""
        return min(AUTO_OVERSAMPLE, self.most_begun_share) if self.oversample == "auto" else self.oversample

    def response_tokens(self, prompt_tokens: int) -> int:
        """Return the length of the longest response to a prompt of `prompt_tokens` tokens."""
        left = self.max_tokens if self.max_total_tokens is None else self.max_total_tokens - prompt_tokens
        return min(self.max_tokens, left)

    def longest_tokens(self, longest_prompt_tokens: int) -> int:
        """Return the length of the longest possible sequence."""
        return min(longest_prompt_tokens + self.max_tokens, self.max_total_tokens or longest_prompt_tokens + self.max_tokens)


class AgentConfig(Section):
    path: LocalPath = ""
    """A Python file with a class `AgentExecutor`, or another of OpenRLHF's contracts (see docs/agents.md), or `calculator`. It
    returns feedback after each turn of the policy, and the reward. Empty: a response is one turn, and section `reward` names the source."""
    command: str = ""
    """Command line of a program that plays episodes and reaches the policy over HTTP with any OpenAI client (see docs/agents.md). It reads
    a row as a line of JSON, and writes a line of JSON with `reward`. `python` is the Python that runs the training. Set this or `path`."""
    programs: int = Field(16, ge=1)
    """Maximum processes of `command` at the same time, in each of `processes`. Each plays one episode at a time."""
    max_tokens: int | None = Field(None, ge=2)
    """Maximum tokens of an episode, including the first observation and everything the agent writes. None: those of the longest prompt
    and response together."""
    turn_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of a turn of the policy. None: the rest of the episode, whatever `rollout.max_tokens` is."""
    timeout_s: float = Field(180.0, gt=0)
    """Time limit for the agent between two turns of the policy. Beyond it the sample gets an error."""
    processes: int = Field(1, ge=1)
    """Processes among which a step's episodes are divided. The agents of a process share an event loop."""

    @property
    def is_used(self) -> bool:
        """Whether samples are episodes of an agent."""
        return bool(self.path or self.command)


class RewardConfig(Section):
    function: LocalPath = ""
    """`task` (the built-in task's verifier), `math` (the answer after `####` or in a box equals the reference), `code` (the response's
    Python passes the tests in `prompts.answer_column`, in a sandbox), or
    `path/to/file.py:name` with `def name(prompt: str, response: str, row: dict) -> float`. Set this, `url` or `model_path`."""
    contract: Literal["row", "openrlhf"] = "row"
    """Arguments of a file's function. `row`: as above. `openrlhf`: lists of queries (prompt and response), prompts and labels; it
    returns rewards or a dict with `rewards`, `scores` and `extra_logs`."""
    url: Texts = Field(default_factory=list)
    """HTTP servers of rewards: POST of query, prompts and labels in OpenRLHF's JSON. Several addresses are used in turn."""
    model_path: LocalPath = ""
    """A local Hugging Face folder of a model with a scalar head and the policy's tokenizer. The reward is its value at the last
    token."""
    value_head: str = "score"
    """Name of that head's weights. `value_head_prefix` in the model's config.json takes precedence."""
    normalize: bool = False
    """Normalize rewards by the mean and std in the model's config.json."""
    ranks: int = Field(1, ge=1)
    """Maximum number of copies of the model that score at once; at most one per leased slot."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of processes that share one copy of the model, each on a slot of its own. All slots are on one node."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Ray labels that the nodes of reward processes and reward models must have. Empty: any node."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Padded tokens of one batch of the model."""
    batch_samples: int = Field(1, ge=1)
    """Samples of one call of contract `openrlhf`, or of one request. A batch that fails is split."""
    workers: int = Field(1, ge=1)
    """Maximum number of processes that score at once; at most one per leased slot."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit for one sample or one HTTP request."""
    deadline_s: float = Field(600.0, gt=0)
    """The run ends if no HTTP server has answered for this long, or if a reward model takes this long for one micro-batch."""
    max_failed_share: float = Field(0.05, ge=0, le=1)
    """The run ends if a larger share of a step's samples could not be scored. A sample without a reward is left out of its group
    and of the update, and shown in the log. It never becomes a silent 0."""
    clip_range: tuple[float, float] | None = None
    """Clip rewards to this range after the baseline is subtracted. None: no clipping."""
    overlong_buffer_tokens: int | None = Field(None, ge=1)
    """Penalise long responses (DAPO): the penalty grows over this many tokens before `rollout.max_tokens`. None: no penalty."""
    overlong_limit_tokens: int | None = Field(None, ge=1)
    """The length at which that penalty is full. None: `rollout.max_tokens`."""
    overlong_feedback: bool = False
    """With an agent: that penalty also counts the agent's tokens between the policy's first and last token."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Size of that penalty at the longest response."""
    stop_properly_penalty: float | None = Field(None, le=1)
    """Factor on the reward of responses cut off at `rollout.max_tokens`. A negative number replaces the reward."""

    @model_validator(mode="after")
    def _check_range(self) -> RewardConfig:
        if self.clip_range is not None and self.clip_range[0] > self.clip_range[1]:
            raise ValueError("reward.clip_range: the lower end must not exceed the upper one")
        if self.tensor_parallel > 1 and not self.model_path:
            raise ValueError("reward.tensor_parallel: only a reward model can be divided; set reward.model_path, or leave it out")
        return self
