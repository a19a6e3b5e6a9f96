"""The examples in the docstrings of everything that `placement` exports."""

from __future__ import annotations

import doctest
import importlib

import pytest

import placement

MODULES = sorted({getattr(placement, name).__module__ for name in placement.__all__} | {"placement"})


RESULTS = {"Bounds", "Choice", "NotFeasible"}  # what functions return or raise: their examples show them


@pytest.mark.parametrize("name", [name for name in placement.__all__ if name not in RESULTS])
def test_every_exported_name_has_an_example(name: str) -> None:
    assert ">>>" in getattr(placement, name).__doc__


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_give_what_they_say(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0
