"""The synthetic run folder (see synthetic_run.py), made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that `synthetic_run` is found under every import mode of pytest

STEPS = 24


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: copy it before changing it."""
    from synthetic_run import write_synthetic_run

    return write_synthetic_run(tmp_path_factory.mktemp("runs") / "finished", STEPS)
