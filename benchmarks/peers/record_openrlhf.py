"""Write what functions of OpenRLHF 0.11.2 give for fixed inputs: `ENVIRONMENT/bin/python record_openrlhf.py FILE`.

Runs in the environment of `openrlhf_port.py`. `tests/learn/test_openrlhf_values.py` compares this project's functions with
`openrlhf_values.json`.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from openrlhf.models.loss import DPOLoss, LogExpLoss, PairWiseLoss, PolicyLoss, ValueLoss
from openrlhf.models.utils import compute_approx_kl
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

LENGTHS = (2, 5, 1, 3, 4, 6)
GROUP = 2  # responses to a prompt
MASK = torch.tensor([[t < n for t in range(max(LENGTHS))] for n in LENGTHS])
CORRECTIONS: tuple[tuple[str, str, str, list[float]], ...] = (
    ("off", "mask", "ratio", [0.5, 5.0]),
    ("token", "clip", "ratio", [0.8, 1.1]),
    ("token", "mask", "ratio", [0.8, 1.1]),
    ("seq", "mask", "ratio", [0.9, 1.05]),
    ("token", "mask", "binary_kl", [0.0, 0.002]),
    ("token", "mask", "tv", [0.0, 0.02]),
    ("seq", "mask", "binary_kl", [0.0, 0.003]),
    ("seq", "mask", "tv", [0.0, 0.02]),
)


def inputs() -> dict[str, list[float]]:
    """Return arrays of tokens and of responses, in float32."""
    rng, tokens = np.random.default_rng(7), sum(LENGTHS)
    old = -rng.gamma(1.0, 1.0, tokens) - 0.01
    found = {
        "old": old,
        "new": old + rng.normal(0, 0.3, tokens),
        "sampler": old + rng.normal(0, 0.15, tokens),
        "reference": old + rng.normal(0, 0.5, tokens),
        "advantages": rng.normal(0, 1, tokens),
        "values": rng.normal(0, 1, tokens),
        "old_values": rng.normal(0, 1, tokens),
        "returns": rng.normal(0, 1, tokens),
        "kl": rng.normal(0, 0.3, tokens),
        "rewards": rng.normal(0, 1, len(LENGTHS)),
    }
    return {name: np.float32(x).tolist() for name, x in found.items()}


def padded(flat: list[float]) -> torch.Tensor:
    whole = torch.zeros(MASK.shape)
    whole[MASK] = torch.tensor(flat)
    return whole


def flat(x: torch.Tensor) -> list[float]:
    return x[MASK].tolist()


def policy_losses(given: dict[str, list[float]]) -> list[dict[str, Any]]:
    old, sampler, advantages = (padded(given[name]) for name in ("old", "sampler", "advantages"))
    found = []
    for kind, dual, by_token, correction in itertools.product(("ppo", "gspo"), (None, 3.0), (True, False), CORRECTIONS):
        new = padded(given["new"]).requires_grad_()
        level, mode, gating, threshold = correction
        loss = PolicyLoss(0.1, 0.15, dual, by_token, kind, level, mode, gating, threshold)
        value, clipped, kl, *_ = loss(new, old, advantages, MASK, rollout_log_probs=sampler)
        value.backward()
        settings = {"kind": kind, "dual": dual, "mean": "token" if loss.token_level_loss else "sequence", "correction": correction}
        found.append({**settings, "loss": value.item(), "gradient": flat(new.grad), "clipped": clipped.item(), "kl": kl.item()})
    return found


def value_losses(given: dict[str, list[float]]) -> list[dict[str, Any]]:
    found = []
    for clip, by_token in itertools.product((None, 0.2), (True, False)):
        values = padded(given["values"]).requires_grad_()
        value = ValueLoss(clip, by_token)(values, padded(given["old_values"]), padded(given["returns"]), MASK)
        value.backward()
        mean = "token" if by_token else "sequence"
        found.append({"clip": clip, "mean": mean, "loss": value.item(), "gradient": flat(values.grad)})
    return found


def kls(given: dict[str, list[float]]) -> list[dict[str, Any]]:
    found = []
    for name, unbiased in itertools.product(("k1", "k2", "k3"), (True, False)):
        new = padded(given["new"]).requires_grad_()
        kl = compute_approx_kl(new, padded(given["reference"]), padded(given["old"]), name, unbiased)
        kl[MASK].sum().backward()
        found.append({"estimator": name, "unbiased": unbiased, "values": flat(kl.detach()), "gradient": flat(new.grad)})
    return found


def advantages(given: dict[str, list[float]]) -> list[dict[str, Any]]:
    names = ("gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
    found = []
    for name, gamma, kl, clip, plain in itertools.product(names, (1.0, 0.9), (0.0, 0.1), (None, [-0.5, 0.5]), (False, True)):
        if gamma != 1 and name not in ("gae", "reinforce"):
            continue  # OpenRLHF sets it to 1
        for overlong, stop in ((None, None), (4, None), (None, 0.3), (None, -0.5))[: 4 if kl and clip and not plain else 1]:
            args = SimpleNamespace(
                algo=SimpleNamespace(advantage=SimpleNamespace(estimator=name, gamma=gamma, lambd=0.8, no_std_norm=plain)),
                rollout=SimpleNamespace(n_samples_per_prompt=GROUP, max_new_tokens=max(LENGTHS)),
                reward=SimpleNamespace(
                    clip_range=clip, overlong_buffer_len=overlong, overlong_penalty_factor=0.7, stop_properly_penalty_coef=stop
                ),
            )
            maker: Any = object.__new__(RemoteExperienceMaker)
            maker.strategy, maker.advantage_estimator = SimpleNamespace(args=args), name
            maker.kl_ctl = SimpleNamespace(value=kl)
            lengths = torch.tensor(LENGTHS)
            one = Experience(
                index=list(range(len(LENGTHS))),
                action_mask=MASK,
                rewards=torch.tensor(given["rewards"]),
                values=padded(given["values"]),
                kl=padded(given["kl"]),
                response_length=lengths,
                truncated=lengths == max(LENGTHS),
                info={},
            )
            (made,) = maker.compute_advantages_and_returns([one])
            settings = {"estimator": name, "gamma": gamma, "kl": kl, "clip": clip, "divide": not plain, "overlong": overlong, "stop": stop}
            found.append({**settings, "advantages": flat(made.advantages), "returns": flat(made.returns)})
    return found


def supervised(given: dict[str, list[float]]) -> dict[str, Any]:
    chosen, rejected, known, other = (torch.tensor(given[name][:6]) for name in ("old", "new", "sampler", "reference"))
    margin = torch.tensor(given["rewards"]).abs()
    kinds = itertools.product((0.1, 0.5), (0.0, 0.2), (False, True))
    return {
        "pairwise": PairWiseLoss()(chosen, rejected, margin).item(),
        "logexp": LogExpLoss()(chosen, rejected).item(),
        "dpo": [
            {
                "beta": beta,
                "smoothing": smoothing,
                "ipo": ipo,
                "loss": DPOLoss(beta, smoothing, ipo)(chosen, rejected, known, other)[0].item(),
            }
            for beta, smoothing, ipo in kinds
        ],
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main(path: Path) -> None:
    given = inputs()
    content = {
        "version": "0.11.2",
        "lengths": LENGTHS,
        "group": GROUP,
        "inputs": given,
        "policy_loss": policy_losses(given),
        "value_loss": value_losses(given),
        "kl": kls(given),
        "advantages": advantages(given),
        "supervised": supervised(given),
    }
    rows = [f"{json.dumps(name)}: {_lines(value)}" for name, value in rounded(content).items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _lines(value: Any) -> str:
    """JSON with one line for each entry of a list of settings."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
    return json.dumps(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
