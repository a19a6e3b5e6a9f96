"""Read rows of a file, each with a name for error messages. No row is dropped or repaired."""

from __future__ import annotations

import csv
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from pyarrow import Table

NamedRow = tuple[str, JsonObject]  # ("line 7", the row)


class TableRow(JsonObject):
    """A row of an Arrow table, whose nested objects have a null in place of each key that only objects of other rows have."""


def read_file(file: Path, where: str) -> list[NamedRow]:
    """Read every row of a JSONL, JSON, CSV, parquet or Arrow file. `where` begins every error message.

    Raises UserError for a missing file, an unknown type, a malformed row (naming its line) and an empty file.
    """
    if not file.is_file():
        raise UserError(f"{where}: no such file; give the path of a JSONL, JSON, CSV, parquet or Arrow file, or of a folder")
    if (reader := FILE_TYPES.get(file.suffix.lower())) is None:
        raise UserError(f"{where}: unknown file type `{file.suffix}`; use .jsonl, .json, .csv, .parquet or .arrow")
    try:
        rows = reader(file, where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not valid UTF-8 at byte {error.start}; save the file as UTF-8") from None
    if not rows:
        raise UserError(f"{where}: the data set is empty; give a file with at least one row")
    return rows


def _jsonl(file: Path, where: str) -> list[NamedRow]:
    rows: list[NamedRow] = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}, line {number}: not valid JSON ({error.msg}); fix or remove the line") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}, line {number}: expected an object with columns, found {_json_type(row)}; fix or remove the line")
            rows.append((f"line {number}", row))
    return rows


def _json(file: Path, where: str) -> list[NamedRow]:
    text = file.read_text(encoding="utf-8-sig")
    try:
        tree = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # several values in a row: JSON lines with another suffix
            return _jsonl(file, where)
        raise UserError(f"{where}, line {error.lineno}: not valid JSON ({error.msg}); fix the file") from None
    if isinstance(tree, dict):
        tree = [tree]
    if not isinstance(tree, list):
        raise UserError(f"{where}: expected a list of objects, found {_json_type(tree)}; write one object per row")
    for number, row in enumerate(tree, 1):
        if not isinstance(row, dict):
            raise UserError(f"{where}, row {number}: expected an object with columns, found {_json_type(row)}; fix or remove the row")
    return [(f"row {number}", row) for number, row in enumerate(tree, 1)]


def _csv(file: Path, where: str) -> list[NamedRow]:
    rows: list[NamedRow] = []
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            if twice := next((name for name in header if header.count(name) > 1), None):
                raise UserError(f"{where}: two columns are called `{twice}`; rename or remove one")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise UserError(
                        f"{where}, line {reader.line_num}: {len(cells)} cells, but the header names {len(header)} columns; "
                        "quote cells that hold commas or line breaks"
                    )
                rows.append((f"line {reader.line_num}", dict(zip(header, cells, strict=True))))
        except csv.Error as error:
            raise UserError(f"{where}, line {reader.line_num}: not valid CSV ({error}); fix or remove the line") from None
    return rows


def _parquet(file: Path, where: str) -> list[NamedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{where}: not a readable parquet file ({first_line(error)}); write it again") from None
    return numbered(table)


def _arrow(file: Path, where: str) -> list[NamedRow]:
    """Read either of Arrow's formats: a stream, as `datasets` writes it, or a file with an index at its end."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            try:
                table = pyarrow.ipc.open_stream(source).read_all()
            except pyarrow.ArrowInvalid:
                source.seek(0)
                table = pyarrow.ipc.open_file(source).read_all()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise UserError(f"{where}: not a readable Arrow file ({first_line(error)}); write it again") from None
        return numbered(table)


def numbered(table: Table) -> list[NamedRow]:
    """Return the rows of an Arrow table. Images and sounds stay encoded."""
    return [(f"row {number}", TableRow(row)) for number, row in enumerate(table.to_pylist(), 1)]


FILE_TYPES = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}


def check_characters(text: str, name: str) -> None:
    """Raise UserError, which begins with `name`, for half of a surrogate pair, which JSON can hold and no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name}: the text holds half of a surrogate pair, which is no character; fix or remove the row") from None


def missing_column(row: JsonObject, column: str, key: str) -> str:
    """Say that a row lacks a column. `key`: the recipe's key that names it."""
    close = difflib.get_close_matches(column, [str(c) for c in row], n=1, cutoff=0.5)
    hint = f"did you mean `{close[0]}`? Set" if close else "set"
    return f"no column `{column}`, only {', '.join(f'`{c}`' for c in row) or 'an empty row'}; {hint} {key}"


def tools_of(row: JsonObject, column: str, template: str) -> list[JsonObject] | None:
    """Return the tools of a row for a chat template, None if it has none. Raises ValueError with what is wrong."""
    tools = row.get(column) if column else None
    has_padding = isinstance(row, TableRow) and not isinstance(tools, str)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise ValueError(f"column `{column}` is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"column `{column}` is not a list of tools (JSON schemas)")
    if "tools" not in template:
        raise ValueError(f"the row has tools in column `{column}`, and the chat template reads none")
    return [without_null_values(tool) for tool in tools] if has_padding else tools


def without_null_values(value: object) -> Any:
    """Return JSON without null values of objects. A genuine null of an Arrow table cannot be told from its padding."""
    if isinstance(value, list):
        return [without_null_values(item) for item in value]
    return {key: without_null_values(item) for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def _json_type(value: object) -> str:
    return {list: "a list", str: "a string", dict: "an object", type(None): "null"}.get(type(value), "a number")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
