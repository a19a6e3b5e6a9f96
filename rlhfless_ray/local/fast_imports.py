"""Speed up imports, which take most of a cold start."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # set, transformers does not say that torch is missing
_set_aside: dict[str, ModuleType] = {}  # transformers as it is without torch


@contextmanager
def fast_imports(absent: Iterable[str] = ()) -> Iterator[None]:
    """Import modules inside the block with garbage collection off; modules named in `absent` appear not to be installed.

    Python's collector scans all live objects whenever their number has grown by a quarter. That takes an eighth of the time of
    importing thousands of modules, none of which is garbage. Objects that exist at the end are excluded from later scans.
    `absent` names optional modules that are slow to import. Modules already loaded stay, and later imports work.
    """
    hidden = [name for name in absent if name not in sys.modules]
    collecting = gc.isenabled()
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail as for a missing module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collecting:
            gc.enable()


@contextmanager
def transformers_without_torch() -> Iterator[None]:
    """Import transformers inside the block without torch, unless one of them is loaded. That is enough for a tokenizer.

    A process that computes no model needs 0.2 GB and some seconds less. Outside of the block transformers seems not to be loaded, so
    that later imports get it whole.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    before = os.environ.get(ADVICE)
    os.environ[ADVICE] = "1"
    sys.modules.update(_set_aside)
    try:
        with fast_imports(("torch",)):
            yield
    finally:
        os.environ.pop(ADVICE)
        if before is not None:
            os.environ[ADVICE] = before
        _set_aside.update({name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"})
        for name in _set_aside:
            del sys.modules[name]
        if (utils := _set_aside.get("transformers.utils.import_utils")) is not None:
            utils.is_torch_available.cache_clear()  # a tokenizer may still be asked for tensors
