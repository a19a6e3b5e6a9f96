"""Run what README and docs show: `python -m docs.check [--only TEXT] [--list]`.

Every command of a bash block runs as it stands, or in the form that docs/commands.yaml lists with a reason. Python blocks without a
title run as scripts. Titled blocks are written as files first. Everything happens in a scratch folder with small copies of the recipes.
Commands in running text, in comments of code and in notebooks are not read. A test checks that the commands at the head of
programs in recipes/ stand in a bash block too. The examples in the docstrings of the public API run there too. The exit code is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import doctest
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from docs.blocks import ROOT, blocks, commands
from tests import warm_workers

TIMEOUT_S = 300.0
SMALL: dict[str, dict[str, Any]] = {
    "run": {"steps": 2}, "prompts": {"batch_prompts": 4}, "evaluate": {"prompts": 8, "every_steps": 0},
    "rollout": {"samples_per_prompt": 2, "max_tokens": 32, "max_actors": 2}, "watch": {"wandb": "off", "progress": "plain"},
}  # fmt: skip
SMALL_OF = {
    "quickstart": {"warm_start": {"steps": 20, "batch_size": 16}},
    "sort": {"warm_start": {"steps": 20, "batch_size": 16}},
    "gsm8k": {"prompts": {"template": "none", "system": "", "batch_prompts": 4}},
}
LAUNCH = "python3 -m openrlhf.cli.train_ppo_ray --pretrain my-model --prompt_data train.jsonl --remote_rm_url reward_func.py\n"


def small_recipe(name: str) -> dict[str, Any]:
    """Return a recipe of the repository with little work in it. Files of sweeps and workflows stay as they are."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    if "recipe" in tree or "stages" in tree:
        return tree
    if "task" in tree:
        policy = {"path": "my-model"} if tree.get("policy") else {}
        small = {"run": {"steps": 2}, "data": {"rows": 64}, "evaluate": {"rows": 8}, "policy": policy, "watch": SMALL["watch"]}
        return tree | {section: {**tree.get(section, {}), **values} for section, values in small.items()}
    for changes in (SMALL, SMALL_OF.get(name, {})):
        for section, values in changes.items():
            tree[section] = {**tree.get(section, {}), **values}
    return tree


@cache
def small_recipe_text(name: str) -> str:
    return yaml.safe_dump(small_recipe(name), sort_keys=False)


def make_scratch(folder: Path) -> dict[str, str]:
    """Fill the scratch folder with recipes, data and the titled blocks. Returns the environment for commands in it."""
    (folder / "recipes").mkdir()
    for path in (ROOT / "recipes").glob("*.yaml"):
        (folder / "recipes" / path.name).write_text(small_recipe_text(path.stem))
    for program in (ROOT / "recipes").glob("*.py"):
        shutil.copy(program, folder / "recipes")  # it reads the quickstart beside it
    rows = [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a in range(8) for b in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train_openrlhf.sh").write_text(LAUNCH)
    for block in blocks():
        if block.title:
            (folder / block.title).parent.mkdir(exist_ok=True)
            (folder / block.title).write_text(block.text)
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in {"rlhfless": "-m rlhfless_ray ", "python": "", "python3": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}


def run(command: list[str], folder: Path, environment: dict[str, str], timeout_s: float = TIMEOUT_S) -> str:
    """Run a command in the scratch folder. Returns an empty text, or what went wrong with the end of its output."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=timeout_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout_s:g} s"
    return "" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stdout[-1500:]}"


def public_examples() -> Iterator[tuple[str, list[doctest.DocTest]]]:
    """Yield each public name with the examples of its docstring and of its methods' docstrings."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for package in ("rlhfless_ray", "placement"):
        for name in importlib.import_module(package).__all__:
            target = getattr(importlib.import_module(package), name)
            module = importlib.import_module(target.__module__)
            yield f"{package}.{name}", [test for test in finder.find(target, name, module=module) if test.examples]


def run_examples(tests: list[doctest.DocTest]) -> str:
    """Run docstring examples in this process. Returns an empty text, or the failures."""
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in tests:
        runner.run(test, out=report.write, clear_globs=False)
    return report.getvalue() if runner.summarize(verbose=False).failed else ""


def checks(folder: Path, environment: dict[str, str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (where, what is shown, command) for everything to run."""
    seen: set[str] = set()
    for found in commands():
        if found.run and found.run not in seen:
            seen.add(found.run)
            yield found.where, found.text if found.run == found.text else f"{found.text}  →  {found.run}", ["bash", "-ec", found.run]
    for number, block in enumerate(blocks()):
        if block.language == "python" and not block.title:
            script = folder / f"block_{number}.py"
            script.write_text(block.text)
            yield block.where, "Python block", [sys.executable, str(script)]
    code = "import sys; from docs.check import public_examples, run_examples; "
    code += "said = ''.join(run_examples(tests) for _, tests in public_examples()); sys.exit(said or None)"
    yield "docstrings", "examples of the public API", [sys.executable, "-c", code]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only what contains this text")
    parser.add_argument("--list", action="store_true", help="list the commands and how each is treated; run nothing")
    options = parser.parse_args()
    if options.list:
        for found in commands():
            print(f"{found.where:<28} {found.text}" + (f"  →  {found.run or 'not run'}: {found.reason}" if found.reason else ""))
        return
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rlhfless-docs-") as scratch:
        folder = Path(scratch)
        warm_workers.start(folder)  # half the time
        environment = make_scratch(folder)
        said = run(["bash", "-ec", "rlhfless train recipes/quickstart.yaml"], folder, environment)
        if said:
            sys.exit(f"the small quickstart, which the other commands need, failed: {said}")
        for name in ("my-model", "my-small-model"):
            shutil.copytree(folder / "runs" / "quickstart" / "model", folder / name)
        for where, shown, command in checks(folder, environment):
            if options.only not in f"{where} {shown}":
                continue
            start = time.monotonic()
            said = run(command, folder, environment)
            failed += bool(said)
            print(f"{'FAILED' if said else 'ok':<7}{time.monotonic() - start:6.1f} s  {where}  {shown}", flush=True)
            if said:
                print(said, flush=True)
    skipped = [found for found in commands() if not found.run]
    print(f"{failed} failed; {len(skipped)} commands are not run (docs/commands.yaml has the reasons)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
