"""With this folder on PYTHONPATH, `python -m openrlhf.cli.train_ppo_ray` runs rlhfless_ray.

Python imports this file at its start. A finder, asked before any folder is searched, answers for the launchers only. So an
installed OpenRLHF, or a checkout of it in the working folder, keeps everything else: `-m` looks in that folder first, and a
package named openrlhf in here would lose there. Python processes that start no launcher are left as they are.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(HERE))))
OURS = ("train_ppo_ray", "serve_rm", "lora_combiner")


class Launchers:
    """Finds openrlhf.cli.<launcher> as the module of that name in rlhfless_ray.cli, and its parents where there are none."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "openrlhf":
            return None
        real = importlib.machinery.PathFinder.find_spec(name, path)
        if name in ("openrlhf", "openrlhf.cli"):
            if real is not None:
                return real
            package = importlib.machinery.ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = []
            return package
        parent, _, launcher = name.rpartition(".")
        if parent != "openrlhf.cli":
            return None
        ours = os.path.join(ROOT, "rlhfless_ray", "cli", launcher + ".py")
        if launcher in OURS and os.path.isfile(ours):
            if ROOT not in sys.path:
                sys.path.append(ROOT)
            return importlib.util.spec_from_file_location(name, ours)
        if real is None:
            return importlib.util.spec_from_file_location(name, os.path.join(HERE, "not_covered.py"))
        return None


def _next_sitecustomize():
    """Whatever would have been imported in this file's place."""
    others = [folder for folder in sys.path if os.path.abspath(folder or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


STARTED = [argument.removeprefix("-m") for argument in getattr(sys, "orig_argv", ())]  # an older Python is left alone
if any(argument.startswith("openrlhf.cli.") for argument in STARTED):
    sys.meta_path.insert(0, Launchers)
if any(argument.startswith("rlhfless_ray.cli.") for argument in STARTED) and ROOT not in sys.path:
    sys.path.append(ROOT)
_next_sitecustomize()
