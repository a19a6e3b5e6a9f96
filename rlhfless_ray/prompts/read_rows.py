"""Read rows of a file, each with a name for error messages. No row is dropped or repaired."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfless_ray.common.errors import UserError

NamedRow = tuple[str, dict[str, Any]]  # ("line 7", the row)
MEDIA = ("image", "audio", "video")
CALLS = "tool_calls"
WORD = re.compile(r"[^\W\d_]{4,}")  # shorter ones are in many texts by chance
ROLES = ("system", "user", "assistant", "tool")  # words that a template writes by itself


class TableRow(dict[str, Any]):
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


def numbered(table: Any) -> list[NamedRow]:
    """Return the rows of an Arrow table. Images and sounds stay encoded."""
    return [(f"row {number}", TableRow(row)) for number, row in enumerate(table.to_pylist(), 1)]


FILE_TYPES = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}


def check_characters(text: str, name: str) -> None:
    """Raise UserError, which begins with `name`, for half of a surrogate pair, which JSON can hold and no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{name}: the text holds half of a surrogate pair, which is no character; fix or remove the row") from None


def missing_column(row: dict[str, Any], column: str, key: str) -> str:
    """Say that a row lacks a column. `key`: the recipe's key that names it."""
    close = difflib.get_close_matches(column, [str(c) for c in row], n=1, cutoff=0.5)
    hint = f"did you mean `{close[0]}`? Set" if close else "set"
    return f"no column `{column}`, only {', '.join(f'`{c}`' for c in row) or 'an empty row'}; {hint} {key}"


def tools_of(row: dict[str, Any], column: str, template: str) -> list[dict[str, Any]] | None:
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
    return [_without_null_values(tool) for tool in tools] if has_padding else tools


def cell_of(row: dict[str, Any], column: str) -> Any:
    """Return a cell. In a table's conversation each call has the arguments of all calls, so those that are null are left out."""
    cell = row[column]
    if not isinstance(row, TableRow) or not isinstance(cell, list) or not all(isinstance(turn, dict) for turn in cell):
        return cell
    return [{key: _without_null_values(value) if key == "tool_calls" else value for key, value in turn.items()} for turn in cell]


def _without_null_values(value: Any) -> Any:
    """Return JSON without null values of objects. A genuine null of an Arrow table cannot be told from its padding."""
    if isinstance(value, list):
        return [_without_null_values(item) for item in value]
    return {key: _without_null_values(item) for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def turn_problem(turns: Sequence[dict[str, Any]], template: str) -> str:
    """Return which turn of a conversation lacks what a chat template reads or has what is not read here, or an empty string.

    A template renders a missing role or content as nothing, or as the word None, and an image as a placeholder.
    """
    for number, turn in enumerate(turns, 1):
        parts = turn.get("content")
        kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if other := next((kind for kind in kinds if any(medium in kind for medium in MEDIA)), None):
            return f"turn {number} has a part of type `{other}`, and only text is read"
        for key in ("role", "content"):
            is_call = key == "content" and turn.get("tool_calls") and "tool_calls" in template
            if turn.get(key) is None and key in template and not is_call:
                return f"turn {number} has no `{key}`" + (
                    "" if key in turn else f", only {', '.join(f'`{name}`' for name in turn) or 'an empty turn'}"
                )
    return ""


def without_nulls(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns without keys that are null, except content: in Arrow's tables every turn has the keys of all turns.

    A chat template would take a null `name` or `tool_calls` for one that is there.
    """
    return [{key: value for key, value in turn.items() if value is not None or key == "content"} for turn in turns]


def rendering_problem(turns: Sequence[dict[str, Any]], text: str, template: str, *, refuse_calls: bool = True) -> str:
    """Return which turn `text`, the rendered conversation, garbles or lacks, or an empty string.

    A chat template for plain text writes a list of parts as Python code. With `refuse_calls` a turn that has nothing but tool calls must
    not be rendered by a template that reads none: it would write an empty turn.
    """
    for number, turn in enumerate(turns, 1):
        content = turn.get("content")
        if isinstance(content, (list, dict)) and content and str(content) in text:
            kind = type(content).__name__
            return f"turn {number} has a {kind} as `content`, which the chat template writes as Python code; give it a string"
        is_empty = not (content.strip() if isinstance(content, str) else content)
        if refuse_calls and is_empty and _loses_calls(turn, text, template):
            return f"turn {number} has `tool_calls` only, and the chat template reads none; remove the turn, or use another template"
    return ""


def _loses_calls(turn: dict[str, Any], text: str, template: str) -> bool:
    return bool(turn.get("tool_calls")) and "tool_calls" not in template and "tool_calls" not in text


def lost_parts(turns: Sequence[dict[str, Any]], text: str, template: str) -> set[str]:
    """Return what `text`, the rendered conversation, lacks: roles of turns, and CALLS. Many chat templates know two roles only.

    A turn is lost if it has words and the text has none of them: a template may edit what a turn says. The assistant's turns are not
    looked at, because templates leave out what it thought.
    """
    lost = {CALLS} if any(_loses_calls(turn, text, template) for turn in turns) else set()
    for turn in turns:
        role, content = str(turn.get("role")), turn.get("content")
        if role == "assistant" or role in lost or not isinstance(content, str):
            continue
        words = [word for word in WORD.findall(content) if word.lower() not in ROLES]
        if words and not any(word in text for word in words):
            lost.add(role)
    return lost


@dataclass
class LostParts:
    """What a chat template leaves out of the conversations in rows, see `lost_parts`."""

    rows: int = 0
    without_turns: int = 0  # rows with a lost turn
    without_calls: int = 0  # rows with lost tool calls
    roles: set[str] = field(default_factory=set)

    def count(self, lost: set[str]) -> None:
        """Count a row. `lost`: what is lost of it."""
        roles = lost - {CALLS}
        self.rows += 1
        self.without_turns += bool(roles)
        self.without_calls += CALLS in lost
        self.roles |= roles

    @property
    def notes(self) -> tuple[str, ...]:
        names = ", ".join(f"`{role}`" for role in sorted(self.roles))
        turns = f"in {self.without_turns} of {self.rows} rows no word of a turn of {names} is in the text that the chat template writes"
        calls = f"{self.without_calls} of {self.rows} rows have turns with `tool_calls`, and the chat template reads none"
        return ((turns,) if self.without_turns else ()) + ((calls,) if self.without_calls else ())


def _json_type(value: Any) -> str:
    return {list: "a list", str: "a string", dict: "an object", type(None): "null"}.get(type(value), "a number")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
