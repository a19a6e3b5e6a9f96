"""Compare the `math` reward's verdicts with a public table of judged answer pairs: the tests of math-verify.

    pip download --no-deps --no-binary :all: math-verify==0.9.0
    python -m benchmarks.math_pairs math_verify-0.9.0.tar.gz

The archive is read, not installed, and no pair is copied. A row counts if each side names one answer: the whole text, one formula
or one box. Rows that test how answers are found in prose are left out. Writes benchmarks/results/math_pairs.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from rlhfless_ray.reward.math_answer import last_box
from rlhfless_ray.reward.math_compare import UnreadableReference, is_equal

RESULT = Path(__file__).parent / "results" / "math_pairs.json"
MAX_CHARS = 300  # of a side without a box; longer ones are solutions in prose
_FORMULA = re.compile(r"\$\$?([^$]*)\$?\$|\\\[(.*?)\\\]|\\\((.*?)\\\)", re.DOTALL)


def read_tables(archive: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield (gold, answer, expected) of all parametrised tables in the archive's tests."""
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            if re.search(r"/tests/test_\w+\.py$", member.name) and (file := files.extractfile(member)):
                for node in ast.walk(ast.parse(file.read())):
                    if isinstance(node, ast.Tuple) and len(node.elts) >= 3:
                        try:
                            gold, answer, *options, expected = ast.literal_eval(node)
                        except ValueError:
                            continue
                        if options:  # the test's own settings of math-verify
                            continue
                        if isinstance(gold, str) and isinstance(answer, str) and expected in (0, 1):
                            yield gold, answer, bool(expected)


def only_answer(text: str) -> str | None:
    """Return the one answer that a side names, or None if it names several or hides it in prose."""
    if (boxes := len(re.findall(r"\\boxed", text))) == 1:
        return last_box(text, "\\boxed")
    if boxes or len(text) > MAX_CHARS:
        return None
    if formula := _FORMULA.fullmatch(text.strip()):
        return next(group for group in formula.groups() if group is not None).strip()
    return None if "$" in text.replace("\\$", "") or "\\[" in text or "\\(" in text else text.strip()


def judge(gold: str, answer: str) -> tuple[str, float]:
    """Return `equal`, `different` or `unreadable` (the reference), and the seconds that it took."""
    start = time.perf_counter()
    try:
        verdict = "equal" if is_equal(gold, answer) else "different"
    except UnreadableReference:
        verdict = "unreadable"
    return verdict, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the source archive of math-verify")
    archive = parser.parse_args().archive
    rows = list(dict.fromkeys(read_tables(archive)))
    pairs = [(gold, answer, expected) for *sides, expected in rows for gold, answer in [map(only_answer, sides)] if gold and answer]
    result = {"source": archive.name, "rows": len(rows), "pairs": len(pairs), "agree": 0, "slowest_s": 0.0, "disagreements": []}
    for gold, answer, expected in pairs:
        verdict, seconds = judge(gold, answer)
        result["slowest_s"] = round(max(result["slowest_s"], seconds), 3)
        if verdict == ("equal" if expected else "different"):
            result["agree"] += 1
        else:
            result["disagreements"].append(
                {"gold": gold, "answer": answer, "theirs": "equal" if expected else "different", "ours": verdict}
            )
    print(f"{result['agree']} of {len(pairs)} pairs agree; {len(rows) - len(pairs)} of {len(rows)} rows left out")
    for each in result["disagreements"]:
        print(each)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
