"""Recipe sections of the learners, and of what is trained in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.local_path import LocalPath
from rlhfless_ray.recipe.section import (
    AutoCount,
    AutoStage,
    CountOrAuto,
    Decay,
    OffIsAWord,
    RankCount,
    ScheduleName,
    Section,
    Share,
    SwitchOrAuto,
    ZeroStage,
)

DEFAULT_MICRO_BATCH_TOKENS = 8192  # the first value that placement.peak_memory tries; processes without a planner do not import that


def fewest_ranks(values: object) -> object:
    """Read `ranks: auto` as the ranks that share one copy of the model, or sequences."""
    if not isinstance(values, dict) or values.get("ranks") != "auto":
        return values
    sizes = [values.get(key, 1) for key in ("tensor_parallel", "sequence_parallel")]
    return {**values, "ranks": AutoCount(math.prod(size for size in sizes if isinstance(size, int)))}


class LearnerConfig(Section):
    ranks: RankCount = 1
    """Number of ranks, which share each batch. `auto`: a run begins with the fewest that fit, and changes their number between steps if
    measured times say that it pays back, or if there are no slots for so many any more. Weights are the same to rounding."""
    tensor_parallel: RankCount = 1
    """Number of ranks that share one copy of the policy (DeepSpeed AutoTP, with `zero_stage` 0, 1 or 2). Each holds a slice of every
    linear layer, and all of them work on the same samples. It must divide `ranks`, the model's heads and its feed-forward size. `auto`:
    chosen for each number of ranks, 1 unless an update does not fit the memory, or only with slower settings."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of ranks that share each sequence (DeepSpeed-Ulysses, any `zero_stage`). Each computes a slice of its tokens, and attention
    for some of the heads, so activations and logits on a rank are divided by this number. It must divide `ranks` and the model's
    attention heads. Not with `tensor_parallel`, `lora.dropout` or `algorithm.loss.router_aux`, and for tested families only. A
    supervised stage on fewer ranks uses the greatest common divisor of this and their number."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Ray labels that the nodes of its ranks must have, such as `{market: on-demand}`. Empty: any node, but none
    of a pool of `rollout.pools` while there are others."""
    max_slots_per_rank: int = Field(1, ge=1)
    """CPU only: a rank runs as many threads as it holds slots, at most this many, when they are free."""
    zero_stage: ZeroStage = 0
    """DeepSpeed ZeRO stage. `auto`: chosen for each number of ranks, the lowest with which an update fits the memory. A higher one is never
    faster: its ranks exchange more."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    schedule: ScheduleName = "constant"
    """Schedule of the learning rate over all optimizer steps of the run, by its name in transformers."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up for the schedule `constant`."""
    warmup_share: Share = 0.0
    """Share of all optimizer steps for the linear warm-up of the other schedules, which begins at 0."""
    min_rate_share: Share = 0.0
    """Final learning rate of `cosine_with_min_lr`, as a share of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    decay_all: bool = True
    """Apply weight decay to every weight. Off: not to biases and norms."""
    train_vision: bool = False
    """Also train the vision tower and projector of a policy that sees images. Off: they stay as they are, and `lora` leaves them out."""
    optimizer: Literal["adam"] = "adam"
    """Optimizer: AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    adam_eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    optimizer_offload: SwitchOrAuto = False
    """Keep AdamW's moments and the float32 weights in host memory and update there, for policy and critic (DeepSpeed's
    ZeRO-Offload; needs `zero_stage` 1, 2 or 3). This frees device memory and slows the update, which is the same to rounding. On
    CPU slots it saves nothing. `auto`: only if nothing else fits the device."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest gradient norm (Euclidean, over all weights). A longer gradient is scaled down to it. 0: no gradient is scaled."""
    micro_batch_tokens: CountOrAuto = "auto"
    """Padded tokens of one micro-batch. `auto`: 8192, or less where a predicted update would not fit the memory."""
    share_prompts: Annotated[Literal["auto", "off"], OffIsAWord] = "auto"
    """`auto`: compute a prompt once for several responses to it where that saves a tenth of the work, in learner, critic and
    reference, for the model families that are tested. The update is the same to rounding. `off`: a copy of the prompt for each
    response."""
    overlap: Annotated[Literal["auto", "off"], OffIsAWord] = "auto"
    """Make the passes before the update on released slots while other responses still decode, for finished samples: log-probabilities
    of reference and policy, and the critic's values. With partial rollouts this is done for groups that the step will certainly
    train on, also on slots that no engine needs. One step off, the learner makes only its own passes, on its own slots after its
    update has ended. `off`: the passes wait for the rollout."""
    gradient_checkpointing: SwitchOrAuto = "auto"
    """Recompute activations in the backward pass instead of keeping them: less memory, more time. `auto`: only if no micro-batch
    of 1024 tokens or more fits the memory otherwise."""
    max_skipped_updates: int = Field(3, ge=0)
    """The run ends after this many optimizer steps in a row were skipped for a non-finite loss or gradient."""
    deadline_s: float = Field(1800, gt=0)
    """An update that takes longer ends the run."""

    _begin_with_fewest = model_validator(mode="before")(fewest_ranks)

    @model_validator(mode="after")
    def _check_combinations(self) -> LearnerConfig:
        if self.warmup_steps and self.schedule != "constant":
            raise ValueError(f"learner.warmup_steps: applies to the schedule `constant`; with {self.schedule} set learner.warmup_share")
        if self.warmup_share and self.schedule == "constant":
            raise ValueError("learner.warmup_share: the schedule `constant` has no warm-up; set learner.schedule to `constant_with_warmup`")
        if self.min_rate_share and self.schedule != "cosine_with_min_lr":
            raise ValueError(
                f"learner.min_rate_share: applies to the schedule `cosine_with_min_lr`, and learner.schedule is {self.schedule}; set it, "
                "or leave this out"
            )
        if self.optimizer_offload is True and self.zero_stage == 0 and not isinstance(self.zero_stage, AutoStage):
            raise ValueError("learner.optimizer_offload: needs a learner.zero_stage of 1, 2 or 3")
        if self.tensor_parallel > 1 and self.zero_stage == 3:
            raise ValueError("learner.tensor_parallel: DeepSpeed divides matrices with a learner.zero_stage of 0, 1 or 2")
        check_copies("learner", self.ranks, self.tensor_parallel, self.sequence_parallel)
        return self

    def on_ranks(self, ranks: int) -> LearnerConfig:
        """Return the settings for another number of ranks of a supervised stage."""
        together = {name: math.gcd(ranks, getattr(self, name)) for name in ("tensor_parallel", "sequence_parallel")}
        return self.model_copy(update={"ranks": ranks, **together})

    @property
    def max_micro_batch_tokens(self) -> int:
        """Padded tokens of one micro-batch. `auto` counts as 8192 until `preflight.memory_fit` has decided."""
        return DEFAULT_MICRO_BATCH_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def recomputes_activations(self) -> bool:
        return self.gradient_checkpointing is True

    @property
    def offloads_optimizer(self) -> bool:
        return self.optimizer_offload is True


def even_ranks(count: int, sharing: int) -> int:
    """Return the most ranks up to `count` that can share copies of the model evenly, `sharing` a copy or a divisor of that.

    Of 7 ranks that should be 8 a copy, 4 share one. All 7 would have the whole model each.
    """
    return count - count % sharing if count >= sharing else max((n for n in range(1, count + 1) if sharing % n == 0), default=0)


def check_copies(section: str, ranks: int, width: int, slices: int = 1) -> None:
    """Raise ValueError if the ranks cannot be divided into groups of `width` that share one copy of a model, or of `slices` that share
    sequences."""
    if width > 1 and slices > 1:
        raise ValueError(f"{section}.sequence_parallel: not available with {section}.tensor_parallel; leave one of them out")
    for key, size in (("tensor_parallel", width), ("sequence_parallel", slices)):
        if ranks % size:
            raise ValueError(f"{section}.{key}: {size} does not divide {section}.ranks, which is {ranks}")


def mistakes_in_slices(section: str, size: int, lora: LoraConfig) -> Iterator[str]:
    """Check adapters of a model whose sequences `size` ranks share."""
    if size > 1 and lora.dropout:
        yield f"{section}.sequence_parallel: not available with lora.dropout, which is drawn for whole sequences; leave one of them out"


def mistakes_in_precision(dtype: str, learner: LearnerConfig) -> Iterator[str]:
    if dtype == "bfloat16" and learner.zero_stage == 0 and not isinstance(learner.zero_stage, AutoStage):
        yield (
            "learner.zero_stage: with policy.dtype bfloat16 it must be 1, 2 or 3, which keep the float32 weights that small updates need"
        )


class CriticConfig(Section):
    path: LocalPath = ""
    """A local Hugging Face folder of a causal LM, reward model or critic. Empty: the policy the run starts from."""
    ranks: RankCount = 1
    """Number of the critic's ranks, which share each batch. `auto`: as many as the learner has. ZeRO stage, micro-batches, threads and
    deadline are the learner's."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that share one copy of the critic, as with `learner.tensor_parallel`. 1: each holds all of it, or its ZeRO shard."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of the critic's ranks that share each sequence, as with `learner.sequence_parallel`."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """As `learner.nodes`."""
    value_head: str = Field("score", min_length=1)
    """Name of the scalar head's weights in that folder; `value_head_prefix` in its config.json goes before it. Weights that
    the folder lacks are random."""
    normalize: bool = False
    """Normalize values as `reward.normalize` does rewards: with the mean and std in the config.json of the critic's folder, in
    passes and in the loss. The saved critic has both numbers in its config, and its head is not scaled."""
    value_clip: float | None = Field(0.5, ge=0)
    """Largest distance of values from the old ones before the loss clips them. None: no clipping."""
    freeze_policy_steps: int = Field(0, ge=0)
    """Steps at the start in which the policy is not trained, only the critic, if there is one."""
    save: bool = False
    """Write the critic as a Hugging Face folder at the end, into `critic/` in the run folder."""
    learning_rate: float = Field(9e-6, gt=0)
    """Peak learning rate."""
    schedule: ScheduleName = "cosine_with_min_lr"
    """As learner.schedule."""
    warmup_share: Share = 0.03
    """As learner.warmup_share. `constant` has no warm-up."""
    min_rate_share: Share = 0.1
    """As learner.min_rate_share."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW, not on biases and norms."""
    optimizer: Literal["adam"] = "adam"
    """Optimizer: AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """As learner.betas."""
    adam_eps: float = Field(1e-8, gt=0)
    """As learner.adam_eps."""
    grad_clip: float = Field(1.0, ge=0)
    """As learner.grad_clip."""

    _begin_with_fewest = model_validator(mode="before")(fewest_ranks)

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> CriticConfig:
        check_copies("critic", self.ranks, self.tensor_parallel, self.sequence_parallel)
        return self


class ReferenceConfig(Section):
    path: LocalPath = ""
    """A Hugging Face folder of the reference, or of the teacher that `on_policy_distill` needs. Its tokenizer must have the policy's
    vocabulary. Empty: the initial policy."""
    ranks: RankCount = 1
    """Processes that share the reference's passes. `auto`: as many as the learner has. Micro-batches, threads and deadline are the
    learner's."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of processes that share one copy of the reference, as with `learner.tensor_parallel`. 1: each holds all of it."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """As `learner.nodes`."""

    _begin_with_fewest = model_validator(mode="before")(fewest_ranks)

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> ReferenceConfig:
        check_copies("reference", self.ranks, self.tensor_parallel)
        return self


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """Rank of the adapters that are trained while policy and critic stay frozen. 0: train every weight."""
    alpha: int = Field(16, ge=1)
    """An adapter's product is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapters' inputs in updates. Sampling and old log-probabilities have none."""
    target_modules: list[str] = Field(["all-linear"], min_length=1)
    """Ends of the names of the layers that get an adapter. `all-linear`: every linear layer except the output head."""
    publish: Literal["auto", "merged", "adapter"] = "auto"
    """Content of a new weight version for engines. `merged`: the whole weights, with the adapter merged. `adapter`: only the adapter,
    which engines apply to its base. `auto`: the adapter if that takes less time: on CPU, from 100 M parameters on, and with responses
    of at most 64 tokens."""

    @model_validator(mode="after")
    def _check_target_modules(self) -> LoraConfig:
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            raise ValueError("lora.target_modules: `all-linear` includes all other names; leave it out, or the names")
        return self

    def mistakes(self) -> Iterator[str]:
        """Check that settings of adapters are not given without adapters."""
        if self != LoraConfig() and not self.rank:
            yield "lora: lora.rank is 0, so there are no adapters; set it, or leave the section out"


class EmaConfig(Section):
    beta: float | None = Field(None, ge=0, le=1)
    """Keep a moving average of the policy's weights. At each optimizer step the old average keeps this share. The final
    model is the average; engines use the policy itself. None: no average."""
