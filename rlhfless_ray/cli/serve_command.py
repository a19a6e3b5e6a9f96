"""`rlhfless serve`: training as a service over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhfless_ray.common.errors import UserError


def serve(
    settings: Annotated[list[str] | None, typer.Argument(help="Recipe keys to set, as section.key=value.", show_default=False)] = None,
    tinker: Annotated[bool, typer.Option("--tinker", help="Serve the remote training interface of the `tinker` client.")] = False,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A base model, as NAME=FOLDER. Several may be served.", show_default=False)
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="A tenant and its key, as NAME=tml-SECRET. Each has models of its own.", show_default=False),
    ] = None,
    root: Annotated[Path, typer.Option("--root", help="Folder of checkpoints and ledgers.")] = Path("service"),
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8700,
    idle_s: Annotated[float, typer.Option("--idle-s", min=0, help="A tenant that sends nothing for so long gives its slot back.")] = 5.0,
) -> None:
    """Serve models that clients train over HTTP. A model leases a slot while it works, and none while it is idle.

    rlhfless serve --tinker --model Qwen/Qwen3-0.6B=models/qwen3 --key alice=tml-alice
    """
    if not tinker:
        raise UserError("serve: name what to serve: --tinker")
    folders, keys = _pairs(model, "--model", "NAME=FOLDER"), _pairs(key, "--key", "NAME=tml-SECRET")
    from rlhfless_ray.recipe.local_path import given_path
    from rlhfless_ray.service.serve import base_model
    from rlhfless_ray.service.serve import serve as run

    bases = [base_model(name, given_path(folder, "--model"), settings or []) for name, folder in folders.items()]
    run(bases, {secret: name for name, secret in keys.items()}, root, host, port, idle_s)


def _pairs(given: list[str] | None, option: str, form: str) -> dict[str, str]:
    """Read options of the form NAME=VALUE, of which there must be at least one."""
    pairs = dict(one.split("=", 1) for one in given or [] if "=" in one)
    if not pairs or len(pairs) < len(given or []):
        raise UserError(f"{option}: expected {form}, at least once and each name once")
    return pairs
