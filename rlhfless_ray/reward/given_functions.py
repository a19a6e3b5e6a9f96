"""Reward functions that a Python program hands over: in this project's signature or in TRL's, one or several with weights.

They are kept in a file beside the run folders, which the recipe names. So such a run resumes and evaluates like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import UserError, one_line_with_type
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.reward.openrlhf_reward import BadReturn, QueryWorker, per_sample
from rlhfless_ray.reward.source import Decode, Score, Source, Worker
from rlhfless_ray.reward.time_limit import TimeLimit, TimeLimitExceeded
from rlhfless_ray.reward.values import describe_exception, timeout_message, to_finite_float
from rlhfless_ray.types import Sample

SUFFIX = ".functions"
BATCH_SAMPLES = 64  # of one call of functions that take lists
OF_TRL = ("prompt", "completion", "completion_ids")  # columns that TRL's arguments of these names replace
CONTRACTS = "write `def {name}(prompt, response, row) -> float`, or TRL's `def {name}(completions, **columns) -> list[float]`"

RewardFunction = Callable[..., Any]
Item = tuple[int, str, str, list[int], JsonObject]  # key, prompt, response, its tokens, the prompt's row


@dataclass(frozen=True)
class GivenSource(Source):
    """Functions of a Python program, pickled by value."""

    pickled: bytes
    name: str  # of all functions, joined by +
    weights: tuple[float, ...]
    batch_samples: int
    prompt_column: str

    def item(self, key: int, sample: Sample, decode: Decode) -> Item:
        return key, sample.prompt.text, sample.text, sample.completion.token_ids.tolist(), dict(sample.prompt.row)

    def worker(self, timeout_s: float, device: str = "cpu") -> Worker:
        return GivenWorker(self, timeout_s)

    def call_s(self, timeout_s: float) -> float:
        """Return the worst case in seconds: a failed batch is scored again one by one."""
        return timeout_s * 2 * self.batch_samples

    @classmethod
    def load(cls, path: str, name: str, batch_samples: int, prompt_column: str) -> GivenSource:
        """Read a file that `keep_functions` wrote. Raises UserError if it cannot be read."""
        try:
            weights, pickled = _read(Path(path))
        except (OSError, ValueError) as error:
            raise UserError(
                f"reward.function {path}: cannot read the functions that a Python program kept there "
                f"({one_line_with_type(error)}); run the program again"
            ) from None
        return cls(pickled, name, weights, batch_samples if batch_samples > 1 else BATCH_SAMPLES, prompt_column)


class GivenWorker(QueryWorker):
    """Call the functions in a process's main thread. A batch that fails is split, so that the sample at fault can be named."""

    def __init__(self, source: GivenSource, timeout_s: float) -> None:
        import pickle

        self.given, self.timeout_s, self.batch_samples = source, timeout_s, source.batch_samples
        paths, functions = pickle.loads(source.pickled)
        sys.path.extend(path for path in paths if path not in sys.path)
        self.functions: list[RewardFunction] = functions
        self.limit = TimeLimit()

    def _score(self, batch: list[Any]) -> list[Score] | str:
        """Return the scores, or an error message for the whole call."""
        keys = [key for key, *_ in batch]
        columns: list[list[float]] = []
        for function in self.functions:
            name = name_of(function)
            try:
                values = self.limit.call(self.timeout_s * len(batch), partial(_call, function, deepcopy(batch), self.given.prompt_column))
                columns.append([_value(name, value) for value in values])
            except TimeLimitExceeded:
                return timeout_message(self.timeout_s)
            except BadReturn as error:
                return f"`{name}` returned {error}"
            except (Exception, SystemExit) as error:
                return describe_exception(error, None)
        names = [f"rewards/{name_of(function)}" for function in self.functions]
        return [self._joined(key, dict(zip(names, values, strict=True))) for key, *values in zip(keys, *columns, strict=True)]

    def _joined(self, key: int, values: Mapping[str, float]) -> Score:
        """Return the weighted sum of the values that are there, as TRL does."""
        terms = [weight * value for weight, value in zip(self.given.weights, values.values(), strict=True) if not math.isnan(value)]
        if not terms:
            return Score(key, None, f"`{self.given.name}` returned no reward: every function gave None")
        return Score(key, sum(terms), extra_logs=values if len(values) > 1 else {})


def _call(function: RewardFunction, batch: list[Item], prompt_column: str) -> list[Any]:
    """Call a function of either signature for a batch, and return one value per sample. Raises BadReturn for another number of them.

    TRL's get prompts and completions as turns if the data has turns.
    """
    if not takes_lists(function):
        return [_awaited(function(prompt, response, row)) for _, prompt, response, _, row in batch]
    rows = [row for *_, row in batch]
    turns = isinstance(rows[0].get(prompt_column), list)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in OF_TRL and all(name in row for row in rows)}
    arguments: JsonObject = {
        "prompts": [row[prompt_column] if turns else prompt for _, prompt, *_, row in batch],
        "completions": [[{"role": "assistant", "content": text}] if turns else text for _, _, text, *_ in batch],
        "completion_ids": [tokens for *_, tokens, _ in batch],
        **columns,
    }
    parameters = inspect.signature(function).parameters.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        arguments = {one.name: arguments[one.name] for one in parameters if one.name in arguments}
    return per_sample(_awaited(function(**arguments)), len(batch), "rewards")


def _awaited(value: Any) -> Any:
    return asyncio.run(_result_of(value)) if inspect.isawaitable(value) else value


async def _result_of(value: Any) -> Any:
    return await value


def _value(name: str, value: Any) -> float:
    """Return a reward as a float, NaN for None, which means that a function does not apply to a sample. Raises BadReturn."""
    if value is None:
        return math.nan
    try:
        return to_finite_float(value)
    except ValueError as error:
        raise BadReturn(str(error)) from None


def takes_lists(function: RewardFunction) -> bool:
    """Return whether a function has TRL's signature."""
    return "completions" in inspect.signature(function).parameters


def name_of(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


# ---- on the driver ---------------------------------------------------------------------------------------------


def keep_functions(functions: Sequence[RewardFunction], weights: Sequence[float], folder: Path) -> str:
    """Write functions to a file in a folder. Returns the value of `reward.function` that names them.

    The file's name depends on the source of the functions and on the weights, so that the same program resumes its run. Raises UserError
    for what is no function of either signature, or cannot be pickled.
    """
    for function in functions:
        _check(function)
    if len(weights) != len(functions):
        raise UserError(f"reward_weights: expected a number for each of {len(functions)} functions, got {len(weights)}")
    from ray import cloudpickle

    digest = hashlib.blake2b(repr(tuple(weights)).encode(), digest_size=6)
    for function in functions:
        digest.update(_source_of(function))
        module = inspect.getmodule(function)
        if module is not None and module.__name__ != "__main__" and not _is_installed(module):
            cloudpickle.register_pickle_by_value(module)
    name = "+".join(map(name_of, functions))
    try:
        pickled: bytes = cloudpickle.dumps((_own_paths(), list(functions)))
    except Exception as error:
        raise UserError(
            f"reward: `{name}` cannot be sent to other processes ({one_line_with_type(error)}); it must hold no open files, locks or models"
        ) from None
    path = folder / f"reward-{digest.hexdigest()}{SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, ",".join(map(repr, map(float, weights))).encode() + b"\n" + pickled)
    return f"{path}:{name}"


def _check(function: RewardFunction) -> None:
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"reward: expected a function, not {type(function).__name__} {function!r}"[:200])
    name = name_of(function)
    try:
        signature = inspect.signature(function)
        if takes_lists(function):
            signature.bind_partial(completions=[])
        else:
            signature.bind("", "", {})
    except (TypeError, ValueError):
        raise UserError(f"reward: `{name}` has neither signature of reward functions; {CONTRACTS.format(name=name)}") from None


def _source_of(function: RewardFunction) -> bytes:
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):  # defined at a prompt, or a callable object
        code = getattr(function, "__code__", None)
        return repr(function).encode() if code is None else code.co_code


def _is_installed(module: Any) -> bool:
    """Return whether other processes import a module by its name."""
    folders = [Path(path) for key, path in sysconfig.get_paths().items() if key in ("stdlib", "platstdlib", "purelib", "platlib")]
    file = getattr(module, "__file__", None)
    return file is None or any(folder in Path(file).parents for folder in folders)


def _own_paths() -> list[str]:
    """Return the folders from which the program imports its own modules."""
    installed = sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]
    return [str(Path(path or ".").resolve()) for path in sys.path if not path.startswith(installed) and not path.endswith(".zip")]


def _read(path: Path) -> tuple[tuple[float, ...], bytes]:
    head, _, pickled = path.read_bytes().partition(b"\n")
    return tuple(float(part) for part in head.decode().split(",")), pickled
