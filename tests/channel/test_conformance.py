"""What every channel of weights promises, its failures among it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import GetTimeoutError
from torch.distributed import HashStore

from rlhfless_ray.weights.channel import ObjectStoreChannel, PublishedVersion, PublisherLost, WeightChannel, WeightsDamaged, WeightsMissing
from rlhfless_ray.weights.collective import CollectiveChannel
from rlhfless_ray.weights.layout import even_share, padded_share
from rlhfless_ray.weights.tensor_file import as_numpy, as_tensor
from rlhfless_ray.weights.tensor_slice import TensorSlice, whole_slices

SHAPES = {"embed.weight": (12, 8), "up.weight": (16, 8), "down.weight": (8, 16), "experts": (4, 8, 12), "norm.weight": (9,), "scale": ()}
DIVIDED = {"embed.weight": 0, "up.weight": 0, "down.weight": 1, "experts": 2}  # the axis that members share out


class Memory:
    """A store in this process. `lost`: what it fails with."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.lost: Exception | None = None

    def put(self, slices: Any) -> int:
        self.objects.append(slices)
        return len(self.objects) - 1

    def get(self, refs: Sequence[int] | None, version: int, within_s: float) -> list[Any]:
        if self.lost is not None:
            raise self.lost
        return [self.objects[ref] for ref in refs or ()]


class Stored:
    """Publishers and readers of an object store share what the driver passes on: references and digests."""

    def __init__(self, publishers: int, readers: int, within_s: float) -> None:
        self.store = Memory()
        self.channel = ObjectStoreChannel(within_s, self.store)  # type: ignore[arg-type]
        self.publishers: list[WeightChannel] = [self.channel] * publishers
        self.readers: list[WeightChannel] = [ObjectStoreChannel(within_s, self.store) for _ in range(readers)]  # type: ignore[arg-type]
        for reader in self.readers:
            reader.refs, reader.digests = self.channel.refs, self.channel.digests  # type: ignore[attr-defined]

    def lose_publisher(self) -> None:
        self.store.lost = GetTimeoutError("not ready")


class Collective:
    def __init__(self, publishers: int, readers: int, within_s: float) -> None:
        from concurrent.futures import ThreadPoolExecutor

        store, ranks = HashStore(), publishers + readers
        with ThreadPoolExecutor(ranks) as threads:
            join = lambda rank: CollectiveChannel(store, rank, ranks, range(publishers), within_s)  # noqa: E731
            members = list(threads.map(join, range(ranks)))
        self.publishers: list[WeightChannel] = list(members[:publishers])
        self.readers: list[WeightChannel] = list(members[publishers:])

    def lose_publisher(self) -> None:
        self.publishers[0]._reply = lambda *_: time.sleep(30)  # type: ignore[attr-defined]


World = Stored | Collective


@pytest.fixture(params=[Stored, Collective], ids=["object-store", "collective"])
def world(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(publishers: int, readers: int, within_s: float = 20.0) -> World:
        made.append(request.param(publishers, readers, within_s))
        return made[-1]

    yield make
    for one in made:
        for channel in (*one.readers, *one.publishers):
            channel.close()


def some_weights(dtype: torch.dtype) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(3)
    return {name: as_numpy(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def shared_out(
    weights: dict[str, np.ndarray], rank: int, ranks: int, share: Callable[..., tuple[int, int]]
) -> dict[TensorSlice, np.ndarray]:
    """A publisher's slices, as ZeRO 3 divides tensors."""
    found = {}
    for name, array in weights.items():
        start, end = share(array.size, ranks, rank)
        if end > start:
            found[TensorSlice(name, array.shape, start, end)] = array.reshape(-1)[start:end].copy()
    return found


def publish(world: World, version: int, weights: dict[str, np.ndarray], share: Callable[..., tuple[int, int]] = padded_share) -> list[Any]:
    parts = [shared_out(weights, rank, len(world.publishers), share) for rank in range(len(world.publishers))]
    for publisher, part in zip(world.publishers, parts, strict=True):
        publisher.publish(version, part)
    return parts


def own(name: str, member: int, width: int) -> TensorSlice:
    if name not in DIVIDED:
        return TensorSlice.whole(name, SHAPES[name])
    size = SHAPES[name][DIVIDED[name]] // width
    return TensorSlice.along(name, SHAPES[name], DIVIDED[name], member * size, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("publishers", "readers"), [(1, 2), (2, 4), (4, 1)])
def test_each_member_fetches_its_own_slices(world: Callable[..., World], publishers: int, readers: int, dtype: torch.dtype) -> None:
    made, weights = world(publishers, readers), some_weights(dtype)
    publish(made, 7, weights, even_share if publishers == 4 else padded_share)
    for member, reader in enumerate(made.readers):
        assert {name: shape for name, (shape, _) in reader.contents(7).items()} == SHAPES
        reader.check(7, member, readers)
        wanted = [own(name, member, readers) for name in SHAPES]
        found = [reader.fetch(7, piece) for piece in wanted]
        for piece, values in zip(wanted, found, strict=True):
            whole = as_tensor(weights[piece.name])
            axis = DIVIDED.get(piece.name)
            right = whole if axis is None else whole.narrow(axis, member * (size := whole.shape[axis] // readers), size)
            assert values.dtype == weights[piece.name].dtype and torch.equal(as_tensor(values.copy()), right)
        divided = sum(weights[name].nbytes for name in DIVIDED)
        rest = sum(array.nbytes for name, array in weights.items() if name not in DIVIDED)
        assert reader.fetched_bytes == divided // readers + rest, "no more than its slices"  # type: ignore[attr-defined]


def test_whole_tensors_of_a_version_are_a_mapping(world: Callable[..., World]) -> None:
    made, weights = world(2, 1), some_weights(torch.bfloat16)
    publish(made, 1, weights)
    found = PublishedVersion(made.readers[0], 1)
    assert found.keys() == weights.keys() and found.nbytes == sum(array.nbytes for array in weights.values())
    assert all(found[name].tobytes() == array.tobytes() for name, array in weights.items())


def test_an_absent_version_is_named_with_the_one_that_is_there(world: Callable[..., World]) -> None:
    made = world(1, 1)
    publish(made, 7, some_weights(torch.float32))
    with pytest.raises(WeightsMissing, match="weight version 8 is not published, only 7"):
        made.readers[0].fetch(8, own("scale", 0, 1))


def test_an_absent_tensor_is_named(world: Callable[..., World]) -> None:
    """Tied weights are published under one name."""
    made = world(2, 1)
    publish(made, 7, some_weights(torch.float32))
    with pytest.raises(WeightsMissing, match="weight version 7 has no tensor lm_head"):
        made.readers[0].fetch(7, TensorSlice.whole("lm_head.weight", (12, 8)))


@pytest.mark.parametrize("name", ["up.weight", "down.weight"])
def test_absent_elements_are_named(world: Callable[..., World], name: str) -> None:
    made, weights = world(2, 2), some_weights(torch.float32)
    for rank, publisher in enumerate(made.publishers):
        part = shared_out(weights, rank, 2, even_share)
        publisher.publish(7, {piece: values for piece, values in part.items() if piece.name != name or rank == 0})
    with pytest.raises(WeightsMissing, match=rf"weight version 7: {name}.*: .*elements are in no part"):
        made.readers[1].fetch(7, own(name, 1, 2))
    made.readers[1].fetch(7, own("experts", 1, 2))


def test_a_damaged_slice_is_named_by_the_members_together(world: Callable[..., World]) -> None:
    made = world(2, 2)
    parts = publish(made, 7, some_weights(torch.float32))
    (damaged,) = (piece for piece in parts[1] if piece.name == "down.weight")
    parts[1][damaged][3] += 1
    said = []
    for member, reader in enumerate(made.readers):
        try:
            reader.check(7, member, 2)
            reader.fetch(7, own("down.weight", member, 2))
        except WeightsDamaged as error:
            said.append(str(error))
    assert said and all("down.weight[64:128] differ" in one and "version 7" in one for one in said)


def test_a_lost_publisher_is_told_within_the_deadline(world: Callable[..., World]) -> None:
    made = world(1, 1, within_s=0.5)
    publish(made, 7, some_weights(torch.float32))
    made.lose_publisher()
    start = time.monotonic()
    with pytest.raises(PublisherLost, match=r"weight version 7 .* 0.5 s"):
        made.readers[0].fetch(7, own("up.weight", 0, 1))
    assert time.monotonic() - start < 5


def test_a_new_version_takes_the_place_of_the_old_one(world: Callable[..., World]) -> None:
    made = world(2, 2)
    for version, dtype in ((1, torch.float32), (2, torch.bfloat16)):
        weights = some_weights(dtype)
        publish(made, version, weights)
        for reader in made.readers:
            assert reader.fetch(version, TensorSlice.whole("up.weight", (16, 8))).tobytes() == weights["up.weight"].tobytes()


def test_whole_tensors_of_one_publisher_are_views_in_the_object_store() -> None:
    weights = {"down.weight": np.arange(128.0).reshape(8, 16)}
    made = Stored(1, 2, 1.0)
    made.channel.publish(1, whole_slices(weights))
    found = made.readers[1].fetch(1, own("down.weight", 1, 2))
    assert np.shares_memory(found, weights["down.weight"]) and found.shape == (8, 8)
