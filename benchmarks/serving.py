"""What engines hold: merged weights, an adapter on its base, or 8-bit weights. `python -m benchmarks.serving [--only SIZE …]`.

Engines of one policy decode in turn in one process on one core, at batches of 1, 8 and 32. An update is what a version costs beyond
the optimizer step: merging the adapter where it is merged, and loading it into an engine. A digest and a transfer, which grow with the
bytes, come on top. Policies and adapters (rank 16, every linear layer) are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.common.results import make_console, save
from benchmarks.peers.shared_work import HALF_BILLION, LARGE, SMALL

CASES = (("0.7M", "float32"), ("11M", "float32"), ("494M", "float32"), ("494M", "bfloat16"))
WORK = {work.name: work for work in (SMALL, LARGE, HALF_BILLION)}
KINDS = ("merged", "adapter", "int8")
BATCHES = (1, 8, 32)
RANK, PROMPT, TOKENS, ROUNDS, UPDATES = 16, 24, 32, 3, 3


def measure(folder: Path, dtype: str) -> dict[str, Any]:
    """Run in a process of its own: build the engines, update and decode in turn."""
    import torch

    from rlhfless_ray.engine.engine_settings import EngineSettings, ServedAdapter
    from rlhfless_ray.engine.prepare_vllm import prepare
    from rlhfless_ray.engine.vllm_engine import VllmEngine
    from rlhfless_ray.weights.adapter import ADAPTABLE, PREFIX, Adapter
    from rlhfless_ray.weights.model_folder import read_folder, stored_weights
    from rlhfless_ray.weights.tensor_file import as_numpy

    prepare()
    torch.set_num_threads(1)
    served = ServedAdapter(RANK, RANK, ADAPTABLE)
    changes: dict[str, dict[str, Any]] = {"merged": {}, "adapter": {"adapter": served}, "int8": {"quantization": "int8"}}
    files = read_folder(folder)
    base = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored_weights(files)}
    tensors: dict[str, Any] = {}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTABLE) and name.endswith(".weight"):
            rows, columns = weight.shape
            tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(RANK, columns).to(weight.dtype) * columns**-0.5
            tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, RANK).to(weight.dtype) * 0.01
    own = {name: as_numpy(tensor) for name, tensor in tensors.items()}
    below = {name: as_numpy(tensor) for name, tensor in stored_weights(files)}

    def merge() -> dict[str, Any]:
        adapter = Adapter.of({"r": RANK, "lora_alpha": RANK}, tensors)
        return {name: as_numpy(adapter.merged(name, weight)) for name, weight in base.items()}

    engines, versions, updates = {}, iter(range(1, 1000)), {}

    def update(kind: str) -> float:
        start = time.perf_counter()
        engines[kind].load(next(versions), *((own, below) if kind == "adapter" else (merge(),)))
        return time.perf_counter() - start

    for kind in KINDS:
        settings = EngineSettings(
            max_model_len=256, max_running=max(BATCHES), block_size=32, kv_cache_mb=64, gpu_memory_share=0.5, dtype=dtype, **changes[kind]
        )
        engines[kind] = VllmEngine(folder, settings)
        torch.set_num_threads(1)
        update(kind)  # the first time allocates, and an adapter's base is loaded
        updates[kind] = [update(kind) for _ in range(UPDATES)]
    found: dict[str, dict[str, list[float]]] = {kind: {str(batch): [] for batch in BATCHES} for kind in KINDS}
    for _ in range(ROUNDS):
        for batch in BATCHES:
            for kind in KINDS:
                found[kind][str(batch)].append(1e3 * decode_s(engines[kind], batch))
    sizes = {"merged": sum(x.nbytes for x in base.values()), "adapter": sum(x.nbytes for x in own.values())}
    return {
        "decode_ms": {kind: {batch: median(times) for batch, times in rows.items()} for kind, rows in found.items()},
        "update_s": {kind: median(times) for kind, times in updates.items()},
        "bytes": {**sizes, "int8": sizes["merged"]},
    }


def decode_s(engine: Any, batch: int) -> float:
    """Return the median seconds of a decode step of so many sequences."""
    import numpy as np

    from rlhfless_ray.types import Request

    rng = np.random.default_rng(0)
    asked = [Request(key, tuple(rng.integers(2, 60, PROMPT).tolist()), key, TOKENS, 1.0) for key in range(batch)]
    engine.take_stats()
    for _ in engine.generate(asked):
        pass
    return median(step.seconds for step in engine.take_stats().steps if step.new_tokens == batch == step.running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORK, default=list(WORK), help="some of the sizes")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # folder and dtype: measure and print
    options = parser.parse_args()
    if options.one:
        folder, dtype = options.one
        print(json.dumps(measure(Path(folder), dtype)), flush=True)
        return
    console, rows = make_console(), []
    with tempfile.TemporaryDirectory(prefix="serving-") as scratch:
        for name, dtype in CASES:
            if name not in options.only:
                continue
            folder = Path(scratch) / name
            policy = folder / "policy" if folder.exists() else WORK[name].write(folder).policy
            console.print(f"{name}, {dtype}", highlight=False)
            command = [sys.executable, "-m", "benchmarks.serving", "--one", str(policy), dtype]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
            rows.append({"size": name, "dtype": dtype, **json.loads(done.stdout.splitlines()[-1])})
    table = Table("policy", "engine", *(f"decode, {batch}" for batch in BATCHES), "update s", "MB", title="Milliseconds of a decode step")
    for row in rows:
        for kind in KINDS:
            of_merged = [f"{t:.1f} ({t / row['decode_ms']['merged'][b]:.2f}×)" for b, t in row["decode_ms"][kind].items()]
            label = f"{row['size']}, {row['dtype']}" if kind == KINDS[0] else ""
            table.add_row(label, kind, *of_merged, f"{row['update_s'][kind]:.3f}", f"{row['bytes'][kind] / 1e6:.1f}")
    console.print(table)
    save("serving", {"rank": RANK, "rows": rows}, [], console=console, quick=len(options.only) < len(WORK))


if __name__ == "__main__":
    main()
