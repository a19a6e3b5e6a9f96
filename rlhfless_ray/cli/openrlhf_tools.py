"""Common code of OpenRLHF's tools that do not train: their dtype flags, and how they end."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_dtype_flags(parser: argparse.ArgumentParser, help: str | None = None) -> None:
    """Add the names that the dtype has in all versions. `options.dtype` is a key of DTYPES."""
    parser.add_argument("--ds.param_dtype", "--param_dtype", dest="dtype", choices=list(DTYPES), default="bf16", help=help)
    parser.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", help="the default")


def run_tool(parser: argparse.ArgumentParser, action: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None) -> None:
    """Parse the command line, run the action and end the process. A mistake is shown after the usage, as argparse does."""
    from rlhfless_ray.cli.guarded import guarded

    guarded(lambda: action(parser.parse_args(arguments)), lambda: f"{parser.format_usage()}{parser.prog}: ")
