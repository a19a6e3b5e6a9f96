"""Settings of one rank of learner, critic or reference: sections of the recipe, and its place in the worker group."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from rlhfless_ray.recipe import AlgorithmConfig, CriticConfig, LearnerConfig, LoraConfig, PolicyConfig, Recipe


@dataclass(frozen=True)
class RankLayout:
    """How a worker group's ranks share its model and its batches. The fields are keys of section `learner`."""

    ranks: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    tensor_parallel: int = 1
    sequence_parallel: int = 1

    def __str__(self) -> str:
        shared = {"ZeRO": self.zero_stage, "tensor parallel": self.tensor_parallel, "sequence parallel": self.sequence_parallel}
        sharing = [f"{what} {size}" for what, size in shared.items() if size > (what != "ZeRO")]
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + (f" ({', '.join(sharing)})" if sharing else "")


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """Settings of a rank that is trained. It pickles, as the recipe's sections do."""

    learner: LearnerConfig  # for a critic: `Recipe.critic_learner`
    lora: LoraConfig
    algorithm: AlgorithmConfig
    policy: PolicyConfig
    optimizer_steps: int  # of the whole run, for the learning rate's schedule
    temperature: float
    seed: int
    deterministic: bool = False  # see `run.deterministic`
    ema_beta: float | None = None  # None: no average of the weights is kept
    rank: int = 0
    device: str = "cpu"  # or "gpu"

    @property
    def layout(self) -> RankLayout:
        section = self.learner
        return RankLayout(section.ranks, section.zero_stage, section.tensor_parallel, section.sequence_parallel)

    def placed(self, rank: int, layout: RankLayout) -> Self:
        """Return the settings of a rank of this layout."""
        return replace(self, rank=rank, learner=self.learner.model_copy(update=asdict(layout)))


@dataclass(frozen=True, kw_only=True)
class CriticSettings(RankSettings):
    critic: CriticConfig


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """Plain values, so that a process without optimizer does not import the recipe."""

    dtype: str
    trust_remote_code: bool
    micro_batch_tokens: int
    temperature: float
    share_prompts: str = "auto"
    ranks: int = 1
    tensor_parallel: int = 1
    deterministic: bool = False
    rank: int = 0
    device: str = "cpu"

    @property
    def layout(self) -> RankLayout:
        return RankLayout(self.ranks, tensor_parallel=self.tensor_parallel)

    def placed(self, rank: int, layout: RankLayout) -> Self:
        """Return the settings of a rank of this layout, as far as it applies to a model that is not trained."""
        return replace(self, rank=rank, ranks=layout.ranks, tensor_parallel=layout.tensor_parallel)


def learner_settings(recipe: Recipe, rank: int = 0, device: str = "cpu") -> RankSettings:
    algorithm = recipe.algorithm.model_copy(update={"importance_cap": 0.0}) if recipe.run.exact else recipe.algorithm
    return RankSettings(
        learner=recipe.learner,
        lora=recipe.lora,
        algorithm=algorithm,
        policy=recipe.policy,
        optimizer_steps=recipe.optimizer_steps,
        temperature=recipe.rollout.temperature,
        seed=recipe.run.seed,
        deterministic=recipe.run.deterministic,
        ema_beta=recipe.ema.beta,
        rank=rank,
        device=device,
    )


def critic_settings(recipe: Recipe, rank: int = 0, device: str = "cpu") -> CriticSettings:
    of_learner = vars(learner_settings(recipe, rank, device))
    return CriticSettings(**{**of_learner, "learner": recipe.critic_learner, "ema_beta": None}, critic=recipe.critic)


def reference_settings(recipe: Recipe, rank: int = 0, device: str = "cpu") -> ReferenceSettings:
    return ReferenceSettings(
        dtype=recipe.policy.dtype,
        trust_remote_code=recipe.policy.trust_remote_code,
        micro_batch_tokens=recipe.learner.max_micro_batch_tokens,
        temperature=recipe.rollout.temperature,
        share_prompts=recipe.learner.share_prompts,
        ranks=recipe.reference.ranks,
        tensor_parallel=recipe.reference.tensor_parallel,
        deterministic=recipe.run.deterministic,
        rank=rank,
        device=device,
    )


def auto_ranks(recipe: Recipe, ranks: int) -> dict[str, int]:
    """Return the number of ranks of each group that is `auto`, where the learner has `ranks`.

    A group whose copies of the model need another multiple keeps the fewest ranks of one copy.
    """
    from rlhfless_ray.recipe.section import AutoCount

    found = {}
    for name in ("learner", "critic", "reference"):
        section = getattr(recipe, name)
        if isinstance(section.ranks, AutoCount):
            found[name] = ranks if ranks % section.ranks == 0 else int(section.ranks)
    return found
