"""An engine of two members in a process of its own, because torch allows one world size per process.

`members_engine.py FILE KIND`: plain, int8 or adapter. Writes its answers under two weight versions to the file, then loses a member.
Its members fetch the plain and int8 weights from a channel, whose store is a file.
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
from rlhfless_ray.weights.channel import ObjectStoreChannel, PublishedVersion
from rlhfless_ray.weights.checksum import digests
from rlhfless_ray.weights.model_folder import without_weights, write_folder
from rlhfless_ray.weights.tensor_slice import whole_slices

WIDE = replace(SETTINGS, tensor_parallel=2, speculation="on")  # the engine that it is compared with drafts nothing
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "int8": {"quantization": "int8"}, "adapter": {"adapter": SERVED}}


class FileStore:
    """Weights in a file that every member reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, refs: Any, version: int, within_s: float) -> list[Any]:
        return [whole_slices(weights_of({"model.safetensors": self.path.read_bytes()}))]


def channel_of(path: Path, version: int, files: dict[str, bytes]) -> ObjectStoreChannel:
    path.write_bytes(files["model.safetensors"])
    store: Any = FileStore(path)
    channel = ObjectStoreChannel(store=store)
    channel.digests[version] = digests(whole_slices(weights_of(files)))
    return channel


def damage_of(engine: VllmEngine, channel: ObjectStoreChannel, name: str) -> str:
    """What the engine says of a version in which this tensor is damaged."""
    digest_of = channel.digests[0]
    channel.digests[0] = {**digest_of, name: digest_of[name] + 1}
    try:
        engine.check(channel, 0)
    except Exception as error:
        return str(error)
    finally:
        channel.digests[0] = digest_of
    return ""


def main(file: Path, kind: str) -> None:
    settings = replace(WIDE, **KINDS[kind])
    with tempfile.TemporaryDirectory() as folder:
        prepare()  # before `tiny_head` imports torch
        from tiny_head import tiny_head

        # of several members, so the head cannot use the policy's embeddings
        drafter = write_folder(Path(folder, "head"), tiny_head(FILES["A"]["config.json"], embeddings=True)) if kind == "plain" else None
        engine = VllmEngine(write_folder(Path(folder, "policy"), without_weights(FILES["A"])), settings, drafter=drafter)

    def load(name: str) -> int:
        """Load a version, and return the bytes that the first member fetched from a channel."""
        version = next(VERSIONS)
        if kind == "adapter":
            engine.load(version, Trained(FILES["A"], ord(name)).weights, weights_of(FILES["A"]))
            return 0
        channel = channel_of(file.with_name(name), version, FILES[name])
        engine.check(channel, version)
        engine.load(version, PublishedVersion(channel, version))
        return channel.fetched_bytes

    found, fetched = {}, 0
    for name in "AB":
        fetched = load(name)
        found[name] = answer(engine, at_several_temperatures(requests()) if kind == "plain" else requests())
        engine.park()
        engine.unpark()
    drafted, differing = sum(step.by_model[0] for step in engine.take_stats().steps), {}
    if kind == "plain":
        engine.load(next(VERSIONS), weights_of(FILES["B"]))
    for name in "BA" if kind == "plain" else "":
        with tempfile.TemporaryDirectory() as folder:
            differing[name] = engine.differing(write_folder(Path(folder), FILES[name]), WIDE, weights_of(FILES[name]))
    channel = channel_of(file.with_name("A"), 0, FILES["A"])
    damage = {name: damage_of(engine, channel, name) for name in channel.digests[0]}
    load("A")  # damaged versions were refused, and the engine goes on
    file.write_bytes(pickle.dumps(([member.pid for member in started], found, differing, drafted, fetched, damage)))
    threading.Timer(0.5, os.kill, (started[0].pid, signal.SIGKILL)).start()
    while True:
        answer(engine, requests())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
