"""`python -m rlhfless_ray.cli.serve_rm`: serve a reward model over HTTP, with the flags of every OpenRLHF version.

It listens on loopback unless --host says otherwise; OpenRLHF's listens on every address.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhfless_ray.cli.openrlhf_tools import DTYPES, add_dtype_flags, run_tool
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.parsers import QuotingParser
from rlhfless_ray.recipe.local_path import given_path


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted. Exit code 2 for a mistake in the command line, or a folder without a reward model."""
    run_tool(_parser(), _serve, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = QuotingParser(prog="serve_rm", description='POST {"query": [text, …]} to /get_reward.')
    add = parser.add_argument
    add("--reward.model_name_or_path", "--reward_pretrain", dest="model", required=True, help="a local Hugging Face folder")
    add("--reward.normalize_enable", "--normalize_reward", dest="normalize", action="store_true", help="mean and std of config.json")
    add("--ds.value_head_prefix", "--value_head_prefix", dest="head", default="score", help="name of the scalar head")
    add("--data.max_len", "--max_len", dest="max_len", type=int, default=2048, help="tokens of a text that are read")
    add("--port", type=int, default=5000, help="0: any free port, which is printed")
    add("--host", default="127.0.0.1")
    add_dtype_flags(parser)
    add("--batch_size", type=int, default=None, help="texts per batch; default: batches are limited by tokens")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the folder")
    add("--ds.load_in_4bit", "--load_in_4bit", dest="four_bit", action="store_true", help="refused")
    add("--use_ms", action="store_true", help="refused: local folders only")
    for speed in ("--ds.attn_implementation", "--attn_implementation", "--ds.experts_implementation"):
        add(speed, default=None, help="accepted without effect: the values are the same")
    for flag in ("--flash_attn", "--ds.packing_samples", "--packing_samples", "--data.disable_fast_tokenizer", "--disable_fast_tokenizer"):
        add(flag, action="store_true", help="accepted without effect")
    return parser


def _serve(options: argparse.Namespace) -> None:
    for given, flag in ((options.four_bit, "load_in_4bit"), (options.use_ms, "use_ms")):
        if given:
            raise UserError(f"--{flag} is not supported; leave it out and give a local folder of full-precision weights")
    if options.max_len < 1 or (options.batch_size is not None and options.batch_size < 1):
        raise UserError("--max_len and --batch_size must be at least 1")
    if not 0 <= options.port < 65536:
        raise UserError(f"--port {options.port}: must be from 0 to 65535")
    import torch

    from rlhfless_ray.reward.reward_server import PATH, TextScorer, create_server

    scorer = TextScorer(
        given_path(options.model, "--reward.model_name_or_path"),
        options.head,
        DTYPES[options.dtype],
        "cuda" if torch.cuda.is_available() else "cpu",
        normalize=options.normalize,
        max_tokens=options.max_len,
        batch_size=options.batch_size,
        trust_remote_code=options.trust_remote_code,
    )
    server = create_server(scorer, options.host, options.port)
    print(f"serving {options.model} at http://{options.host}:{server.server_port}{PATH}", flush=True)
    if options.host == "127.0.0.1":
        print("only this machine can reach it; use --host 0.0.0.0 to listen on every address, as OpenRLHF does", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
