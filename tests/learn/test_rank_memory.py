"""What a rank is said to hold at least, beside what a real one holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from placement.memory import VALUE_BYTES, Training, rank_memory
from rlhfless_ray.local.laptop.local_ray import forked

# Bytes per parameter that DeepSpeed's buffers and copies add at the peak, by type and ZeRO stage; a lower bound leaves them out.
SLACK = {("float32", 0): 3, ("float32", 1): 15, ("bfloat16", 2): 12, ("bfloat16", 3): 16}


@pytest.fixture(scope="module")
def held(warm_processes: None) -> dict[tuple[str, int], dict[str, float]]:
    """What real ranks hold."""
    lines = run(*(f"{dtype}:{stage}" for dtype, stage in SLACK))
    return dict(zip(SLACK, lines, strict=True))


def run(*cases: str) -> list[dict[str, float]]:
    """Return what the processes of rank_memory.py print."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(Path(__file__).with_name("rank_memory.py")), *cases]
    done = subprocess.run(forked(command), capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "stage"), SLACK)
def test_a_real_rank_holds_what_is_foreseen_and_not_much_more(held: dict[tuple[str, int], Any], dtype: str, stage: int) -> None:
    told = held[dtype, stage]
    n = told["parameters"]
    rank = rank_memory(n, Training(1, stage, VALUE_BYTES[dtype]))
    foreseen = {"loaded": rank.loaded / n, "idle": rank.idle / n, "peak": sum(size for _, size in rank.training) / n}
    for moment, least in foreseen.items():
        assert told[moment] >= least - 0.1, (moment, told)  # the watch of memory has its own grain
    assert told["peak"] <= foreseen["peak"] + SLACK[dtype, stage], told


@pytest.mark.slow
def test_no_rank_of_zero_3_holds_the_whole_model(warm_processes: None) -> None:
    """Neither while it opens the model, nor while it publishes a version or writes a model folder. Its part is 0.5, imports and heap take
    up to 0.35. When DeepSpeed wrote into the mapped file, the second rank took 1.47."""
    ranks = run("bfloat16:shards", "float32:shards", "float32:critic", "float32:adapters")
    assert sorted(told["rank"] for told in ranks) == [0] * 4 + [1] * 4
    for told in ranks:
        assert told["opening"] < 0.8, told
        if told["kind"] == "shards":
            assert told["publishing"] < 0.1 and told["writing model"] < 0.9 and told["writing average"] < 0.1, told
            assert told["published"] == pytest.approx(0.5, abs=0.01), told
            assert [told["model"], told["average"]] == pytest.approx([0.5] * 2, abs=0.07), told
        else:
            assert told["dtypes"] == ["float32"], told
