"""Imports are most of a cold start: what they can do without."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def lean_imports(absent: Iterable[str] = ()) -> Iterator[None]:
    """Modules imported inside are taken for granted from then on; a module of `absent` that is not loaded yet seems not to be installed.

    Python's collector looks at everything alive each time a quarter more is alive: for thousands of modules, none of which is
    garbage, that is an eighth of the time of importing them. So it is off inside, and passes over what is there afterwards.
    `absent` is for modules whose importers do without where they find none; a later import of them works.
    """
    hidden = [name for name in absent if name not in sys.modules]
    collecting = gc.isenabled()
    gc.disable()
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: what Python takes for "not there"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if collecting:
            gc.enable()
