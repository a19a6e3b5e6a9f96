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
from asking import FILES, answer, at_several_temperatures, put, requests, weights_of
from test_adapter_engine import Trained
from test_quantization import mean_mismatch

from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.local.member_process import LOST_RC
from rlhfless_ray.runtime.agreement import tolerance

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("warm_processes")]


def answers_of_two(file: Path, kind: str) -> tuple[Any, ...]:
    """Return the further members' process ids, the answers under A and B, the tensors that differ, the tokens that a head drafted,
    the bytes of a version that the first member fetched, and what the engine says of each tensor if it is damaged."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = forked([sys.executable, str(Path(__file__).parent / "members_engine.py"), str(file), kind])
    ended = subprocess.run(command, env=environment, timeout=180, check=False)
    assert ended.returncode == LOST_RC, "a wait for a lost member would not end"
    return pickle.loads(file.read_bytes())


def test_two_members_generate_as_one_and_end_when_one_is_lost(new_engine: Callable[..., Any], tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    pids, found, differing, drafted, fetched, damage = answers_of_two(tmp_path / "answers", "plain")
    sizes = {name: array.nbytes for name, array in weights_of(FILES["B"]).items()}
    shared = sum(size for name, size in sizes.items() if any(part in name for part in ("norm", ".k_proj.", ".v_proj.")))
    share = (sum(sizes.values()) + shared) / 2
    assert share <= fetched < share * 1.02, "each member holds the norms and the only KV head. The rest is halved"
    assert damage.keys() == sizes.keys() and all(f"version 0 arrived damaged: {name} differ" in said for name, said in damage.items())
    assert differing["B"] == [] and len(differing["A"]) > 5, "each member compares its part"
    assert len(pids) == 1 and not Path(f"/proc/{pids[0]}").exists()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("vllm_dist")]
    assert drafted > 100
    engine = new_engine(FILES["A"])
    for name in "AB":
        put(engine, weights_of(FILES[name]))
        wanted = answer(engine, at_several_temperatures(requests()))
        for key, one in wanted.items():
            np.testing.assert_array_equal(found[name][key].token_ids, one.token_ids)
            np.testing.assert_allclose(found[name][key].logprobs, one.logprobs, atol=1e-5)


def test_two_members_share_an_adapter(tmp_path: Path) -> None:
    _, found, *_ = answers_of_two(tmp_path / "answers", "adapter")
    for name in "AB":
        assert Trained(FILES["A"], ord(name)).largest_mismatch(requests(), found[name]) < 1e-4


def test_two_members_quantise_their_parts(tmp_path: Path) -> None:
    """Each member scales the rows of its own part, so the result is near that of one member, not the same."""
    _, found, *_ = answers_of_two(tmp_path / "answers", "int8")
    for name in "AB":
        assert 1e-4 < mean_mismatch(FILES[name], requests(), found[name]) < tolerance("float32", "int8")
