"""Imports with modules that seem absent and without the collector."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from rlhfless_ray.local.fast_imports import fast_imports


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`careful` does without `wanted` where it is not there; `reckless` does not."""
    (tmp_path / "wanted_module.py").write_text("value = 1\n")
    (tmp_path / "careful_module.py").write_text(
        "try:\n    import wanted_module\nexcept ImportError:\n    wanted_module = None\nimport gc\ncollects = gc.isenabled()\n"
    )
    (tmp_path / "reckless_module.py").write_text("import wanted_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("wanted_module", "careful_module", "reckless_module"):
        sys.modules.pop(name, None)


def test_what_seems_absent_can_be_imported_later(modules: None) -> None:
    with fast_imports(("wanted_module",)):
        import careful_module  # type: ignore[import-not-found]
    assert careful_module.wanted_module is None and careful_module.collects is False
    assert "wanted_module" not in sys.modules and gc.isenabled()
    import wanted_module  # type: ignore[import-not-found]

    assert wanted_module.value == 1


def test_what_is_loaded_already_stays_visible(modules: None) -> None:
    import wanted_module  # type: ignore[import-not-found]

    with fast_imports(("wanted_module",)):
        import careful_module  # type: ignore[import-not-found]
    assert careful_module.wanted_module is wanted_module is sys.modules["wanted_module"]


def test_a_failure_inside_leaves_nothing_hidden(modules: None) -> None:
    with pytest.raises(ImportError, match="wanted_module"), fast_imports(("wanted_module",)):
        import reckless_module  # type: ignore[import-not-found]
    import reckless_module  # type: ignore[import-not-found]

    assert reckless_module.wanted_module.value == 1 and gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with fast_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
