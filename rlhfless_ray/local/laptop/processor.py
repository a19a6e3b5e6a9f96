"""What products this machine's processor has instructions for, as far as oneDNN, which computes them, may use these."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

LIMIT = "ONEDNN_MAX_CPU_ISA"  # environment variable: the newest instructions that the kernels may use
# Names in /proc/cpuinfo (on ARM `bf16`), and the parts of a limit's name that still allow them
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}, ("ALL", "DEFAULT", "BF16", "AMX")
INT8 = {"avx512_vnni", "avx_vnni", "amx_int8"}, ("ALL", "DEFAULT", "VNNI", "BF16", "FP16", "AMX", "AVX10")


def _has(instructions: set[str], limits: tuple[str, ...]) -> bool:
    limit = os.environ.get(LIMIT, "ALL")
    return any(name in limit for name in limits) and not instructions.isdisjoint(Path("/proc/cpuinfo").read_text().split())


@cache
def has_bfloat16() -> bool:
    """Return whether PyTorch's kernels multiply bfloat16 by instructions of this processor.

    Beside float32, their products took 0.5 times as long with them, 2.6 times with AVX-512 without them, and 60 times with AVX2.
    """
    return _has(*BFLOAT16)


@cache
def has_int8() -> bool:
    """Return whether products of 8 bits add up in 32 bits. Only x86 processors have other kernels."""
    return platform.machine() not in ("x86_64", "AMD64") or _has(*INT8)


@cache
def has_int4() -> bool:
    """Return whether vLLM (0.32) on this processor multiplies by packed weights of 4 bits: its build for AVX2 does not."""
    return platform.machine() not in ("x86_64", "AMD64") or "avx512f" in Path("/proc/cpuinfo").read_text().split()
