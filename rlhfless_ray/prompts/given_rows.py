"""Rows that a Python program hands over. They are kept in a file beside the run folders, which the recipe names."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.vision.read_image import as_data_uri


def keep_rows(rows: object, folder: Path, what: str, max_rows: int | None = None) -> tuple[Path, JsonObject, int]:
    """Write rows as JSON lines to a file that their content names. Returns the file, the first row, and their number.

    Args:
        rows: a list of dicts, a `datasets.Dataset`, or a streamed one.
        what: the argument's name, for messages.
        max_rows: how many rows to take at most. A streamed data set needs it.

    Raises:
        UserError: for other types, an empty data set, and values that JSON has not.
    """
    if isinstance(rows, Mapping):
        names = ", ".join(f"`{name}`" for name in rows)
        raise UserError(f"{what}: expected rows, got a dict of {names}; choose one, such as {what}=dataset[{next(iter(rows), 'train')!r}]")
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Iterable):
        raise UserError(f"{what}: expected a path, a list of dicts or a datasets.Dataset, got {type(rows).__name__}")
    if not hasattr(rows, "__len__") and max_rows is None:
        raise UserError(f"{what}: a streamed data set has no end; say how many rows to take, such as max_rows=10_000")
    lines, first = list[str](), JsonObject()
    for number, row in enumerate(itertools.islice(rows, max_rows), 1):
        if not isinstance(row, Mapping):
            raise UserError(f"{what}, row {number}: expected a dict of columns, got {type(row).__name__}")
        first = first or dict(row)
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=as_data_uri))
        except (TypeError, ValueError):
            column, value = next((name, value) for name, value in row.items() if not _is_json(value))
            raise UserError(f"{what}, row {number}: column `{column}` has a {type(value).__name__}, which is no JSON; remove it") from None
    if not lines:
        raise UserError(f"{what}: the data set is empty; give at least one row")
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    path = folder / f"rows-{hashlib.blake2b(content, digest_size=6).hexdigest()}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
    return path, first, len(lines)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, default=as_data_uri)
    except (TypeError, ValueError):
        return False
    return True
