from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.weights.model_folder import (
    content_addressed_folder,
    folder_index,
    parameter_count,
    read_folder,
    split_files,
    stored_tensors,
    stored_weights,
    with_dtype,
    without_weights,
    write_folder,
)
from rlhfless_ray.weights.tensor_file import load_tensors

COMPLETE = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"\x00\xff",
    "model-00002-of-00002.safetensors": b"x",
    "model.safetensors.index.json": b"{}",
    "chat_template.jinja": b"{{ m }}",
}


def test_a_folder_travels_as_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a" / "b", COMPLETE)
    (folder / "optimizer.bin").write_bytes(b"not part of it")
    (folder / "sub").mkdir()
    assert read_folder(folder) == COMPLETE
    assert set(without_weights(COMPLETE)) == {"config.json", "tokenizer.json", "chat_template.jinja"}


def test_weights_that_a_folder_holds_twice_are_read_once(tmp_path: Path) -> None:
    """Such as Mistral's: shards with an index, and one file with other names, which transformers does not load."""
    import torch

    tensors = {f"layer.{i}": torch.full((10,), float(i)) for i in range(4)}
    files = {**split_files(tensors, 80), "consolidated.safetensors": split_files({"other": torch.zeros(40)})["model.safetensors"]}
    assert len(files) == 4
    assert parameter_count(files) == 40
    assert {name: float(tensor[0]) for name, tensor in stored_weights(files)} == {f"layer.{i}": i for i in range(4)}
    assert set(stored_tensors(write_folder(tmp_path / "model", files))) == set(tensors)
    whole = {**files, **split_files(tensors)}
    assert parameter_count(whole) == 40 and {name for name, _ in stored_weights(whole)} == set(tensors)


@pytest.mark.parametrize(
    ("left_out", "said"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer"), ("safetensors", r"no \*\.safetensors weights")],
)
def test_what_is_missing_is_said(tmp_path: Path, left_out: str, said: str) -> None:
    folder = write_folder(tmp_path / "model", {k: v for k, v in COMPLETE.items() if not k.endswith(left_out)})
    with pytest.raises(UserError, match=said) as error:
        read_folder(folder)
    assert str(folder) in str(error.value) and str(error.value).startswith("policy.path: ")
    assert "\n" not in str(error.value)


def test_no_folder_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(UserError, match="is not a folder"):
            read_folder(path)


def test_the_same_files_are_kept_under_the_same_path_once(tmp_path: Path) -> None:
    """A compiled model is found again by it."""
    folder = content_addressed_folder(tmp_path / "kept", COMPLETE)
    assert read_folder(folder) == COMPLETE
    written = (folder / "config.json").stat().st_mtime_ns
    assert content_addressed_folder(tmp_path / "kept", dict(reversed(COMPLETE.items()))) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    other = content_addressed_folder(tmp_path / "kept", {**COMPLETE, "config.json": b"{ }"})
    assert other != folder and sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, other.name])


def test_of_several_that_keep_the_same_files_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def second(self: Path, target: Path) -> Path:
        """Somebody else is faster."""
        write_folder(target, COMPLETE)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second)
    folder = content_addressed_folder(tmp_path, COMPLETE)
    assert read_folder(folder) == COMPLETE and list(tmp_path.iterdir()) == [folder]


def test_where_nothing_can_be_kept_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        content_addressed_folder(tmp_path / "file", COMPLETE)


def test_parameters_are_counted_as_torch_counts_them() -> None:
    import torch
    from safetensors.torch import save

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False)).bfloat16()
    files = {"config.json": b"{}", "model.safetensors": save(dict(model.state_dict()))}
    assert parameter_count(files) == sum(p.numel() for p in model.parameters()) == 30
    assert parameter_count(COMPLETE) == 0


@pytest.mark.parametrize(
    ("config", "dtype", "told"),
    [
        ({"dtype": "float32", "layers": 2}, "bfloat16", {"dtype": "bfloat16"}),
        ({"torch_dtype": "bfloat16"}, "float32", {"torch_dtype": "float32"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, "float16", {"dtype": "float16", "torch_dtype": "float16"}),
        ({}, "bfloat16", {"dtype": "bfloat16"}),
    ],
)
def test_the_config_of_a_model_tells_the_dtype_of_its_weights(config: dict, dtype: str, told: dict) -> None:
    import torch
    from safetensors.torch import save

    weights = save({"a": torch.zeros(8, dtype=getattr(torch, dtype)), "norm": torch.zeros(2), "ids": torch.zeros(99, dtype=torch.int64)})
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": b"{}"}
    found = with_dtype(files, [weights])
    assert found["tokenizer.json"] == b"{}"
    assert json.loads(found["config.json"]) == {**config, **told}
    assert json.loads(files["config.json"]) == config
    assert with_dtype({}, [weights]) == {}


def test_large_models_are_split_as_save_pretrained_splits_them(tmp_path: Path) -> None:
    import torch

    tensors = {f"layer.{n}": torch.arange(n, n + 100, dtype=torch.float32) for n in range(5)}
    files = split_files(tensors, most_bytes=900)
    assert sorted(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + ["model.safetensors.index.json"]
    write_folder(tmp_path, files)
    assert stored_tensors(tmp_path).keys() == tensors.keys()
    found = {
        name: tensor for key, content in files.items() if key.endswith(".safetensors") for name, tensor in load_tensors(content).items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert list(split_files(tensors)) == ["model.safetensors"]


def test_parts_of_several_ranks_are_one_folder_with_an_index() -> None:
    import torch

    tensors = {f"layer.{n}": torch.arange(n, n + 100, dtype=torch.float32) for n in range(5)}
    parts = [dict(list(tensors.items())[:3]), dict(list(tensors.items())[3:])]
    files = {name: x for rank, part in enumerate(parts) for name, x in split_files(part, 900, rank=rank, ranks=2).items()}
    assert sorted(files) == [f"model{which}.safetensors" for which in ("-00001-of-00002", "-00002-of-00002", ".2-00001-of-00002")]
    index = json.loads(folder_index(files))
    assert index["metadata"] == {"total_size": 2000} and index["weight_map"].keys() == tensors.keys()
    read = dict(stored_weights({**files, "model.safetensors.index.json": folder_index(files)}))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
