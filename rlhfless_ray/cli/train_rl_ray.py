"""`python -m rlhfless_ray.cli.train_rl_ray`: train with the flags of Molt's launcher of this name."""

from __future__ import annotations

from rlhfless_ray.cli.supervised_launcher import start
from rlhfless_ray.cli.train_ppo_ray import train_translated
from rlhfless_ray.compat.openrlhf.command import MOLT
from rlhfless_ray.compat.openrlhf.molt import translate_molt

if __name__ == "__main__":
    start(MOLT, lambda tokens: train_translated(translate_molt(tokens), tokens))
