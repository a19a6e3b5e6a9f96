"""An engine of two members in a process of its own, because torch allows one world size per process.

Writes its answers under two weight versions to the file that is named, then loses a member.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from pathlib import Path

from asking import FILES, VERSIONS, answer, requests, weights_of

from rlhfless_ray.rollout.engine_members import started
from rlhfless_ray.rollout.engine_settings import EngineSettings
from rlhfless_ray.rollout.vllm_engine import VllmEngine
from rlhfless_ray.weights.model_folder import without_weights, write_folder

SETTINGS = EngineSettings(
    max_model_len=320,
    max_running=64,
    block_size=32,
    kv_cache_mb=64,
    gpu_memory_share=0.5,
    tensor_parallel=2,
    speculation="on",  # the engine that it is compared with drafts nothing
)


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = VllmEngine(write_folder(Path(folder), without_weights(FILES["A"])), SETTINGS)
    found = {}
    for name in "AB":
        engine.load(next(VERSIONS), weights_of(FILES[name]))
        found[name] = answer(engine, requests())
        engine.park()
        engine.unpark()
    differing = {}
    engine.load(next(VERSIONS), weights_of(FILES["B"]))
    for name in "BA":
        with tempfile.TemporaryDirectory() as folder:
            differing[name] = engine.differing(write_folder(Path(folder), FILES[name]), SETTINGS, weights_of(FILES[name]))
    file.write_bytes(pickle.dumps(([member.process.pid for member in started], found, differing)))
    threading.Timer(0.5, os.kill, (started[0].process.pid, signal.SIGKILL)).start()
    while True:
        answer(engine, requests())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
