"""Safetensors files without copies, against the safetensors library."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import torch as library

from rlhfless_ray.weights.layout import padded_share
from rlhfless_ray.weights.shards import share_of, write_slices
from rlhfless_ray.weights.tensor_file import (
    BFLOAT16,
    FileParts,
    as_numpy,
    as_tensor,
    checksum,
    load_tensors,
    parts_of,
    read_header,
    read_header_bytes,
    save_tensors,
    write_file,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def made(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 10).to(dtype)


tensors = st.dictionaries(
    st.text("ab.é", min_size=1, max_size=6),
    st.builds(made, st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.integers(0, 9)),
    max_size=5,
)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(x.dtype == other[k].dtype and torch.equal(x, other[k]) for k, x in one.items())


@settings(deadline=None, max_examples=60)
@given(tensors)
def test_files_are_those_of_the_library(state: dict[str, torch.Tensor]) -> None:
    content = save_tensors(state, {"format": "pt"})
    assert len(content) == len(bytes(content))
    assert same(library.load(bytes(content)), state)
    assert same(load_tensors(content), state)
    assert same(load_tensors(library.save(state)), state)
    assert same(load_tensors(pickle.loads(pickle.dumps(content))), state)


def test_nothing_is_copied(tmp_path: Path) -> None:
    weight = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    content = save_tensors({"w": weight})
    assert content.parts[1].ctypes.data == weight.data_ptr()
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(content, protocol=5, buffer_callback=buffers.append)) < 2000 and len(buffers) == 2
    assert write_file(tmp_path / "file", content) == checksum(bytes(content))
    mapped = FileParts.map(tmp_path / "file")
    (only,) = load_tensors(mapped).values()
    assert torch.equal(only, weight) and isinstance(mapped.parts[0].base, np.memmap)
    start = mapped.parts[0].ctypes.data
    assert start < only.data_ptr() < start + len(mapped)


def test_checking_a_mapped_file_keeps_none_of_it_in_memory(tmp_path: Path) -> None:
    """A resumed run's driver would otherwise hold the whole checkpoint."""
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(48 << 20))
    mapped, memory = FileParts.map(tmp_path / "file"), psutil.Process().memory_info
    expected, before = checksum((tmp_path / "file").read_bytes()), memory().rss
    assert checksum(mapped) == expected and memory().rss - before < 24 << 20
    assert checksum(FileParts(tuple(np.array_split(mapped.parts[0], 3)))) == checksum(mapped), "parts of a map are read as they are"


@pytest.mark.parametrize("cut", [1, 7, 30, -1])
def test_an_incomplete_file_is_found(cut: int) -> None:
    content = bytes(save_tensors({"w": torch.ones(3)}))[:cut]
    assert read_header(content) is None
    with pytest.raises(ValueError, match="incomplete"):
        load_tensors(content)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_tensors(dtype: torch.dtype) -> None:
    tensor = made([3, 5], dtype, 1)
    array = as_numpy(tensor.T)
    assert array.shape == (5, 3) and array.itemsize == tensor.element_size()
    assert (array.dtype == BFLOAT16) == (dtype == torch.bfloat16)
    assert torch.equal(as_tensor(pickle.loads(pickle.dumps(array))), tensor.T)


@given(st.lists(st.binary(max_size=5), max_size=5), st.integers(0, 25), st.integers(0, 25))
def test_a_range_of_parts(pieces: list[bytes], start: int, end: int) -> None:
    content = FileParts(tuple(parts_of(piece).parts[0] for piece in pieces))
    assert content.at(start, end).tobytes() == b"".join(pieces)[start:end]


@given(tensors, st.integers(1, 4))
def test_a_rank_s_parts_make_a_file_that_is_its_own_and_all_make_the_whole(named: dict[str, torch.Tensor], ranks: int) -> None:
    content = save_tensors(named, {"format": "pt"})
    header, shares = read_header_bytes(content), [share_of(content, rank, ranks) for rank in range(ranks)]
    assert len(header) + sum(values.nbytes for share in shares for values in share.values()) == len(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        write_slices(path, header, shares)
        assert path.read_bytes() == bytes(content)
        for rank, share in enumerate(shares):
            write_slices(path, header, [pickle.loads(pickle.dumps(share))])
            for name, found in load_tensors(path.read_bytes()).items():
                start, end = padded_share(found.numel(), ranks, rank)
                raw, wanted = (x.reshape(-1).view(torch.uint8) for x in (found, named[name]))
                size = found.element_size()
                assert torch.equal(raw[start * size : end * size], wanted[start * size : end * size])
                assert not raw[: start * size].any() and not raw[end * size :].any(), "a hole reads as zeros"


def test_a_slice_of_another_shape_than_the_header_says_is_named(tmp_path: Path) -> None:
    header = read_header_bytes(save_tensors({"w": torch.ones(8)}))
    with pytest.raises(ValueError, match=r"^x\.safetensors: w\[6:12\] is of a tensor of shape \(12,\), where its header says \(8,\)"):
        write_slices(tmp_path / "x.safetensors", header, [share_of(save_tensors({"w": torch.ones(12)}), 1, 2)])
