"""The import hook: `python -m openrlhf.cli.train_ppo_ray` is ours, with and without an OpenRLHF around."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless_ray.compat.openrlhf.command import shim_folder, with_shim

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, cwd, path=(), **environment):
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    kept["PYTHONPATH"] = os.pathsep.join([str(shim_folder()), *map(str, path)])
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=kept, timeout=120)


def checkout(folder: Path) -> Path:
    """A folder that looks like OpenRLHF's repository."""
    cli = folder / "openrlhf" / "cli"
    cli.mkdir(parents=True)
    (cli.parent / "__init__.py").write_text("")
    (cli / "__init__.py").write_text("")
    (cli.parent / "own.py").write_text("HERE = 'theirs'\n")
    for name in ("train_ppo_ray", "train_sft", "train_es_ray"):
        (cli / f"{name}.py").write_text("from openrlhf.own import HERE\nprint(HERE)\n")
    return folder


@pytest.mark.parametrize("real", ["absent", "working folder", "installed"])
def test_the_launcher_is_ours(tmp_path, real):
    cwd, path = tmp_path, []
    if real == "working folder":
        cwd = checkout(tmp_path / "OpenRLHF")
    elif real == "installed":
        path = [checkout(tmp_path / "site")]
    done = python("-m", "openrlhf.cli.train_ppo_ray", "--pretrain", "/m", "--no_such_flag", cwd=cwd, path=path)
    assert done.returncode == 2 and "theirs" not in done.stdout
    assert "--no_such_flag: no version of OpenRLHF" in done.stderr and done.stderr.startswith("usage: train_ppo_ray.py")


def test_without_the_folder_the_working_folder_wins(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"], capture_output=True, text=True, cwd=checkout(tmp_path), check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert done.stdout == "theirs\n"


@pytest.mark.slow
def test_the_other_trainers_stay_theirs(tmp_path):
    done = python("-m", "openrlhf.cli.train_es_ray", cwd=checkout(tmp_path / "there"))
    assert done.stdout == "theirs\n"
    done = python("-m", "openrlhf.cli.train_sft", "--no_such_flag", cwd=tmp_path)
    assert done.returncode == 2 and "--no_such_flag" in done.stderr
    done = python("-m", "openrlhf.cli.train_es_ray", cwd=tmp_path)
    assert done.returncode == 2 and "openrlhf.cli.train_es_ray is not covered" in done.stderr and "Traceback" not in done.stderr


def test_other_processes_are_left_alone_and_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    done = python("-c", "import sys; print([f for f in sys.meta_path if 'Launchers' in repr(f)])", cwd="/", path=[tmp_path])
    assert done.stdout == "mine\n[]\n"
    done = python("-c", "import openrlhf", cwd="/")
    assert "No module named 'openrlhf'" in done.stderr


def test_a_script_that_starts_the_launcher(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text('set -e\nARGS=(--pretrain /m --no_such_flag)\npython -m openrlhf.cli.train_ppo_ray "${ARGS[@]}"\n')
    environment = with_shim({**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 2 and "--no_such_flag" in done.stderr


def test_an_interpreter_without_the_package_finds_it(tmp_path):
    bare = Path(sys.base_prefix) / "bin" / "python3"  # the environment's own base: nothing is installed there
    for module in ("openrlhf.cli.train_ppo_ray", "rlhfless_ray.cli.train_ppo_ray"):
        environment = {**os.environ, "PYTHONPATH": str(shim_folder())}
        done = subprocess.run([bare, "-m", module, "--help"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
        assert done.returncode == 0 and "--elastic.FIELD" in done.stdout, done.stderr


def test_no_top_level_package_is_named_openrlhf():
    assert not (ROOT / "openrlhf").exists() and not (shim_folder() / "openrlhf").exists()
