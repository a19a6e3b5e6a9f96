"""For CPUs only: multiply bfloat16 matrices in float32 where the processor has no instructions for it.

A processor without bfloat16 instructions, such as most with AVX2 only, multiplies bfloat16 matrices up to 50 times slower than float32
ones. Weights and activations keep their dtype here. Blocks of both sides of a product become float32, are multiplied, and the result is
rounded to bfloat16 once. That is the arithmetic of bfloat16 instructions, which add up in float32 too.

`use_float32_products` is the only entry. It replaces the kernels of PyTorch's products in this process. So it holds for every layer,
forward and backward, in models of transformers, peft, DeepSpeed and vLLM alike.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from rlhfless_ray.local.laptop.processor import has_bfloat16

BLOCK = 1 << 18  # elements of a block in float32, 1 MB: larger ones leave the cache, and were up to twice as slow
WHOLE = 1 << 22  # elements of a matrix that becomes float32 as a whole, 17 MB
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def use_float32_products(dtype: str, device: str) -> bool:
    """Replace this process' bfloat16 products if the processor has no instructions for them. Returns whether they are replaced.

    Call it before the first product of a model with weights of this `dtype` on this `device` ("cpu", or anything else for others).
    """
    if dtype != "bfloat16" or device != "cpu" or has_bfloat16():
        return False
    install()
    return True


def note() -> str:
    """Return a sentence for the user if this process' products are replaced, else an empty string."""
    if not _installed:
        return ""
    return (
        f"node {platform.node()}: its processor has no instructions for bfloat16; weights stay in bfloat16, and their products are "
        "computed in float32"
    )


_installed: list[torch.library.Library] = []  # the library that holds the kernels, once they are replaced


def install() -> None:
    """Replace the kernels for CPU tensors. Other dtypes still reach PyTorch's own."""
    if _installed:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that its own kernels are replaced
        for name, product in PRODUCTS.items():
            library.impl(name, _or_own(name, product), "CPU", with_keyset=True, allow_override=True)
        for name in (ATTENTION, f"{ATTENTION}_backward"):
            library.impl(name, _in_float32(name), "CPU", with_keyset=True, allow_override=True)
    _installed.append(library)


def uninstall() -> None:
    """Restore PyTorch's kernels, for tests."""
    while _installed:
        _installed.pop()._destroy()


def _or_own(name: str, product: Callable[..., Tensor]) -> Callable[..., object]:
    """Return a kernel: `product` for bfloat16, PyTorch's own for other dtypes."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: torch.DispatchKeySet, *arguments: object, **options: object) -> object:
        if any(isinstance(x, Tensor) and x.dtype != torch.bfloat16 for x in (*arguments, *options.values())):
            return own.call_boxed(keys, *arguments, **options)
        return product(*arguments, **options)

    return kernel


def _in_float32(name: str) -> Callable[..., object]:
    """Return a kernel that computes with float32 copies of bfloat16 tensors, and returns bfloat16 for them."""
    own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: torch.DispatchKeySet, query: Tensor, *arguments: object, **options: object) -> object:
        if query.dtype != torch.bfloat16:
            return own.call_boxed(keys, query, *arguments, **options)
        wide = [_wide(x) for x in (query, *arguments)]
        results = own.call_boxed(keys, *wide, **{key: _wide(x) for key, x in options.items()})
        # the first is the attention; the second of the forward pass is a logarithm, which is float32 in any case
        narrow = len(results) if name.endswith("_backward") else 1
        return tuple(x.bfloat16() if number < narrow else x for number, x in enumerate(results))

    return kernel


def _wide(x: object) -> object:
    return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x


def _addmm(base: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    """Return beta·base + alpha·a@b, of a (rows, inner) and b (inner, columns), computed in blocks.

    The smaller of both becomes float32 as a whole, and the other block by block. Long sums are divided, too.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    out = a.new_empty(rows, columns) if out is None else out.resize_(rows, columns)
    base = None if base is None or beta == 0 else base.expand(rows, columns)

    def put(part: Tensor, *where: slice) -> None:
        part = part if alpha == 1 else part.mul_(alpha)
        out[where] = part if base is None else part.add_(base[where], alpha=beta)

    size = max(64, BLOCK // max(1, inner))
    if inner > max(rows, columns) and (min(rows, columns) * inner > WHOLE or b.stride(1) == 1):  # columns of b would be thin and apart
        size, total = max(64, BLOCK // (rows + columns)), torch.zeros(rows, columns)
        for start in range(0, inner, size):
            total.addmm_(a[:, start : start + size].float(), b[start : start + size].float())
        put(total, slice(None))
    elif columns >= rows:
        wide = a.float()
        for start in range(0, columns, size):
            block = slice(start, start + size)
            put(wide @ b[:, block].float(), slice(None), block)
    else:
        wide = b.float()
        for start in range(0, rows, size):
            block = slice(start, start + size)
            put(a[block].float() @ wide, block)
    return out


def _baddbmm(base: Tensor | None, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    """Do the same for a batch of matrices (count, rows, inner) and (count, inner, columns), several small ones at a time."""
    (count, rows, inner), columns = a.shape, b.shape[2]
    out = a.new_empty(count, rows, columns) if out is None else out.resize_(count, rows, columns)
    base = None if base is None or beta == 0 else base.expand(count, rows, columns)
    size = BLOCK // max(1, rows * inner, inner * columns, rows * columns)
    if size <= 1:
        for number in range(count):
            _addmm(None if base is None else base[number], a[number], b[number], beta=beta, alpha=alpha, out=out[number])
        return out
    for start in range(0, count, size):
        block = slice(start, start + size)
        part = a[block].float() @ b[block].float()
        part = part if alpha == 1 else part.mul_(alpha)
        out[block] = part if base is None else part.add_(base[block], alpha=beta)
    return out


def _addmv(base: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    """Do the same for a matrix (rows, inner) and a vector (inner,)."""
    result = _addmm(base.expand(len(a))[:, None], a, b[:, None], beta=beta, alpha=alpha)[:, 0]
    return result if out is None else out.copy_(result)


def _without_base(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, b, **options: product(None, a, b, **options)


def _in_place(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda base, a, b, **options: product(base, a, b, out=base, **options)


def _variants(name: str, product: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return {name: product, f"{name}_": _in_place(product), f"{name}.out": product}


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("mm", "mm.out"), _without_base(_addmm)),
    **dict.fromkeys(("bmm", "bmm.out"), _without_base(_baddbmm)),
    **_variants("addmm", _addmm),
    **_variants("baddbmm", _baddbmm),
    **_variants("addmv", _addmv),
}
