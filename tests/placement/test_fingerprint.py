"""Results of the planner and the rollout simulator, compared with hashes that an earlier version left.

Where results change on purpose, record new hashes: `python -m tests.placement.test_fingerprint`. Length forecasts are left
out: they are kept in single precision, whose last digits differ between processors.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fingerprint import fingerprint

HASHES = Path(__file__).with_name("fingerprint.json")
PARTS = ("planner", "scaling", "fits", "moves", "rollouts")


@pytest.mark.parametrize("part", PARTS)
def test_results_are_those_of_before(part: str) -> None:
    before = {name: value for name, value in json.loads(HASHES.read_text()).items() if name.startswith(f"{part},")}
    assert before and fingerprint([part], [0]) == before, "results changed; see the head of this file if that is meant"


if __name__ == "__main__":
    HASHES.write_text(json.dumps(fingerprint(list(PARTS), [0]), indent=1) + "\n")
