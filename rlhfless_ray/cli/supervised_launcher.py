"""Common code of OpenRLHF's launchers other than PPO's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from rlhfless_ray.compat.openrlhf.starters import OWN_VARIABLES, process_place


def main(launcher: str) -> None:
    """Train. Exit code 0 after the final save, 1 for a failed run, and 2 for a mistake. The first process runs all ranks on Ray."""
    start(launcher, lambda tokens: _train(launcher, tokens))


def start(launcher: str, action: Callable[[list[str]], None], arguments: Sequence[str] | None = None) -> None:
    """Run `action` with the command line in the first process that torchrun, deepspeed or mpirun starts. The others end at once.

    With `--help` print the flags of `launcher` instead.
    """
    from rlhfless_ray.cli.guarded import guarded

    if process_place(os.environ)[0] > 0:
        return
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(tokens):
        from rlhfless_ray.compat.openrlhf.explain_report import list_flags

        action = lambda _: print(list_flags(launcher))  # noqa: E731
    guarded(lambda: action(tokens))


def _train(launcher: str, tokens: Sequence[str]) -> None:
    from rlhfless_ray.cli.main import print_results
    from rlhfless_ray.common.disk_space import DiskFull
    from rlhfless_ray.common.errors import Stopped
    from rlhfless_ray.compat.openrlhf.elastic_flags import resume_options
    from rlhfless_ray.compat.openrlhf.explain_report import announce
    from rlhfless_ray.compat.openrlhf.supervised import translate_supervised
    from rlhfless_ray.local.machine_memory import visible_gpus

    translation = translate_supervised(launcher, tokens, ranks=max(1, visible_gpus()))
    announce(translation)
    recipe = translation.recipe()
    for name in [name for name in os.environ if OWN_VARIABLES.fullmatch(name)]:
        del os.environ[name]  # the ranks get their own from Ray Train; with torchrun's they would wait for its store
    from rlhfless_ray.supervise.find_checkpoints import has_checkpoint, newest_folder
    from rlhfless_ray.supervise.run_supervised import run_supervised

    previous, changed = resume_options(tokens)
    resumes = translation.resumes and has_checkpoint(recipe)
    if resumes and not recipe.checkpoint.has_regular:  # OpenRLHF keeps no checkpoint at the end of such a run, which would be found here
        resumes = not newest_folder(recipe).is_done
    try:
        with translation.flags_in_errors():
            run = run_supervised(recipe, resume="previous" if previous else resumes, resume_changed=changed)
    except (Stopped, DiskFull) as stop:
        if recipe.checkpoint.path:
            stop.continue_with = translation.load_flag
        elif stop.resumable:
            stop.continue_with = f"rlhfless train {newest_folder(recipe).path / 'recipe.yaml'} --resume"
        raise
    print_results(run.path, recipe.save.path)
