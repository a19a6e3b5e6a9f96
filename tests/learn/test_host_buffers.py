"""The host memory that a learner's state goes to when it leaves a GPU, with DeepSpeed's calls on the host's own memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from rlhfless_ray.learn import offload
from rlhfless_ray.learn.offload import LEAST_LOCKED_BYTES, HostBuffers


def test_a_state_that_leaves_again_and_again_takes_exactly_its_size(monkeypatch: Any) -> None:
    """torch's allocator would round the 5 MB of a tensor up to 8."""
    elements = 5 * LEAST_LOCKED_BYTES // 4
    state = [
        torch.arange(elements, dtype=torch.float32),
        torch.full((2, elements), 3.0).bfloat16(),
        torch.tensor(7.0),
        torch.ones(elements),
    ]
    parked: list[torch.Tensor] = []

    def offload_states(pin_memory: bool) -> None:
        assert pin_memory
        parked[:] = [get_accelerator().pin_empty_like(tensor, device="cpu").copy_(tensor) for tensor in state]

    optimizer = SimpleNamespace(_link_all_hp_params=lambda: None)
    engine: Any = SimpleNamespace(offload_states=offload_states, optimizer=optimizer, module=torch.nn.Linear(1, 1))
    monkeypatch.setattr(offload, "link_moments", lambda engine: None)
    buffers, own = HostBuffers(), get_accelerator().pin_empty_like
    places = []
    for _ in range(2):
        offload.leave_device(engine, 1, buffers=buffers)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(parked, state, strict=True))
        places.append([tensor.data_ptr() for tensor in parked if tensor.numel() > 1])
        state = [tensor + 1 for tensor in state]
    assert places[0] == places[1] and len(set(places[0])) == 3, "the next time it goes to the same memory"
    assert buffers.nbytes == 3 * 5 * LEAST_LOCKED_BYTES
    assert get_accelerator().pin_empty_like == own
