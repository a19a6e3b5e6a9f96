"""Write what TRL 1.16's losses are for fixed inputs: `.env-trl/bin/python record_trl.py FILE`.

Runs in TRL's environment. A trainer's loss is called with a model that answers fixed log-probabilities or rewards, so nothing else counts.
`tests/supervise/test_losses.py` compares this project's losses and gradients with `trl_values.json`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer

BETA, WEIGHTS = 0.3, (1.5, 0.5)
LENGTHS = (2, 5, 1, 3, 4, 6, 2, 3)
DESIRABLE = (True, False, False, True, True, False, True, False)
RNG = np.random.default_rng(11)


def answer(log_probs: torch.Tensor) -> SimpleNamespace:
    nothing = torch.zeros_like(log_probs).detach()
    return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def trainer(**settings: Any) -> SimpleNamespace:
    same = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    model = SimpleNamespace(training=False)
    defaults = {"aux_loss_enabled": False, "precompute_ref_logps": True, "_total_train_tokens": 0, "_tp_size": 1}
    metrics = {"eval": defaultdict(list)}
    return SimpleNamespace(accelerator=same, model=model, beta=BETA, _metrics=metrics, **defaults, **settings)


def learned(loss: torch.Tensor, inputs: torch.Tensor) -> dict[str, Any]:
    loss.backward()
    assert inputs.grad is not None
    return {"loss": loss.item(), "gradient": inputs.grad.tolist()}


def sequences() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return log-probabilities (sequences, tokens), 0 beyond a response's end, and a batch of them, whose first token is the prompt."""
    mask = torch.tensor([[0] + [int(t < n) for t in range(max(LENGTHS))] for n in LENGTHS])
    values = torch.from_numpy(-RNG.exponential(size=(len(LENGTHS), max(LENGTHS)))) * mask[:, 1:]
    return values, {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def dpo() -> dict[str, Any]:
    values, batch = sequences()
    references = torch.from_numpy(-RNG.exponential(size=len(LENGTHS)) * 3)
    batch["ref_chosen_logps"], batch["ref_rejected_logps"] = references.chunk(2)
    policy = values.clone().requires_grad_()
    settings = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "loss_types": ["sigmoid"], "loss_weights": [1.0]}
    stub = trainer(use_weighting=False, **settings)
    loss = DPOTrainer._compute_loss(stub, lambda **_: answer(policy), batch, False)
    return {"logprobs": values.tolist(), "references": references.tolist(), **learned(loss, policy)}


def kto() -> dict[str, Any]:
    values, batch = sequences()
    references, kl, kl_references = (torch.from_numpy(-RNG.exponential(size=len(LENGTHS)) * size) for size in (3, 3, 4))
    policy = values.clone().requires_grad_()
    batch |= {"label": torch.tensor(DESIRABLE), "ref_logps": references, "ref_KL_logps": kl_references}
    weights = dict(zip(("desirable_weight", "undesirable_weight"), WEIGHTS, strict=True))
    stub = trainer(calculate_KL=True, loss_type="kto", _compute_kl_logps=lambda model, batch: kl, **weights)
    loss = KTOTrainer._compute_loss(stub, lambda **_: answer(policy), batch, False)
    given = {"references": references.tolist(), "kl": kl.tolist(), "kl_references": kl_references.tolist(), "desirable": DESIRABLE}
    return {"logprobs": values.tolist(), **given, **learned(loss, policy)}


def reward(with_margin: bool) -> dict[str, Any]:
    rewards, margins = torch.from_numpy(RNG.normal(size=8)), torch.from_numpy(RNG.random(4))
    policy = rewards.clone().requires_grad_()
    stub = trainer(args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {"attention_mask": torch.ones(8, 2), **({"margin": margins} if with_margin else {})}
    loss = RewardTrainer.compute_loss(stub, lambda **_: SimpleNamespace(logits=policy[:, None]), inputs)
    return {"rewards": rewards.tolist(), "margins": margins.tolist() if with_margin else [0.0] * 4, **learned(loss, policy)}


if __name__ == "__main__":
    found = {"dpo": dpo(), "kto": kto(), "reward": reward(False), "reward_margin": reward(True)}
    Path(sys.argv[1]).write_text(json.dumps({"beta": BETA, "weights": WEIGHTS, **found}, indent=1) + "\n")
