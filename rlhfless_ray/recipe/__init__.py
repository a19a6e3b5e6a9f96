"""The recipe: one typed section per stage, one docstring per field, read from YAML with dotted overrides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import model_validator

from rlhfless_ray.common.estimators import ESTIMATORS
from rlhfless_ray.recipe.algorithm_sections import AlgorithmConfig
from rlhfless_ray.recipe.data_sections import EvaluateConfig, PromptsConfig
from rlhfless_ray.recipe.engine_pools import mistakes_in_pools
from rlhfless_ray.recipe.learn_sections import (
    CriticConfig,
    EmaConfig,
    LearnerConfig,
    LoraConfig,
    ReferenceConfig,
    mistakes_in_precision,
    mistakes_in_slices,
)
from rlhfless_ray.recipe.recipe_file import RecipeFile
from rlhfless_ray.recipe.rollout_sections import AgentConfig, PolicyConfig, RewardConfig, RolloutConfig, WarmStartConfig
from rlhfless_ray.recipe.run_sections import (
    CheckpointConfig,
    ClusterConfig,
    FunctionsConfig,
    ObjectiveConfig,
    PlanConfig,
    PriceConfig,
    RunConfig,
    SaveConfig,
    WatchConfig,
)
from rlhfless_ray.recipe.section import AutoCount, raise_first
from rlhfless_ray.recipe.stock_engine import mistakes_in_stock


class Recipe(RecipeFile):
    """All settings of a run: one typed section for each of its parts.

    docs/recipes.md explains the sections. The reference of all keys is generated from these types.

    Examples:
        >>> recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
        >>> recipe.rollout.samples_per_prompt, recipe.objective.prefer
        (8, 0.5)
    """

    run: RunConfig = RunConfig()
    policy: PolicyConfig = PolicyConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    prompts: PromptsConfig = PromptsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    agent: AgentConfig = AgentConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    lora: LoraConfig = LoraConfig()
    ema: EmaConfig = EmaConfig()
    functions: FunctionsConfig = FunctionsConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    plan: PlanConfig = PlanConfig()
    price: PriceConfig = PriceConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    save: SaveConfig = SaveConfig()
    watch: WatchConfig = WatchConfig()
    learns: ClassVar[bool] = True  # whether there is a learner

    @property
    def scores(self) -> bool:
        """Whether responses get a reward."""
        return bool(self.reward.function or self.reward.url or self.reward.model_path or self.agent.is_used)

    @model_validator(mode="after")
    def _check_combinations(self) -> Recipe:
        raise_first(
            self._mistakes_in_prompts,
            self._mistakes_in_groups,
            self._mistakes_in_models,
            self._mistakes_in_lengths,
            self._mistakes_in_batches,
            self._mistakes_in_slots,
            lambda: mistakes_in_pools(self.rollout),
            self._mistakes_in_corrections,
            self._mistakes_in_router_replay,
            self._mistakes_in_drafter,
            lambda: mistakes_in_stock(self.rollout, self.lora, self.algorithm, self.run),
            self._mistakes_in_partial_rollouts,
            self._mistakes_in_training,
            self._mistakes_in_rewards,
            self._mistakes_in_exact,
            self._mistakes_in_mirror,
        )
        return self

    def _mistakes_in_mirror(self) -> Iterator[str]:
        if self.run.mirror and self.checkpoint.path:
            yield "run.mirror: it copies the run folder, and checkpoint.path puts checkpoints elsewhere; set one of the two"

    def _mistakes_in_prompts(self) -> Iterator[str]:
        """Check prompts and held-out prompts."""
        yield from self.prompts.mistakes(self.policy.path, self.evaluate.path)

    def _mistakes_in_groups(self) -> Iterator[str]:
        """Check the number of responses to a prompt."""
        estimator, samples = self.algorithm.advantage.estimator, self.rollout.samples_per_prompt
        if self.learns and samples < ESTIMATORS[estimator].least_samples:
            yield f"rollout.samples_per_prompt: {estimator} compares the responses to one prompt, so it must be at least 2"
        if samples < 2 and self.algorithm.filter_range is not None:
            yield "rollout.samples_per_prompt: algorithm.filter_range compares groups, so it must be at least 2"

    def _mistakes_in_models(self) -> Iterator[str]:
        """Check the models beside the policy, and adapters."""
        estimator = self.algorithm.advantage.estimator
        frozen = CriticConfig(freeze_policy_steps=self.critic.freeze_policy_steps)  # it applies to the policy, with and without a critic
        if self.critic != frozen and not self.algorithm.has_critic:
            yield f"critic: algorithm.advantage.estimator {estimator} has no critic, so leave its settings out"
        if self.reference != ReferenceConfig() and not self.has_reference:
            why = "lora.rank makes it the policy without its adapters" if self.lora.rank else "algorithm.kl.coefficient is 0"
            yield f"reference: {why}, so leave its settings out"
        if ESTIMATORS[estimator].teacher and not self.reference.path:
            yield f"reference.path: {estimator} needs a teacher; name its folder"
        if self.lora.rank and self.ema.beta is not None:
            yield "ema.beta: an average of adapters is not the average of the merged weights; leave it out with lora.rank"
        yield from self.lora.mistakes()

    def _mistakes_in_lengths(self) -> Iterator[str]:
        """Check numbers of tokens."""
        if self.rollout.min_tokens > self.rollout.max_tokens:
            yield "rollout.min_tokens: must not exceed rollout.max_tokens"
        buffer, limit = self.reward.overlong_buffer_tokens, self.reward.overlong_limit_tokens
        if buffer is not None and buffer > (limit or self.rollout.max_tokens):
            yield f"reward.overlong_buffer_tokens: must not exceed {'reward.overlong_limit_tokens' if limit else 'rollout.max_tokens'}"
        for name in ("limit_tokens", "feedback", "penalty"):
            if buffer is None and getattr(self.reward, f"overlong_{name}") != RewardConfig.model_fields[f"overlong_{name}"].default:
                yield f"reward.overlong_buffer_tokens: reward.overlong_{name} needs it; set it, or leave that out"

    def _mistakes_in_batches(self) -> Iterator[str]:
        """Check the samples of an optimizer step."""
        samples = self.prompts.batch_prompts * self.rollout.samples_per_prompt
        if (self.algorithm.batch_samples or 1) > samples and self.algorithm.remainder != "carry":
            yield (
                "algorithm.batch_samples: must not exceed prompts.batch_prompts × rollout.samples_per_prompt, unless algorithm.remainder "
                "is carry"
            )
        kl = self.algorithm.kl
        if kl.target is not None and 5 * kl.horizon <= samples:  # one step changes it by at most a fifth of samples / horizon
            yield (
                f"algorithm.kl.horizon: must exceed a fifth of a step's {samples} samples, or one step could change the sign of the "
                "coefficient"
            )

    def _mistakes_in_slots(self) -> Iterator[str]:
        """Check engines, and ranks that share a model."""
        if self.rollout.min_actors > self.rollout.max_actors:
            yield "rollout.min_actors: must not exceed rollout.max_actors"
        if self.functions.demand and self.cluster.pool:
            yield "functions.demand: runs that share a pool would replace each other's announcement to Ray; set cluster.pool to false"
        if self.functions.demand and not self.functions.elastic:
            yield "functions.demand: plans decide what is announced, and functions.elastic is off; leave one of them out"
        if self.critic.tensor_parallel > 1 and self.learner.zero_stage == 3:
            yield "critic.tensor_parallel: DeepSpeed divides matrices with a learner.zero_stage of 0, 1 or 2"
        yield from mistakes_in_slices("learner", self.learner.sequence_parallel, self.lora)
        yield from mistakes_in_slices("critic", self.critic.sequence_parallel, self.lora)
        if self.learner.sequence_parallel > 1 and self.algorithm.loss.router_aux:
            yield "algorithm.loss.router_aux: not available with learner.sequence_parallel, where a rank's routers see a slice; set it to 0"

    def _mistakes_in_corrections(self) -> Iterator[str]:
        """Check what is sampled from other weights than those that are trained."""
        algorithm = self.algorithm
        weighted = algorithm.importance_cap > 0 or algorithm.loss.correction_level != "off" or algorithm.loss.ratio_to == "sampler"
        corrected = weighted or ESTIMATORS[algorithm.advantage.estimator].pairs  # a pair counts the same whatever it was drawn from
        if self.rollout.quantization != "off" and not corrected:
            yield (
                f"rollout.quantization: {self.rollout.quantization} changes what engines sample from, and nothing corrects for it; set "
                "algorithm.importance_cap to 2, or algorithm.loss.correction_level"
            )
        if self.rollout.top_k and not corrected:
            yield (
                f"rollout.top_k: {self.rollout.top_k} leaves out tokens of the policy, and nothing corrects for it; set "
                "algorithm.importance_cap to 2, or algorithm.loss.correction_level, or top_k to 0"
            )
        if self.rollout.max_lag_steps and not corrected and not algorithm.uncorrected_lag:
            yield (
                "rollout.max_lag_steps: responses of older weights need importance weights, and nothing corrects for them; set "
                "algorithm.importance_cap to 2, or algorithm.loss.correction_level; algorithm.uncorrected_lag allows it nevertheless"
            )
        if self.rollout.max_lag_steps and algorithm.remainder == "carry":
            yield (
                "rollout.max_lag_steps: samples that algorithm.remainder=carry keeps for later steps would be older than this bound; set "
                "remainder to `short` or `drop`, or max_lag_steps to 0"
            )

    def _mistakes_in_router_replay(self) -> Iterator[str]:
        """Check that engines know the routers' choices for every token."""
        if not self.algorithm.loss.router_replay:
            return
        key, rollout = "algorithm.loss.router_replay", self.rollout
        if rollout.prefix_kv != "off" or rollout.partial_kv == "keep":
            wrong = "rollout.prefix_kv to off" if rollout.prefix_kv != "off" else "rollout.partial_kv to recompute"
            yield f"{key}: KV pages that an engine gets come without the routers' choices; set {wrong}"
        if self.agent.is_used:
            yield f"{key}: not available with agents; set it to false, or leave section agent out"

    def _mistakes_in_drafter(self) -> Iterator[str]:
        """Check the model that drafts."""
        rollout = self.rollout
        trains = rollout.drafter_train == "on"
        if (rollout.drafter or trains) and rollout.speculation == "off":
            key = "drafter_train" if trains else "drafter"
            yield f"rollout.{key}: rollout.speculation is off, so nothing is drafted; set it to auto, or leave the drafter out"
        if trains and not self.functions.elastic:
            yield (
                "rollout.drafter_train: it needs slots that engines leave, and with functions.elastic=false they leave none; set "
                "functions.elastic to true, or drafter_train to off"
            )
        if trains and rollout.max_lag_steps:
            yield (
                "rollout.drafter_train: a rollout with rollout.max_lag_steps leaves no slots to train the drafter on; set it to off, or "
                "max_lag_steps to 0"
            )

    def _mistakes_in_partial_rollouts(self) -> Iterator[str]:
        """Check responses that outlive a step."""
        rollout = self.rollout
        if rollout.partial_kv == "keep" and rollout.partial != "continue":
            yield "rollout.partial_kv: only responses that continue have KV to keep; set rollout.partial to continue"
        if rollout.partial_kv == "keep" and self.agent.is_used:
            yield "rollout.partial_kv: an agent plays an unfinished episode again from its beginning, so leave it out"
        if rollout.partial_kv == "keep" and self.lora.publish == "adapter":
            yield "rollout.partial_kv: engines that hold an adapter keep no KV pages; set lora.publish to merged"
        if rollout.partial == "off":
            if rollout.max_lag_steps > 1:
                yield (
                    "rollout.max_lag_steps: more than 1 needs responses that outlive a step, since an update waits for whole rollouts; set "
                    "rollout.partial to continue"
                )
            if rollout.oversample != "auto":
                yield "rollout.oversample: rollout.partial is off, so leave it out, or set partial to continue"
            if rollout.ahead:
                yield "rollout.ahead: rollout.partial is off, so leave it out: max_lag_steps of 1 means the same there"
            return
        max_share = rollout.most_begun_share
        if not rollout.max_lag_steps:
            yield "rollout.partial: responses that outlive a step need a bound on their age; set rollout.max_lag_steps to 1 or more"
        if not 1 <= rollout.begun_share <= max_share:
            limit = f"rollout.max_lag_steps{'' if rollout.ahead else ' + 1'} = {max_share}"
            yield f"rollout.oversample: {rollout.begun_share:g} is not between 1 and {limit}, so some groups could not be trained in time"
        if rollout.ahead and rollout.partial == "restart":
            yield "rollout.ahead: with restart each update would discard all unfinished responses; set rollout.partial to continue"

    def _mistakes_in_training(self) -> Iterator[str]:
        """Check price, precision, and the metric that chooses checkpoints."""
        if self.checkpoint.best_metric != "none" and not self.evaluate.prompts:
            yield "checkpoint.best_metric: evaluate.prompts is 0, so there is no evaluation to compare; set it, or leave the metric out"
        if self.price.rollout_slot_per_hour is not None and not self.rollout.nodes:
            other = "; give rollout.pools their own prices" if self.rollout.pools else ""
            yield f"price.rollout_slot_per_hour: it is the price of the nodes that rollout.nodes names, which is empty{other}"
        if self.algorithm.updates_per_step > self.prompts.batch_prompts:
            yield "algorithm.updates_per_step: must not exceed prompts.batch_prompts"
        yield from mistakes_in_precision(self.policy.dtype, self.learner)

    def _mistakes_in_rewards(self) -> Iterator[str]:
        """Check where rewards come from."""
        if self.reward.function == "task" and not self.prompts.task:
            yield "reward.function: `task` needs a built-in task in prompts.task"
        sources = [name for name in ("function", "url", "model_path") if getattr(self.reward, name)]
        if self.agent.path and self.agent.command:
            yield "agent.command: the agent is the file of agent.path; set one of them"
        if self.agent.is_used and sources:
            yield f"reward.{sources[0]}: the agent gives the rewards; leave it out"
        if self.agent.is_used and self.rollout.migrate == "tau":
            yield "rollout.migrate: turns of an agent are not moved between engines; leave it at `auto`, or set `off`"
        if not self.agent.is_used and self.agent != AgentConfig():
            yield "agent.path: name the agent's file, or a program in agent.command, or leave the section out"
        if self.learns and not sources and not self.agent.is_used:
            yield "reward.function: name one: `task`, `math` or `path/to/file.py:name`; or set reward.url or model_path"
        if len(sources) > 1:
            yield f"reward.{sources[1]}: rewards have one source; set it or reward.{sources[0]}"
        if self.reward.normalize and not self.reward.model_path:
            yield "reward.normalize: only a reward model has a mean and std to normalize by; set reward.model_path, or leave it out"
        if self.reward.batch_samples > 1 and not self.reward.url and self.reward.contract != "openrlhf":
            yield "reward.batch_samples: only reward.url and reward.contract openrlhf score several samples at once; leave it out"

    def _mistakes_in_exact(self) -> Iterator[str]:
        """Check that updates need nothing whose bits depend on times, see `run.exact`."""
        if not self.run.exact:
            return
        for name in ("learner", "critic", "reference"):
            if isinstance(getattr(self, name).ranks, AutoCount):
                yield f"{name}.ranks: `auto` changes rounding from step to step, and run.exact keeps the bits; give a number"
        loss, rollout, logprobs = self.algorithm.loss, self.rollout, "the engines' log-probabilities"
        reads = {
            f"rollout.partial={rollout.partial}": rollout.partial != "off" and "the responses that are complete first",
            f"rollout.max_lag_steps={rollout.max_lag_steps}": rollout.max_lag_steps > 0 and logprobs,
            f"rollout.top_k={rollout.top_k}": rollout.top_k > 0 and logprobs,
            f"rollout.top_p={rollout.top_p:g}": rollout.top_p < 1 and logprobs,
            f"rollout.quantization={rollout.quantization}": rollout.quantization != "off" and logprobs,
            "rollout.tensor_parallel=auto": rollout.tensor_parallel == "auto" and "the width that a plan gives the engines",
            f"algorithm.loss.correction_level={loss.correction_level}": loss.correction_level != "off" and logprobs,
            f"algorithm.loss.ratio_to={loss.ratio_to}": loss.ratio_to != "learner" and logprobs,
            "algorithm.loss.router_replay=true": loss.router_replay and "the experts that engines choose",
        }
        for setting, what in reads.items():
            if what:
                yield f"run.exact: with {setting} updates depend on {what}, whose bits change with times; change it, or leave run.exact out"

    @property
    def answer_column(self) -> str:
        """Column of the rows that reward functions and agents get as the label."""
        return "answer" if self.prompts.task else self.prompts.answer_column

    def longest_tokens(self, longest_prompt_tokens: int) -> int:
        """Return the length of the longest possible sequence, prompt included."""
        return self.agent.max_tokens or self.rollout.longest_tokens(longest_prompt_tokens)

    @property
    def has_reference(self) -> bool:
        """Whether the reference is a separate function. With adapters it is the policy without them."""
        return self.algorithm.keeps_reference and (bool(self.reference.path) or not self.lora.rank)

    @property
    def keeps_start(self) -> bool:
        """Whether a run keeps its initial policy: as the reference, or because only adapters are trained."""
        return (self.algorithm.keeps_reference and not self.reference.path) or self.lora.rank > 0

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run if no sample is missing."""
        per_step, size = self.algorithm.updates_per_step, self.algorithm.batch_samples
        samples, epochs = self.prompts.batch_prompts * self.rollout.samples_per_prompt, self.algorithm.epochs
        if size is not None and self.algorithm.remainder == "carry":
            # OpenRLHF rounds down once an episode; at least one, or a schedule would have no length
            episodes = self.run.episodes or 1
            return max(1, self.run.steps // episodes * samples // size * episodes * epochs)
        if size is not None:
            per_step = samples // size if self.algorithm.remainder == "drop" else -(-samples // size)
        return self.run.steps * epochs * per_step

    @property
    def untrained_note(self) -> str:
        """Message for the user if the samples of the whole run fill no optimizer step, else an empty string."""
        size, samples = self.algorithm.batch_samples, self.prompts.batch_prompts * self.rollout.samples_per_prompt
        all_samples = self.run.steps * samples * self.algorithm.epochs
        if size is None or self.algorithm.remainder != "carry" or all_samples >= size:
            return ""
        return (
            f"nothing will be trained: the run has {all_samples} samples, and an optimizer step needs {size} (algorithm.batch_samples, "
            "OpenRLHF's training batch size); lower it, or raise run.steps"
        )

    @property
    def exact_note(self) -> str:
        """Message for the user about what `run.exact` leaves out, or an empty string."""
        if not self.run.exact or not self.algorithm.importance_cap:
            return ""
        return (
            f"run.exact: algorithm.importance_cap counts as 0 instead of {self.algorithm.importance_cap:g}, because the bits of the "
            "engines' log-probabilities depend on batches and moves"
        )

    @property
    def critic_learner(self) -> LearnerConfig:
        """The critic's learner settings: section `learner`, with the settings of `critic` for keys that both sections have."""
        both = LearnerConfig.model_fields.keys() & CriticConfig.model_fields.keys()
        settings = {name: getattr(self.critic, name) for name in both}
        return self.learner.model_copy(update={**settings, "warmup_steps": 0, "decay_all": False})
