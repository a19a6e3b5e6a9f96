"""Sections about who answers, how, and how that is scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.section import OffIsAWord, Section


class Policy(Section):
    path: str = ""
    """A Hugging Face folder of a causal LM, or its name `org/name` on the hub. Empty: a small one is made from scratch for a
    built-in task."""
    hidden_size: int = Field(128, ge=32, multiple_of=32)
    """Width of a policy made from scratch (heads are 32 wide: vLLM's CPU attention refuses narrower ones)."""
    layers: int = Field(3, ge=1)
    """Layers of a policy made from scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in learner and engines."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Off unless you trust its author."""


class WarmStart(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps before the first rollout, for a policy made from scratch. The result is cached."""
    batch_size: int = Field(64, ge=1)
    """Supervised responses per step."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak; linear warm-up over the first tenth, then cosine to zero."""


class Rollout(Section):
    samples_per_prompt: int = Field(8, ge=1)
    """The group size."""
    max_tokens: int = Field(256, ge=1)
    """Longest response; a response cut there has finish reason `length`."""
    max_total_tokens: int | None = Field(None, ge=2)
    """Longest prompt and response together: a response has what its prompt leaves of it, and no more than `max_tokens`.
    None: there is no such limit."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampling distribution, which is also the one that is trained."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the least likely tokens are not sampled: those beside the most likely ones that have this probability together. The
    policy that is trained is still the whole one; importance weights correct for the difference."""
    min_actors: int = Field(1, ge=1)
    """Fewest engines; a rollout waits until it has a slot for each."""
    max_actors: int = Field(2, ge=1)
    """Most engines at once. The plan of each step decides how many there are."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Ray labels that the engines' nodes must have, such as `{market: spot}`. Empty: any node will do."""
    max_running: int = Field(256, ge=1)
    """Sequences one engine decodes at once."""
    kv_cache_mb: int = Field(256, ge=16)
    """KV cache of one engine on CPU."""
    gpu_memory_share: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory one engine takes."""
    block_size: int = Field(32, ge=1)
    """Tokens of a KV block; prefixes are shared in whole blocks."""
    prefix_kv: Annotated[Literal["auto", "on", "off"], OffIsAWord] = "auto"
    """The service that computes each distinct beginning of a step's prompts once for all engines. `auto`: in the steps where
    the planner expects it to save prefill, its own costs included; `on`: in every step; `off`: engines keep no pages either, so
    what moves between them is computed again."""
    stream_interval_s: float = Field(0.25, gt=0)
    """How often an engine tells what it generated. What it has not told yet is generated again if it dies."""
    migrate: Annotated[Literal["off", "tau", "auto"], OffIsAWord] = "auto"
    """Moving responses between engines while they are generated. `auto`: as the planner expects it to save time or leases;
    `tau`: the RLHFless paper's rule, an engine of which a share `migrate_tau` has finished hands the rest on; `off`."""
    migrate_tau: float = Field(0.7, gt=0, le=1)
    """For `migrate: tau` only."""
    deadline_s: float = Field(1800, gt=0)
    """A rollout that takes longer ends the run."""
    silence_s: float = Field(180, gt=0)
    """An engine that has started, is to load weights or to work, and says nothing for this long hangs: it is killed, and others go
    on with what it had."""

    def response_tokens(self, prompt_tokens: int) -> int:
        """The longest response that a prompt of so many tokens may have."""
        left = self.max_tokens if self.max_total_tokens is None else self.max_total_tokens - prompt_tokens
        return min(self.max_tokens, left)

    def longest_tokens(self, longest_prompt_tokens: int) -> int:
        """The longest sequence that there may be."""
        return min(longest_prompt_tokens + self.max_tokens, self.max_total_tokens or longest_prompt_tokens + self.max_tokens)


class Agent(Section):
    path: str = ""
    """A Python file with class `AgentExecutor` (or another of OpenRLHF's contracts, see docs/agents.md): what answers the policy,
    turn by turn, and gives the reward. Empty: a response is one turn, and rewards come from section `reward`."""
    max_tokens: int | None = Field(None, ge=2)
    """Longest episode, the first observation and all that the agent says included. None: as long as the longest prompt and response
    may be together."""
    turn_tokens: int | None = Field(None, ge=1)
    """Longest turn of the policy. None: what is left of the episode, whatever `rollout.max_tokens` says."""
    timeout_s: float = Field(180.0, gt=0)
    """What the agent may take at a time, from one turn of the policy to the next. Over it the sample has an error."""
    processes: int = Field(1, ge=1)
    """Processes that the episodes of a step are dealt to; in each, agents share an event loop."""


class Reward(Section):
    function: str = ""
    """`task` (the built-in task's verifier), `math` (math-verify on the text after `####` or in a box), or
    `path/to/file.py:name` with `def name(prompt: str, response: str, row: dict) -> float`. Set this, `url` or `model_path`."""
    contract: Literal["row", "openrlhf"] = "row"
    """What a file's function is called with: the above, or, as OpenRLHF does, lists of queries (prompt and response), prompts
    and labels, for rewards or a dict with `rewards`, `scores` and `extra_logs`."""
    url: list[str] = Field(default_factory=list)
    """HTTP rewards: POST of query, prompts and labels, the JSON of OpenRLHF; several addresses are taken in turn."""
    model_path: str = ""
    """A local Hugging Face folder of a model with a scalar head and the policy's tokenizer; the reward is its value at the last
    token."""
    value_head: str = "score"
    """Name of that head's weights. `value_head_prefix` in the model's config.json goes before it."""
    normalize: bool = False
    """Apply the mean and std that the model's config.json has of its rewards."""
    ranks: int = Field(1, ge=1)
    """Copies of the model that score at once, at most one per leased slot."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Padded tokens the model reads at once."""
    batch_samples: int = Field(1, ge=1)
    """Samples of one call of contract `openrlhf`, or of one request. A batch that fails is taken apart."""
    workers: int = Field(1, ge=1)
    """Processes that score at once, at most one per leased slot."""
    timeout_s: float = Field(10.0, gt=0)
    """For one sample, or one HTTP request."""
    deadline_s: float = Field(600.0, gt=0)
    """The run ends when no HTTP server has answered, or a reward model is at one micro-batch, for so long."""
    max_failed_share: float = Field(0.05, ge=0, le=1)
    """The run ends when a larger share of a step's samples could not be scored. A sample that could not be scored is
    left out of its group and of the update, and is shown in the log: it never becomes a silent 0."""
    clip_range: tuple[float, float] | None = None
    """Rewards are cut to it after the baseline is subtracted. None: they are not."""
    overlong_buffer_tokens: int | None = Field(None, ge=1)
    """A penalty that grows over so many tokens before `rollout.max_tokens` is added to the reward (DAPO). None: there is none."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Its size at the longest response."""
    stop_properly_penalty: float | None = Field(None, le=1)
    """Responses cut off at `rollout.max_tokens`: their reward is multiplied by it, or, where it is negative, replaced by it."""

    @model_validator(mode="after")
    def _a_range(self) -> Reward:
        if self.clip_range is not None and self.clip_range[0] > self.clip_range[1]:
            raise ValueError("reward.clip_range: the lower end must not exceed the upper one")
        return self
