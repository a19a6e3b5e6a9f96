"""An engine of two members answers as one of one member does, and ends when it loses a member."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import FILES, answer, put, requests, weights_of

from rlhfless_ray.rollout.engine_members import LOST_RC

pytestmark = pytest.mark.engine


def test_two_members_answer_as_one_and_end_when_one_is_lost(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    before, file = set(os.listdir("/dev/shm")), tmp_path / "answers"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(Path(__file__).parent / "members_engine.py"), str(file)]
    ended = subprocess.run(command, env=environment, timeout=180, check=False)
    assert ended.returncode == LOST_RC, "a wait for a lost member would not end"
    pids, found, differing = pickle.loads(file.read_bytes())
    assert differing["B"] == [] and len(differing["A"]) > 5, "each member compares its part"
    assert len(pids) == 1 and not Path(f"/proc/{pids[0]}").exists()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("vllm_dist")]
    engine = new_engine(FILES["A"])
    for name in "AB":
        put(engine, weights_of(FILES[name]))
        wanted = answer(engine, requests())
        for key, one in wanted.items():
            np.testing.assert_array_equal(found[name][key].token_ids, one.token_ids)
            np.testing.assert_allclose(found[name][key].logprobs, one.logprobs, atol=1e-5)
