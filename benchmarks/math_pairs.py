"""Compare the `math` reward's verdicts with a public table of judged answer pairs: the tests of math-verify.

pip download --no-deps --no-binary :all: math-verify==0.9.0
python -m benchmarks.math_pairs math_verify-0.9.0.tar.gz [--quick]

The archive is read, not installed. A row counts if each side names one answer: the whole text, one formula or one box. Rows that test
how answers are found in prose are left out. Only the pairs on which the verdicts differ are printed and kept.
"""

from __future__ import annotations

import argparse
import ast
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.results import Target, make_console, save, show_targets
from rlhfless_ray.reward.math_answer import extract_boxed_answer, prepare
from rlhfless_ray.reward.math_compare import UnreadableReference, is_equal

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
        return extract_boxed_answer(text)
    if boxes or len(text) > MAX_CHARS:
        return None
    if formula := _FORMULA.fullmatch(text.strip()):
        return next(group for group in formula.groups() if group is not None).strip()
    return None if "$" in text.replace("\\$", "") or "\\[" in text or "\\(" in text else text.strip()


def judge(gold: str, answer: str) -> tuple[str, float]:
    """Return `equal`, `different` or `broken` (the reference), and the milliseconds of processor time that it took."""
    start = time.process_time()
    try:
        verdict = "equal" if is_equal(gold, answer) else "different"
    except UnreadableReference:
        verdict = "broken"
    return verdict, 1e3 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the source archive of math-verify")
    parser.add_argument("--quick", action="store_true", help="write to results/quick/")
    options = parser.parse_args()
    prepare()
    rows = list(dict.fromkeys(read_tables(options.archive)))
    times_ms, differing = [], []
    for *sides, is_same in rows:
        gold, answer = map(only_answer, sides)
        if gold and answer:
            verdict, ms = judge(gold, answer)
            times_ms.append(ms)
            if verdict != ("equal" if is_same else "different"):
                differing.append({"gold": gold, "answer": answer, "theirs": "equal" if is_same else "different", "ours": verdict})
    console = make_console()
    for pair in differing:
        console.print(pair, markup=False)
    pairs = len(times_ms)
    console.print(f"{pairs - len(differing)} of {pairs} pairs agree; {len(rows) - pairs} of {len(rows)} rows left out")
    targets = [
        Target("share of pairs that agree", 1 - len(differing) / pairs, least=0.9),
        Target("slowest pair", max(times_ms), most=100, unit=" ms"),
    ]
    show_targets(console, targets)
    content = {"source": options.archive.name, "rows": len(rows), "pairs": pairs, "agree": pairs - len(differing), "differing": differing}
    save("math_pairs", content, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
