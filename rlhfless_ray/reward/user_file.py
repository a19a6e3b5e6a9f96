"""A user's Python file as a value: read and checked on the driver, shipped as text and run where it is needed."""

from __future__ import annotations

import hashlib
import inspect
import linecache
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

from rlhfless_ray.common.errors import UserError, one_line_with_type


@dataclass(frozen=True)
class UserFile:
    """Path and text of a Python file. It pickles."""

    path: str  # the user's path, for messages only: workers use `text`
    text: str

    @classmethod
    def read(cls, path: str, where: str) -> UserFile:
        """Read the file. Raises UserError, which begins with `where`, if it is missing or not UTF-8 text."""
        if not Path(path).is_file():
            raise UserError(f"{where}: no such file `{path}`")
        try:
            return cls(path, Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise UserError(f"{where}: `{path}` is not UTF-8 text; give a Python file") from None

    def module(self) -> types.ModuleType:
        """Run the file's top-level code. Imports of OpenRLHF and vLLM get replacements where those are missing."""
        from rlhfless_ray.reward.openrlhf_compat import install_modules

        if "openrlhf" in self.text or "vllm" in self.text:
            install_modules()
        code = compile(self.text, self.path, "exec")
        module = types.ModuleType(f"rlhfless_reward_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}")
        module.__file__ = self.path
        # Dataclasses and pickle look up modules by name, and tracebacks look up lines by file name.
        sys.modules[module.__name__] = module
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
        exec(code, module.__dict__)
        return module

    def checked_module(self, where: str) -> types.ModuleType:
        """Call `module`. Raises UserError, which begins with `where`, with the line of a syntax, import or other error."""
        try:
            return self.module()
        except SyntaxError as error:
            raise UserError(f"{where}: syntax error in line {error.lineno}: {error.msg}") from None
        except ModuleNotFoundError as error:
            raise UserError(
                f"{where}: line {self.line_of(error)} imports `{error.name}`, which is not installed; only this file is shipped, "
                "so it may import installed packages only"
            ) from None
        except (Exception, SystemExit) as error:
            line = self.line_of(error)
            at = f"line {line}" if line is not None else "the file"
            raise UserError(f"{where}: {at} failed when it was loaded: {one_line_with_type(error)}") from None

    def line_of(self, error: BaseException) -> int | None:
        """Return the innermost line of the file in the error's traceback, or None."""
        lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == self.path]
        return lines[-1] if lines else None


def read_function(path: str, name: str, contract: str, arguments: tuple[object, ...]) -> UserFile:
    """Read a file and check its function `name` by loading it once.

    Raises UserError if the file cannot be loaded, or if the function is missing, not callable, or cannot be called with `arguments`.
    """
    where = f"reward.function {path}:{name}"
    file = UserFile.read(path, where)
    module = file.checked_module(where)
    if not hasattr(module, name):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        defined = f"it defines {', '.join(f'`{n}`' for n in functions)}" if functions else "it defines no function"
        raise UserError(f"{where}: the file has no function `{name}`; {defined}")
    value = getattr(module, name)
    if not callable(value) or inspect.isclass(value):
        raise UserError(f"{where}: `{name}` is not a function; write `{contract}`")
    if inspect.iscoroutinefunction(value):
        raise UserError(f"{where}: `{name}` is async; write `{contract}`")
    try:
        signature = inspect.signature(value)
    except ValueError:  # some built-in callables have no signature: the first call checks it
        return file
    try:
        signature.bind(*arguments)
    except TypeError:
        count = {1: "one argument", 3: "three arguments"}[len(arguments)]
        raise UserError(f"{where}: `{name}{signature}` cannot take {count}; write `{contract}`") from None
    return file
