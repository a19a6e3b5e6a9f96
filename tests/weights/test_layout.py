"""Layouts and transfers: any layout to any other, bit for bit what gathering and slicing gives."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_ray.rollout.weight_traffic import least_bytes
from rlhfless_ray.weights.checksum import damaged, digests, digests_like
from rlhfless_ray.weights.layout import Cut, even_share, pieces, whole_layers, whole_tensors
from rlhfless_ray.weights.parts import Assembled, Part
from rlhfless_ray.weights.shards import Shards, save_intervals, shard_name
from rlhfless_ray.weights.tensor_file import RemoteFile, as_numpy, read_header_bytes


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A number of elements, and intervals that cover them all, with overlaps, in any order."""
    elements = draw(st.integers(1, 60))
    cuts = sorted({0, elements, *draw(st.lists(st.integers(0, elements), max_size=6))})
    spare = st.tuples(st.integers(0, elements), st.integers(0, elements)).map(lambda pair: (min(pair), max(pair)))
    intervals = [*itertools.pairwise(cuts), *draw(st.lists(spare, max_size=4))]
    return elements, draw(st.permutations(intervals))


@given(layouts(), st.data())
def test_any_interval_is_put_together_from_any_layout(layout: tuple[int, list[tuple[int, int]]], data: st.DataObject) -> None:
    elements, held = layout
    start = data.draw(st.integers(0, elements))
    end = data.draw(st.integers(start, elements))
    values = np.arange(elements)
    plan = pieces((start, end), held)
    found = [values[held[holder][0] : held[holder][1]][a - held[holder][0] : b - held[holder][0]] for holder, (a, b) in plan]
    np.testing.assert_array_equal(np.concatenate([[], *found]), values[start:end])


@given(layouts(), st.sampled_from(["float32", "bfloat16"]))
def test_a_version_is_assembled_from_any_layout(layout: tuple[int, list[tuple[int, int]]], dtype: str) -> None:
    elements, intervals = layout
    whole = as_numpy(torch.arange(elements * 2).to(getattr(torch, dtype)).view(2, elements))
    flat = whole.reshape(-1)
    held = [(2 * start, 2 * end) for start, end in intervals]
    version = Assembled([{"w": Part(whole.shape, start, flat[start:end])} for start, end in held] + [{"b": flat}])
    assert version["w"].dtype == whole.dtype and version["w"].shape == whole.shape
    assert version["w"].tobytes() == whole.tobytes() and version["b"] is not flat and np.shares_memory(version["b"], flat)
    assert list(version) == ["w", "b"] and version.nbytes == 2 * whole.nbytes


def test_a_missing_part_of_a_version_is_named_and_a_damaged_one_too() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    shards = [{"w": Part(array.shape, start, array.reshape(-1)[start : start + 4])} for start in (0, 4)]
    with pytest.raises(ValueError, match=r"^w: elements 4 to 8 are in no part"):
        Assembled(shards[:1])["w"]
    turned = {"w": Part((4, 2), 4, shards[1]["w"].values)}
    with pytest.raises(ValueError, match="w: one shard has a part of a tensor of shape"):
        Assembled([shards[0], turned])["w"]
    published = {name: digest for shard in shards for name, digest in digests(shard).items()}
    assert list(published) == ["w[0:4]", "w[4:8]"] and digests_like({"w": array}, published) == published
    array[1, 0] = 7
    assert damaged(digests_like({"w": array}, published), published) == ["w[4:8]"]


def test_all_tensors_of_a_layer_have_one_owner() -> None:
    layers = [f"model.layers.{n}.mlp.experts.{e}.weight" for n in range(4) for e in range(3)]
    ends = ["model.embed.base_layer.weight", "model.embed.lora_embedding_A.default", "model.norm.weight"]
    owner = whole_layers({name: 100 if name in ends else 90 for name in [*layers, *ends]}, 5)
    assert owner.keys() == {*layers, *ends}
    assert len({owner[name] for name in ends}) == 1 and len({owner[name] for name in layers}) == 4
    assert len({(name.split(".experts")[0], owner[name]) for name in layers}) == 4


@given(st.integers(0, 200), st.integers(1, 9))
def test_nodes_that_hold_shards_lack_the_rest(size: int, ranks: int) -> None:
    held = [(f"node{rank}", end - start) for rank, (start, end) in enumerate(even_share(size, ranks, rank) for rank in range(ranks))]
    nodes = [node for node, _ in held]
    assert least_bytes(held, nodes) == size * (ranks - 1)
    assert least_bytes(held, [*nodes, "elsewhere"], nodes) == size, "their ranks hold all of it"


@given(st.integers(0, 200), st.integers(1, 9))
def test_even_shares_cover_every_element_once(elements: int, ranks: int) -> None:
    shares = [even_share(elements, ranks, rank) for rank in range(ranks)]
    assert [x for start, end in shares for x in range(start, end)] == list(range(elements))
    assert max(end - start for start, end in shares) - min(end - start for start, end in shares) <= 1


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_whole_tensors_are_balanced(sizes: dict[str, int], ranks: int) -> None:
    owner = whole_tensors(sizes, ranks)
    assert owner.keys() == sizes.keys() and set(owner.values()) <= set(range(ranks))
    loads = [sum(size for name, size in sizes.items() if owner[name] == rank) for rank in range(ranks)]
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values(), default=0)


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans())
def test_shards_of_any_number_of_ranks_are_read_by_any_other(writers: int, readers: int, sizes: list[int], half: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    whole = {f"w{i}": torch.randn(size, generator=torch.Generator().manual_seed(i)).to(dtype) for i, size in enumerate(sizes)}
    files = {}
    for rank in range(writers):
        shares = {name: even_share(x.numel(), writers, rank) for name, x in whole.items()}
        parts = {name: (a, whole[name][a:b]) for name, (a, b) in shares.items() if b > a}
        files[shard_name("optimizer", rank, writers)] = save_intervals(parts, {"rng": torch.arange(3)} if rank == 0 else {})
    shards = Shards(bytes(content) for content in files.values())
    for rank in range(readers):
        for name, x in whole.items():
            a, b = even_share(x.numel(), readers, rank)
            assert torch.equal(shards.read(name, a, b), x[a:b])
    assert torch.equal(shards.whole("rng"), torch.arange(3)) and set(shards) == {*whole, "rng"}


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_a_reader_fetches_the_files_that_have_some_of_its_part(writers: int, readers: int, sizes: list[int]) -> None:
    """So as many readers as writers fetch a file each."""
    fetched: list[int] = []

    def remote(rank: int) -> RemoteFile:
        file = save_intervals(
            {f"w{i}": (a, torch.zeros(b - a)) for i, (a, b) in enumerate(even_share(n, writers, rank) for n in sizes)}, {}
        )
        return RemoteFile(read_header_bytes(file), lambda: [fetched.append(rank), file][1])

    for rank in range(readers):
        fetched.clear()
        shards = Shards(remote(writer) for writer in range(writers))
        own = [even_share(size, readers, rank) for size in sizes]
        assert [len(shards.read(f"w{i}", *interval)) for i, interval in enumerate(own)] == [b - a for a, b in own]
        held = {
            k
            for k in range(writers)
            for size, (a, b) in zip(sizes, own, strict=True)
            if a < b and overlap(even_share(size, writers, k), (a, b))
        }
        assert sorted(fetched) == sorted(held)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def test_a_missing_part_is_named() -> None:
    shards = Shards([save_intervals({"w": (2, torch.arange(4.0))}, {})])
    with pytest.raises(ValueError, match="w: elements 0 to 2 are in no part"):
        shards.read("w", 0, 6)
    with pytest.raises(ValueError, match="w: elements 6 to 9 are in no part"):
        shards.read("w", 3, 9)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_intervals_of_any_cut_are_where_a_slice_has_them(shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[axis] - 1))
    cut = Cut(tuple(shape), axis, first, data.draw(st.integers(1, shape[axis] - first)))
    whole = torch.arange(math.prod(shape))
    own = whole.view(shape).narrow(axis, first, cut.size).reshape(-1)
    start = data.draw(st.integers(0, own.numel()))
    end = data.draw(st.integers(start, own.numel()))
    matrix, found = whole.view(-1, cut.row_elements), torch.full((end - start,), -1)
    blocks = list(cut.blocks((start, end)))
    for (a, b), (rows, columns) in blocks:
        found[a:b] = matrix[slice(*rows), slice(*columns)].reshape(-1)
    assert torch.equal(found, own[start:end]) and len(blocks) <= 3


@given(st.sampled_from([(6, 4), (4, 6), (12,), (2, 6, 4)]), st.data())
def test_what_one_width_wrote_is_read_at_any_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Writers and readers are divided along an axis, each with shares of its own cut by data-parallel ranks."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def layout() -> list[tuple[Cut | None, int, int]]:
        axis = data.draw(st.integers(0, len(shape) - 1))
        width = data.draw(st.sampled_from([n for n in (1, 2, 3) if shape[axis] % n == 0]))
        replicas, size = data.draw(st.integers(1, 3)), shape[axis] // width
        cuts = [Cut(shape, axis, rank * size, size) if width > 1 else None for rank in range(width)]
        return [(cut, *even_share(tensor.numel() // width, replicas, k)) for cut in cuts for k in range(replicas)]

    def own(cut: Cut | None) -> torch.Tensor:
        return (tensor if cut is None else tensor.narrow(cut.axis, cut.first, cut.size)).reshape(-1)

    files = [save_intervals({"w": (a, own(cut)[a:b])}, {}, {} if cut is None else {"w": cut}) for cut, a, b in layout() if b > a]
    shards = Shards(bytes(content) for content in files)
    for cut, a, b in layout():
        assert torch.equal(shards.read("w", a, b, cut), own(cut)[a:b])
    if len(files) > 1:
        with pytest.raises(ValueError, match=r"w: .* are in no part"):
            Shards(bytes(content) for content in files[1:]).read("w", 0, tensor.numel())
