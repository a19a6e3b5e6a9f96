"""A reward function is called once before the first step, in a process of its own, so that a run does not find out after an hour
that what it returns is not of the contract."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rlhfless_ray.errors import UserError
from rlhfless_ray.reward.queries import QuerySource
from rlhfless_ray.reward.worker import Score
from rlhfless_ray.types import Completion, Prompt, Sample

START_S = 120.0  # for the process and what the user's file imports


def dry_call(source: Any, prompts: list[Prompt], tokenizer: Any, timeout_s: float) -> None:
    """Scores made-up responses to the first prompts: the empty one and the label itself. Raises UserError when the function
    fails for each of them, hangs or ends its process; one that fails for some may be right to. Other sources need no call."""
    if not isinstance(source, QuerySource):
        return
    where = f"reward.function {source.file.path}:{source.name}"
    items = _items(source, prompts, tokenizer)
    scores = _in_a_process(source, items, timeout_s, where)
    if all(score.error is not None for score in scores):
        raise UserError(f"{where}: it fails in a dry call with made-up responses: {scores[0].error}")


def _items(source: QuerySource, prompts: list[Prompt], tokenizer: Any) -> list[Any]:
    items = []
    for key in range(max(2, source.batch_samples)):
        prompt = prompts[key % len(prompts)]
        label = str(prompt.row.get(source.label_column, "")) if key % 2 and source.label_column else ""
        tokens = np.array(tokenizer(label, add_special_tokens=False)["input_ids"] if label else [], np.int32)
        completion = Completion(key, tokens, np.zeros(len(tokens), np.float32), "stop", 0)
        items.append(source.item(key, Sample(prompt, 0, completion), lambda ids: tokenizer.decode(ids, skip_special_tokens=False)))
    return items


def _in_a_process(source: QuerySource, items: list[Any], timeout_s: float, where: str) -> list[Score]:
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    limit_s = START_S + 2 * timeout_s * len(items)
    with tempfile.TemporaryDirectory(prefix="rlhfless-dry-") as folder:
        answer = Path(folder) / "scores"
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(answer)], input=pickle.dumps((source, items, timeout_s)), timeout=limit_s,
                capture_output=True, env={**os.environ, "PYTHONPATH": path}, check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{where}: a dry call did not return within {limit_s:g} s") from None
        if not answer.is_file():
            last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:300]
            raise UserError(f"{where}: its process ended with code {done.returncode} in a dry call" + (f": {last}" if last else ""))
        return pickle.loads(answer.read_bytes())


def main() -> None:
    source, items, timeout_s = pickle.loads(sys.stdin.buffer.read())
    scores = source.worker(timeout_s).score(items)
    temporary = Path(sys.argv[1] + ".part")
    temporary.write_bytes(pickle.dumps(scores))
    temporary.rename(sys.argv[1])


if __name__ == "__main__":
    main()
