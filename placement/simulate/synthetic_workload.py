"""Workloads of a run: prompts, their lengths, and the response lengths of every visit, synthetic or replayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement.catalog.catalog import match_name, number, read, values
from placement.forecast.recorded_lengths import read_lengths
from placement.plain_data import JsonObject

MAX_DEVIATION = 10  # standard deviation of log length: at 10, one deviation is a factor of 20,000


@dataclass(frozen=True)
class SyntheticWorkload:
    """Consecutive steps. Arrays have one row per step.

    prompts (steps, p): rows of the data set. prompt_tokens (steps, p). lengths (steps, p, g): response tokens of each
    sample. epoch (steps,).

    earlier: prompts (q,), their tokens (q,) and lengths (q, g) of a step before the first, with other prompts. It is
    not simulated, but forecasts know it. An epoch has hundreds of steps and a simulation a few, so a first step without
    any forecast would otherwise count for too much.
    """

    prompts: np.ndarray
    prompt_tokens: np.ndarray
    lengths: np.ndarray
    epoch: np.ndarray
    earlier: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None


def synthesise(
    name: str | JsonObject,
    *,
    prompts: int,
    samples: int,
    steps_per_epoch: int,
    epochs: int,
    response_limit: int,
    prompt_limit: int,
    seed: int,
) -> SyntheticWorkload:
    """Draw log-normal lengths whose variance of log length splits as published.

    The parts are: prompt, sampling, drift of the policy (common to an epoch), and the rest, drawn per prompt and epoch.
    Every epoch visits the same prompts in a new order.

    name: a distribution of placement/catalog/data/lengths.yaml, or a mapping of its changed fields (`like` names it). A
    data set smaller than steps_per_epoch × prompts shortens the epoch. Raises ValueError for an unknown name, or a data
    set smaller than one step.
    """
    tables = read("lengths")
    shares = values(tables["shares"])
    known = [k for k in tables if k != "shares"]
    given = {"like": name} if isinstance(name, str) else dict(name)
    spread = values(tables[match_name("length distribution", given.pop("like", "gsm8k"), known)])
    for key, value in ((key, number(value)) for key, value in given.items()):
        spread[match_name("field of a length distribution", key, list(spread))] = value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < np.inf:
            raise ValueError(f"lengths: `{key}` must be a finite number of at least 0, not {value!r}")
        if value == 0 and key in ("median_tokens", "prompt_tokens"):
            raise ValueError(f"lengths: `{key}` must be above 0")
        if key.endswith("deviation") and value > MAX_DEVIATION:
            raise ValueError(f"lengths: `{key}` is of the logarithm, at most {MAX_DEVIATION}, not {value!r}")
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
    return SyntheticWorkload(
        index, tokens[index], np.concatenate(lengths).reshape(len(index), prompts, samples), np.repeat(np.arange(epochs), steps), earlier
    )


def replay(path: Path, *, prompts: int, epochs: int, response_limit: int, column: str | None = None, seed: int = 0) -> SyntheticWorkload:
    """Replay recorded lengths (see `read_lengths`) in the first epoch, and draw lengths from them in later ones.

    A recording has one epoch, but a policy answers a prompt anew in each. From the second epoch on every length is drawn with
    replacement from the recorded responses to its prompt, or from the whole recording where a prompt has only one response.
    Lengths above the limit are cut there. The recording determines how many samples a prompt has. Where it names no prompts,
    every response is a prompt's only one.

    Args:
        column: name of the lengths, if it is not a known one.

    Raises:
        ValueError: naming the first entry that is wrong.
    """
    recorded = read_lengths(path, column)
    order = np.argsort(recorded.group, kind="stable")
    each = np.bincount(recorded.group)
    if len(each) < prompts:
        raise ValueError(f"{path}: {len(each)} prompts, fewer than the {prompts} of one step")
    odd = int(np.argmax(each != each[0]))
    if each[odd] != each[0]:
        raise ValueError(f"{path}: prompt {odd + 1} has {each[odd]} responses and prompt 1 has {each[0]}; each needs equally many")
    steps = len(each) // prompts
    index = np.arange(steps * prompts).reshape(steps, prompts)
    shape = (len(each), each[0])
    tokens = recorded.prompt_tokens[order].reshape(shape)[: steps * prompts, 0].reshape(steps, prompts)
    every = recorded.tokens[order].reshape(shape)
    epoch_lengths, rng = [every[: steps * prompts]], np.random.default_rng([seed, 2])
    for _ in range(epochs - 1):
        if each[0] == 1:
            epoch_lengths.append(rng.choice(every, steps * prompts))
        else:
            epoch_lengths.append(np.take_along_axis(every, rng.integers(0, each[0], shape), 1)[: steps * prompts])
    lengths = np.concatenate(epoch_lengths).reshape(epochs * steps, prompts, -1)
    return SyntheticWorkload(
        np.tile(index, (epochs, 1)),
        np.tile(np.maximum(tokens, 1), (epochs, 1)),  # the recording has 0 where it does not say
        np.minimum(lengths, response_limit),
        np.repeat(np.arange(epochs), steps),
    )
