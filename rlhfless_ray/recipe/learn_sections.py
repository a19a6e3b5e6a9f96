"""Recipe sections of the algorithm and the learners."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rlhfless_ray.common.estimators import ESTIMATORS, OTHER_NAMES, EstimatorName
from rlhfless_ray.recipe.local_path import LocalPath
from rlhfless_ray.recipe.section import CountOrAuto, Decay, OffIsAWord, ScheduleName, Section, Share, SwitchOrAuto, raise_first

DEFAULT_MICRO_BATCH_TOKENS = 8192  # the first value that placement.peak_memory tries; processes without a planner do not import that


class AdvantageConfig(Section):
    estimator: EstimatorName = "group_norm"
    """How rewards become advantages. `group_norm` (GRPO): a group's rewards, centred and divided by their deviation. `dr_grpo`:
    only centred. `rloo`: minus the mean of the others in the group. `reinforce_baseline`: centred, then whitened over the batch.
    `reinforce`: the rewards, whitened over the batch. `flash_reinforce`: minus the batch's mean, without groups. `gae` (PPO):
    generalised advantages over a critic's values, whitened over the batch. `on_policy_distill`: log-probability of each token under the
    teacher in `reference.path` minus that under the policy; rewards are reported only. `online_dpo`: DPO's loss on the best and the
    worst response of each group, with the β in `algorithm.kl.coefficient`."""
    gamma: Share = 1.0
    """Discount per token, for `gae` and `reinforce`."""
    lambd: Share = 1.0
    """λ of `gae`: 0 uses the critic's next value, 1 the rewards that followed."""
    whiten: bool | None = None
    """Whiten advantages over the tokens of the rollout batch. None: as the estimator is published (`gae`, `reinforce` and
    `reinforce_baseline` whiten)."""
    normalize_std: bool = True
    """Whether whitening divides by the deviation, besides centring."""

    @field_validator("estimator", mode="before")
    @classmethod
    def _name_the_estimator(cls, value: object) -> object:
        """Reject a name of other systems with the name that it has here."""
        if isinstance(value, str) and value.lower() in OTHER_NAMES:
            raise ValueError(f"expected `{OTHER_NAMES[value.lower()]}`, which is its name here")
        return value

    @property
    def whitens(self) -> bool:
        return ESTIMATORS[self.estimator].whitens if self.whiten is None else self.whiten


class KlConfig(Section):
    coefficient: float = Field(0.0, ge=0)
    """0: there is no reference model."""
    limit: float | None = Field(10.0, gt=0)
    """Estimates of a token are cut to ±limit, in the loss and in the reward. None: they are not cut."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimator of KL(policy ‖ reference). As a loss `k1` only adds noise, because the expectation of its gradient is
    zero. `k2` has the gradient of the KL itself, and `k3` comes close near the reference."""
    place: Literal["loss", "reward"] = "loss"
    """Whether the estimate is a term of the loss or is subtracted from each token's reward."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient so that the KL reaches this value (Ziegler et al. 2019). None: the coefficient is fixed."""
    horizon: int = Field(10_000, ge=1)
    """Samples over which the coefficient adapts; more than a fifth of a step's samples."""
    unbiased_gradient: bool = False
    """As a loss: use the gradient of the KL itself, whatever the estimator, with a bounded importance weight off-policy."""


class LossConfig(Section):
    kind: Literal["ppo", "gspo"] = "ppo"
    """`ppo`: clip each token's ratio. `gspo`: clip the geometric mean of the ratio over the sequence."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of negative advantages, in units of the advantage. None: no bound."""
    entropy_coefficient: float | None = Field(None, ge=0)
    """Weight of the policy's entropy in what is maximised. The entropy is logged in any case."""
    router_aux: float = Field(0.0, ge=0)
    """Weight of the routers' auxiliary loss, which keeps the experts of a mixture equally busy. It is computed for each micro-batch,
    so it depends on which samples share one. Computing ahead of the learn phase is off with it."""
    router_replay: bool = False
    """In the learner, the policy's routers choose the experts that the engine's routers chose for each token (R3, arXiv 2510.11370).
    Without it, rounding may send a token to other experts than those that drew it. For Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE. Needs
    `rollout.prefix_kv: off` and `rollout.partial_kv: recompute`, and no agent."""
    correction_level: Literal["off", "token", "seq"] = "off"
    """Use importance weights learner / sampler with a band instead of `importance_cap`, judged per token or per sequence."""
    correction_mode: Literal["mask", "clip"] = "mask"
    """`mask`: leave out what is outside the band. `clip`: cut it to the band (tokens' ratios only)."""
    correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What the band limits: the ratio, or a divergence between the two probabilities of the sampled token."""
    correction_low: float = Field(0.0, ge=0)
    """Lower end of the band."""
    correction_high: float = Field(5.0, gt=0)
    """Upper end of the band."""
    ratio_to: Literal["learner", "sampler"] = "learner"
    """Denominator of gspo's ratio: the learner's probabilities before the step's updates, or the sampler's. The latter includes the
    mismatch of the two, and no weights correct for it."""

    @model_validator(mode="after")
    def _check_band(self) -> LossConfig:
        name = "algorithm.loss.correction"
        if self.correction_level == "off":
            for part in ("mode", "gating", "low", "high"):
                if getattr(self, f"correction_{part}") != LossConfig.model_fields[f"correction_{part}"].default:
                    raise ValueError(f"{name}_{part}: applies to a correction, and {name}_level is off; set it, or leave this out")
            return self
        if self.correction_mode == "clip" and (self.correction_level, self.correction_gating) != ("token", "ratio"):
            raise ValueError(f"{name}_mode: only a token's ratio can be cut, so `clip` needs {name}_level token and {name}_gating ratio")
        if self.correction_gating != "ratio" and self.correction_low > 0:
            raise ValueError(f"{name}_low: a divergence is bounded from above only, so it must be 0 with {self.correction_gating}")
        if self.correction_low > self.correction_high:
            raise ValueError(f"{name}_low: must not exceed {name}_high")
        return self


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    """From rewards to advantages."""
    clip_low: float = Field(0.2, ge=0)
    """Clip the ratio to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.2, ge=0)
    """Upper side of that range."""
    importance_cap: float = Field(2.0, ge=0)
    """Cap of the truncated importance weight learner / sampler. 0: no correction."""
    uncorrected_lag: bool = False
    """Allow `rollout.max_lag_steps` with `importance_cap: 0` and no `loss` correction. Responses of older weights are then trained
    on as if the current weights had drawn them, which biases the gradient. OpenRLHF's asynchronous mode trains this way by default. No
    effect while a correction is on."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the optimizer step, or over sequences of each sequence's token mean."""
    regularization_mean: Literal["token", "sequence"] | None = None
    """Mean of the KL loss and of the entropy bonus. None: the same as `loss_mean`."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per rollout batch, each on its share of the prompts."""
    batch_samples: int | None = Field(None, ge=1)
    """Samples of one optimizer step, drawn from the shuffled rollout batch, in `updates_per_step`'s place. See `remainder`."""
    remainder: Literal["short", "carry", "drop"] = "short"
    """Samples that do not fill an optimizer step of `batch_samples`. `short`: they make a smaller step of their own. `carry`: they
    join the first optimizer step of the next rollout, and checkpoints keep them. `drop`: they are not trained on. With `carry`
    a rollout may have fewer samples than a step."""
    filter_range: tuple[float, float] | None = None
    """Drop prompts whose responses' mean score is not strictly inside this range, and generate responses to others in the same step
    until it has `prompts.batch_prompts`. The reward serves as the score if the function returns none. At the end of an episode a step
    may have fewer prompts."""
    filter_draw: float = Field(1.0, ge=1, lt=2)
    """Number of new prompts for each missing one. Above 1 fewer rounds are needed, and groups may be left over. The next step trains
    on them, and checkpoints keep them. Groups left over in the last step are not trained on."""
    filter_patience: int = Field(10, ge=1)
    """The run ends after this many batches of prompts in a row were dropped."""
    epochs: int = Field(1, ge=1)
    """Passes of the optimizer over a rollout batch."""
    loss: LossConfig = LossConfig()
    """The policy's loss, beyond the clip."""
    kl: KlConfig = KlConfig()
    """Distance to the initial policy."""

    @model_validator(mode="after")
    def _check_combinations(self) -> AlgorithmConfig:
        raise_first(self._mistakes_in_advantages, self._mistakes_in_losses, self._mistakes_in_batches)
        return self

    def _mistakes_in_advantages(self) -> Iterator[str]:
        """Check the estimator's settings."""
        name = self.advantage.estimator
        if self.advantage.gamma != 1 and not ESTIMATORS[name].discounts:
            yield f"algorithm.advantage.gamma: {name} does not discount, so it must be 1"
        if self.advantage.lambd != 1 and not self.has_critic:
            yield f"algorithm.advantage.lambd: only gae uses it, so with {name} it must be 1"
        if not self.advantage.normalize_std and not self.advantage.whitens:
            why = f"{name} does not do" if self.advantage.whiten is None else "algorithm.advantage.whiten turns off"
            yield f"algorithm.advantage.normalize_std: applies to whitening, which {why}; leave it out"
        if ESTIMATORS[name].teacher and not (self.kl.coefficient and self.kl.place == "reward" and self.kl.estimator == "k1"):
            yield (
                f"algorithm.kl: with {name} a token's reward is the KL to the teacher; set algorithm.kl.coefficient to 1, "
                "algorithm.kl.place to reward and algorithm.kl.estimator to k1"
            )
        if ESTIMATORS[name].pairs:
            yield from self._mistakes_in_pairs()

    def _mistakes_in_pairs(self) -> Iterator[str]:
        """Check that the policy loss has DPO's gradient: one optimizer step per batch, without weights, over all its tokens."""
        name = self.advantage.estimator
        if not (self.kl.coefficient and self.kl.place == "reward" and self.kl.estimator == "k1" and self.kl.limit is None):
            yield (
                f"algorithm.kl: {name} compares the policy with a reference; set algorithm.kl.coefficient to β (such as 0.1), "
                "algorithm.kl.place to reward, algorithm.kl.estimator to k1 and algorithm.kl.limit to null"
            )
        if self.updates_per_step > 1 or self.epochs > 1 or self.batch_samples is not None:
            yield (
                f"algorithm.updates_per_step: {name} takes one optimizer step per rollout batch; leave out "
                "algorithm.updates_per_step, algorithm.epochs and algorithm.batch_samples"
            )
        if self.importance_cap > 0 or self.loss.correction_level != "off":
            yield (
                f"algorithm.importance_cap: a pair of {name} counts the same whichever version drew it; set it to 0, and "
                "algorithm.loss.correction_level to off"
            )
        if self.loss_mean != "token" or self.loss.kind != "ppo" or self.advantage.whitens:
            yield f"algorithm.loss_mean: {name} needs `token`, algorithm.loss.kind ppo and algorithm.advantage.whiten off or left out"

    def _mistakes_in_losses(self) -> Iterator[str]:
        """Check the loss and the KL to the initial policy."""
        if self.loss.kind == "gspo" and self.loss_mean != "sequence":
            yield "algorithm.loss_mean: gspo is a loss of sequences, so it must be `sequence`"
        if self.loss.ratio_to == "sampler" and self.loss.kind != "gspo":
            yield "algorithm.loss.ratio_to: only gspo uses it; set algorithm.loss.kind to gspo, or leave it out"
        if self.loss.ratio_to == "sampler" and (self.importance_cap > 0 or self.loss.correction_level != "off"):
            yield (
                "algorithm.loss.ratio_to: a ratio to the sampler needs no weights; set algorithm.importance_cap 0 and leave "
                "algorithm.loss.correction_level off"
            )
        if self.loss.correction_level != "off" and self.importance_cap > 0:
            yield "algorithm.importance_cap: must be 0, because algorithm.loss.correction_level is set"
        if self.kl.target is not None and not self.kl.coefficient:
            yield "algorithm.kl.target: needs an initial algorithm.kl.coefficient above 0"
        if self.kl.unbiased_gradient and self.kl.place == "reward":
            yield "algorithm.kl.unbiased_gradient: applies to the KL as a loss; leave it out with algorithm.kl.place reward"

    def _mistakes_in_batches(self) -> Iterator[str]:
        """Check which samples are trained on, and optimizer steps."""
        if self.filter_range is not None and self.filter_range[0] >= self.filter_range[1]:
            yield "algorithm.filter_range: the first must be smaller than the second"
        if self.filter_range is None and (self.filter_draw, self.filter_patience) != (1.0, 10):
            yield "algorithm.filter_range: filter_draw and filter_patience need it; set it, or leave them out"
        if self.batch_samples is not None and self.updates_per_step > 1:
            yield "algorithm.batch_samples: set either this or algorithm.updates_per_step"
        if self.remainder != "short" and self.batch_samples is None:
            yield "algorithm.remainder: needs algorithm.batch_samples; set it, or leave this out"

    @property
    def keeps_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def has_critic(self) -> bool:
        return ESTIMATORS[self.advantage.estimator].critic


class LearnerConfig(Section):
    ranks: int = Field(1, ge=1)
    """Number of ranks, which share each batch."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that share one copy of the policy (DeepSpeed AutoTP, with `zero_stage` 0, 1 or 2). Each holds a slice of every
    linear layer, and all of them work on the same samples. It must divide `ranks`, the model's heads and its feed-forward size."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of ranks that share each sequence (DeepSpeed-Ulysses, any `zero_stage`). Each computes a slice of its tokens, and attention
    for some of the heads, so activations and logits on a rank are divided by this number. It must divide `ranks` and the model's
    attention heads. Not with `tensor_parallel`, `lora.dropout` or `algorithm.loss.router_aux`, and for tested families only. A
    supervised stage on fewer ranks uses the greatest common divisor of this and their number."""
    max_slots_per_rank: int = Field(1, ge=1)
    """CPU only: a rank runs as many threads as it holds slots, at most this many, when they are free."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
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
    """Score samples and accumulate gradients of complete groups on released slots while other responses still decode. Gradients go
    ahead only if the update is then the same to rounding: one per step, ZeRO 0, 1 or 2. Passes for finished samples also go ahead:
    the reference's log-probabilities, and if gradients cannot, the old log-probabilities and the critic's values. With partial
    rollouts this is done for groups that the step will certainly train on, also on slots that no engine needs. One step
    off, the learner makes only its own passes, on its own slots after its update has ended. A run sets it to `off` if an update beside
    engines is predicted not to fit the memory. `off`: the learner waits for the rollout."""
    gradient_checkpointing: SwitchOrAuto = "auto"
    """Recompute activations in the backward pass instead of keeping them: less memory, more time. `auto`: only if no micro-batch
    of 1024 tokens or more fits the memory otherwise."""
    max_skipped_updates: int = Field(3, ge=0)
    """The run ends after this many optimizer steps in a row were skipped for a non-finite loss or gradient."""
    deadline_s: float = Field(1800, gt=0)
    """An update that takes longer ends the run."""

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
        if self.optimizer_offload is True and self.zero_stage == 0:
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
    if dtype == "bfloat16" and learner.zero_stage == 0:
        yield (
            "learner.zero_stage: with policy.dtype bfloat16 it must be 1, 2 or 3, which keep the float32 weights that small updates need"
        )


class CriticConfig(Section):
    path: LocalPath = ""
    """A local Hugging Face folder of a causal LM, reward model or critic. Empty: the policy the run starts from."""
    ranks: int = Field(1, ge=1)
    """Number of the critic's ranks, which share each batch. ZeRO stage, micro-batches, threads and deadline are the learner's."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of ranks that share one copy of the critic, as with `learner.tensor_parallel`. 1: each holds all of it, or its ZeRO shard."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of the critic's ranks that share each sequence, as with `learner.sequence_parallel`."""
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

    @model_validator(mode="after")
    def _check_tensor_parallel(self) -> CriticConfig:
        check_copies("critic", self.ranks, self.tensor_parallel, self.sequence_parallel)
        return self


class ReferenceConfig(Section):
    path: LocalPath = ""
    """A Hugging Face folder of the reference, or of the teacher that `on_policy_distill` needs. Its tokenizer must have the policy's
    vocabulary. Empty: the initial policy."""
    ranks: int = Field(1, ge=1)
    """Processes that share the reference's passes. Micro-batches, threads and deadline are the learner's."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of processes that share one copy of the reference, as with `learner.tensor_parallel`. 1: each holds all of it."""

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
