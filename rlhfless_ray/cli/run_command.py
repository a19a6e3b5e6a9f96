"""`rlhfless run -- COMMAND` and `rlhfless submit OPTIONS -- COMMAND`: start unmodified OpenRLHF commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from http import HTTPStatus
from itertools import pairwise

import typer

from rlhfless_ray.cli.passthrough import split_options
from rlhfless_ray.common.errors import UserError, one_line
from rlhfless_ray.common.ray_environment import AUTH_MODE

ADDRESS = re.compile(r"--address(=|$)")
CONNECT_S = 5.0


def run(ctx: typer.Context) -> None:
    """Run a command with this project's launcher instead of OpenRLHF's: rlhfless run [--dry-run] -- python3 -m openrlhf.cli.train_ppo_ray …

    A launcher in the command itself is replaced. In scripts that the command starts, an import hook on PYTHONPATH replaces it,
    even if the working folder is an OpenRLHF checkout. `ray job submit` is handled as by `rlhfless submit`. `--dry-run` prints
    what would run. A script is run for that as by `rlhfless explain`: its launchers start nothing.
    """
    chosen, argv = split_options(ctx.args, "--dry-run")
    from rlhfless_ray.compat.openrlhf.command import is_submission, launch_in, replaced, submission, with_shim

    if not argv:
        raise UserError("rlhfless run: give a command, for example rlhfless run -- python3 -m openrlhf.cli.train_ppo_ray …")
    submits, dry = is_submission(argv), "--dry-run" in chosen
    if dry and not submits and launch_in(argv) is None:
        _show_replaced(argv)
        return
    if submits and not dry:
        _check_address(argv[: argv.index("--")])
    _start(submission(argv) if submits else replaced(argv), with_shim(dict(os.environ)), dry=dry)


def submit(ctx: typer.Context) -> None:
    """Submit a command as a Ray job: rlhfless submit [--no-package] [--dry-run] [OPTIONS of ray job submit] -- COMMAND

    Flags of a launcher in the command itself are checked before the job is submitted. The job takes this project's packages along;
    `--no-package` leaves them out if the cluster has them. `--dry-run` only prints the command.
    """
    chosen, rest = split_options(ctx.args, "--dry-run", "--no-package")
    from rlhfless_ray.compat.openrlhf.command import submission

    if rest[:3] == ["ray", "job", "submit"]:
        rest = rest[3:]
    if "--" not in rest:
        rest = ["--", *rest] if rest and not rest[0].startswith("-") else rest
    if "--" not in rest or rest[-1] == "--":
        raise UserError("rlhfless submit: expected [OPTIONS of ray job submit] -- COMMAND")
    _check_flags(rest[rest.index("--") + 1 :])
    if "--dry-run" not in chosen:
        _check_address(rest[: rest.index("--")])
    _start(submission(["ray", "job", "submit", *rest], ship="--no-package" not in chosen), dict(os.environ), dry="--dry-run" in chosen)


def _check_address(options: list[str]) -> None:
    """Raise UserError if no server is at the address of the cluster, or one that asks for a token: `ray job submit` prints a traceback.

    An address behind a proxy, or one that is no URL of a dashboard, is left to Ray. So is another kind of server.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlsplit
    from urllib.request import getproxies, urlopen

    given = next((option.partition("=")[2] or following for option, following in pairwise([*options, ""]) if ADDRESS.match(option)), "")
    address = given or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname or getproxies():
        return
    try:
        urlopen(f"{address.rstrip('/')}/api/version", timeout=CONNECT_S).close()
    except HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED and os.environ.get(AUTH_MODE) != "token":
            raise UserError(
                f"--address {address}: this cluster asks for a token; set {AUTH_MODE}=token, and if ~/.ray/auth_token does not hold its "
                "token, put it into RAY_AUTH_TOKEN"
            ) from None
    except HTTPException:
        return
    except (OSError, ValueError) as error:
        where = "--address" if given else "--address (default)"
        why = one_line(getattr(error, "reason", error))
        raise UserError(
            f"{where} {address}: no cluster answers there ({why}); give its dashboard's address, such as http://HEAD:8265"
        ) from None


def _show_replaced(argv: list[str]) -> None:
    """Print what runs in place of each launcher that a script starts."""
    from rlhfless_ray.cli.explain_command import launches

    run = launches(argv)
    for launch in run.launches:
        where = f"{launch.script} line {launch.line}: " if launch.script else ""
        print(f"{where}{shlex.join([sys.executable, '-m', f'rlhfless_ray.cli.{launch.launcher}', *launch.flags])}")
    for line in (*run.lost, *run.notes):
        print(line, file=sys.stderr)


def _check_flags(argv: list[str]) -> None:
    """Raise UserError for a command line with which the job would end at once."""
    from rlhfless_ray.compat.openrlhf.command import launch_in
    from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch

    launch = launch_in(argv)
    translation = translate_launch(launch) if launch is not None else None  # None: the launcher is in a script
    if translation is not None and (wrong := translation.refusal() or translation.problem()):
        raise wrong


def _start(argv: list[str], environment: dict[str, str], *, dry: bool) -> None:
    if dry:
        print(shlex.join(argv))
        return
    program = shutil.which(argv[0])
    if program is None:
        raise UserError(f"`{argv[0]}`: no such program" + ("; install Ray to submit jobs" if argv[0] == "ray" else ""))
    os.execve(program, argv, environment)
