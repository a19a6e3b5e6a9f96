"""The recipe: one typed section per stage, one docstring per field, read from YAML with dotted overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from rlhfless_ray.errors import UserError, one_line
from rlhfless_ray.recipe.data import Evaluate, Prompts
from rlhfless_ray.recipe.reading import apply, known_keys, read_yaml, sentence
from rlhfless_ray.recipe.running import Checkpoint, Cluster, Functions, Objective, Price, Run, Save, Watch
from rlhfless_ray.recipe.sampling import Agent, Policy, Reward, Rollout, WarmStart
from rlhfless_ray.recipe.section import Section
from rlhfless_ray.recipe.training import COMPARES, Algorithm, Critic, Ema, Learner, Lora, Reference

__all__ = [
    "Agent", "Algorithm", "Checkpoint", "Cluster", "Critic", "Ema", "Evaluate", "Functions", "Learner", "Lora", "Objective",
    "Policy", "Price", "Prompts", "Recipe", "Reference", "Reward", "Rollout", "Run", "Save", "WarmStart", "Watch", "known_keys",
]


class Recipe(Section):
    """Everything a run needs to be repeated."""

    run: Run = Run()
    policy: Policy = Policy()
    warm_start: WarmStart = WarmStart()
    prompts: Prompts = Prompts()
    evaluate: Evaluate = Evaluate()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    agent: Agent = Agent()
    algorithm: Algorithm = Algorithm()
    learner: Learner = Learner()
    critic: Critic = Critic()
    reference: Reference = Reference()
    lora: Lora = Lora()
    ema: Ema = Ema()
    functions: Functions = Functions()
    objective: Objective = Objective()
    price: Price = Price()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    save: Save = Save()
    watch: Watch = Watch()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if sum(map(bool, (self.prompts.task, self.prompts.path, self.prompts.paths))) != 1:
            raise ValueError("prompts: set exactly one of `task` (built in) and `path` (a file) or `paths` (several)")
        if self.evaluate.path and self.prompts.task:
            raise ValueError("evaluate.path: a built-in task makes its own held-out rows; leave it out")
        if self.prompts.sources and not self.policy.path:
            raise ValueError("policy.path: name a local Hugging Face model folder; only built-in tasks make their own policy")
        estimator, samples = self.algorithm.advantage.estimator, self.rollout.samples_per_prompt
        if samples < 2 and estimator in COMPARES:
            raise ValueError(
                f"rollout.samples_per_prompt: {estimator} compares the responses to one prompt, so it must be at least 2"
            )
        if samples < 2 and self.algorithm.filter_range is not None:
            raise ValueError("rollout.samples_per_prompt: algorithm.filter_range is about groups, so it must be at least 2")
        if self.critic != Critic() and not self.algorithm.has_critic:
            raise ValueError(f"critic: algorithm.advantage.estimator {estimator} has no critic, so leave its settings out")
        if self.reference != Reference() and not self.has_reference:
            why = "lora.rank makes it the policy without its adapters" if self.lora.rank else "algorithm.kl.coefficient is 0"
            raise ValueError(f"reference: {why}, so leave its settings out")
        if self.lora.rank and self.ema.beta is not None:
            raise ValueError("ema.beta: an average of adapters is not that of the weights they make; leave it out with lora.rank")
        if self.lora != Lora() and not self.lora.rank:
            raise ValueError("lora: its settings are about adapters, which there are with a lora.rank above 0")
        buffer = self.reward.overlong_buffer_tokens
        if buffer is not None and buffer > self.rollout.max_tokens:
            raise ValueError("reward.overlong_buffer_tokens: must not exceed rollout.max_tokens")
        if (self.algorithm.batch_samples or 1) > self.prompts.batch_prompts * samples:
            raise ValueError("algorithm.batch_samples: must not exceed prompts.batch_prompts × rollout.samples_per_prompt")
        kl, step_samples = self.algorithm.kl, self.prompts.batch_prompts * samples
        if kl.target is not None and 5 * kl.horizon <= step_samples:  # a step takes off a fifth of samples / horizon at most
            raise ValueError(
                f"algorithm.kl.horizon: must exceed a fifth of a step's {step_samples} samples, or one step could turn the sign of the "
                "coefficient"
            )
        if self.rollout.min_actors > self.rollout.max_actors:
            raise ValueError("rollout.min_actors: must not exceed rollout.max_actors")
        if self.price.rollout_slot_per_hour is not None and not self.rollout.nodes:
            raise ValueError("price.rollout_slot_per_hour: it is the price of the nodes that rollout.nodes names, which is empty")
        if self.algorithm.updates_per_step > self.prompts.batch_prompts:
            raise ValueError("algorithm.updates_per_step: must not exceed prompts.batch_prompts")
        if self.policy.dtype == "bfloat16" and self.learner.zero_stage == 0:
            raise ValueError(
                "learner.zero_stage: with policy.dtype bfloat16 it must be 1, 2 or 3, which keep the float32 weights that "
                "small updates need"
            )
        if self.reward.function == "task" and not self.prompts.task:
            raise ValueError("reward.function: `task` needs a built-in task in prompts.task")
        sources = [name for name in ("function", "url", "model_path") if getattr(self.reward, name)]
        if self.agent.path and sources:
            raise ValueError(f"reward.{sources[0]}: the agent of agent.path gives the rewards; leave it out")
        if self.agent.path and self.rollout.migrate == "tau":
            raise ValueError("rollout.migrate: turns of an agent are not moved between engines; leave it at `auto`, or set `off`")
        if not self.agent.path and self.agent != Agent():
            raise ValueError("agent.path: name the agent's file, or leave the section out")
        if not sources and not self.agent.path:
            raise ValueError("reward.function: name one: `task`, `math` or `path/to/file.py:name`; or set reward.url or model_path")
        if len(sources) > 1:
            raise ValueError(f"reward.{sources[1]}: rewards have one source; set it or reward.{sources[0]}")
        return self

    @property
    def answer_column(self) -> str:
        """Of the rows: what reward functions and agents know as the label."""
        return "answer" if self.prompts.task else self.prompts.answer_column

    def longest_tokens(self, longest_prompt_tokens: int) -> int:
        """The longest sequence that there may be."""
        return self.agent.max_tokens or self.rollout.longest_tokens(longest_prompt_tokens)

    @property
    def has_reference(self) -> bool:
        """Whether the reference is a function of its own. Where adapters alone are trained it is the policy without them."""
        return self.algorithm.keeps_reference and not self.lora.rank

    @property
    def keeps_start(self) -> bool:
        """Whether a run keeps the policy that it began with: as the reference, or because adapters alone are trained."""
        return self.algorithm.keeps_reference or self.lora.rank > 0

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run, where no sample is missing."""
        per_step, size = self.algorithm.updates_per_step, self.algorithm.batch_samples
        if size is not None:
            per_step = -(-self.prompts.batch_prompts * self.rollout.samples_per_prompt // size)
        return self.run.steps * self.algorithm.epochs * per_step

    def learner_section(self) -> dict[str, Any]:
        """What a rank of the learner needs of `learner`."""
        own = {"optimizer_steps": self.optimizer_steps, "ema_beta": self.ema.beta, "lora": self.lora.model_dump()}
        return {**self.learner.model_dump(), **own}

    def critic_section(self) -> dict[str, Any]:
        """The same for the critic, with what it shares with the learner."""
        own = self.critic.model_dump()
        return {**self.learner_section(), "warmup_steps": 0, "decay_all": False, "ema_beta": None, **own}

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
        """Read a YAML file and apply `section.key=value` overrides (values are YAML).

        Raises UserError for a missing file, an unknown key (naming the nearest one), a wrong type or range.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"recipe {path}: " + ("a folder; name the recipe's YAML file" if path.is_dir() else "no such file"))
        try:
            tree = read_yaml(path.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {path}: not valid YAML: {one_line(error)}") from None
        if not isinstance(tree, dict):
            raise UserError(f"recipe {path}: expected sections such as `rollout:` at the top, found {type(tree).__name__}")
        for override in overrides:
            apply(tree, override)
        run = tree.get("run")
        if run is None or (isinstance(run, dict) and not run.get("name")):
            tree["run"] = {**(run or {}), "name": re.sub(r"[^\w.-]+", "-", path.stem).lstrip(".-")}
        return cls.parse(tree, where=f"recipe {path}")

    @classmethod
    def parse(cls, tree: dict[str, Any], where: str = "recipe") -> Recipe:
        """Validate a nested dict. Raises UserError with one sentence on the first mistake."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"{where}: {sentence(cls, error)}") from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
