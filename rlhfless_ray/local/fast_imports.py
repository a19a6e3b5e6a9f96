"""Speed up imports, which take most of a cold start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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
