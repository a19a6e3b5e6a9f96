"""Products of bfloat16 in float32: they equal the rounded float32 products, in every layer and its gradients, and only where it is slow."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlhfless_ray.local.laptop import cpu_bfloat16
from rlhfless_ray.local.laptop.cpu_bfloat16 import use_float32_products


@pytest.fixture
def replaced() -> Iterator[None]:
    cpu_bfloat16.install()
    yield
    cpu_bfloat16.uninstall()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


# several blocks of columns, of rows and of the sum, then batches, vectors, bases and empty ones
PRODUCTS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "columns": lambda to: to(drawn(5, 700)) @ to(drawn(700, 1500)),
    "rows": lambda to: to(drawn(1700, 600)) @ to(drawn(600, 20)),
    "inner": lambda to: to(drawn(40, 6000)) @ to(drawn(6000, 300)),
    "long sums": lambda to: to(drawn(260, 17_000)) @ to(drawn(17_000, 250)),
    "transposed": lambda to: to(drawn(1000, 30)).T @ to(drawn(1000, 600)),
    "layer": lambda to: functional.linear(to(drawn(2, 9, 70)), to(drawn(50, 70)), to(drawn(50))),
    "no bias": lambda to: functional.linear(to(drawn(2, 9, 70)), to(drawn(50, 70))),
    "vector": lambda to: functional.linear(to(drawn(70)), to(drawn(50, 70)), to(drawn(50))),
    "small batch": lambda to: to(drawn(40, 30, 64)) @ to(drawn(40, 64, 33)),
    "large batch": lambda to: to(drawn(2, 600, 500)) @ to(drawn(2, 500, 600)),
    "scaled": lambda to: torch.addmm(to(drawn(40)), to(drawn(30, 20)), to(drawn(20, 40)), beta=0.5, alpha=2.0),
    "scaled batch": lambda to: torch.baddbmm(to(drawn(3, 1, 40)), to(drawn(3, 30, 20)), to(drawn(3, 20, 40)), beta=0.5, alpha=-1.0),
    "unused base": lambda to: torch.addmm(to(drawn(40)) * torch.nan, to(drawn(30, 20)), to(drawn(20, 40)), beta=0.0),
    "no rows": lambda to: to(drawn(0, 20)) @ to(drawn(20, 40)),
    "nothing to add": lambda to: to(drawn(30, 0)) @ to(drawn(0, 40)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_rounded_products_of_float32(replaced: None, name: str) -> None:
    found, wanted = PRODUCTS[name](lambda x: x), PRODUCTS[name](Tensor.float)
    assert found.dtype == torch.bfloat16
    # another order of additions changes the last bits of float32, and with them the rounding of a few values by one step
    assert (found == wanted.bfloat16()).float().mean() > 0.999 or not found.numel()
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=2e-5)


def test_products_into_given_memory(replaced: None) -> None:
    """As the engines add an adapter's products into a slice of the output."""
    whole, a, b = drawn(30, 90), drawn(30, 20), drawn(20, 40)
    wanted = whole.clone()
    wanted[:, 10:50] = (whole[:, 10:50].float() + a.float() @ b.float()).bfloat16()
    whole[:, 10:50].addmm_(a, b)
    assert torch.equal(whole, wanted)
    for shape in ((30, 40), (0,)):
        assert torch.equal(torch.mm(a, b, out=torch.empty(shape, dtype=torch.bfloat16)), (a.float() @ b.float()).bfloat16())


class Block(torch.nn.Module):
    """Attention and a gated MLP, and experts as transformers multiplies them on CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.out = (torch.nn.Linear(64, 64, bias=bias) for bias in (True, True, False))
        self.gate, self.up, self.down = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)
        self.experts = torch.nn.Parameter(torch.randn(3, 64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.queries, self.keys, self.keys)]
        x = x + self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(functional.silu(self.gate(x)) * self.up(x))
        ends = torch.tensor([8, 16, 24], dtype=torch.int32)
        return x + torch._grouped_mm(x.flatten(0, 1), self.experts, offs=ends).view_as(x)


def gradients(model: Any, checkpointed: bool) -> list[Tensor]:
    x = drawn(2, 12, 64).to(next(model.parameters()).dtype).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    (y.float() ** 2).mean().backward()
    found = [y, x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [tensor.detach() for tensor in found]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_and_their_gradients(replaced: None, checkpointed: bool) -> None:
    torch.manual_seed(0)
    model = Block().bfloat16()
    found = gradients(model, checkpointed)
    wanted = gradients(model.float(), checkpointed)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).norm() < 0.02 * other.norm()


def test_every_product_of_a_block_is_replaced(replaced: None) -> None:
    """A kernel of PyTorch that multiplies by itself would be slow: all of it happens in float32, forward and backward."""
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    model = Block().bfloat16()
    with Record():
        gradients(model, checkpointed=False)
    products = {name.removeprefix("aten.").split(".")[0] for name in seen if "mm" in name or "attention" in name}
    known = {name.split(".")[0] for name in cpu_bfloat16.PRODUCTS} | {cpu_bfloat16.ATTENTION, f"{cpu_bfloat16.ATTENTION}_backward"}
    assert products - {"_grouped_mm"} <= known  # that one calls `mm` for each expert
    assert {"mm", "addmm", cpu_bfloat16.ATTENTION} <= products


def test_other_dtypes_keep_their_kernels() -> None:
    made = [torch.randn(30, 40, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    before = [x @ x.T for x in made]
    cpu_bfloat16.install()
    try:
        assert all(torch.equal(x @ x.T, one) for x, one in zip(made, before, strict=True))
        with pytest.raises(RuntimeError, match="dtype"):
            drawn(3, 4) @ made[0].T[:4]
    finally:
        cpu_bfloat16.uninstall()


def test_products_are_replaced_only_where_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def processor(has: bool) -> None:
        monkeypatch.setattr(cpu_bfloat16, "has_bfloat16", lambda: asked.append(1) or has)

    try:
        processor(False)
        assert not use_float32_products("float32", "cpu") and not use_float32_products("bfloat16", "cuda")
        assert asked == [] and cpu_bfloat16.note() == ""
        processor(True)
        assert not use_float32_products("bfloat16", "cpu") and cpu_bfloat16.note() == ""
        processor(False)
        assert use_float32_products("bfloat16", "cpu") and use_float32_products("bfloat16", "cpu")
        assert "no instructions for bfloat16" in cpu_bfloat16.note()
    finally:
        cpu_bfloat16.uninstall()


@cache
def judged_and_timed(limit: str) -> tuple[bool, float]:
    """Return the judgement, and the time of bfloat16 products over float32 ones, in a process of its own, where kernels are chosen."""
    code = """if True:
        import time, torch
        from rlhfless_ray.local.laptop.processor import has_bfloat16
        def best_s(dtype):
            a, b, times = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype), []
            for _ in range(20):
                start = time.perf_counter()
                a @ b
                times.append(time.perf_counter() - start)
            return min(times)
        print(int(has_bfloat16()), best_s(torch.bfloat16) / best_s(torch.float32))
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    has, ratio = found.stdout.split()
    return has == "1", float(ratio)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the limits are those of x86")
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE", "ALL"])
def test_the_processor_is_judged_as_its_products_are_timed(limit: str) -> None:
    """Instructions for bfloat16 show in what they gain over AVX-512 without them. Beside float32, processors differ: 0.5 to 2.4."""
    has, ratio = judged_and_timed(limit)
    assert has == (ratio < 0.7 * judged_and_timed("AVX512_CORE")[1])
