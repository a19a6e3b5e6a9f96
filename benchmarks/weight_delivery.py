"""How soon each member of an engine has its part of a weight version. `python -m benchmarks.weight_delivery [--mib N] [--quick]`.

512 MiB in bfloat16 lie in Ray's object store as eight ranks of ZeRO 3 publish them. Members of an engine check them and copy their slices
into memory of their own, as vLLM's loaders do, without vLLM. `sockets` is the way until commit a25cb58e: the engine's first process
checked and assembled whole tensors, and sent all of them to each further member.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import ray
from rich.table import Table

from benchmarks.common.delivery_member import Member, send
from benchmarks.common.results import Spread, Target, make_console, save, show_targets
from rlhfless_ray.local.member_process import MemberProcess
from rlhfless_ray.weights.channel import ObjectStoreChannel
from rlhfless_ray.weights.checksum import damaged, digests
from rlhfless_ray.weights.layout import padded_share
from rlhfless_ray.weights.tensor_file import BFLOAT16
from rlhfless_ray.weights.tensor_slice import HeldSlices, Slices, TensorSlice

WIDTHS = 1, 2, 4
RANKS = 8
HIDDEN, INNER, VOCABULARY = 1024, 4096, 32768
FASTER = 4.0  # wanted, per member


def shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """A policy of about this size, in bfloat16."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": (HIDDEN, INNER), "input_layernorm.weight": (HIDDEN,)}
    size = 2 * sum(int(np.prod(shape)) for shape in layer.values())
    for number in range(max(1, (mib * 2**20 - 2 * VOCABULARY * HIDDEN) // size)):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found


@ray.remote(num_cpus=0)
class Rank:
    """A rank that publishes its part of each tensor, other values for each version."""

    def __init__(self, rank: int, mib: int) -> None:
        self.rank, self.shapes = rank, shapes(mib)

    def weights(self, version: int) -> tuple[Slices, dict[str, int]]:
        rng, found = np.random.default_rng([version, self.rank]), {}
        for name, shape in self.shapes.items():
            start, end = padded_share(int(np.prod(shape)), RANKS, self.rank)
            found[TensorSlice(name, shape, start, end)] = rng.integers(0, 2**15, end - start, np.uint16).view(BFLOAT16)
        return found, digests(found)


class DeliveredEngine:
    concurrency_groups: ClassVar = {"control": 1}

    def __init__(self, width: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.first, self.channel = Member(0, width), ObjectStoreChannel()
        self.members = [MemberProcess("benchmarks.common.delivery_member") for _ in range(width - 1)]
        for number, member in enumerate(self.members, 1):
            member.call("build", (number, width))
            member.result()

    def fetch(self, version: int, digest_of: dict[str, int], refs: Sequence[Any], *parts: Slices) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        self.channel.offer(version, parts, digest_of, refs)
        for member in self.members:
            member.call("fetch", (self.channel, version))
        found = [self.first.fetch(self.channel, version), *(member.result() for member in self.members)]
        self.channel.close()
        return time.perf_counter() - start, found

    def sockets(self, version: int, digest_of: dict[str, int], refs: Sequence[Any], *parts: Slices) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        assert not damaged({name: digest for part in parts for name, digest in digests(part).items()}, digest_of)
        weights, senders = HeldSlices.of(*parts), []
        for member in self.members:
            member.call("take")
            senders.append(threading.Thread(target=send, args=(member.writer, weights)))
            senders[-1].start()
        found = [self.first.take(iter(weights.items())), *(member.result() for member in self.members)]
        return time.perf_counter() - start, found

    def published(self, version: int) -> Sequence[Any]:
        return self.channel.refs[version]


def measure(width: int, ranks: Sequence[Any], versions: int) -> dict[str, dict[str, Any]]:
    engine: Any = ray.remote(num_cpus=0, concurrency_groups=DeliveredEngine.concurrency_groups)(DeliveredEngine).remote(width)
    seconds: dict[str, list[float]] = {"fetch": [], "sockets": []}
    sizes: dict[str, list[int]] = {}
    for number in range(2 * (versions + 1)):
        way = list(seconds)[number % 2]
        published = [rank.weights.options(num_returns=2).remote(number) for rank in ranks]
        refs = [ref for ref, _ in published]
        digest_of = {name: digest for _, of_rank in published for name, digest in ray.get(of_rank).items()}
        took, members = ray.get(getattr(engine, way).remote(number, digest_of, refs, *refs), timeout=300)
        if number > 1:  # the first of each way touches the members' memory, and lets further members join Ray
            seconds[way].append(took)
            sizes[way] = [size for _, size in members]
        del published, refs
    ray.kill(engine)
    return {way: {"seconds": Spread.of(seconds[way]), "bytes_per_member": sizes[way]} for way in seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of a version")
    parser.add_argument("--versions", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    mib, versions = (64, 2) if options.quick else (options.mib, options.versions)
    console = make_console()
    ray.init(include_dashboard=False, object_store_memory=max(2**28, 4 * mib * 2**20), logging_level="ERROR")
    ranks = [Rank.remote(rank, mib) for rank in range(RANKS)]
    total = 2 * sum(int(np.prod(shape)) for shape in shapes(mib).values())
    rows = {str(width): measure(width, ranks, versions) for width in WIDTHS}
    targets = []
    table = Table("members", "way", "seconds", "GiB/s", "of a version each member reads", title=f"A version of {total / 2**20:.0f} MiB")
    for width, ways in rows.items():
        for way, row in ways.items():
            share = max(row["bytes_per_member"]) / total
            table.add_row(width, way, row["seconds"].show(), f"{total / 2**30 / row['seconds'].median:.2f}", f"{share:.3f}")
        if width != "1":
            speedup = ways["sockets"]["seconds"].median / ways["fetch"]["seconds"].median
            targets.append(Target(f"{width} members: times as quick as through sockets", speedup, least=FASTER, unit="×"))
            share = max(ways["fetch"]["bytes_per_member"]) / total * int(width)
            targets.append(Target(f"{width} members: bytes read by one over version / width", share, most=1.01, unit="×"))
    console.print(table)
    show_targets(console, targets)
    save("weight_delivery", {"bytes": total, "rows": rows}, targets, console=console, quick=options.quick)


if __name__ == "__main__":
    main()
