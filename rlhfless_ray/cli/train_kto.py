"""`python -m rlhfless_ray.cli.train_kto`: run a supervised stage with the flags of OpenRLHF's launcher of this name."""

from __future__ import annotations

from rlhfless_ray.cli.supervised_launcher import main

if __name__ == "__main__":
    main("train_kto")
