"""Why a flag of PPO's launcher has no effect on a command line in OpenRLHF: empty strings where it has one."""

from __future__ import annotations

from collections.abc import Callable

from rlhfless_ray.compat.openrlhf.normalise import LEVEL, Values


def unless(name: str, why: str) -> Callable[[Values], str]:
    """Return a function that returns `why` if another flag is off."""
    return lambda v: "" if v[name] else why


def when(name: str, why: str) -> Callable[[Values], str]:
    """Return a function that returns `why` if another flag is on."""
    return lambda v: why if v[name] else ""


def no_critic(v: Values) -> str:
    return "" if v.has_critic else f"there is no critic with {v.estimator}"


def no_reference(v: Values) -> str:
    return "" if v.has_reference else "the KL coefficient is 0, there is no reference model"


def no_reward_model(v: Values) -> str:
    return "rewards come from a file, URL or agent, there is no reward model" if v.external_reward else ""


def no_evaluation(v: Values) -> str:
    return no_set(v) or off_for_set(v)


def off_for_set(v: Values) -> str:
    return "evaluation is off" if v["eval.dataset"] and not v.evaluates else ""


def no_correction(v: Values) -> str:
    if v[LEVEL] == "off":
        return "the importance correction is off"
    return "gspo's correction is a ratio to the sampler, without a band" if v["actor.policy_loss_type"] == "gspo" else ""


def no_checkpoints(v: Values) -> str:
    keeps_best = v.evaluates and v["ckpt.best_metric_key"] != "none"
    return "" if v["ckpt.save_steps"] > 0 or v["ckpt.load_enable"] or keeps_best else "no checkpoints are requested"


def no_limited_checkpoints(v: Values) -> str:
    return no_checkpoints(v) or ("only models are written, which no flag limits" if v["ckpt.disable_ds"] else "")


def no_discount(v: Values) -> str:
    return "" if v.traits.discounts else f"{v.estimator} does not discount"


def no_whitening(v: Values) -> str:
    return "" if v.whitens else f"{v.estimator} is not whitened"


def no_kl_target(v: Values) -> str:
    return no_reference(v) or ("" if v["algo.kl.target"] else "no KL target")


def no_overlong_buffer(v: Values) -> str:
    return "no overlong buffer is set" if v["reward.overlong_buffer_len"] is None else ""


def no_value_model(v: Values) -> str:
    return "" if v.has_critic else no_reward_model(v)


def no_value_head(v: Values) -> str:
    return "" if v.has_critic or not v.external_reward else "there is neither critic nor reward model"


def no_run_name(v: Values) -> str:
    shown = v["logger.wandb.key"] or v["logger.tensorboard_dir"] or "logger.wandb.run_name" in v.set_by
    return "" if shown else "Weights & Biases and TensorBoard are off"


no_set = unless("eval.dataset", "there is no evaluation data set")
no_lora = unless("ds.lora.rank", "the LoRA rank is 0")
no_wandb = unless("logger.wandb.key", "Weights & Biases is off")
