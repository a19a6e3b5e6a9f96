"""Settings that have no effect beside the other settings of a recipe. A run names those that its user has set when it starts.

Settings whose meaning would be in doubt are refused instead, by the recipes' own checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import Section
from rlhfless_ray.recipe.supervised_sections import PAIRED, SupervisedRecipe

AnyRecipe = Recipe | SupervisedRecipe
R = TypeVar("R", bound=AnyRecipe)


@dataclass(frozen=True)
class UnusedKeys(Generic[R]):
    """Keys, separated by spaces, that have no effect in a recipe for which `holds` is true. `why` completes a sentence about them."""

    keys: str
    why: str
    holds: Callable[[R], object]


def _has_sink(recipe: AnyRecipe) -> bool:
    watch = recipe.watch
    return watch.tensorboard or watch.wandb != "off" or bool(watch.mlflow or watch.trackio) or watch.prometheus


SCORING = "reward.contract reward.workers reward.timeout_s"
COMMON: tuple[UnusedKeys[AnyRecipe], ...] = (
    UnusedKeys(
        "policy.hidden_size policy.layers policy.context_tokens warm_start.steps warm_start.batch_size warm_start.learning_rate",
        "only a policy made from scratch has them, and policy.path names a model",
        lambda r: r.policy.path,
    ),
    UnusedKeys("evaluate.split", "evaluate.path names no data set", lambda r: not r.evaluate.path),
    UnusedKeys("watch.tensorboard_path", "watch.tensorboard is off", lambda r: not r.watch.tensorboard),
    UnusedKeys("watch.wandb_project watch.wandb_entity watch.wandb_group", "watch.wandb is off", lambda r: r.watch.wandb == "off"),
    UnusedKeys("watch.mlflow_experiment", "watch.mlflow names no address", lambda r: not r.watch.mlflow),
    UnusedKeys("watch.every_steps", "metrics.jsonl has every step, and nothing else logs them", lambda r: not _has_sink(r)),
)

OF_RUNS: tuple[UnusedKeys[Recipe], ...] = (
    UnusedKeys("run.steps", "run.episodes determines the steps", lambda r: r.run.episodes is not None),
    UnusedKeys(
        "prompts.prompt_column prompts.split",
        "the built-in task of prompts.task has columns of its own, and no splits",
        lambda r: r.prompts.task,
    ),
    UnusedKeys(
        "prompts.answer_column", "the built-in task of prompts.task has its own", lambda r: r.prompts.task and r.prompts.answer_column
    ),
    UnusedKeys("prompts.tools_column", "only prompts.template=chat reads tools", lambda r: r.prompts.template == "none"),
    UnusedKeys("prompts.add_bos", "the chat template decides it", lambda r: r.prompts.template == "chat"),
    UnusedKeys(
        "evaluate.path evaluate.every_steps evaluate.greedy evaluate.temperature evaluate.samples_per_prompt evaluate.source_column",
        "evaluate.prompts is 0, so nothing is evaluated",
        lambda r: r.learns and not r.evaluate.prompts,
    ),
    UnusedKeys("rollout.top_p rollout.top_k", "rollout.temperature is 0, which is greedy", lambda r: r.rollout.temperature == 0),
    UnusedKeys("rollout.migrate_tau", "rollout.migrate is not `tau`", lambda r: r.rollout.migrate != "tau"),
    UnusedKeys("rollout.drafter_learning_rate", "rollout.drafter_train is off", lambda r: r.rollout.drafter_train == "off"),
    UnusedKeys(
        "rollout.drafter_hidden_size rollout.drafter_layers",
        "only a drafter with random weights has them: rollout.drafter_train is on and rollout.drafter names none",
        lambda r: r.rollout.drafter_train == "off" or bool(r.rollout.drafter),
    ),
    UnusedKeys(
        "reward.value_head reward.ranks reward.micro_batch_tokens",
        "reward.model_path names no reward model",
        lambda r: not r.reward.model_path,
    ),
    UnusedKeys(
        SCORING,
        "the reward model of reward.model_path scores in reward.ranks processes, within reward.deadline_s",
        lambda r: r.reward.model_path,
    ),
    UnusedKeys("reward.contract", "reward.url names servers", lambda r: r.reward.url),
    UnusedKeys(
        "reward.deadline_s",
        "only reward.url and reward.model_path use it, and neither is set",
        lambda r: not r.reward.url and not r.reward.model_path,
    ),
    UnusedKeys(SCORING, "the agent gives the rewards", lambda r: r.agent.is_used),
    UnusedKeys("reward.overlong_feedback", "agent.path and agent.command name no agent", lambda r: not r.agent.is_used),
    UnusedKeys(
        "algorithm.kl.estimator algorithm.kl.place algorithm.kl.limit algorithm.kl.unbiased_gradient",
        "algorithm.kl.coefficient is 0",
        lambda r: not r.algorithm.kl.coefficient,
    ),
    UnusedKeys("algorithm.kl.horizon", "algorithm.kl.target is not set", lambda r: r.algorithm.kl.target is None),
    UnusedKeys("algorithm.uncorrected_lag", "rollout.max_lag_steps is 0", lambda r: not r.rollout.max_lag_steps),
    UnusedKeys(
        "critic.warmup_share", "the schedule `constant` of critic.schedule has no warm-up", lambda r: r.critic.schedule == "constant"
    ),
    UnusedKeys(
        "critic.min_rate_share",
        "it applies to the schedule `cosine_with_min_lr`, and critic.schedule is another",
        lambda r: r.critic.schedule != "cosine_with_min_lr",
    ),
    UnusedKeys(
        "objective.prefer",
        "objective.deadline_s, budget or knee takes precedence",
        lambda r: r.objective.deadline_s or r.objective.budget or r.objective.knee,
    ),
    UnusedKeys(
        "reward.clip_range reward.overlong_buffer_tokens reward.overlong_limit_tokens reward.overlong_penalty reward.stop_properly_penalty",
        "only learning uses this, and nothing is learned",
        lambda r: not r.learns,
    ),
    UnusedKeys(
        f"reward.max_failed_share {SCORING}",
        "nothing is scored: set reward.function, reward.url or reward.model_path",
        lambda r: not r.learns and not r.scores,
    ),
)

OF_STAGES: tuple[UnusedKeys[SupervisedRecipe], ...] = (
    UnusedKeys("run.epochs", "run.steps determines the steps", lambda r: r.run.steps is not None and r.run.schedule_end == "last_step"),
    UnusedKeys("run.schedule_end", "only data.remainder=carry adds steps to an epoch's batches", lambda r: r.data.remainder != "carry"),
    UnusedKeys("data.split", "the built-in task of data.task has no splits", lambda r: r.data.task),
    UnusedKeys("data.tools_column", "only data.template=chat reads tools", lambda r: r.data.template == "none"),
    UnusedKeys("data.add_bos", "the chat template decides it", lambda r: r.data.template == "chat"),
    UnusedKeys("data.input_template", "data.prompt_column is empty, so there are no prompts", lambda r: not r.data.prompt_column),
    UnusedKeys("data.response_column", "the task reads other columns", lambda r: r.task in (*PAIRED, "prm")),
    UnusedKeys("data.chosen_column data.rejected_column", "the task reads no pairs", lambda r: r.task not in PAIRED),
    UnusedKeys("data.margin_column", "only `rm` with loss.kind=sigmoid has margins", lambda r: r.task != "rm" or r.loss.kind != "sigmoid"),
    UnusedKeys("data.label_column", "the task reads no labels", lambda r: r.task not in ("kto", "prm")),
    UnusedKeys("learner.share_prompts", "a row of the task is one sequence", lambda r: r.task not in PAIRED),
    UnusedKeys("price.rollout_slot_per_hour", "a supervised stage has no rollout", lambda _: True),
    UnusedKeys("learner.nodes", "a supervised stage takes any node", lambda _: True),
    UnusedKeys("learner.train_vision", "a supervised stage reads no images", lambda _: True),
    UnusedKeys("price.parked_share", "a supervised stage parks no processes", lambda _: True),
    UnusedKeys("checkpoint.keep", "checkpoint.every_steps is 0, so there is one checkpoint", lambda r: not r.checkpoint.has_regular),
    UnusedKeys("watch.samples_per_step", "a supervised stage draws no samples", lambda _: True),
)

ON_CPU = "rollout.gpu_memory_share", "slots are CPU cores"
ON_GPU = "rollout.kv_cache_mb learner.max_slots_per_rank", "slots are GPUs"
ON_PRIVATE = "cluster.pool cluster.share cluster.priority", "this Ray has no other runs"
WITHOUT_AUTOSCALER = "functions.demand", "the run starts its own Ray, to which no node can come"
ON_ONE_NODE = "functions.notice", "this Ray has one node, and a run ends with it"
ON_JOINED = "cluster.cpus cluster.local_nodes cluster.object_store_mb", "they are for a Ray that the run starts, and it joins one"


def without_effect(recipe: Recipe | SupervisedRecipe, resource: str = "", *, private: bool | None = None) -> Iterator[str]:
    """Yield a sentence for each reason why settings other than the defaults have no effect.

    `resource`: "cpu" or "gpu", the kind of the run's slots. `private`: whether the run has started its Ray. Both may be unknown.
    """
    found = _unused(COMMON, recipe)
    found += _unused(OF_STAGES, recipe) if isinstance(recipe, SupervisedRecipe) else _unused(OF_RUNS, recipe)
    if resource:
        found.append(ON_CPU if resource == "cpu" else ON_GPU)
    if private is not None:
        found += [ON_PRIVATE, WITHOUT_AUTOSCALER] if private else [ON_JOINED]
        found += [ON_ONE_NODE] if private and not recipe.cluster.local_nodes else []
    for keys, why in found:
        yield from sentences(recipe, keys.split(), why)


def _unused(rules: Iterable[UnusedKeys[R]], recipe: R) -> list[tuple[str, str]]:
    return [(rule.keys, rule.why) for rule in rules if rule.holds(recipe)]


def sentences(recipe: AnyRecipe, keys: Iterable[str], why: str) -> Iterator[str]:
    """Yield the sentence about those of the keys that have another value than their default, if there are any."""
    named = recipe._named
    if changed := [key for key in keys if (named is None or key in named) and _differs_from_default(recipe, key)]:
        yield f"{', '.join(changed)} {'has' if len(changed) == 1 else 'have'} no effect: {why}"


def _differs_from_default(recipe: AnyRecipe, key: str) -> bool:
    """Return whether a key of the recipe has another value than its default. A recipe without its section has the default."""
    *sections, name = key.split(".")
    holder: Section | None = recipe
    for section in sections:
        holder = getattr(holder, section, None)
    if holder is None or name not in type(holder).model_fields:
        return False
    return bool(getattr(holder, name) != type(holder).model_fields[name].get_default(call_default_factory=True))
