"""`python -m rlhfless_ray.cli.train_ppo_ray`: train with the flags of OpenRLHF's launcher of this name, of any version."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhfless_ray.common.disk_space import DiskFull
from rlhfless_ray.common.errors import Stopped, UserError
from rlhfless_ray.compat.openrlhf.dialect import Unreadable
from rlhfless_ray.compat.openrlhf.flags import newest
from rlhfless_ray.compat.openrlhf.parsers import parser_of

if TYPE_CHECKING:
    from rlhfless_ray.compat.openrlhf.translate import Translation

HELP = """
Every flag of OpenRLHF 0.8.0 to {newest} is accepted; the usage above is that of {newest}. Recipe settings
are --elastic.FIELD (sections functions and objective), --elastic.SECTION.FIELD and --prefix.FIELD.
--elastic.dialect VERSION accepts the flags of that version only. `rlhfless explain -- COMMAND` shows how each flag is read."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train. Exit code 0 after the final save, 1 for a failed run, and 2 for a mistake, with usage and flag on stderr."""
    from rlhfless_ray.cli.guarded import guarded

    tokens = list(sys.argv[1:] if arguments is None else arguments)
    asks_for_help = any(re.fullmatch(r"-h|--h(e(lp?)?)?", token) for token in tokens)
    guarded(_print_help if asks_for_help else lambda: _train(tokens), lambda: _usage(tokens))


def _print_help() -> None:
    print(parser_of(newest()).format_usage() + HELP.format(newest=newest()))


def _train(tokens: Sequence[str]) -> None:
    from rlhfless_ray.compat.openrlhf.translate import translate

    train_translated(translate(tokens), tokens)


def train_translated(translation: Translation, tokens: Sequence[str]) -> None:
    """Train with the recipe that a command line was translated to. `tokens`: the command line."""
    from rlhfless_ray.cli.main import print_results
    from rlhfless_ray.compat.openrlhf.explain_report import announce
    from rlhfless_ray.compat.openrlhf.resources import fit

    if fewer := fit(translation):
        translation.notes.append(fewer)
    announce(translation)
    recipe = translation.recipe()
    for name, value in translation.secrets.items():
        os.environ.setdefault(name, value)
    from rlhfless_ray.compat.openrlhf.elastic_flags import resume_options
    from rlhfless_ray.runtime.runtime import Runtime

    previous, changed = resume_options(tokens)
    try:
        with translation.flags_in_errors(), (run := Runtime(recipe, resume="previous" if previous else False, resume_changed=changed)):
            for _ in run:
                pass
    except (Stopped, DiskFull) as stop:
        if recipe.checkpoint.path:
            stop.continue_with = translation.values.named("ckpt.load_enable")
        elif stop.resumable:
            stop.continue_with = f"rlhfless train {run.folder.path / 'recipe.yaml'} --resume"
        raise
    print_results(run.folder.path, recipe.save.path)


def _usage(tokens: Sequence[str]) -> str:
    """Return the text before the message of a mistake, with the usage of the line's version."""
    from rlhfless_ray.compat.openrlhf.dialect import read
    from rlhfless_ray.compat.openrlhf.elastic_flags import separate

    try:
        theirs, _, version = separate(tokens)
        version = read(theirs, version).version
    except Unreadable as error:
        version = error.version
    except UserError:
        version = newest()
    parser = parser_of(version)
    return f"{parser.format_usage()}{parser.prog}: "


if __name__ == "__main__":
    main()
