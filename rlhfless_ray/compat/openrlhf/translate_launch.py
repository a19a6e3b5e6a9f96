"""Translate a launch command of any launcher that trains or generates."""

from __future__ import annotations

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.command import MOLT, LaunchCommand
from rlhfless_ray.compat.openrlhf.dialect import Unreadable
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER
from rlhfless_ray.compat.openrlhf.inference import translate_inference
from rlhfless_ray.compat.openrlhf.inference_table import LAUNCHERS
from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation
from rlhfless_ray.compat.openrlhf.molt import translate_molt
from rlhfless_ray.compat.openrlhf.supervised import translate_supervised
from rlhfless_ray.compat.openrlhf.supervised_table import TASKS
from rlhfless_ray.compat.openrlhf.translate import Translation, translate


def translate_launch(launch: LaunchCommand) -> Translation | LauncherTranslation | None:
    """Return the translation of a command, or None for a launcher that is started as it is. Raises UserError if no version accepts it."""
    if launch.launcher in TASKS:
        return translate_supervised(launch.launcher, launch.flags)
    if launch.launcher in LAUNCHERS:
        return translate_inference(launch.launcher, launch.flags)
    if launch.launcher not in (LAUNCHER, MOLT):
        return None
    try:
        return translate_molt(launch.flags) if launch.launcher == MOLT else translate(launch.flags)
    except Unreadable as error:
        raise UserError(f"{error} (read as OpenRLHF {error.version})") from None
