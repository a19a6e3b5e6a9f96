"""With this folder on PYTHONPATH, `python -m openrlhf.cli.train_ppo_ray` runs rlhfless_ray, and so does Molt's launcher.

Python imports this file at its start. It installs a finder that runs before any folder is searched and finds the launchers only.
The rest of an installed OpenRLHF, or of a checkout in the working folder, stays in use. A package named openrlhf in this folder
would not work, because `-m` searches the working folder first. Python processes that start no launcher do not change.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
OURS = (
    "train_ppo_ray",
    "train_sft",
    "train_rm",
    "train_dpo",
    "train_kto",
    "train_kd",
    "train_prm",
    "batch_inference",
    "interactive_chat",
    "serve_rm",
    "lora_combiner",
)
PACKAGES = {"openrlhf": OURS, "molt": ("train_rl_ray",)}


class Launchers:
    """Find openrlhf.cli.<launcher> in rlhfless_ray.cli, and its parent packages if they do not exist."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in PACKAGES:
            return None
        real = importlib.machinery.PathFinder.find_spec(name, path)
        if name in (package, f"{package}.cli"):
            if real is not None:
                return real
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        parent, _, launcher = name.rpartition(".")
        if parent != f"{package}.cli":
            return None
        ours = os.path.join(ROOT, "rlhfless_ray", "cli", launcher + ".py")
        if launcher in PACKAGES[package] and os.path.isfile(ours):
            if ROOT not in sys.path:
                sys.path.append(ROOT)
            return importlib.util.spec_from_file_location(name, ours)
        if real is None:
            return importlib.util.spec_from_file_location(name, os.path.join(HERE, "not_covered.py"))
        return None


def _run_next_sitecustomize():
    """Run the sitecustomize module that this file hides."""
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "RLHFLESS_EXPLAIN" in os.environ and sys.version_info >= (3, 10):
    importlib.import_module("rlhfless_explain").stand_in_for_python()  # a launcher is recorded and not started
STARTED = [argument.removeprefix("-m") for argument in getattr(sys, "orig_argv", ())]  # Python 3.9 and older has no orig_argv
if any(argument.startswith(("openrlhf.cli.", "molt.cli.")) for argument in STARTED):
    sys.meta_path.insert(0, Launchers)
if any(argument.startswith("rlhfless_ray.cli.") for argument in STARTED) and ROOT not in sys.path:
    sys.path.append(ROOT)
_run_next_sitecustomize()
