"""Find a blank after a backslash at the end of a script's line, with which bash ends a command too early."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rlhfless_ray.common.errors import UserError

SHELLS = ("bash", "sh", "dash", "zsh")
BROKEN_END = re.compile(r"(\S*)\\([ \t\r]+)$")


def check_line_ends(words: Sequence[str], script: Path | None = None, line: int = 1) -> None:
    """Raise UserError if an argument of this command comes from a blank after a backslash in the script that started it.

    `script`: None: the scripts of the shells above this process. `line`: where the command begins.
    """
    if (word := next((word for word in words if word != word.rstrip(" \t\r")), None)) is None:
        return
    for file in _scripts_above() if script is None else [script]:
        with suppress(OSError):
            text = file.read_bytes().decode("utf-8", "replace")  # newlines as they are
            for number, end in enumerate(text.split("\n"), start=1):
                found = BROKEN_END.search(end) if number >= line and not end.lstrip().startswith("#") else None
                if found and (found[1] == word.rstrip(" \t\r") or re.search("[$'\"`]", found[1])):
                    what = "carriage return (the file has line ends of Windows)" if "\r" in found[2] else "blank"
                    ends = f"a {what} after the backslash ends the command there, with the argument {word!r}"
                    raise UserError(f"{file} line {number}: {ends}; delete it so that the next line belongs to the command")


def _scripts_above() -> Iterator[Path]:
    """Yield the scripts of the shells that started this process."""
    process = os.getppid()
    with suppress(OSError):  # not on Linux
        while process > 1:
            words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
            if Path(words[0]).name in SHELLS:
                folder = Path(f"/proc/{process}/cwd").resolve()
                yield from (folder / word for word in words[1:] if word and not word.startswith("-") and (folder / word).is_file())
            process = int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(") ")[2].split()[1])
