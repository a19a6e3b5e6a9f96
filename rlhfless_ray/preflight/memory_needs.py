"""Compute the memory needs of a recipe's functions by the lower bounds of `placement.memory`, from config.json and safetensors headers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import memory, peak_memory
from placement.drafting import MODEL_SEQUENCES
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.section import LEAST_KV_MB
from rlhfless_ray.rollout.speculation import random_drafter_config
from rlhfless_ray.weights.model_folder import WEIGHTS, check_sizes, config_of, stored_tensors
from rlhfless_ray.weights.quantized_base import has_4_bits

if TYPE_CHECKING:
    from rlhfless_ray.types import Prompt

TRAINED_BYTES = 4 + memory.GRADIENT_BYTES + memory.MOMENT_BYTES  # bytes per parameter of a trained drafter, in float32
SURE_SEQUENCES = 2  # with KV for two of the longest sequences an engine holds one, whatever kinds of attention its layers have
MIN_LISTED_BYTES = 5e7  # smaller parts of a need are not listed: they would read 0.0 GB


@dataclass(frozen=True)
class ModelSize:
    """A model folder's size.

    `key`: the recipe's key that names it. `body`: parameters without the output head. `stored`: bytes of its weights on disk,
    which pass through the object store whole.
    """

    key: str
    config: dict[str, Any]
    parameters: int
    body: int
    stored: int

    @classmethod
    def of(cls, path: Path, key: str) -> ModelSize | None:
        """Read a folder's sizes. Returns None if they are unknown; loading the model reports what is wrong.

        Raises UserError if config.json has sizes that no model can have.
        """
        try:
            config = config_of({"config.json": (path / "config.json").read_bytes()})
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict):
            return None
        check_sizes(config, key)
        try:
            tensors = [(name, entry["shape"], entry["dtype"]) for name, entry in stored_tensors(path).items()]
            counts = [memory.header_parameters(tensors, head) if tensors else None for head in (True, False)]
        except (KeyError, TypeError, AttributeError):
            return None
        computed = [memory.parameter_count(config, head) for head in (True, False)]
        whole, body = (min((n for n in pair if n is not None), default=None) for pair in zip(counts, computed, strict=True))
        if whole is None or body is None:
            return None
        return cls(key, config, whole, body, sum(file.stat().st_size for file in path.glob(f"*{WEIGHTS}") if file.is_file()))


def models_of(recipe: Recipe, fetch: bool = True) -> dict[str, ModelSize]:
    """Return the models by name ("policy", "critic", "reference", "reward", "drafter"), without unreadable folders and policies made from
    scratch.

    `fetch`: ask the Hugging Face hub for the configuration of a policy that is not on this machine.
    """
    from rlhfless_ray.weights.load_policy import cached_folder, small_files

    named = {
        "policy": "policy.path",
        "critic": "critic.path",
        "reference": "reference.path",
        "reward": "reward.model_path",
        "drafter": "rollout.drafter",
    }
    models: dict[str, ModelSize] = {}
    for who, key in named.items():
        section, _, field = key.partition(".")
        text = getattr(getattr(recipe, section), field)
        path = Path(text)
        if who == "policy" and text:
            path = small_files(text, key) if fetch else cached_folder(text)
        model = ModelSize.of(path, key) if text and path.is_dir() else None
        if model is not None:
            models[who] = model
    if recipe.algorithm.has_critic and not recipe.critic.path and "policy" in models:
        models["critic"] = models["policy"]
    if recipe.rollout.drafter_train == "on" and not recipe.rollout.drafter and "policy" in models:
        config = random_drafter_config(recipe, models["policy"].config)
        size = memory.parameter_count(config)
        assert size is not None
        models["drafter"] = ModelSize("rollout.drafter_train", config, size, size, 0)
    return models


@dataclass(frozen=True)
class Need:
    """Memory needed at the same time.

    Attributes:
        parts: (name, bytes) of each part.
        alone: whether the memory is needed by one process.
        share: usable share of a GPU.
        devices: number of devices, each of which needs this memory.
        predicted: whether this is an estimate of the peak instead of a lower bound; `function` and `processes` name its function and
            the number of its processes.
        of_update: whether the settings of an update change it.
        on_host: whether it is host memory beside GPUs.
    """

    who: str
    key: str
    parts: tuple[tuple[str, int], ...]
    alone: bool = False
    share: float = 1.0
    devices: int = 1
    predicted: bool = False
    function: str = ""
    processes: int = 1
    of_update: bool = False
    on_host: bool = False

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def is_engine(self) -> bool:
        return self.who == "an engine"

    def __str__(self) -> str:
        listed = [f"{gb(size)} {what}" for what, size in self.parts if size >= MIN_LISTED_BYTES]
        return f"{'about' if self.predicted else 'at least'} {gb(self.bytes)}" + (f" ({', '.join(listed)})" if len(listed) > 1 else "")


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest and the shortest prompt. Before prompts are read, the smallest possible numbers."""

    longest_prompt: int = 1
    shortest_prompt: int = 1


UNREAD = Lengths()


def lengths_of(*prompts: Iterable[Prompt]) -> Lengths:
    tokens = [len(prompt.token_ids) for prompt in itertools.chain(*prompts)]
    return Lengths(max(tokens), min(tokens))


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def device_needs(recipe: Recipe, models: dict[str, ModelSize], lengths: Lengths = UNREAD) -> list[Need]:
    """Return each function's need on one GPU while it works; functions take turns on a device."""
    width, needs = memory.VALUE_BYTES[recipe.policy.dtype], []
    if policy := models.get("policy"):
        slots = recipe.rollout.least_width
        longest = recipe.longest_tokens(lengths.longest_prompt)
        kv = memory.kv_bytes(policy.config, longest, width, slots)
        parts = (
            ("weights", _engine_weights(recipe, policy.config, policy.parameters) // slots),
            (f"KV cache of one sequence of {longest} tokens", kv),
        )
        needs.append(Need("an engine", policy.key, parts, True, recipe.rollout.gpu_memory_share, slots))
        if drafter := models.get("drafter"):
            kv = MODEL_SEQUENCES * memory.kv_bytes(drafter.config, longest, width)
            parts = (("weights", drafter.parameters * width), (f"KV of {MODEL_SEQUENCES} sequences", kv))
            needs.append(Need("the drafter beside an engine", drafter.key, parts, True, 1 - recipe.rollout.gpu_memory_share))
    for group in training_groups(recipe, models, lengths):
        needs.append(Need(f"a {group.name} rank", group.model.key, group.rank.on_device, True))
    if policy and recipe.has_reference:
        model = models.get("reference", policy)
        needs.append(Need("a reference rank", model.key, (("weights", reference_parameters(recipe, model) * width),), True))
    if reward := models.get("reward"):
        needs.append(Need("a reward model rank", reward.key, (("weights", reward.body * width // recipe.reward.tensor_parallel),), True))
    return needs


def host_needs(recipe: Recipe, models: dict[str, ModelSize], has_driver: bool, lengths: Lengths = UNREAD) -> list[Need]:
    """Return the needs of nodes whose slots are cores: of each kind of work at once, and of single processes.

    The learner and the critic keep their state in memory for the whole run. Parked engines, references and reward processes are
    ended if memory is short, so they count only while they work.
    """
    policy = models.get("policy")
    if policy is None:
        return []
    width, worker_groups = memory.VALUE_BYTES[recipe.policy.dtype], training_groups(recipe, models, lengths)
    driver: tuple[tuple[str, int], ...] = ()
    filters = recipe.run.episodes is not None and recipe.algorithm.filter_range is not None  # then the last step may be the first
    learned = recipe.run.steps > 1 and not filters  # the first update makes the moments, and engines work once more after it
    idle = {g.name: (f"in the {g.name}", g.ranks * (g.rank.idle if learned else g.rank.loaded)) for g in worker_groups}
    if recipe.ema.beta is not None:
        driver = (*driver, ("in the average of the weights", memory.AVERAGE_BYTES * policy.parameters))
    engines = (
        ("in engine weights", _engine_weights(recipe, policy.config, policy.parameters)),
        ("in drafter weights", models["drafter"].parameters * width if "drafter" in models else 0),
        ("in KV cache", least_kv_mb(recipe, policy, lengths) * 2**20),  # vLLM does not start an engine unless this much is free
    )
    needs, opened = [], driver
    for group in worker_groups:
        name, model, rank, ranks = group.name, group.model, group.rank, group.ranks
        needs.append(Need(f"a {name} rank", model.key, ((f"in the {name}", rank.weights),), True))
        several = "" if ranks == 1 else f" in its {ranks} ranks"
        passed_on = (("in the object store", model.stored),) if has_driver else ()  # the driver itself only maps the folder's files
        loading = (*opened, *passed_on, (f"in the {name}", ranks * rank.weights))
        needs.append(Need(f"loading the {name}{several}", model.key, loading))
        opened = (*opened, idle[name])
        if recipe.run.steps > 0:
            others = tuple(part for other, part in idle.items() if other != name)
            needs.append(Need(f"a {name} rank", model.key, rank.training, True))
            training = tuple((what, ranks * size) for what, size in rank.training)
            needs.append(Need(f"the {name}'s update{several}", model.key, (*driver, *others, *training)))
            if name == "learner" and recipe.rollout.rolls_out_ahead:
                versions = (("in the object store", policy.parameters * width),)  # engines may still load the previous version
                beside = (*versions, *((what, recipe.rollout.min_actors * size) for what, size in engines))
                needs.append(Need("the rollout beside the learner's update", model.key, (*driver, *others, *training, *beside)))

    def works(who: str, count: int, key: str, *parts: tuple[str, int]) -> None:
        needs.append(Need(who, key, parts, True))
        several = "" if count == 1 else f" of {count}"
        needs.append(
            Need(
                "the rollout" if who == "an engine" else f"the {who.split(' ', 1)[1]}'s pass",
                key,
                (*opened, *((f"{what}{several}", count * size) for what, size in parts)),
            )
        )

    works("an engine", recipe.rollout.min_actors, policy.key, *engines)
    if recipe.rollout.drafter_train == "on" and (drafter := models.get("drafter")):
        trainer = ("in the drafter's training", drafter.parameters * TRAINED_BYTES)
        working = ((what, recipe.rollout.min_actors * size) for what, size in engines)
        needs.append(Need("the drafter's training beside the rollout", drafter.key, (*opened, *working, trainer)))
    if recipe.has_reference:
        model = models.get("reference", policy)
        works("a reference rank", recipe.reference.ranks, model.key, ("in the reference", reference_parameters(recipe, model) * width))
    if reward := models.get("reward"):
        works("a reward model rank", 1, reward.key, ("in the reward model", reward.body * width))
    return needs


def kv_mb(recipe: Recipe, policy: ModelSize, sequences: int, lengths: Lengths) -> int:
    """Return the MB of KV cache in which an engine holds `sequences` of the longest sequences at once, 0 if that is not known."""
    longest, rollout, width = recipe.longest_tokens(lengths.longest_prompt), recipe.rollout, memory.VALUE_BYTES[recipe.policy.dtype]
    size = peak_memory.kv_cache_bytes(policy.config, sequences, longest, rollout.block_size, width, rollout.least_width)
    return max(LEAST_KV_MB, -(-size // 2**20)) if size else 0


def least_kv_mb(recipe: Recipe, policy: ModelSize, lengths: Lengths) -> int:
    """Return the MB of the smallest KV cache that an engine may have: its own if it is set, else that of one sequence."""
    if recipe.rollout.kv_cache_mb != "auto":
        return recipe.rollout.kv_cache_mb
    return kv_mb(recipe, policy, 1, lengths) or recipe.rollout.engine_kv_mb


def reference_parameters(recipe: Recipe, model: ModelSize) -> int:
    """Return the parameters of the reference that each of its ranks holds."""
    ends = memory.end_parameters(model.config)
    return memory.Training(tensor_parallel=recipe.reference.tensor_parallel, undivided=ends).own(model.parameters)


def _engine_weights(recipe: Recipe, config: Mapping[str, Any], parameters: int) -> int:
    """Return the bytes of the weights in an engine. Routers, norms and biases count as quantised, and so do the ends of a 4-bit base."""
    width, kind = memory.VALUE_BYTES[recipe.policy.dtype], recipe.rollout.quantization
    if has_4_bits(config):
        return parameters // 2
    if kind == "off":
        return parameters * width
    kept = memory.end_parameters(config) + (memory.expert_parameters(config) if kind == "int8" else 0)
    return parameters + (width - 1) * min(kept, parameters)


def policy_models(recipe: Recipe, config: dict[str, Any], parameters: int) -> dict[str, ModelSize]:
    """Return the policy, and the critic if there is one, where both are a model of this size."""
    policy = ModelSize("policy.path", config, parameters, parameters, 0)
    return {"policy": policy, **({"critic": policy} if recipe.algorithm.has_critic else {})}


def least_mb(recipe: Recipe, config: dict[str, Any], parameters: int, lengths: Lengths) -> dict[str, float]:
    """Return the least memory in MB of each working function, of all its processes together.

    Engines count as one, because the planner chooses their number. `config`, `parameters`: the policy's.
    """
    least = {}
    for group in training_groups(recipe, policy_models(recipe, config, parameters), lengths):
        least[group.name] = group.ranks * sum(size for _, size in group.rank.training) / 1e6
    weights = parameters * memory.VALUE_BYTES[recipe.policy.dtype] / 1e6
    least["engines"] = (_engine_weights(recipe, config, parameters) + recipe.rollout.engine_kv_mb * 2**20) / 1e6
    if recipe.has_reference:
        other = ModelSize.of(Path(recipe.reference.path), "reference.path") if recipe.reference.path else None
        least["reference"] = recipe.reference.ranks * (weights if other is None else weights / parameters * other.parameters)
    return least


@dataclass(frozen=True)
class TrainingGroup:
    """A worker group that trains `model`, of which `parameters` are its own."""

    name: str
    model: ModelSize
    parameters: int
    training: memory.Training
    rank: memory.RankMemory

    @property
    def ranks(self) -> int:
        return self.training.ranks


def training_groups(recipe: Recipe, models: dict[str, ModelSize], lengths: Lengths) -> list[TrainingGroup]:
    width, section = memory.VALUE_BYTES[recipe.policy.dtype], recipe.learner
    groups = []
    for name, model in (("learner", models.get("policy")), ("critic", models.get("critic"))):
        if model is None or not recipe.learns:
            continue
        settings, parameters = (section, model.parameters) if name == "learner" else (recipe.critic, model.body)
        whole = memory.end_parameters(model.config) - (model.parameters - parameters)  # a critic has no output head
        division = (settings.tensor_parallel, whole, settings.sequence_parallel)
        training = memory.Training(settings.ranks, section.zero_stage, width, section.offloads_optimizer, recipe.lora.rank > 0, *division)
        activations = memory.activation_bytes(model.config, -(-(lengths.shortest_prompt + 1) // settings.sequence_parallel), width)
        groups.append(TrainingGroup(name, model, parameters, training, memory.rank_memory(parameters, training, activations)))
    return groups
