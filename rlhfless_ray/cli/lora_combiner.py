"""`python -m rlhfless_ray.cli.lora_combiner`: merge a LoRA adapter into its base model, with the flags of every OpenRLHF version."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rlhfless_ray.cli.openrlhf_tools import DTYPES, add_dtype_flags, run_tool
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.parsers import QuotingParser
from rlhfless_ray.recipe.local_path import given_path


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge. Exit code 2 for a mistake in the command line, an invalid folder, or an adapter that does not fit the model."""
    parser = QuotingParser(prog="lora_combiner", description="Merge a LoRA adapter into its base model.")
    add = parser.add_argument
    add("--model_path", required=True, help="the base model's folder")
    add("--lora_path", required=True, help="the adapter's folder")
    add("--output_path", required=True, help="folder of the merged model")
    add("--is_rm", action="store_true", help="the base model is a reward model with the scalar head `score`")
    add_dtype_flags(parser, "dtype of the merged weights")
    run_tool(parser, _combine, arguments)


def _combine(options: argparse.Namespace) -> None:
    base, adapter, output = (given_path(getattr(options, name), f"--{name}") for name in ("model_path", "lora_path", "output_path"))
    combine(base, adapter, output, options.is_rm, DTYPES[options.dtype])


def combine(base: Path, adapter: Path, output: Path, is_reward_model: bool, dtype: str) -> None:
    from rlhfless_ray.weights.adapter import Adapter, merge_folder
    from rlhfless_ray.weights.load_policy import read_model
    from rlhfless_ray.weights.model_folder import config_of, without_weights, write_folder

    if output.resolve() in (base.resolve(), adapter.resolve()):
        raise UserError(f"--output_path {output}: this is the folder of the model or the adapter; give another one")
    files = read_model(base, "--model_path")
    print(f"merging {adapter} into {base}")
    parsed = Adapter.read(adapter)
    merge_folder(base, parsed, output, dtype, "score" if is_reward_model else "")
    rest = without_weights(files)
    config = config_of(rest)
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    rest["config.json"] = json.dumps(config, indent=2).encode()
    rest |= {name: content for name, content in files.items() if name.endswith(".index.json")}
    write_folder(output, rest)
    print(f"merged {len(parsed.used)} weights; the model is in {output}")


if __name__ == "__main__":
    main()
