"""Tensors that fetch what a loader copies of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfless_ray.engine.sliced_tensor import SlicedTensor, sliced_tensors
from rlhfless_ray.weights.channel import ObjectStoreChannel, PublishedVersion
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.shards import share_of
from rlhfless_ray.weights.tensor_file import as_numpy, save_tensors
from rlhfless_ray.weights.tensor_slice import whole_slices

WHOLE = {
    "matrix": torch.arange(48.0).view(6, 8).to(torch.bfloat16),
    "experts": torch.arange(2 * 4 * 6, dtype=torch.float32).view(2, 4, 6),
    "scale": torch.tensor(3.0),
}


@pytest.fixture(params=[1, 3])
def channel(request: pytest.FixtureRequest) -> ObjectStoreChannel:
    """`params`: number of ranks that have some of each tensor."""
    contents = save_tensors(WHOLE)
    parts = [share_of(contents, rank, request.param) for rank in range(request.param)]
    made = ObjectStoreChannel()
    made.offer(1, parts, {name: digest for part in parts for name, digest in digests(part).items()})
    return made


@pytest.fixture
def tensors(channel: ObjectStoreChannel) -> dict[str, Any]:
    return dict(sliced_tensors(PublishedVersion(channel, 1)))


class Parameter(torch.nn.Parameter):
    """As vLLM's own parameters, with a `__torch_function__` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("matrix", lambda x: x),
        ("matrix", lambda x: x.narrow(0, 2, 3)),
        ("matrix", lambda x: x.narrow(1, 4, 4)),
        ("matrix", lambda x: x.narrow(-1, 4, 4).narrow(1, 1, 2)),
        ("matrix", lambda x: x[1:4]),
        ("matrix", lambda x: x[:, 2:-2]),
        ("matrix", lambda x: x.narrow(0, 1, 4).narrow(1, 2, 4)),
        ("experts", lambda x: x.narrow(2, 3, 3)),
        ("experts", lambda x: x.narrow(1, 2, 2)),
        ("scale", lambda x: x),
    ],
)
def test_a_copy_fetches_the_slice_only(channel: ObjectStoreChannel, name: str, cut: Any, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        asked = cut(dict(sliced_tensors(PublishedVersion(channel, 1)))[name])
        right = cut(WHOLE[name])
        assert isinstance(asked, SlicedTensor) and asked.shape == right.shape and asked.dtype == right.dtype
        assert channel.fetched_bytes == 0, "slicing fetches nothing"
        parameter = Parameter(torch.zeros(right.shape, dtype=right.dtype), requires_grad=False)
        parameter.data.copy_(asked)
    assert torch.equal(parameter.data.as_subclass(torch.Tensor), right)
    axes = sum(a != b for a, b in zip(right.shape, WHOLE[name].shape, strict=True))
    assert channel.fetched_bytes == right.nbytes if axes < 2 else right.nbytes < channel.fetched_bytes < WHOLE[name].nbytes


def test_a_copy_to_no_memory_is_counted_and_fetches_nothing(channel: ObjectStoreChannel, tensors: dict[str, Any]) -> None:
    """vLLM counts in this way what a layer gets, before the layer has memory."""
    counted = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                counted.append(args[1].numel())
            return func(*args, **(kwargs or {}))

    with Counter():
        Parameter(torch.empty(6, 4, dtype=torch.bfloat16, device="meta"), requires_grad=False).data.copy_(tensors["matrix"].narrow(1, 0, 4))
    assert counted == [24] and channel.fetched_bytes == 0


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.reshape(-1),
        lambda x: x.t().narrow(0, 1, 3),
        lambda x: x + 1,
        lambda x: torch.cat([x, x]),
        lambda x: x[::2],
        lambda x: x.float(),
        lambda x: x.unsqueeze(0),
        lambda x: torch.stack(list(x.unbind(1))),
    ],
)
def test_any_other_operation_has_the_values(tensors: dict[str, Any], compute: Any) -> None:
    for cut in (lambda x: x, lambda x: x.narrow(0, 1, 4)):
        found = compute(cut(tensors["matrix"]))
        assert not isinstance(found, SlicedTensor) and torch.equal(found, compute(cut(WHOLE["matrix"])))


def test_a_published_tensor_is_not_changed(tensors: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="would change matrix"):
        tensors["matrix"].narrow(0, 0, 2).mul_(2)


def test_a_copy_may_convert_and_broadcast(tensors: dict[str, Any]) -> None:
    found = torch.zeros(3, 6, 8).copy_(tensors["matrix"])
    assert torch.equal(found, WHOLE["matrix"].float().expand(3, 6, 8))


def test_types_of_all_weights_are_known() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        made = ObjectStoreChannel()
        made.offer(1, [whole_slices({"w": as_numpy(torch.ones(3, 2).to(dtype))})], {})
        ((_, tensor),) = sliced_tensors(PublishedVersion(made, 1))
        assert tensor.dtype == dtype and torch.equal(tensor.narrow(0, 1, 2), torch.ones(2, 2).to(dtype))
