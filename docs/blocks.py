"""Read the fenced blocks of the READMEs, CONTRIBUTING and docs: commands, Python, YAML and the files that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```(\w+)?([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, line, language, `title="…"` (a file name, or empty) and text."""

    page: str
    line: int
    language: str
    title: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class BlockCommand:
    """A command of a bash block, and how `python -m docs.check` treats it."""

    where: str
    text: str
    run: str  # what runs instead; empty: it is not run, and `reason` says why
    reason: str = ""
    is_fast: bool = False


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> Iterator[Block]:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            title = TITLE.search(match[3])
            line = text.count("\n", 0, match.start()) + 1
            yield Block(str(page.relative_to(ROOT)), line, match[2] or "", title[1] if title else "", match[4])


def rules() -> list[dict[str, Any]]:
    """Return the entries of docs/commands.yaml."""
    return yaml.safe_load((ROOT / "docs" / "commands.yaml").read_text(encoding="utf-8"))


def commands() -> list[BlockCommand]:
    """Return every command of every bash block, in order.

    Raises ValueError for a command that bash would not read.
    """
    known = rules()
    found: list[BlockCommand] = []
    for block in blocks():
        if block.language not in ("bash", "console", "sh"):
            continue
        for text in _logical_lines(block):
            rule = next((rule for rule in known if re.search(rule["match"], text)), {})
            run = "" if "not_run" in rule else rule.get("run", text)
            found.append(BlockCommand(block.where, text, run, rule.get("not_run", rule.get("reason", "")), bool(rule.get("fast"))))
    return found


def _logical_lines(block: Block) -> Iterator[str]:
    for line in block.text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError as error:
            raise ValueError(f"{block.where}: bash cannot read `{line}`: {error}") from None
        if words:
            yield shlex.join(words)
