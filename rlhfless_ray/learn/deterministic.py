"""Kernels of PyTorch that give the same result for the same input in every run."""

from __future__ import annotations

import os

import torch


def use_deterministic_kernels() -> None:
    """Let this process only use kernels that add up in the same order in every run. Call it before anything is computed on a GPU."""
    # cuBLAS reads it when it is first used, and PyTorch refuses products without it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers hands it to flash-attention's backward pass
    torch.use_deterministic_algorithms(True)
