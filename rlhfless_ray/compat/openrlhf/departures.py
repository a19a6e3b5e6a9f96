"""Write notes before a run on intended differences from OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping

from rlhfless_ray.compat.openrlhf import flag_semantics as m
from rlhfless_ray.compat.openrlhf.flags import flags_of
from rlhfless_ray.compat.openrlhf.normalise import LEVEL, Values, targets


def departures(v: Values, own: Mapping[str, object]) -> list[str]:
    """Return a sentence for each difference from OpenRLHF, and for lag that nothing corrects for. `own`: settings of this project."""
    return [*_long_prompts(v, own), *_frozen(v), *_remainder(v), *_asynchronous(v), *_uncorrected(v)]


def _long_prompts(v: Values, own: Mapping[str, object]) -> list[str]:
    if "prompts.overlong" in own:
        return []
    longest = m.lengths(None, v)["prompts.max_prompt_tokens"]
    return [
        f"prompts longer than {longest} tokens end the run before it starts; OpenRLHF cuts tokens off their left, which "
        "--elastic.prompts.overlong cut_left does here"
    ]


def _uncorrected(v: Values) -> list[str]:
    if not v["train.async_enable"] or v[LEVEL] != "off":
        return []
    switch = next((flag for flag in flags_of(v.version) if LEVEL in targets(flag)), "--enable_vllm_is_correction of 0.9.2 and later")
    older = "responses of older weights are trained on as if the current ones had drawn them, as in OpenRLHF"
    return [f"{v.spelled('train.async_enable')}: {older}; {switch} corrects for that"]


def _asynchronous(v: Values) -> list[str]:
    if not v["train.async_enable"]:
        return []
    steps, partial = m.queue_steps(v), v.spelled("train.partial_rollout_enable")
    if not v["train.partial_rollout_enable"]:
        longer = f"{v.spelled('train.async_queue_size')}: samples are at most one step old; OpenRLHF allows {steps}"
        return [longer] if steps > 1 else []
    notes = [
        f"{partial}: a response that goes on under new weights is prefilled again under them; OpenRLHF keeps the KV of the old weights"
    ]
    if v[LEVEL] != "off":
        notes.append(f"{partial}: engines load new weights later than the end of the update if a pause costs more than it brings")
    bound = m.asynchronous(v)["rollout.max_lag_steps"]
    if bound > 1:
        notes.append(f"{partial}: groups are trained as they are complete, and none is older than {bound} steps")
    return notes


def _frozen(v: Values) -> list[str]:
    steps = m.frozen_steps(v["critic.freezing_steps"], v).get("critic.freeze_policy_steps", 0)
    if not steps:
        return []
    without = "" if v.has_critic else f" (with {v.estimator} there is no critic, so nothing else is trained either)"
    carries = m.optimizer_steps(v["train.batch_size"], v).get("algorithm.remainder") == "carry"
    but = ", but for what the last of these steps carries over" if carries and v.has_critic else ""
    return [
        f"{v.spelled('critic.freezing_steps')}: the policy is not trained in the first {steps} step{'s' * (steps > 1)}{without}; it never "
        f"learns from their samples{but}, where OpenRLHF leaves them in the actor's buffer for its first update"
    ]


def _remainder(v: Values) -> list[str]:
    settings, samples = m.optimizer_steps(v["train.batch_size"], v), v["rollout.batch_size"] * v["rollout.n_samples_per_prompt"]
    if "algorithm.remainder" not in settings:
        return []
    start = f"{v.spelled('train.batch_size')}: it does not divide the {samples} samples of a rollout; "
    if settings["algorithm.remainder"] == "drop":
        return [f"{start}with {v.named('train.dynamic_batch_enable')} the other {samples % v['train.batch_size']} are dropped"]
    return [
        f"{start}the rest is used in the first optimizer step of the next rollout, and is kept in checkpoints; that step's mean is "
        "over all of its samples (OpenRLHF keeps gradients instead and loses them at a stop; from 0.11 on it weighs the rest like a "
        "whole step)"
    ]
