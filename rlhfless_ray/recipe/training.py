"""Sections about how the policy learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfless_ray.recipe.section import Decay, OffIsAWord, Section


class Kl(Section):
    coefficient: float = Field(0.0, ge=0)
    """0: no reference model is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy ‖ reference), added to the loss. As a loss `k1` does nothing but add noise: the
    expectation of its gradient is zero. `k2` has the gradient of the KL itself, `k3` comes close near the reference."""


class Algorithm(Section):
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); off: centred only (Dr. GRPO)."""
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
    kl: Kl = Kl()
    """Distance to the policy the run started from."""


class Learner(Section):
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks of the gang."""
    max_slots_per_rank: int = Field(1, ge=1)
    """CPU only: a rank runs as many threads as the slots it holds, up to this many when they are free."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    learning_rate: float = Field(1e-6, gt=0)
    """Constant after `warmup_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up of the learning rate, in optimizer steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, on every weight."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    grad_clip: float = Field(1.0, gt=0)
    """Longest gradient (Euclidean norm over all weights); a longer one is shortened to it."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one micro-batch."""
    overlap: Annotated[Literal["auto", "off"], OffIsAWord] = "auto"
    """Scoring and gradients of complete groups on slots that engines have left, while others still decode. Gradients only
    where the update is then the same, to rounding: one per step, ZeRO 0, 1 or 2. `off`: the learner waits for the rollout."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    max_skipped_updates: int = Field(3, ge=0)
    """The run ends after this many optimizer steps in a row were skipped for a non-finite loss or gradient."""
    deadline_s: float = Field(1800, gt=0)
    """An update that takes longer ends the run."""
