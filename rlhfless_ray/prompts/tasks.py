"""The built-in tasks by name."""

from __future__ import annotations

from rlhfless_ray.errors import UserError
from rlhfless_ray.prompts.chain import Chain
from rlhfless_ray.prompts.sort import Sort
from rlhfless_ray.prompts.task import Task

TASKS: dict[str, type[Task]] = {"chain": Chain, "sort": Sort}


def task(name: str) -> Task:
    """The built-in task of that name. Raises UserError naming the known ones."""
    if name not in TASKS:
        raise UserError(f"prompts.task: no built-in task is called `{name}`; the known ones are {', '.join(sorted(TASKS))}")
    return TASKS[name]()
