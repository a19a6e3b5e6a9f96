"""The learner on the device: parked and back, with its optimizer on the host, and with activations computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.gpu.hosts import OPEN_S
from tests.learn.conftest import learner_settings
from tests.learn.tiny_policy import random_batch, tiny_policy

pytestmark = pytest.mark.gpu

CLOSE = {"float32": 1e-5, "bfloat16": 2e-3}  # of weights below 1 after steps of 1e-3: the last bits of some, not a step of any
KINDS: dict[str, dict[str, Any]] = {"parked": {}, "hosted": {"optimizer_offload": True}, "recompute": {"gradient_checkpointing": True}}


def begin(hosts: Any, items: list[Any]) -> None:
    hosts.get("LearnerTools", "learner tests")


def train(host: Any, name: str, dtype: str, stage: int, learner: dict[str, Any], parks: bool = False) -> tuple[Any, list[float], Any]:
    """Make two updates. Returns the weights, the losses, and what parking took."""
    rng = np.random.default_rng(7)
    settings = learner_settings(1, stage, dtype=dtype, learner=learner)
    host.ask("open", name, tiny_policy(0, dtype=dtype, spread=0.15), settings, within_s=OPEN_S)
    losses, report = [], {}
    for number in range(2):
        losses.append(host.ask("update", name, random_batch(rng)).loss)
        if parks and number == 0:
            before = host.ask("weights", name)
            report = host.ask("leave_and_return", name)
            after = host.ask("weights", name)
            assert all(np.array_equal(after[key], before[key]) for key in before)
    return host.ask("weights", name), losses, report


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("bfloat16", 1), ("float32", 3)])
def test_it_computes_what_an_undisturbed_learner_computes(
    hosts: Any, record: Callable[..., None], kind: str, dtype: str, stage: int
) -> None:
    if kind == "hosted" and stage == 0:
        pytest.skip("the optimizer is offloaded from ZeRO 1 on")
    host, name = hosts.get("LearnerTools", "learner tests"), f"{kind} {dtype} {stage}"
    wanted, losses, _ = train(host, f"{name} plain", dtype, stage, {})
    found, others, report = train(host, name, dtype, stage, KINDS[kind], parks=kind == "parked")
    apart = max(float(np.abs(as_float(found[key]) - as_float(wanted[key])).max()) for key in wanted)
    record(weights_apart=apart, losses=losses, others=others, **report)
    assert apart < CLOSE[dtype] and np.allclose(losses, others, atol=CLOSE[dtype])


def as_float(array: np.ndarray) -> np.ndarray:
    """Return float32 of an array as it is published: bfloat16 has a dtype that numpy cannot subtract."""
    from rlhfless_ray.weights.tensor_file import as_tensor

    return as_tensor(array).float().numpy()
