"""Properties of the advantage estimators: the one table that validation, advantages and OpenRLHF's flags read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EstimatorName = Literal[
    "gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce", "on_policy_distill", "online_dpo"
]

OTHER_NAMES: dict[str, EstimatorName] = {
    "grpo": "group_norm",
    "ppo": "gae",
    "reinforce++": "reinforce",
    "reinforce_plus_plus": "reinforce",
    "reinforce++_baseline": "reinforce_baseline",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
}
"""What papers and other systems call an estimator, for messages."""


@dataclass(frozen=True)
class Estimator:
    whitens: bool = False  # advantages are whitened over the rollout batch, unless the recipe says otherwise
    discounts: bool = False  # a gamma other than 1 is meant to be used
    critic: bool = False
    least_samples: int = 1  # per prompt; 2 where the responses to one prompt are compared with each other
    teacher: bool = False  # a token's advantage comes from a teacher's log-probability; rewards do not count
    whole_batch: bool = False  # an advantage depends on the whole rollout batch, not only on the group
    pairs: bool = False  # trains on each group's best and worst response, whichever weight version drew them


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(whitens=True, discounts=True, critic=True),  # arXiv 1506.02438, with 1707.06347
    "reinforce": Estimator(whitens=True, discounts=True),  # REINFORCE++, arXiv 2501.03262
    "rloo": Estimator(least_samples=2),  # arXiv 2402.14740
    "reinforce_baseline": Estimator(whitens=True, least_samples=2),  # REINFORCE++-baseline, arXiv 2501.03262
    "group_norm": Estimator(least_samples=2),  # GRPO, arXiv 2402.03300
    "dr_grpo": Estimator(least_samples=2),  # arXiv 2503.20783; the constant-length division is the loss's
    "flash_reinforce": Estimator(whole_batch=True),  # OpenRLHF 0.11.2
    "on_policy_distill": Estimator(teacher=True),  # arXiv 2306.13649 with the reverse KL, one token at a time
    "online_dpo": Estimator(least_samples=2, whole_batch=True, pairs=True),  # arXiv 2305.18290 and 2402.04792
}
