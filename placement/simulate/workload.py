"""What a run generates: prompts, their lengths, and the response lengths of every visit; synthesised or replayed."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placement.simulate.catalog import choose, number, read, values

MOST = 1e9  # tokens: beyond every response there is
MOST_DEVIATION = 10  # e¹⁰: one deviation more and a response is 20,000 times as long


@dataclass(frozen=True)
class Workload:
    """One step after another. Arrays have one row per step: prompts (steps, p) are rows of the data set, prompt_tokens
    (steps, p), lengths (steps, p, g) the response tokens of each sample; epoch (steps,).

    earlier: prompts (q,), their tokens (q,) and lengths (q, g) of a step before the first one, of other prompts: it is not
    simulated, forecasts know it. (An epoch has hundreds of steps, a simulation a few: its first would otherwise stand for
    far more than its share with forecasts that know nothing.)"""

    prompts: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    epoch: np.ndarray
    source: str
    limit: int
    earlier: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


def synthesise(
    name: str | dict[str, Any],
    *,
    prompts: int,
    samples: int,
    steps_per_epoch: int,
    epochs: int,
    response_limit: int,
    prompt_limit: int,
    seed: int,
) -> Workload:
    """Log-normal lengths whose variance of log length splits as published: prompt, sampling, drift of the policy (common to
    an epoch), and the rest drawn per prompt and epoch. Every epoch visits the same prompts, in a new order.

    name: a distribution of placement/data/lengths.yaml, or a mapping of its fields that differ (`like` names it). A data set
    smaller than steps_per_epoch × prompts shortens the epoch.
    Raises ValueError for an unknown name, or a data set smaller than one step.
    """
    tables = read("lengths")
    shares = values(tables["shares"])
    known = [k for k in tables if k != "shares"]
    given = {"like": name} if isinstance(name, str) else dict(name)
    spread = values(tables[choose("length distribution", given.pop("like", "gsm8k"), known)])
    for key, value in ((key, number(value)) for key, value in given.items()):
        spread[choose("field of a length distribution", key, list(spread))] = value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < np.inf:
            raise ValueError(f"lengths: `{key}` must be a finite number of at least 0, not {value!r}")
        if value == 0 and key in ("median_tokens", "prompt_tokens"):
            raise ValueError(f"lengths: `{key}` must be above 0")
        if key.endswith("deviation") and value > MOST_DEVIATION:
            raise ValueError(f"lengths: `{key}` is of the logarithm, at most {MOST_DEVIATION}, not {value!r}")
        if key == "prompts" and not isinstance(value, int):
            raise ValueError(f"lengths: `prompts` must be a whole number, not {value!r}")
    if prompts > spread["prompts"]:
        raise ValueError(f"`prompts`: {prompts} per step, but {name} has {spread['prompts']}; take fewer prompts per step")
    steps = max(1, min(steps_per_epoch, spread["prompts"] // prompts))
    total, rng = steps * prompts, np.random.default_rng([seed, 1])
    others = min(prompts, spread["prompts"] - total)
    deviation = spread["log_deviation"] * np.sqrt(
        [shares["prompt"], shares["drift"], 1 - shares["prompt"] - shares["drift"] - shares["sampling"], shares["sampling"]]
    )
    tokens = spread["prompt_tokens"] * np.exp(spread["prompt_log_deviation"] * rng.standard_normal(total + others))
    tokens = np.clip(np.round(tokens), 8, prompt_limit)
    of_prompt = np.log(spread["median_tokens"]) + deviation[0] * rng.standard_normal(total + others)
    drift = deviation[1] * rng.standard_normal(epochs)

    def visit(rows: np.ndarray, epoch: int) -> np.ndarray:
        center = of_prompt[rows] + drift[epoch] + deviation[2] * rng.standard_normal(len(rows))
        each = np.exp(center[:, None] + deviation[3] * rng.standard_normal((len(rows), samples)))
        return np.clip(np.round(each), 1, response_limit)

    rest = np.arange(total, total + others)
    earlier = (rest, tokens[rest], visit(rest, 0)) if others else None
    rows = [rng.permutation(total) for _ in range(epochs)]
    lengths = [visit(order, epoch) for epoch, order in enumerate(rows)]
    index = np.concatenate(rows).reshape(-1, prompts)
    return Workload(
        index,
        tokens[index],
        np.concatenate(lengths).reshape(len(index), prompts, samples),
        np.repeat(np.arange(epochs), steps),
        str(name),
        response_limit,
        earlier,
    )


def replay(path: Path, *, prompts: int, epochs: int, response_limit: int) -> Workload:
    """Recorded lengths, every epoch the same ones in the order recorded (a prompt's history is then exact after one epoch
    unless the recording visits it again itself).

    JSON: a list with one entry per prompt, either [lengths…] or {"prompt_tokens": n, "lengths": [lengths…]}, equally many
    lengths each; or a list of numbers, each the one response to a prompt of its own. CSV: columns response_tokens, and
    optionally prompt_tokens and prompt (rows of equal `prompt` are its samples; without it every row is a prompt of its own).
    Lengths above the limit are cut there. How many samples a prompt has is what the recording says.

    Raises ValueError naming row and column of the first entry that is wrong.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        table = _from_json(path) if path.suffix == ".json" else _from_csv(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file; a trace is CSV or JSON") from None
    if len(table) < prompts:
        raise ValueError(f"{path}: {len(table)} prompts, fewer than the {prompts} of one step")
    each = len(table[0][1])
    odd = next((i for i, (_, lengths) in enumerate(table, 1) if len(lengths) != each), None)
    if odd is not None:
        raise ValueError(f"{path}: prompt {odd} has {len(table[odd - 1][1])} responses and prompt 1 has {each}; each needs equally many")
    steps = len(table) // prompts
    used = table[: steps * prompts]
    tokens = np.array([t for t, _ in used], float).reshape(steps, prompts)
    lengths = np.minimum(np.array([row for _, row in used], float), response_limit).reshape(steps, prompts, -1)
    index = np.arange(steps * prompts).reshape(steps, prompts)
    return Workload(
        np.tile(index, (epochs, 1)),
        np.tile(tokens, (epochs, 1)),
        np.tile(lengths, (epochs, 1, 1)),
        np.repeat(np.arange(epochs), steps),
        path.name,
        response_limit,
    )


def _number(value: object, where: str) -> float:
    try:
        tokens = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        tokens = float("nan")
    if isinstance(value, bool) or not 1 <= tokens <= MOST:
        raise ValueError(f"{where}: expected a number of tokens of at least 1, found {_short(value)}")
    return tokens


def _short(value: object) -> str:
    if isinstance(value, (int, float)) and value > MOST:
        return f"more than {MOST:g}"  # Python prints no integer of more than some thousand digits
    return repr(value)[:60]


def _from_json(path: Path) -> list[tuple[float, list[float]]]:
    text = path.read_text()
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON (line {error.lineno}, column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{path}: lists in lists too deep to be lengths") from None
    except ValueError:  # Python converts no more than some thousand digits
        raise ValueError(f"{path}: a number in it has too many digits to be a length") from None
    if not isinstance(tree, list) or not tree:
        raise ValueError(f"{path}: expected a list with one entry per prompt")
    if not isinstance(tree[0], (list, dict)):
        tree = [[length] if not isinstance(length, (list, dict)) else length for length in tree]
    table = []
    for i, entry in enumerate(tree, 1):
        known = entry.get("prompt_tokens", 1) if isinstance(entry, dict) else 1
        if isinstance(entry, dict) and "lengths" not in entry:
            raise ValueError(f"{path}: row {i}: no column `lengths` (columns: {', '.join(entry) or 'none'})")
        lengths = entry["lengths"] if isinstance(entry, dict) else entry
        if not isinstance(lengths, list) or not lengths:
            raise ValueError(f"{path}: row {i}, column `lengths`: expected a list of response lengths, found {_short(lengths)}")
        row = [_number(v, f"{path}: row {i}, column {j}") for j, v in enumerate(lengths, 1)]
        table.append((_number(known, f"{path}: row {i}, column `prompt_tokens`"), row))
    return table


def _from_csv(path: Path) -> list[tuple[float, list[float]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", strict=True)
        try:
            names, rows = reader.fieldnames or [], [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise ValueError(f"{path}: row {reader.reader.line_num}: not CSV ({error})") from None
    if "response_tokens" not in names:
        raise ValueError(f"{path}: row 1: no column `response_tokens` (columns: {', '.join(map(str, names)) or 'none'})")
    if not rows:
        raise ValueError(f"{path}: no rows below the header")
    groups: dict[str, tuple[float, list[float]]] = {}
    for i, row in rows:  # the header is row 1
        if None in row.values() or "" in row:
            raise ValueError(f"{path}: row {i}: not as many columns as the header has ({len(names)})")
        length = _number(row["response_tokens"], f"{path}: row {i}, column `response_tokens`")
        prompt = row.get("prompt", str(i))
        tokens = _number(row["prompt_tokens"], f"{path}: row {i}, column `prompt_tokens`") if "prompt_tokens" in names else 1.0
        groups.setdefault(prompt, (tokens, []))[1].append(length)
    return list(groups.values())
