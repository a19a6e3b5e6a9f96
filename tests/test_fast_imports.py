"""Imports with modules that seem absent and without the collector."""

from __future__ import annotations

import gc
import subprocess
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


TOKENIZER = """
import os, sys
from rlhfless_ray.local.fast_imports import transformers_without_torch

for _ in range(2):
    with transformers_without_torch():
        from transformers import Qwen2Tokenizer
        tokenizer = Qwen2Tokenizer(vocab={"<pad>": 0, "a": 1, "b": 2}, merges=[], unk_token=None, pad_token="<pad>")
    assert not {"torch", "transformers"} & sys.modules.keys() and "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
assert tokenizer("ab")["input_ids"] == [1, 2]
assert tokenizer("ab", return_tensors="pt")["input_ids"].tolist() == [[1, 2]]
from transformers import Qwen2Config, Qwen2ForCausalLM  # whole now
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, vocab_size=3)
Qwen2ForCausalLM(Qwen2Config(**sizes))
"""


@pytest.mark.slow
def test_a_tokenizer_needs_no_torch_and_models_come_later() -> None:
    done = subprocess.run([sys.executable, "-c", TOKENIZER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "PyTorch" not in done.stderr, done.stderr[-2000:]
