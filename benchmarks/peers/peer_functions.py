"""verl's and OpenRLHF's own functions, callable without starting either. Only in the environment of `peer_env.py`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor


def load_verl() -> Any:
    return importlib.import_module("verl.trainer.ppo.core_algos")


def load_openrlhf() -> SimpleNamespace:
    """Losses, KL and the experience maker. The packages' own __init__ files import flash-attn, vLLM and more: the modules are
    loaded past them."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("models", "utils", "trainer", "trainer.ray", "trainer.ppo_utils"):
        package = ModuleType(f"openrlhf.{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    launcher = ModuleType("openrlhf.trainer.ray.launcher")
    launcher.RayActorGroup = object  # type: ignore[attr-defined]
    sys.modules[launcher.__name__] = launcher
    loss = importlib.import_module("openrlhf.models.loss")
    utils = importlib.import_module("openrlhf.models.utils")
    maker = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    return SimpleNamespace(PolicyLoss=loss.PolicyLoss, ValueLoss=loss.ValueLoss, kl=utils.compute_approx_kl, maker=maker)


def openrlhf_advantages(
    openrlhf: SimpleNamespace,
    name: str,
    rewards: Tensor,
    kl: Tensor,
    values: Tensor,
    mask: Tensor,
    truncated: Tensor,
    settings: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Its whole way from rewards (prompts, samples) to advantages and returns (prompts · samples, length), padded. `settings`:
    gamma, lambd, clip_range, kl_coefficient, divide, max_new_tokens, overlong_buffer, stop_properly."""
    space = SimpleNamespace
    args = space(
        algo=space(advantage=space(estimator=name, gamma=settings["gamma"], lambd=settings["lambd"], no_std_norm=not settings["divide"])),
        reward=space(
            clip_range=settings["clip_range"],
            overlong_buffer_len=settings["overlong_buffer"],
            overlong_penalty_factor=0.7,
            stop_properly_penalty_coef=settings["stop_properly"],
        ),
        rollout=space(n_samples_per_prompt=rewards.shape[1], max_new_tokens=settings["max_new_tokens"]),
        data=space(max_len=settings["max_new_tokens"]),
    )
    experience = space(
        rewards=rewards.reshape(-1).clone(),
        index=list(range(rewards.numel())),
        info={},
        kl=kl,
        values=values,
        action_mask=mask,
        response_length=mask.sum(-1),
        truncated=truncated,
        advantages=None,
        returns=None,
    )
    maker = openrlhf.maker.__new__(openrlhf.maker)
    maker.strategy, maker.advantage_estimator = space(args=args), name
    maker.kl_ctl = space(value=settings["kl_coefficient"])
    (done,) = maker.compute_advantages_and_returns([experience])
    return done.advantages, done.returns
