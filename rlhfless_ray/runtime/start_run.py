"""Start a training run: its learner and the processes of its engines, with the first weights."""

from __future__ import annotations

from pathlib import Path

import ray

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.lease import Slot, places
from rlhfless_ray.learn.colocation import of_learner
from rlhfless_ray.run.checkpoints import swap_folder
from rlhfless_ray.run.context import RunContext
from rlhfless_ray.run.folder import RunFolder
from rlhfless_ray.runtime.run_inputs import RunInputs
from rlhfless_ray.runtime.run_parts import RunParts
from rlhfless_ray.runtime.stages import Stages
from rlhfless_ray.weights.load_policy import cache_policy, cached_folder
from rlhfless_ray.weights.model_folder import read_folder
from rlhfless_ray.weights.remote_folder import StoredFiles, writer

Checkpoint = tuple[int, StoredFiles, JsonObject]  # step, the learner's files, the driver's state


def start_learner(run: RunParts, inputs: RunInputs, folder: RunFolder, checkpoint: Checkpoint | None, *, private: bool) -> None:
    """Start the learner and the engines' processes, and publish the first weights. `private`: whether this Ray serves no other run."""
    context, stages, session, recipe = run.stages.context, run.stages, run.session, run.stages.context.recipe
    groups, learner = stages.learn.worker_groups, stages.learn.worker_group
    with context.phases.phase("start", "starting the learner"):
        context.broker.staff(learner)
        prewarm(context, stages, learner.by_rank[0].slot)
        if inputs.owes_warm_start and checkpoint is None:
            context.record.progress.phase("supervised warm start (cached afterwards)")
            context.say(f"supervised warm start first: {recipe.warm_start.steps} steps, cached afterwards")
            inputs.files = learner.warm_start(ray.put(inputs.files), recipe)
            cache_policy(recipe, inputs.files)
        context.record.progress.phase("loading the policy")
        start = cached_folder(recipe.policy.path) if recipe.policy.path else None
        if recipe.keeps_start:  # reference and adapters need the initial policy, also after a resume
            start = folder.path / "reference"
            if checkpoint and start.is_dir():
                inputs.files = read_folder(start)
            else:
                swap_folder(start, writer(inputs.files))
        state = checkpoint[1] if checkpoint and checkpoint[1].files else None  # the first checkpoint of a given policy has no state
        policy = StoredFiles(start, inputs.files)
        learner.build(policy, private, state and of_learner(state))
        if checkpoint:
            run.state.restore(checkpoint[2])
            stages.learn.restore_files(checkpoint[1].files)
            stages.rollout.restore_files(checkpoint[1].files)
            run.records.end_if_prompts_are_used_up(run.state.steps_done)
        session.weights = learner.weights.publish(run.state.steps_done)
        context.broker.put(learner.park())
        critic, other = inputs.critic_files, inputs.reference
        of_critic = policy if critic is None else StoredFiles(Path(recipe.critic.path), critic)
        groups.open_critic(of_critic, private, state)
        groups.open_reference(policy if other is None else StoredFiles(other, read_folder(other)), private)
        for group in filter(None, (learner, groups.reference, groups.critic)):
            for note in group.notes:
                context.record.progress.message(note, once=True)
        if stages.agents is not None:
            stages.agents.check()
    if checkpoint is None:
        run.state.save(learned=not recipe.policy.path)  # so that a stop at any later moment can be resumed


def prewarm(context: RunContext, stages: Stages, home: Slot) -> None:
    """Start processes ahead of their leases, on the learner's node first. On GPU only the learner's devices are known by then."""
    leases, pool, learn = context.leases, stages.rollout.pool, stages.learn
    nodes, most = dict(context.limits().slots), context.most_engines(pool.width)
    if leases.resource == "gpu" and pool.width == 1:  # several devices of one engine may be others
        slots = dict.fromkeys(instance.slot for instance in learn.worker_group.by_rank if instance.slot.node in nodes)
        for slot in list(slots)[:most]:
            pool.prewarm(slot)
    elif leases.resource == "cpu":
        engines = {node: slots // pool.width for node, slots in nodes.items()}
        for slot in places(engines, home.node, most):
            pool.prewarm(slot)
        if learn.worker_groups.reference is not None:
            learn.worker_groups.reference.prewarm(home)
        if stages.rollout.drafter is not None:
            stages.rollout.drafter.prewarm(home)
    if stages.agents is None:
        stages.score.pool.prewarm(home)
