"""TRL's calls for GRPO, run by this project: `from rlhfless_ray.trl import GRPOConfig, GRPOTrainer`.

Settings with an equivalent become keys of a recipe. Settings that change what is learned and have none are refused by name. Those that
only say how TRL itself runs, such as `gradient_checkpointing` or `vllm_mode`, have no effect.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.front.train import Rewards, make_recipe, run_recipe
from rlhfless_ray.front.trained_run import TrainedRun
from rlhfless_ray.recipe import Recipe

RENAMED = {  # TRL's setting → key of a recipe with the same values
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "num_iterations": "algorithm.epochs",
    "epsilon": "algorithm.clip_low",
    "delta": "algorithm.loss.dual_clip",
    "beta": "algorithm.kl.coefficient",
    "learning_rate": "learner.learning_rate",
    "weight_decay": "learner.weight_decay",
    "max_grad_norm": "learner.grad_clip",
    "adam_epsilon": "learner.adam_eps",
    "shuffle_dataset": "prompts.shuffle",
    "seed": "run.seed",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "run_name": "watch.run_name",
}
CONVERTED = (  # settings that `_recipe_settings` reads
    *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("max_steps", "num_train_epochs", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "adam_beta1", "adam_beta2", "epsilon_high"),
    *("scale_rewards", "loss_type", "importance_sampling_level", "reward_weights", "model_init_kwargs", "report_to", "eval_strategy"),
    *("eval_steps", "max_prompt_length", "resume_from_checkpoint", "hub_model_id", "bf16"),
)
DEFAULTS: JsonObject = {  # TRL's own, where they differ from a recipe's
    "num_generations": 8,
    "max_completion_length": 256,
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "seed": 42,
    "save_steps": 500,
    "temperature": 1.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "output_dir": "trainer_output",
}
WITHOUT_EFFECT = re.compile(  # how TRL runs, and not what it learns
    r"logging_.*|log_.*|vllm_.*|use_vllm|dataloader_.*|fp16.*|bf16_.*|tf32|torch_compile.*|gradient_checkpointing.*|ddp_.*|fsdp.*|deepspeed"
    r"|ds3_.*|push_to_hub.*|hub_.*|save_strategy|save_.*|overwrite_output_dir|do_.*|per_device_eval_batch_size|eval_.*|num_completions_to_print"
    r"|wandb_.*|disable_tqdm|remove_unused_columns|use_liger.*|cache_implementation|use_transformers_paged|accelerator_config|parallelism_config"
    r"|include_.*|label_names|full_determinism|data_seed|local_rank|use_cpu|trackio_.*|project|sync_ref_model|disable_dropout|optim"
    r"|num_generations_eval|torch_empty_cache_steps|skip_memory_metrics|average_tokens_across_devices|hub_token|ray_scope|batch_eval_metrics"
)
LOSS_MEANS = {"grpo": "sequence", "dapo": "token", "bnpo": "token"}
ESTIMATORS: dict[object, str] = {"group": "group_norm", True: "group_norm", "none": "dr_grpo", False: "dr_grpo"}


class GRPOConfig:
    """Settings of GRPOTrainer by TRL's names, with TRL's defaults. Raises UserError for one without an equivalent."""

    def __init__(self, output_dir: str = "trainer_output", **settings: object) -> None:
        self.given = {"output_dir": output_dir, **settings}
        for name in settings:
            _check_known(name)

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        if name in DEFAULTS:
            return DEFAULTS[name]
        if name in RENAMED or name in CONVERTED:
            return None
        raise AttributeError(f"GRPOConfig has no setting {name}")


class GRPOTrainer:
    """TRL's trainer: the same arguments, `train`, `save_model` and `push_to_hub`. `recipe` is what it runs.

    Args:
        model: a model folder, or a name on the Hugging Face hub.
        reward_funcs: functions of TRL's signature, or the folder of a reward model.
        args: a GRPOConfig of this module or of TRL.
        train_dataset, eval_dataset: rows with the column `prompt`, texts or turns.
        callbacks: transformers' callbacks, see `rlhfless_ray.train`.
        peft_config: a peft.LoraConfig, of which rank, alpha, dropout and target_modules are read.

    Raises:
        UserError: For an argument or setting without an equivalent, or a mistake in one.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Rewards,
        args: object | None = None,
        train_dataset: Iterable[JsonObject] | str | None = None,
        eval_dataset: Iterable[JsonObject] | str | None = None,
        callbacks: Sequence[object] | None = None,
        peft_config: object | None = None,
        **others: object,
    ) -> None:
        for name, value in others.items():
            if value is not None and name != "processing_class":  # the tokenizer is that of the model folder
                raise UserError(f"GRPOTrainer: the argument `{name}` has no equivalent here; leave it out")
        if not isinstance(model, (str, Path)):
            raise UserError("GRPOTrainer: `model` must be a folder or a name on the hub, because each process loads it by itself")
        settings = _settings_of(args)
        keys = _recipe_settings(settings, peft_config)
        if eval_dataset is None:
            keys["evaluate.prompts"] = 0
        self.callbacks, self.settings, self.run = list(callbacks or ()), settings, None
        self.recipe: Recipe = make_recipe(
            str(model), train_dataset, reward_funcs, reward_weights=settings.get("reward_weights"), evaluate=eval_dataset, **keys
        )

    run: TrainedRun | None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainedRun:
        """Train to the end and return the run."""
        resume: bool | Literal["previous"] = bool(resume_from_checkpoint)
        self.run = run_recipe(self.recipe, self.callbacks, resume)
        return self.run

    def save_model(self, output_dir: str | None = None) -> None:
        """Copy the trained policy to a folder; default: `output_dir`/model, where it is already."""
        run = self._trained()
        if output_dir is not None and Path(output_dir) not in (run.folder, run.policy.folder):
            run.policy.save(output_dir)

    def push_to_hub(self, repo_id: str | None = None, **card: object) -> str:
        """Upload the policy with a model card; default: to `hub_model_id`."""
        name = repo_id or self.settings.get("hub_model_id") or self.recipe.run.name
        return self._trained().push_to_hub(str(name))

    def _trained(self) -> TrainedRun:
        if self.run is None:
            raise UserError("GRPOTrainer: call train first")
        return self.run


def _check_known(name: str) -> None:
    if name not in RENAMED and name not in CONVERTED and not WITHOUT_EFFECT.fullmatch(name):
        raise UserError(f"GRPOConfig: `{name}` has no equivalent here; leave it out (docs/trl-verl.md has those that do)")


def _settings_of(args: object | None) -> JsonObject:
    """Return the settings of a GRPOConfig, this module's or TRL's. Raises UserError for one of TRL's that is set and has no equivalent."""
    if args is None:
        return dict(DEFAULTS)
    if isinstance(args, GRPOConfig):
        return DEFAULTS | args.given
    if not dataclasses.is_dataclass(args):
        raise UserError(f"GRPOTrainer: `args` must be a GRPOConfig, not {type(args).__name__}")
    found: JsonObject = {}
    for one in dataclasses.fields(args):
        value = getattr(args, one.name)
        known = one.name in RENAMED or one.name in CONVERTED
        if not known and one.default is not dataclasses.MISSING and value != one.default:
            _check_known(one.name)
        if known and value is not None:
            found[one.name] = value
    return found


def _recipe_settings(settings: JsonObject, peft_config: object | None) -> JsonObject:
    """Return keys of a recipe. Raises UserError for values without an equivalent."""
    keys: JsonObject = {key: settings[name] for name, key in RENAMED.items() if settings.get(name) is not None}
    folder = Path(settings["output_dir"])
    keys |= {"run.root": str(folder.parent), "run.name": re.sub(r"[^\w.-]+", "-", folder.name).lstrip(".-")}
    keys["prompts.batch_prompts"] = _prompts_of_step(settings)
    if settings["max_steps"] > 0:
        keys["run.steps"] = settings["max_steps"]
    else:
        keys["run.episodes"] = max(1, math.ceil(settings["num_train_epochs"]))
    keys |= _schedule(settings)
    keys["learner.betas"] = (settings.get("adam_beta1") or 0.9, settings.get("adam_beta2") or 0.999)
    keys["algorithm.clip_high"] = settings.get("epsilon_high") or settings.get("epsilon") or 0.2
    keys["algorithm.loss_mean"] = _choice(settings, "loss_type", LOSS_MEANS)
    keys["algorithm.advantage.estimator"] = _choice(settings, "scale_rewards", ESTIMATORS)
    kind = _choice(settings, "importance_sampling_level", {"token": "ppo", "sequence": "gspo"})
    keys["algorithm.loss.kind"] = kind
    if kind == "gspo":
        keys["algorithm.loss_mean"] = "sequence"
    keys["prompts.max_prompt_tokens"] = settings.get("max_prompt_length") or 10**6
    if settings.get("max_prompt_length"):
        keys["prompts.overlong"] = "cut_left"
    if settings.get("eval_strategy") in ("steps",) and settings.get("eval_steps"):
        keys["evaluate.every_steps"] = int(settings["eval_steps"])
    dtype = str(
        (settings.get("model_init_kwargs") or {}).get("dtype") or (settings.get("model_init_kwargs") or {}).get("torch_dtype") or ""
    )
    if "bfloat16" in dtype:
        keys |= {"policy.dtype": "bfloat16", "learner.zero_stage": 1}
    reports = settings.get("report_to")
    names = [reports] if isinstance(reports, str) else reports
    if names is not None and not {"all", "wandb"} & set(names):
        keys["watch.wandb"] = "off"
    return keys | _lora(peft_config)


def _prompts_of_step(settings: JsonObject) -> int:
    """Return the prompts of a step: TRL counts completions, on each device and in each accumulated batch."""
    samples = settings.get("generation_batch_size")
    if samples is None:
        steps = settings.get("steps_per_generation") or settings["gradient_accumulation_steps"]
        samples = settings["per_device_train_batch_size"] * steps * _devices()
    prompts, left = divmod(samples, settings["num_generations"])
    if left or not prompts:
        raise UserError(
            f"GRPOConfig: {samples} completions of a step cannot be divided into groups of num_generations = {settings['num_generations']}"
        )
    return int(prompts)


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _schedule(settings: JsonObject) -> JsonObject:
    name = str(getattr(settings["lr_scheduler_type"], "value", settings["lr_scheduler_type"]))
    steps, share = settings.get("warmup_steps") or 0, settings.get("warmup_ratio") or 0.0
    if 0 < steps < 1:
        steps, share = 0, steps
    if name == "constant":
        return {"learner.schedule": name}
    if steps and settings["max_steps"] <= 0:
        raise UserError("GRPOConfig: warmup_steps needs max_steps here; set that, or give warmup_ratio")
    return {"learner.schedule": name, "learner.warmup_share": steps / settings["max_steps"] if steps else share}


def _choice(settings: JsonObject, name: str, choices: Mapping[Any, str]) -> str:
    value = settings.get(name, DEFAULTS[name])
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise UserError(f"GRPOConfig: {name} = {value!r} has no equivalent here; choose one of {known}")
    return choices[value]


def _lora(peft_config: Any | None) -> JsonObject:
    if peft_config is None:
        return {}
    read: Callable[[str], Any] = lambda name: getattr(peft_config, name, None)  # noqa: E731
    if read("r") is None:
        raise UserError(f"GRPOTrainer: peft_config must be a peft.LoraConfig, not {type(peft_config).__name__}")
    modules = read("target_modules")
    keys = {"lora.rank": read("r"), "lora.alpha": read("lora_alpha"), "lora.dropout": read("lora_dropout") or 0.0}
    return keys | ({"lora.target_modules": [modules] if isinstance(modules, str) else sorted(modules)} if modules else {})
