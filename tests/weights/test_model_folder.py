from __future__ import annotations

from pathlib import Path

import pytest

from rlhfless_ray.errors import UserError
from rlhfless_ray.weights.folder import kept_folder, parameter_count, read_folder, without_weights, write_folder

COMPLETE = {
    "config.json": b"{}", "tokenizer.json": b"{}", "model-00001-of-00002.safetensors": b"\x00\xff",
    "model-00002-of-00002.safetensors": b"x",
    "model.safetensors.index.json": b"{}", "chat_template.jinja": b"{{ m }}",
}


def test_a_folder_travels_as_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a" / "b", COMPLETE)
    (folder / "optimizer.bin").write_bytes(b"not part of it")
    (folder / "sub").mkdir()
    assert read_folder(folder) == COMPLETE
    assert set(without_weights(COMPLETE)) == {"config.json", "tokenizer.json", "chat_template.jinja"}


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
    folder = kept_folder(tmp_path / "kept", COMPLETE)
    assert read_folder(folder) == COMPLETE
    written = (folder / "config.json").stat().st_mtime_ns
    assert kept_folder(tmp_path / "kept", dict(reversed(COMPLETE.items()))) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    other = kept_folder(tmp_path / "kept", {**COMPLETE, "config.json": b"{ }"})
    assert other != folder and sorted(path.name for path in folder.parent.iterdir()) == sorted([folder.name, other.name])


def test_of_several_that_keep_the_same_files_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def second(self: Path, target: Path) -> Path:
        """Somebody else is faster."""
        write_folder(target, COMPLETE)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second)
    folder = kept_folder(tmp_path, COMPLETE)
    assert read_folder(folder) == COMPLETE and list(tmp_path.iterdir()) == [folder]


def test_where_nothing_can_be_kept_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        kept_folder(tmp_path / "file", COMPLETE)


def test_parameters_are_counted_as_torch_counts_them() -> None:
    import torch
    from safetensors.torch import save

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False)).bfloat16()
    files = {"config.json": b"{}", "model.safetensors": save(dict(model.state_dict()))}
    assert parameter_count(files) == sum(p.numel() for p in model.parameters()) == 30
    assert parameter_count(COMPLETE) == 0
