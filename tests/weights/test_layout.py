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
from rlhfless_ray.weights.layout import even_share, whole_layers, whole_tensors
from rlhfless_ray.weights.shards import save_slices, shard_name, slices_in
from rlhfless_ray.weights.tensor_file import RemoteFile, as_numpy, as_tensor, read_header_bytes, save_tensors
from rlhfless_ray.weights.tensor_slice import UNKNOWN, HeldSlices, TensorSlice, whole_slices


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A number of elements, and intervals that cover them all, in any order."""
    elements = draw(st.integers(1, 60))
    cuts = sorted({0, elements, *draw(st.lists(st.integers(0, elements), max_size=6))})
    return elements, draw(st.permutations(list(itertools.pairwise(cuts))))


@given(layouts(), st.sampled_from(["float32", "bfloat16"]))
def test_a_version_is_assembled_from_any_layout(layout: tuple[int, list[tuple[int, int]]], dtype: str) -> None:
    elements, intervals = layout
    whole = as_numpy(torch.arange(elements * 2).to(getattr(torch, dtype)).view(2, elements))
    flat = whole.reshape(-1)
    held = [(2 * start, 2 * end) for start, end in intervals]
    version = HeldSlices.of(*({TensorSlice("w", whole.shape, a, b): flat[a:b]} for a, b in held), whole_slices({"b": flat}))
    assert version["w"].dtype == whole.dtype and version["w"].shape == whole.shape
    assert version["w"].tobytes() == whole.tobytes() and version["b"] is not flat and np.shares_memory(version["b"], flat)
    assert list(version) == ["w", "b"] and version.content("w") == (whole.shape, whole.dtype)


def test_a_missing_part_of_a_version_is_named_and_a_damaged_one_too() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    shards = [{TensorSlice("w", array.shape, start, start + 4): array.reshape(-1)[start : start + 4]} for start in (0, 4)]
    with pytest.raises(ValueError, match=r"^w: 4 elements are in no part"):
        HeldSlices.of(shards[0])["w"]
    with pytest.raises(ValueError, match=r"^w: 4 elements are in several parts"):
        HeldSlices.of(*shards, {TensorSlice("w", array.shape, 2, 6): array.reshape(-1)[2:6]})["w"]
    turned = {TensorSlice("w", (4, 2), 4, 8): array.reshape(-1)[4:]}
    with pytest.raises(ValueError, match=r"w: pieces are of tensors of different shapes: \(2, 4\), \(4, 2\)"):
        HeldSlices.of(shards[0], turned)["w"]
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
        parts = {TensorSlice(name, (len(whole[name]),), a, b): whole[name][a:b] for name, (a, b) in shares.items() if b > a}
        files[shard_name("optimizer", rank, writers)] = save_slices(parts)
    files["whole"] = save_tensors({"rng": torch.arange(3)})
    shards = slices_in(bytes(content) for content in files.values())
    for rank in range(readers):
        for name, x in whole.items():
            a, b = even_share(x.numel(), readers, rank)
            assert torch.equal(as_tensor(shards.read(TensorSlice(name, (len(x),), a, b))), x[a:b])
    assert torch.equal(as_tensor(shards["rng"]), torch.arange(3)) and set(shards) == {*whole, "rng"}


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_a_reader_fetches_the_files_that_have_some_of_its_part(writers: int, readers: int, sizes: list[int]) -> None:
    """So as many readers as writers fetch a file each."""
    fetched: list[int] = []

    def remote(rank: int) -> RemoteFile:
        shares = [TensorSlice(f"w{i}", (n,), *even_share(n, writers, rank)) for i, n in enumerate(sizes)]
        file = save_slices({share: torch.zeros(share.end - share.start) for share in shares})
        return RemoteFile(read_header_bytes(file), lambda: [fetched.append(rank), file][1])

    for rank in range(readers):
        fetched.clear()
        shards = slices_in(remote(writer) for writer in range(writers))
        own = [even_share(size, readers, rank) for size in sizes]
        assert [len(shards.read(TensorSlice(f"w{i}", UNKNOWN, *interval))) for i, interval in enumerate(own)] == [b - a for a, b in own]
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
    shards = slices_in([save_slices({TensorSlice("w", (9,), 2, 6): torch.arange(4.0)})])
    with pytest.raises(ValueError, match=r"^w: 2 elements are in no part"):
        shards.read(TensorSlice("w", UNKNOWN, 0, 6))
    with pytest.raises(ValueError, match=r"^w\[3:9\]: 3 elements are in no part"):
        shards.read(TensorSlice("w", (9,), 3, 9))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_intervals_of_any_cut_are_where_a_slice_has_them(shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[axis] - 1))
    size = data.draw(st.integers(1, shape[axis] - first))
    whole = torch.arange(math.prod(shape))
    own = whole.view(shape).narrow(axis, first, size).reshape(-1)
    start = data.draw(st.integers(0, own.numel()))
    end = data.draw(st.integers(start, own.numel()))
    piece = TensorSlice.along("w", shape, axis, first, size).part(start, end)
    matrix, found = whole.view(-1, math.prod(shape[axis:])), torch.full((end - start,), -1)
    blocks = list(piece.blocks(axis))
    for (a, b), (rows, columns) in blocks:
        found[a:b] = matrix[slice(*rows), slice(*columns)].reshape(-1)
    assert torch.equal(found, own[start:end]) and len(blocks) <= 3


@given(st.sampled_from([(6, 4), (4, 6), (12,), (2, 6, 4)]), st.data())
def test_what_one_width_wrote_is_read_at_any_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Writers and readers are divided along an axis, each with shares of its own cut by data-parallel ranks."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

    def layout() -> list[tuple[TensorSlice, torch.Tensor]]:
        axis = data.draw(st.integers(0, len(shape) - 1))
        width = data.draw(st.sampled_from([n for n in (1, 2, 3) if shape[axis] % n == 0]))
        replicas, size, found = data.draw(st.integers(1, 3)), shape[axis] // width, []
        for rank in range(width):
            cut = TensorSlice.along("w", shape, axis, rank * size, size) if width > 1 else TensorSlice.whole("w", shape)
            own = tensor.narrow(axis, rank * size, size).reshape(-1)
            found += [(cut.part(a, b), own[a:b]) for a, b in (even_share(own.numel(), replicas, k) for k in range(replicas)) if b > a]
        return found

    written = layout()
    files = [save_slices({piece: values}) for piece, values in written]
    in_files, published = slices_in(bytes(content) for content in files), HeldSlices.of(*({x: as_numpy(v)} for x, v in written))
    for piece, values in layout():
        for held in (in_files, published):
            found = held.read(piece)
            assert found.shape == piece.values_shape and torch.equal(as_tensor(found.copy()).reshape(-1), values)
    if len(files) > 1:
        with pytest.raises(ValueError, match=r"w: .* are in no part"):
            slices_in(bytes(content) for content in files[1:]).read(TensorSlice.whole("w", shape))


def test_a_column_of_a_tensor_in_one_piece_is_a_view() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    held = HeldSlices.of(whole_slices({"w": whole}))
    found = held.read(TensorSlice.along("w", (4, 6), 1, 2, 3))
    assert np.shares_memory(found, whole) and found.tolist() == whole[:, 2:5].tolist()


def test_an_old_checkpoint_s_cuts_along_the_first_axis_are_read() -> None:
    """They were saved with the cut, and counted from its beginning."""
    tensor = torch.arange(12.0).view(6, 2)
    cuts = [{"starts": f'{{"w": {a}}}', "cuts": f'{{"w": [[6, 2], 0, {first}, 3]}}'} for first in (0, 3) for a in (0, 4)]
    files = [
        save_tensors({"w": tensor.reshape(-1)[a:b]}, cut) for (a, b), cut in zip([(0, 4), (4, 6), (6, 10), (10, 12)], cuts, strict=True)
    ]
    assert torch.equal(as_tensor(slices_in(files)["w"]), tensor)
