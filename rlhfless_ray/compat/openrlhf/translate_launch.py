"""Translate a launch command of any launcher that trains or generates."""

from __future__ import annotations

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.command import MOLT, OURS, LaunchCommand
from rlhfless_ray.compat.openrlhf.dialect import Unreadable
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER, launchers
from rlhfless_ray.compat.openrlhf.inference import translate_inference
from rlhfless_ray.compat.openrlhf.inference_table import LAUNCHERS
from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
from rlhfless_ray.compat.openrlhf.molt import translate_molt
from rlhfless_ray.compat.openrlhf.supervised import translate_supervised
from rlhfless_ray.compat.openrlhf.supervised_table import TASKS
from rlhfless_ray.compat.openrlhf.translate import Translation, translate
from rlhfless_ray.local.machine_memory import visible_gpus


def translate_launch(launch: LaunchCommand) -> Translation | LauncherTranslation | None:
    """Return the translation of a command, or None for a launcher that is started as it is.

    Raises UserError for a launcher that only OpenRLHF itself runs, and if no version accepts the command line.
    """
    _check_covered(launch.launcher)
    if launch.launcher in TASKS:
        return translate_supervised(launch.launcher, launch.flags, ranks=max(1, visible_gpus()))
    if launch.launcher in LAUNCHERS:
        return translate_inference(launch.launcher, launch.flags)
    if launch.launcher not in (LAUNCHER, MOLT):
        return None
    try:
        return translate_molt(launch.flags) if launch.launcher == MOLT else translate(launch.flags)
    except Unreadable as error:
        raise UserError(f"{error} (read as OpenRLHF {error.version})") from None


def _check_covered(launcher: str) -> None:
    if launcher in OURS:
        return
    if launcher == "train_ppo":
        raise UserError(f"openrlhf.cli.train_ppo: OpenRLHF removed it after 0.6.1; start openrlhf.cli.{LAUNCHER} instead")
    if launcher in launchers():
        raise UserError(f"openrlhf.cli.{launcher} is not covered yet; run it with OpenRLHF itself")
    raise UserError(f"openrlhf.cli.{launcher}: OpenRLHF has no such launcher")
