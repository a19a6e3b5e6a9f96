"""Which random supervised stages and critics cover every option, and how they are compared with float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhfless_ray.recipe.supervised_sections import SupervisedLoss
from tests.fuzz import draw_critics, draw_supervised
from tests.fuzz.compare import CLOSE, is_close, weight_differences
from tests.fuzz.critic_reference import CriticReference
from tests.fuzz.draw_critics import CriticCase
from tests.fuzz.draw_supervised import TASKS, SupervisedCase
from tests.fuzz.sections import Read, options_in, options_of
from tests.fuzz.supervised_reference import SupervisedReference

OF_CRITICS = {("critic.value_clip", None), ("critic.value_clip", "default"), ("critic.value_clip", "other")}
OF_CRITICS |= {("critic.normalize", True), ("critic.normalize", False)}


def options_of_case(case: SupervisedCase) -> set[tuple[str, object]]:
    """Return the options of the loss that a case's task uses."""
    of_tasks = {
        "sft": ("mean",), "rm": ("kind", "value_head"), "dpo": ("kind", "beta", "label_smoothing", "nll_coefficient"),
        "kto": ("beta", "desirable_weight", "undesirable_weight"), "kd": ("mean", "teacher_weight"), "prm": (),
    }  # fmt: skip
    return {option for option in options_in(case.settings.loss, "loss") if option[0].split(".")[1] in of_tasks[case.settings.task]}


def covering(seeds: range) -> list[int]:
    """Return the first seeds that together draw every option of the loss with every task that uses it."""
    left, drawn, chosen = options_of(SupervisedLoss, "loss"), set[tuple[str, str, object]](), []
    for seed in seeds:
        case = draw_supervised.draw_case(seed)
        mine: set[tuple[str, str, object]] = {(case.settings.task, *option) for option in options_of_case(case)}
        learner = case.settings.learner
        mine |= {(case.settings.task, "ranks", learner.ranks), (case.settings.task, "one row", learner.micro_batch_tokens == 1)}
        if mine - drawn:
            chosen.append(seed)
        drawn |= mine
    assert {task for task, *_ in drawn} == set(TASKS)
    left -= {(key, value) for _, key, value in drawn}
    assert not left, f"never drawn: {sorted(map(str, left))}; let tests/fuzz/draw_supervised.py draw them"
    return chosen


def critics_covering(seeds: range) -> list[int]:
    left, chosen = set(OF_CRITICS), list[int]()
    for seed in seeds:
        drawn = options_in(draw_critics.draw_case(seed).settings.critic, "critic")
        if left & drawn:
            chosen.append(seed)
        left -= drawn
    assert not left, f"never drawn: {sorted(map(str, left))}"
    return chosen


def critic_differences(case: CriticCase, found: dict[str, Any]) -> tuple[list[str], float]:
    settings, wrong = case.settings, list[str]()
    sections = Read(settings.algorithm, "algorithm"), Read(settings.critic, "critic"), Read(settings.learner, "learner")
    reference = CriticReference(case.files, *sections, settings.seed, settings.optimizer_steps)
    before = {name: w.detach().clone() for name, w in reference.model.weights.items()}
    for number, batch in enumerate(case.batches):
        values = reference.values(batch)
        apart = float(np.abs(found["values"][number] - values).max())
        if apart > CLOSE * np.abs(values).max():
            wrong.append(f"update {number}: values are off by {apart:.1e}")
        if batch.values is None:
            batch = draw_critics.with_values(batch, values)
        for name, value in reference.update(batch).items():
            got = getattr(found["stats"][number], name)
            if not is_close(got, value):
                wrong.append(f"update {number}: {name} is {got!r}, and should be {value!r}")
        wrong += [f"update {number}: {error}" for error in weight_differences(found["weights"][number], reference.model.weights, before)]
    return wrong, reference.margin


def stage_differences(case: SupervisedCase, found: dict[str, Any]) -> tuple[list[str], float]:
    recipe, wrong = case.settings, list[str]()
    sections = Read(recipe.loss, "loss"), Read(recipe.learner, "learner")
    reference = SupervisedReference(recipe.task, case.files, case.second, *sections, case.examples, case.reward_tokens)
    before = {name: w.detach().clone() for name, w in reference.model.weights.items()}
    for number, rows in enumerate(case.steps):
        result = found["stats"][number]
        got = {**result.metrics, "grad_norm": result.grad_norm}
        for name, value in reference.step(rows).items():
            if not is_close(got[name], value):
                wrong.append(f"step {number} of {recipe.task}: {name} is {got[name]!r}, and should be {value!r}")
        errors = weight_differences(found["weights"][number], reference.model.weights, before)
        wrong += [f"step {number} of {recipe.task}: {error}" for error in errors]
    return wrong, np.inf
