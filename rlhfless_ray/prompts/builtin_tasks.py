"""The built-in tasks by name."""

from __future__ import annotations

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.builtin_task import Task
from rlhfless_ray.prompts.chain_task import Chain
from rlhfless_ray.prompts.sort_task import Sort

TASKS: dict[str, type[Task]] = {"chain": Chain, "sort": Sort}


def task(name: str) -> Task:
    """Return the built-in task called `name`. Raises UserError, naming the known ones."""
    if name not in TASKS:
        raise UserError(f"prompts.task: no built-in task is called `{name}`; the known ones are {', '.join(sorted(TASKS))}")
    return TASKS[name]()
