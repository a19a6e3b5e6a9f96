"""Read recorded response lengths from a file or a run folder. Errors name every malformed entry."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("response_tokens", "tokens", "response_length", "length", "lengths", "generated_tokens", "output_tokens")
PROMPT_NAMES = ("prompt_tokens", "prompt_length", "input_tokens", "context_tokens")
GROUP_NAMES = ("prompt_index", "prompt", "prompt_id", "group")


@dataclass(frozen=True)
class Recorded:
    """Recorded responses.

    tokens (n,). group (n,): the prompt of each, numbered in order of appearance. prompt_tokens (n,): 0 where unknown.
    """

    tokens: np.ndarray
    group: np.ndarray
    prompt_tokens: np.ndarray
    source: str


MAX_TOKENS = 1e9  # longer than any real response

Row = tuple[Any, Any, Any]  # group key, prompt tokens, length


def read_lengths(path: Path, column: str | None = None) -> Recorded:
    """Read lengths from a file or a run folder. Raises ValueError naming the entry that is wrong.

    JSON: numbers, lists of one prompt's responses, or objects. JSONL: one of these per line. CSV: a column of numbers,
    by name or the only one. Run folder: the samples of its last step.
    """
    if path.is_dir():
        steps = [p for p in (path / "samples").glob("step_*.jsonl") if p.stem[5:].isdigit()]
        steps.sort(key=lambda p: int(p.stem[5:]))
        if not steps:
            raise ValueError(f"{path}: a folder without samples/step_<n>.jsonl; give a file of lengths or a run folder")
        path = steps[-1]
    readers = {".json": _json, ".jsonl": _jsonl, ".csv": _csv}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: lengths are read from .json, .jsonl and .csv files and from run folders")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    rows = list(readers[path.suffix.lower()](path, text, column))
    if not rows:
        raise ValueError(f"{path}: no lengths in it")
    number: dict[str, int] = {}
    group = np.array([number.setdefault(str(row[0]), len(number)) for row in rows])
    return Recorded(np.array([row[2] for row in rows], float), group, np.array([row[1] for row in rows], float), str(path))


def _number(value: object, where: str, least: float) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{where}: `{value}` is not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {json.dumps(value)[:60]} is not a number")
    if isinstance(value, int) and abs(value) > MAX_TOKENS:  # possibly too large to print, or for a float
        raise ValueError(f"{where}: an integer beyond {MAX_TOKENS:g} is no number of tokens")
    if not math.isfinite(value):
        raise ValueError(f"{where}: {value} is not finite")
    if value > MAX_TOKENS:
        raise ValueError(f"{where}: {value:g} is no number of tokens (more than {MAX_TOKENS:g})")
    if value < least:
        raise ValueError(f"{where}: {value:g} is below {least:g}, lengths are tokens")
    return float(value)


def _entry(entry: object, where: str, key: object, column: str | None) -> Iterator[Row]:
    if column is not None and not isinstance(entry, dict):
        raise ValueError(f"{where}: column `{column}` was requested, but this entry has no columns")
    if isinstance(entry, dict):
        name = _pick(list(entry), column, where)
        group = next((entry[g] for g in GROUP_NAMES if g in entry), key)
        prompt = next((p for p in PROMPT_NAMES if p in entry), None)
        tokens = _number(entry[prompt], f"{where}, column `{prompt}`", 0) if prompt else 0.0
        value = entry[name]
        if isinstance(value, dict):
            for who, one in value.items():
                yield group, tokens, _number(one, f"{where}, column `{name}`, response `{who}`", 1)
            return
        for j, one in enumerate(value if isinstance(value, list) else [value]):
            place = f", response {j + 1}" if isinstance(value, list) else ""
            yield group, tokens, _number(one, f"{where}, column `{name}`{place}", 1)
    elif isinstance(entry, list):
        for j, one in enumerate(entry):
            yield key, 0.0, _number(one, f"{where}, response {j + 1}", 1)
    else:
        yield key, 0.0, _number(entry, where, 1)


def _parsed(text: str, where: str, above: int = 0) -> Any:
    """Parse JSON. `above`: lines of the file before this text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: line {above + error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{where}: line {above + 1}: lists in lists too deep to be lengths") from None
    except ValueError:  # Python refuses integers of more than some thousand digits
        raise ValueError(f"{where}: a number in it has too many digits to be a length") from None


def _json(path: Path, text: str, column: str | None) -> Iterator[Row]:
    tree = _parsed(text, str(path))
    if not isinstance(tree, list):
        raise ValueError(f"{path}: a list of lengths is needed, or a list of lists, one per prompt")
    for i, entry in enumerate(tree):
        column = _same(column, entry, f"{path}: entry {i + 1}")
        yield from _entry(entry, f"{path}: entry {i + 1}", i, column)


def _jsonl(path: Path, text: str, column: str | None) -> Iterator[Row]:
    for i, line in enumerate(text.split("\n")):  # responses may contain other line separators
        if not line.strip():
            continue
        entry = _parsed(line, str(path), i)
        column = _same(column, entry, f"{path}: line {i + 1}")
        yield from _entry(entry, f"{path}: line {i + 1}", i, column)


def _same(column: str | None, entry: object, where: str) -> str | None:
    """Return the first object's column for all that follow: a row that lacks it must not be read from another column."""
    return _pick(list(entry), column, where) if isinstance(entry, dict) else column


def _csv(path: Path, text: str, column: str | None) -> Iterator[Row]:
    reader = csv.reader(text.splitlines(keepends=True), strict=True)  # otherwise an open quote would join the following lines
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num}: not CSV ({error})") from None
    if not rows:
        return
    header = [cell.strip() for cell in rows[0][1]]
    if all(_reads_as_number(cell) for cell in header):
        if len(header) > 1:
            raise ValueError(f"{path}: {len(header)} columns without a header; name them in the first line")
        names, body = ["1"], rows
    else:
        names, body = header, rows[1:]
    name = _pick(names, column, str(path))
    at = names.index(name)
    prompt = next((names.index(p) for p in PROMPT_NAMES if p in names), None)
    group = next((names.index(g) for g in GROUP_NAMES if g in names), None)
    for line, row in body:
        where = f"{path}: line {line}"
        if len(row) != len(names):
            raise ValueError(f"{where}: {len(row)} columns, the header has {len(names)}")
        tokens = _number(row[prompt].strip(), f"{where}, column `{names[prompt]}`", 0) if prompt is not None else 0.0
        key = row[group] if group is not None else line
        yield key, tokens, _number(row[at].strip(), f"{where}, column `{name}`", 1)


def _reads_as_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _pick(names: Iterable[str], column: str | None, where: str) -> str:
    """Return the name of the column of lengths."""
    names = list(names)
    if not names:
        raise ValueError(f"{where}: the object is empty")
    if column is not None:
        if column not in names:
            raise ValueError(f"{where}: no column `{column}`; there are {', '.join(names)}")
        return column
    found = [name for name in names if name in NAMES]
    if len(found) == 1:
        return found[0]
    if len(names) == 1:
        return names[0]
    which = "several columns could be" if found else "no column is known to be"
    raise ValueError(f"{where}: {which} the lengths among {', '.join(names)}; say which (`plan --column`, `trace_column` of a setting)")
