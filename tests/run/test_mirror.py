"""`run.mirror` and remote inputs, with fsspec's local file system as the bucket."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.remote_files import fetched, is_remote
from rlhfless_ray.prompts.sources import read_source
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.run import mirror as mirrors
from rlhfless_ray.run.mirror import Mirror, mirrored, prepare_mirror
from rlhfless_ray.weights.load_policy import model_folder


class Refusing(LocalFileSystem):
    """A bucket without rights."""

    protocol = "refusing"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise PermissionError("Access Denied")

    def find(self, path: str, *args: object, **kwargs: object) -> dict[str, object]:
        raise PermissionError("Access Denied")


fsspec.register_implementation("refusing", Refusing, clobber=True)


def make_run(folder: Path, step: int) -> None:
    """Write what a run has written after a step, with one checkpoint."""
    checkpoint = folder / "checkpoints" / f"step_{step}"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "driver.json", "checksums.json"):
        (checkpoint / name).write_text(f"{name} of {step}")
    (folder / "ledger.csv").write_text("row\n" * step)
    (folder / "status.json").write_text(json.dumps({"started_at": f"2026-01-0{step}"}))
    (folder / ".reserve").write_text("temporary")


def recipe_of(folder: Path, bucket: Path, **run: object) -> Recipe:
    return Recipe.parse(
        {
            "run": {"name": "mine", "root": str(folder), "mirror": f"local://{bucket}", **run},
            "prompts": {"task": "sort"},
            "reward": {"function": "task"},
        }
    )


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_mirror_has_what_the_run_folder_has_and_forgets_what_it_removed(tmp_path: Path) -> None:
    here, bucket = tmp_path / "runs" / "mine", tmp_path / "bucket"
    make_run(here, 1)
    mirror = Mirror(here, f"local://{bucket}")
    mirror.copy()
    assert names(bucket / "mine") == names(here) - {".reserve"}
    (here / "checkpoints" / "step_1").rename(here / ".gone")
    make_run(here, 2)
    mirror.copy()
    assert {name for name in names(bucket / "mine") if "step_1" in name} == set()
    assert (bucket / "mine" / "ledger.csv").read_text() == "row\n" * 2
    assert Mirror(here, f"local://{bucket}").newest_step == 2


def test_a_checkpoint_is_marked_as_whole_last_and_a_changed_one_loses_its_mark_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, bucket, sent = tmp_path / "mine", tmp_path / "bucket", []
    make_run(here, 1)
    mirror = Mirror(here, f"local://{bucket}")
    put, remove = mirror.system.put_file, mirror.system.rm_file
    monkeypatch.setattr(mirror.system, "put_file", lambda own, path: (sent.append(f"+{Path(path).name}"), put(own, path)))
    monkeypatch.setattr(mirror.system, "rm_file", lambda path: (sent.append(f"-{Path(path).name}"), remove(path)))
    mirror.copy()
    assert sent == ["+ledger.csv", "+status.json", "+driver.json", "+model.safetensors", "+checksums.json"]
    sent.clear()
    (here / "checkpoints" / "step_1" / "driver.json").write_text("another, of the same step")
    mirror.copy()
    assert sent == ["-checksums.json", "+driver.json", "+checksums.json"]


def test_a_run_goes_on_on_another_machine_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    bucket, there, here = tmp_path / "bucket", tmp_path / "there", tmp_path / "here"
    prepare_mirror(recipe_of(there, bucket), resume=False)
    make_run(there / "mine", 1)
    make_run(there / "mine", 2)
    with mirrored(there / "mine", f"local://{bucket}"):
        pass
    (bucket / "mine" / "checkpoints" / "step_2" / "checksums.json").unlink()  # the machine died while it copied
    prepare_mirror(recipe_of(here, bucket), resume=True)
    assert names(here / "mine") == {name for name in names(there / "mine") if "step_2" not in name and name != ".reserve"}
    make_run(here / "mine", 3)
    prepare_mirror(recipe_of(here, bucket), resume=True)  # this machine has a newer one
    assert (here / "mine" / "checkpoints" / "step_3").is_dir()


def test_a_new_run_does_not_overwrite_one_of_another_machine(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    make_run(bucket / "mine", 1)
    with pytest.raises(UserError, match=r"there is a run mine already; continue it with --resume, or set another run.name"):
        prepare_mirror(recipe_of(tmp_path / "here", bucket), resume=False)


def test_a_mirror_that_fails_leaves_the_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "mine", 1)

    def refuse(self: object, *paths: str) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(LocalFileSystem, "put_file", refuse)
    with mirrored(tmp_path / "mine", f"local://{tmp_path / 'bucket'}"):
        pass
    assert "cannot be written to (Access Denied); the run folder here is complete" in capsys.readouterr().err
    assert mirrors.LAST_S > mirrors.EVERY_S


def test_a_bucket_without_rights_is_refused_before_a_run(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, tmp_path, mirror="refusing:///bucket/runs")
    with pytest.raises(UserError, match=r"run.mirror refusing:///bucket/runs: cannot be written to \(Access Denied\); check its name"):
        prepare_mirror(recipe, resume=False)
    with pytest.raises(UserError, match=r"policy.path refusing:///bucket/model: cannot be read \(Access Denied\)"):
        model_folder("refusing:///bucket/model", "policy.path")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mirror", "s3://key:secret@bucket/runs", "a URL with credentials would be written into run folders"),
        ("mirror", "runs-elsewhere", "not the URL of a remote folder"),
        ("root", "s3://bucket/runs", "`run.mirror` copies the run folder to a bucket"),
    ],
)
def test_mistakes_in_remote_paths(key: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        recipe_of(tmp_path, tmp_path, **{key: value})
    assert "secret" not in str(error.value)


def test_rows_and_models_are_fetched_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = tmp_path / "bucket"
    (bucket / "model").mkdir(parents=True)
    (bucket / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (bucket / "model" / "config.json").write_text("{}")
    (bucket / "model" / "notes.bin").write_text("not of a model")
    assert read_source(f"local://{bucket}/rows.jsonl", "train", "prompts") == [("line 1", {"prompt": "a"})]
    first = model_folder(f"local://{bucket}/model", "policy.path")
    assert names(first) == {"config.json"} and first.name == "model"
    assert model_folder(f"local://{bucket}/model", "policy.path") == first
    (bucket / "rows.jsonl").write_text('{"prompt": "another"}\n')
    assert read_source(f"local://{bucket}/rows.jsonl", "train", "prompts")[0][1] == {"prompt": "another"}
    with pytest.raises(UserError, match="there is no such file or folder"):
        fetched(f"local://{bucket}/none", "prompts.path", tmp_path)
    assert not is_remote("org/name") and not is_remote("https://host/x") and is_remote("s3://bucket/x")
