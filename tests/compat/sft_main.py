"""`main` of the launcher, without arguments."""

from __future__ import annotations

from rlhfless_ray.cli import supervised_launcher


def main() -> None:
    supervised_launcher.main("train_sft")
