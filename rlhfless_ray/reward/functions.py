"""The reward function as a value: found and checked on the driver, shipped as source text, built where it runs."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfless_ray.errors import UserError

if TYPE_CHECKING:
    from rlhfless_ray.recipe import Recipe

RewardFunction = Callable[[str, str, dict[str, Any]], float]
CONTRACT = "def {name}(prompt: str, response: str, row: dict) -> float"


@dataclass(frozen=True)
class RewardSource:
    """Everything a worker on another machine needs; plain strings, so it pickles."""

    kind: str  # "task", "math" or "file"
    name: str  # the task's name, or the function's
    answer_column: str = ""  # for "math"
    file: str = ""  # as the user wrote it: for messages only, it is never opened again
    text: str = ""  # the file's source

    def build(self) -> RewardFunction:
        """The function `(prompt, response, row) -> float`. For a file this runs its top-level code."""
        if self.kind == "task":
            return self._of_task()
        if self.kind == "math":
            from rlhfless_ray.reward.math_answer import math_reward

            return partial(math_reward, answer_column=self.answer_column)
        return getattr(self._module(), self.name)

    def _of_task(self) -> RewardFunction:
        from rlhfless_ray.prompts.tasks import task

        verify = task(self.name).verify
        return lambda prompt, response, row: verify(response, row)

    def _module(self) -> types.ModuleType:
        code = compile(self.text, self.file, "exec")
        module = types.ModuleType(f"rlhfless_reward_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}")
        module.__file__ = self.file
        # Dataclasses and pickle look a module up by name; tracebacks look its lines up by file name.
        sys.modules[module.__name__] = module
        linecache.cache[self.file] = (len(self.text), None, self.text.splitlines(keepends=True), self.file)
        exec(code, module.__dict__)
        return module

    def line_of(self, error: BaseException) -> int | None:
        """The innermost line of the user's file in the error's traceback."""
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.file]
        return lines[-1] if lines else None


def load_reward(recipe: Recipe) -> RewardSource:
    """Find the recipe's reward function and check that it can be called with (prompt, response, row).

    Runs the top-level code of a user's file once. Raises UserError for a missing file or function, a syntax or import
    error (with its line), something that is not callable, and other parameters.
    """
    function = recipe.reward.function
    if function == "task":
        return RewardSource("task", recipe.prompts.task)
    if function == "math":
        column = "answer" if recipe.prompts.task else recipe.prompts.answer_column
        if not column:
            raise UserError("reward.function: `math` compares with the reference answer; set prompts.answer_column")
        return RewardSource("math", "math_reward", answer_column=column)
    path, colon, name = function.rpartition(":")
    if not colon or not path or not name:
        raise UserError(f"reward.function: `{function}` is none of `task`, `math` and `path/to/file.py:name`")
    where = f"reward.function {function}"
    if not Path(path).is_file():
        raise UserError(f"{where}: no such file `{path}`")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{where}: `{path}` is not UTF-8 text; give a Python file") from None
    source = RewardSource("file", name, file=path, text=text)
    _check(source, where)
    return source


def _check(source: RewardSource, where: str) -> None:
    try:
        module = source._module()
    except SyntaxError as error:
        raise UserError(f"{where}: syntax error in line {error.lineno}: {error.msg}") from None
    except ModuleNotFoundError as error:
        raise UserError(
            f"{where}: line {source.line_of(error)} imports `{error.name}`, which is not installed; the file is shipped "
            "alone, so it may import installed packages only"
        ) from None
    except (Exception, SystemExit) as error:
        line = source.line_of(error)
        at = f"line {line}" if line is not None else "the file"
        words = " ".join(str(error).split())
        raise UserError(f"{where}: {at} failed when it was loaded: {type(error).__name__}: {words}") from None
    if not hasattr(module, source.name):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        found = f"it defines {', '.join(f'`{n}`' for n in own)}" if own else "it defines no function"
        raise UserError(f"{where}: the file has no function `{source.name}`; {found}")
    value = getattr(module, source.name)
    contract = CONTRACT.format(name=source.name)
    if not callable(value) or inspect.isclass(value):
        raise UserError(f"{where}: `{source.name}` is not a function; write `{contract}`")
    if inspect.iscoroutinefunction(value):
        raise UserError(f"{where}: `{source.name}` is async; write `{contract}`")
    try:
        signature = inspect.signature(value)
    except ValueError:  # some built-in callables have none: the first call will tell
        return
    try:
        signature.bind("", "", {})
    except TypeError:
        raise UserError(f"{where}: `{source.name}{signature}` cannot take three arguments; write `{contract}`") from None
