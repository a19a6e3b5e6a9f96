"""Tables of a package that are data: YAML files beside its modules."""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml


def read_data_file(package: str, *path: str) -> Any:
    """Return the content of a YAML file of this project's."""
    text = resources.files(package).joinpath(*path).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
