"""Recipe section of the algorithm: advantages, loss and distance to the initial policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rlhfless_ray.common.estimators import ESTIMATORS, OTHER_NAMES, EstimatorName
from rlhfless_ray.recipe.section import Section, Share, raise_first


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
