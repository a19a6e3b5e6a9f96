"""An engine of two members in a process of its own, because torch allows one world size per process.

`members_engine.py FILE KIND`: plain, int8 or adapter. Writes its answers under two weight versions to the file, then loses a member.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from asking import FILES, SETTINGS, VERSIONS, answer, at_several_temperatures, requests, weights_of
from test_adapter_engine import SERVED, Trained

from rlhfless_ray.engine.engine_members import started
from rlhfless_ray.engine.prepare_vllm import prepare
from rlhfless_ray.engine.vllm_engine import VllmEngine
from rlhfless_ray.weights.model_folder import without_weights, write_folder

WIDE = replace(SETTINGS, tensor_parallel=2, speculation="on")  # the engine that it is compared with drafts nothing
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "int8": {"quantization": "int8"}, "adapter": {"adapter": SERVED}}


def main(file: Path, kind: str) -> None:
    settings = replace(WIDE, **KINDS[kind])
    with tempfile.TemporaryDirectory() as folder:
        prepare()  # before `tiny_head` imports torch
        from tiny_head import tiny_head

        # of several members, so the head cannot use the policy's embeddings
        drafter = write_folder(Path(folder, "head"), tiny_head(FILES["A"]["config.json"], embeddings=True)) if kind == "plain" else None
        engine = VllmEngine(write_folder(Path(folder, "policy"), without_weights(FILES["A"])), settings, drafter=drafter)
    found = {}
    for name in "AB":
        if kind == "adapter":
            engine.load(next(VERSIONS), Trained(FILES["A"], ord(name)).weights, FILES["A"])
        else:
            engine.load(next(VERSIONS), weights_of(FILES[name]))
        found[name] = answer(engine, at_several_temperatures(requests()) if kind == "plain" else requests())
        engine.park()
        engine.unpark()
    drafted, differing = sum(step.by_model[0] for step in engine.take_stats().steps), {}
    if kind == "plain":
        engine.load(next(VERSIONS), weights_of(FILES["B"]))
    for name in "BA" if kind == "plain" else "":
        with tempfile.TemporaryDirectory() as folder:
            differing[name] = engine.differing(write_folder(Path(folder), FILES[name]), WIDE, weights_of(FILES[name]))
    file.write_bytes(pickle.dumps(([member.pid for member in started], found, differing, drafted)))
    threading.Timer(0.5, os.kill, (started[0].pid, signal.SIGKILL)).start()
    while True:
        answer(engine, requests())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
