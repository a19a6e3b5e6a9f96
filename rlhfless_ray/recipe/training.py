"""Sections about how the policy learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.section import Decay, OffIsAWord, ScheduleName, Section, Share

COMPARES = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")  # the responses to one prompt with each other
WHITENS = ("gae", "reinforce", "reinforce_baseline")
DISCOUNTS = ("gae", "reinforce")


class Advantage(Section):
    estimator: Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"] = "group_norm"
    """How rewards become advantages. `group_norm` (GRPO): a group's rewards, centred and divided by their deviation; `dr_grpo`:
    centred only; `rloo`: minus the mean of the others of the group; `reinforce_baseline`: centred, then whitened over the batch;
    `reinforce`: the rewards, whitened over the batch; `flash_reinforce`: minus the batch's mean, no group is needed; `gae`
    (PPO): generalised advantages over a critic's values, whitened over the batch."""
    gamma: Share = 1.0
    """Discount per token, for `gae` and `reinforce`."""
    lambd: Share = 1.0
    """Of `gae`: 0 trusts the critic's next value, 1 what was returned."""
    normalize_std: bool = True
    """Whitening divides by the deviation, besides centring."""


class Kl(Section):
    coefficient: float = Field(0.0, ge=0)
    """0: there is no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy ‖ reference). As a loss `k1` does nothing but add noise: the expectation of its
    gradient is zero. `k2` has the gradient of the KL itself, `k3` comes close near the reference."""
    place: Literal["loss", "reward"] = "loss"
    """The estimate is a term of the loss, or taken off each token's reward."""
    target: float | None = Field(None, gt=0)
    """The coefficient is adapted so that the KL comes to this (Ziegler et al. 2019). None: it stays as it is."""
    horizon: int = Field(10_000, ge=1)
    """In samples, more than a fifth of a step's: how slowly the coefficient is adapted."""
    unbiased_gradient: bool = False
    """As a loss: the gradient of the KL itself, whatever the estimator, with a bounded importance weight off-policy."""


class Loss(Section):
    kind: Literal["ppo", "gspo"] = "ppo"
    """The clipped ratio is that of a token, or the geometric mean over its sequence."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of negative advantages, in units of the advantage. None: there is none."""
    entropy_coefficient: float | None = Field(None, ge=0)
    """Weight of the policy's entropy, which is added to what is maximised. The entropy is logged in any case."""
    correction_level: Literal["off", "token", "seq"] = "off"
    """Importance weights learner / sampler with a band, in `importance_cap`'s place: looked at per token, or per sequence."""
    correction_mode: Literal["mask", "clip"] = "mask"
    """What is outside the band is left out, or (tokens' ratios only) cut to it."""
    correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What the band holds for: the ratio; or a divergence between the two probabilities of the drawn token."""
    correction_low: float = Field(0.0, ge=0)
    """Lower end of the band."""
    correction_high: float = Field(5.0, gt=0)
    """Upper end of the band."""
    ratio_to: Literal["learner", "sampler"] = "learner"
    """gspo's ratio is to the learner's probabilities before the step's updates, or to those the tokens were drawn with: it then holds
    what the two differ by, and no weights correct for it."""

    @model_validator(mode="after")
    def _a_band(self) -> Loss:
        name = "algorithm.loss.correction"
        if self.correction_level == "off":
            return self
        if self.correction_mode == "clip" and (self.correction_level, self.correction_gating) != ("token", "ratio"):
            raise ValueError(f"{name}_mode: only a token's ratio can be cut, so `clip` needs {name}_level token and {name}_gating ratio")
        if self.correction_gating != "ratio" and self.correction_low > 0:
            raise ValueError(f"{name}_low: a divergence is bounded from above only, so it must be 0 with {self.correction_gating}")
        if self.correction_low > self.correction_high:
            raise ValueError(f"{name}_low: must not exceed {name}_high")
        return self


class Algorithm(Section):
    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.2, gt=0)
    """Its upper side, see `clip_low`."""
    importance_cap: float = Field(2.0, ge=0)
    """Cap of the truncated importance weight learner / sampler. 0: no correction."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the optimizer step, or over sequences of each sequence's token mean."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per rollout batch, each on its share of the prompts."""
    batch_samples: int | None = Field(None, ge=1)
    """Samples of one optimizer step, drawn from the shuffled rollout batch, in `updates_per_step`'s place. The last one may
    have fewer."""
    filter_range: tuple[float, float] | None = None
    """Prompts whose responses' mean score (the reward, where the function gives no score) is not strictly inside are dropped, and
    others answered in the same step until it has `prompts.batch_prompts`; at the end of an episode it may have fewer."""
    filter_draw: float = Field(1.0, ge=1, lt=2)
    """Prompts answered for each one that is missing. Above 1 fewer rounds are needed, and groups may be left over: the next step
    learns from them, in checkpoints they are kept. Those of the last step are not learned from."""
    filter_patience: int = Field(10, ge=1)
    """The run ends when so many batches of prompts in a row are dropped."""
    epochs: int = Field(1, ge=1)
    """Passes of the optimizer over a rollout batch."""
    loss: Loss = Loss()
    """The policy's loss, beyond the clip."""
    kl: Kl = Kl()
    """Distance to the policy the run started from."""

    @model_validator(mode="after")
    def _fits_together(self) -> Algorithm:
        name = self.advantage.estimator
        if self.advantage.gamma != 1 and name not in DISCOUNTS:
            raise ValueError(f"algorithm.advantage.gamma: {name} does not discount, so it must be 1")
        if self.advantage.lambd != 1 and name != "gae":
            raise ValueError(f"algorithm.advantage.lambd: is about gae, {name} has none, so it must be 1")
        if not self.advantage.normalize_std and name not in WHITENS:
            raise ValueError(f"algorithm.advantage.normalize_std: is about whitening, which {name} does not do; leave it out")
        if self.loss.kind == "gspo" and self.loss_mean != "sequence":
            raise ValueError("algorithm.loss_mean: gspo is a loss of sequences, so it must be `sequence`")
        if self.loss.ratio_to == "sampler" and self.loss.kind != "gspo":
            raise ValueError("algorithm.loss.ratio_to: is about gspo's ratio; set algorithm.loss.kind gspo, or leave it out")
        if self.loss.ratio_to == "sampler" and (self.importance_cap > 0 or self.loss.correction_level != "off"):
            raise ValueError(
                "algorithm.loss.ratio_to: a ratio to the sampler needs no weights; set algorithm.importance_cap 0 and leave "
                "algorithm.loss.correction_level off"
            )
        if self.loss.correction_level != "off" and self.importance_cap > 0:
            raise ValueError("algorithm.importance_cap: must be 0 where algorithm.loss.correction_level corrects instead")
        if self.kl.target is not None and not self.kl.coefficient:
            raise ValueError("algorithm.kl.target: needs an algorithm.kl.coefficient above 0 to begin with")
        if self.kl.unbiased_gradient and self.kl.place == "reward":
            raise ValueError("algorithm.kl.unbiased_gradient: is about the KL as a loss; with algorithm.kl.place reward leave it out")
        if self.filter_range is not None and self.filter_range[0] >= self.filter_range[1]:
            raise ValueError("algorithm.filter_range: the first must be smaller than the second")
        if self.filter_range is None and (self.filter_draw, self.filter_patience) != (1.0, 10):
            raise ValueError("algorithm.filter_range: filter_draw and filter_patience are about it; set it, or leave them out")
        if self.batch_samples is not None and self.updates_per_step > 1:
            raise ValueError("algorithm.batch_samples: set either this or algorithm.updates_per_step")
        return self

    @property
    def keeps_reference(self) -> bool:
        return self.kl.coefficient > 0

    @property
    def has_critic(self) -> bool:
        return self.advantage.estimator == "gae"


class Learner(Section):
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks of the gang."""
    max_slots_per_rank: int = Field(1, ge=1)
    """CPU only: a rank runs as many threads as the slots it holds, up to this many when they are free."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    learning_rate: float = Field(1e-6, gt=0)
    """Its peak."""
    schedule: ScheduleName = "constant"
    """Of the learning rate, by the name that transformers has for it, over all optimizer steps of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up of a `constant` learning rate, in optimizer steps."""
    warmup_share: Share = 0.0
    """Linear warm-up of the other schedules, as a share of all optimizer steps. It begins at 0."""
    min_rate_share: Share = 0.0
    """Where `cosine_with_min_lr` ends, as a share of the peak."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's."""
    decay_all: bool = True
    """Weight decay on every weight. Off: not on biases and norms."""
    optimizer: Literal["adam"] = "adam"
    """AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    adam_eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    optimizer_offload: bool = False
    """AdamW's moments and the float32 weights stay in host memory and the update is made there, the critic's too (DeepSpeed's
    ZeRO-Offload, so with `zero_stage` 1, 2 or 3): room on the device for a slower update, the same to rounding. On CPU slots it
    saves nothing."""
    grad_clip: float = Field(1.0, gt=0)
    """Longest gradient (Euclidean norm over all weights); a longer one is shortened to it."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one micro-batch."""
    overlap: Annotated[Literal["auto", "off"], OffIsAWord] = "auto"
    """Scoring and gradients of complete groups on slots that engines have left, while others still decode. Gradients only
    where the update is then the same, to rounding: one per step, ZeRO 0, 1 or 2. Of what has ended, the passes that an update begins
    with: the reference's log-probabilities, else also the old ones and the critic's values. `off`: the learner waits for the
    rollout."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    max_skipped_updates: int = Field(3, ge=0)
    """The run ends after this many optimizer steps in a row were skipped for a non-finite loss or gradient."""
    deadline_s: float = Field(1800, gt=0)
    """An update that takes longer ends the run."""

    @model_validator(mode="after")
    def _one_warm_up(self) -> Learner:
        if self.warmup_steps and self.schedule != "constant":
            raise ValueError(f"learner.warmup_steps: is for the schedule `constant`; with {self.schedule} set learner.warmup_share")
        if self.warmup_share and self.schedule == "constant":
            raise ValueError("learner.warmup_share: `constant` has none; set learner.schedule to `constant_with_warmup`")
        return self

    @model_validator(mode="after")
    def _offloads_shards(self) -> Learner:
        if self.optimizer_offload and self.zero_stage == 0:
            raise ValueError("learner.optimizer_offload: needs a learner.zero_stage of 1, 2 or 3")
        return self


class Critic(Section):
    path: str = ""
    """A local Hugging Face folder of a causal LM, reward model or critic. Empty: the policy the run starts from."""
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks of the critic's gang. ZeRO stage, micro-batches, threads and deadline are the learner's."""
    value_head: str = Field("score", min_length=1)
    """Name of the scalar head's weights in that folder. Where it has none they are drawn."""
    value_clip: float | None = Field(0.5, gt=0)
    """Values may move so far from the old ones before the loss clips them. None: as far as they like."""
    freeze_policy_steps: int = Field(0, ge=0)
    """Steps at the start that train the critic alone."""
    save: bool = False
    """Write the critic as a Hugging Face folder at the end, `critic/` in the run folder."""
    learning_rate: float = Field(9e-6, gt=0)
    """Its peak."""
    schedule: ScheduleName = "cosine_with_min_lr"
    """As learner.schedule."""
    warmup_share: Share = 0.03
    """As learner.warmup_share; `constant` has no warm-up."""
    min_rate_share: Share = 0.1
    """As learner.min_rate_share."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's; not on biases and norms."""
    optimizer: Literal["adam"] = "adam"
    """AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """As learner.betas."""
    adam_eps: float = Field(1e-8, gt=0)
    """As learner.adam_eps."""
    grad_clip: float = Field(1.0, gt=0)
    """As learner.grad_clip."""


class Reference(Section):
    ranks: int = Field(1, ge=1)
    """Processes that share the reference's passes; each holds the policy that the run began with. Micro-batches, threads and
    deadline are the learner's."""


class Lora(Section):
    rank: int = Field(0, ge=0)
    """Of the adapters that are trained while the policy (and the critic) stay as they are; engines get the two merged. 0: every
    weight is trained."""
    alpha: int = Field(16, ge=1)
    """An adapter's product is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that an update leaves out. Sampling and old log-probabilities leave out none."""
    target_modules: list[str] = Field(["all-linear"], min_length=1)
    """Ends of the names of the layers that get an adapter. `all-linear`: every linear layer but the output head."""

    @model_validator(mode="after")
    def _all_or_names(self) -> Lora:
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            raise ValueError("lora.target_modules: `all-linear` stands alone; leave it or the names out")
        return self


class Ema(Section):
    beta: float | None = Field(None, ge=0, le=1)
    """An average of the policy's weights is kept, in which the old average has this share at each optimizer step; it is what is
    saved as the final model. Engines go on with the policy itself. None: there is none."""
