"""Small data sets of our own in the layout that the hub's have: folders of parquet files, with the columns that shipped recipes name."""

from __future__ import annotations

import json
from pathlib import Path

SUMS = [(a, b) for a in range(2, 6) for b in range(2, 4)]


def _turns(asked: str, said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


MATH = [{"problem": f"Find ${a}+{b}$.", "level": "Level 1", "type": "Algebra", "solution": f"It is $\\boxed{{{a + b}}}$."} for a, b in SUMS]
GSM8K = [{"question": f"Tom has {a} and Ann {b}. Together?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in SUMS]
CODE = [
    {"problem": f"Read n, print n + {a + b}.", "tests": json.dumps([{"type": "stdin_stdout", "input": "1\n", "output": f"{a + b + 1}\n"}])}
    for a, b in SUMS
]
PAIRS = [{"chosen": _turns(f"{a}+{b}?", str(a + b)), "rejected": _turns(f"{a}+{b}?", "No."), "score_chosen": 9.0} for a, b in SUMS]
CHATS = [{"source": "ours", "messages": [*_turns(f"{a}+{b}?", str(a + b)), *_turns("Sure?", "Yes.")]} for a, b in SUMS]


def write_hub_folder(folder: Path, rows: list[dict], *, inside: str = "data", splits: tuple[str, ...] = ("train", "test")) -> Path:
    import pyarrow
    from pyarrow import parquet

    (folder / inside).mkdir(parents=True)
    for split in splits:
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / inside / f"{split}-00000-of-00001.parquet")
    return folder
