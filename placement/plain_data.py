"""Types of plain data, as JSON and YAML files hold it."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
