"""`rlhfless plan --execution`: the plan of a recipe's step, as a small Gantt chart."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.cli.memory_table import load_run
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.estimators import ESTIMATORS
from rlhfless_ray.learn.model_checks import family_refusal
from rlhfless_ray.learn.overlap_rules import passes
from rlhfless_ray.preflight.divisions import why_undivided
from rlhfless_ray.preflight.memory_check import local_room
from rlhfless_ray.preflight.run_memory import RunMemory
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import AutoCount

if TYPE_CHECKING:
    from placement import Objective
    from placement.call_schedule import Problem
    from placement.calls import Call, StepGraph
    from placement.execution_plan import ExecutionPlan
    from placement.layouts import Fitting
    from placement.speed.call_seconds import CallWork
    from placement.step_problem import CallModel
    from rlhfless_ray.recipe.learn_sections import CriticConfig, LearnerConfig, ReferenceConfig

NODE = 8  # devices of a node
WIDE = 60  # characters of the chart
USED_SHARE = 0.85  # of a device's memory
CPU_DEVICE = "CPU-core"


def show_execution(path: Path, overrides: list[str], device: str | None, devices: int | None, goal: Objective, as_json: bool) -> None:
    """Print the plan of a step, and what the same calls take one after the other on all slots.

    device, devices: kind and number of the devices; without a kind, the cores of this machine. Responses and prompts count as half as
    long as they may be, and times are the roofline's. Raises UserError for a number that no layout fits.
    """
    from placement.execution_plan import plan_step

    job, longest, _ = load_run(path, overrides)
    try:
        problem = _problem(job, longest.longest_tokens, device, devices)
        plan, _ = plan_step(problem, goal)
    except ValueError as error:
        raise UserError(f"--execution {path}: {error}") from None
    turns_s = in_turn_s(problem)
    if as_json:
        print(json.dumps({**asdict(plan), "in_turn_s": turns_s}, indent=1))
        return
    print("\n".join(chart(plan)))
    print(f"\n{plan.reason}")
    if why := why_undivided(job):
        print(why)
    print(f"all calls on as many slots as are fastest, one after the other: {turns_s:.3g} s")
    print("times are the roofline's, for prompts and responses half as long as they may be; a run corrects them by what its calls take")


def in_turn_s(problem: Problem) -> float:
    """Return the seconds of all calls, each in its fastest layout, one after the other: the order of a run without a plan."""
    return sum(min(option.seconds for option in problem.options[call.name]) for call in problem.graph.calls)


def chart(plan: ExecutionPlan) -> list[str]:
    """Return lines of a Gantt chart: a bar for each call, with its seconds and layout."""
    wide = max(len(call.call) for call in plan.calls)
    lines = []
    for call in plan.calls:
        first, last = (round(WIDE * moment / plan.seconds) for moment in (call.start_s, call.end_s))
        bar = " " * first + "█" * max(1, last - first)
        lines.append(f"{call.call:{wide}} │{bar:{WIDE + 1}}│ {call.start_s:8.3g} to {call.end_s:.3g} s on {call.layout}")
    return lines


def _problem(job: RunMemory, longest_tokens: int, device: str | None, devices: int | None) -> Problem:
    """Return the choices of a recipe's step. Raises ValueError for unknown devices and for calls without a layout."""
    from placement.calls import ModelRole
    from placement.catalog import catalog
    from placement.layouts import Devices
    from placement.peak_memory import CUDA_BYTES
    from placement.speed.call_seconds import CallSeconds, CallWork
    from placement.step_problem import CallModel, allowed_layouts, step_problem

    recipe, rollout = job.recipe, job.recipe.rollout
    graph = step_graph_of(recipe)
    own = job.models["policy"]
    sizes = {
        ModelRole.POLICY: own,
        ModelRole.ENGINES: own,
        ModelRole.REFERENCE: job.models.get("reference", own),
        ModelRole.CRITIC: job.models.get("critic", own),
        ModelRole.REWARD: job.models.get("reward", own),
    }
    models = {role: CallModel.of(role, size.config, job.value_bytes) for role, size in sizes.items()}
    sequences = recipe.prompts.batch_prompts * rollout.samples_per_prompt
    work = CallWork(
        sequences, recipe.prompts.max_prompt_tokens / 2, rollout.max_tokens / 2, longest_tokens, recipe.algorithm.updates_per_step
    )
    kind = catalog.device(device or CPU_DEVICE)
    slots = devices or local_room(recipe).slots
    if device is not None and slots > NODE and slots % NODE:
        raise ValueError(f"{slots} devices: more than {NODE} must be whole nodes of {NODE}")
    each = min(slots, NODE) if device is not None else slots
    cluster = Devices(slots // each, each, USED_SHARE * kind.memory_bytes - len({call.model for call in graph.calls}) * CUDA_BYTES)
    phases = catalog.values(catalog.read("phases"))
    if device is None:  # a core computes small batches as fast as large ones
        phases |= {"half_efficiency_tokens": 0.0, "weight_sync_s": 0.0}
    seconds = CallSeconds(kind, each, phases)
    layouts = {}
    for call in graph.calls:
        if device is None:
            layouts[call.name] = _on_cores(call, recipe, slots, work)
        else:
            layouts[call.name] = allowed_layouts(call, models[call.model], work, cluster, *_set_numbers(call, recipe, models[call.model]))
    return step_problem(graph, models, work, cluster, seconds, layouts)


def step_graph_of(recipe: Recipe) -> StepGraph:
    """Return the calls of a recipe's step. With a lag the next step's rollout is one of them."""
    from placement.calls import Features, lagged, step_graph

    kl = recipe.algorithm.kl
    samples = recipe.prompts.batch_prompts * recipe.rollout.samples_per_prompt
    graph = step_graph(
        Features(
            values=ESTIMATORS[recipe.algorithm.advantage.estimator].critic,
            reference=recipe.has_reference,
            reward_model=bool(recipe.reward.model_path),
            pass_before="old" in passes(recipe.algorithm, recipe.lora, samples, recipe.has_reference),
            kl_in_reward=kl.coefficient > 0 and kl.place == "reward",
        )
    )
    return lagged(graph) if recipe.rollout.rolls_out_ahead else graph


def _set_numbers(call: Call, recipe: Recipe, model: CallModel) -> tuple[int | None, int | None]:
    """Return the number of slots and the tensor parallelism of a call that a recipe sets, None for those that it leaves open.

    Ranks share no copy of a model of a family that is not tested with it.
    """
    from placement.calls import Kind

    if call.kind is Kind.GENERATE:
        width = recipe.rollout.tensor_parallel
        return None, width if isinstance(width, int) and "tensor_parallel" in recipe.rollout.model_fields_set else None
    section = _section_of(call, recipe)
    if section is None:
        return None, None
    ranks, shared = (_set_number(section, key) for key in ("ranks", "tensor_parallel"))
    return ranks, 1 if shared is None and family_refusal(model.config) else shared


def _set_number(section: LearnerConfig | CriticConfig | ReferenceConfig, key: str) -> int | None:
    value: int = getattr(section, key)
    return value if key in section.model_fields_set and not isinstance(value, AutoCount) else None


def _section_of(call: Call, recipe: Recipe) -> LearnerConfig | CriticConfig | ReferenceConfig | None:
    """Return the recipe's section of the worker group that makes a call, None for the reward model."""
    from placement.calls import ModelRole

    if call.model is ModelRole.CRITIC:
        return recipe.critic
    if call.model is ModelRole.REFERENCE:
        return recipe.reference
    return recipe.learner if call.model is ModelRole.POLICY else None


def _on_cores(call: Call, recipe: Recipe, slots: int, work: CallWork) -> list[Fitting]:
    """Return the layouts of a call on cores: engines of the recipe's width, or the recipe's ranks with 1, 2, 4 … threads each."""
    from placement.calls import Kind
    from placement.layouts import Fitting, Layout, NoLayout

    if call.kind is Kind.GENERATE:
        width, rollout = recipe.rollout.least_width, recipe.rollout
        most = min(rollout.max_actors, slots // width)
        if most < rollout.min_actors:
            raise NoLayout(f"{call.name}: {rollout.min_actors} engines of {width} slots do not fit {slots} slots; {most} would")
        return [Fitting(Layout(count, width), work.longest, 0.0) for count in range(max(1, rollout.min_actors), most + 1)]
    section = _section_of(call, recipe)
    ranks = 1 if section is None else section.ranks
    if ranks > slots:
        raise NoLayout(f"{call.name}: {ranks} ranks do not fit {slots} slots; the most that do are {slots}")
    tokens = recipe.learner.max_micro_batch_tokens
    threads = [2**k for k in range((slots // ranks).bit_length())]
    return [Fitting(Layout(ranks, threads=count), tokens, 0.0) for count in threads]
