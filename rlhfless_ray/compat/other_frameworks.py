"""Commands of TRL and verl: they are not run, but their simple settings are shown as a recipe's."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.recipe_keys import nested
from rlhfless_ray.recipe.yaml_text import read_yaml, write_yaml

PAGE = "docs/trl-verl.md"
STAGES = {"sft": "sft", "dpo": "dpo", "reward": "rm", "kto": "kto"}  # subcommands of TRL that are supervised stages here
TRL_COMMANDS = ("grpo", "rloo", *STAGES)
VERL = re.compile(r"(?:-m)?verl\.(?:trainer|experimental|recipe)\b[\w.]*")
IN_SCRIPT = re.compile(r"-m\s*verl\.trainer\b|^\s*trl\s+(?:" + "|".join(TRL_COMMANDS) + r")\b", re.MULTILINE)

OF_TRL = {
    "model_name_or_path": "policy.path",
    "dtype": "policy.dtype",
    "dataset_name": "prompts.path",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "prompts.max_prompt_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "num_iterations": "algorithm.epochs",
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
}
OF_TRL_STAGES = {"model_name_or_path": "policy.path", "dtype": "policy.dtype", "dataset_name": "data.path", "max_length": "data.max_tokens"}
OF_BOTH = {
    "learning_rate": "learner.learning_rate",
    "max_grad_norm": "learner.grad_clip",
    "weight_decay": "learner.weight_decay",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "seed": "run.seed",
}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
OF_VERL = {
    "actor_rollout_ref.model.path": "policy.path",
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "data.train_files": "prompts.path",
    "data.prompt_key": "prompts.prompt_column",
    "data.train_batch_size": "prompts.batch_prompts",
    "data.max_prompt_length": "prompts.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    f"{ROLLOUT}.n": "rollout.samples_per_prompt",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel",
    f"{ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_share",
    f"{ACTOR}.optim.lr": "learner.learning_rate",
    f"{ACTOR}.optim.weight_decay": "learner.weight_decay",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    f"{ACTOR}.ulysses_sequence_parallel_size": "learner.sequence_parallel",
    f"{ACTOR}.kl_loss_coef": "algorithm.kl.coefficient",
    f"{ACTOR}.clip_ratio_low": "algorithm.clip_low",
    f"{ACTOR}.clip_ratio_high": "algorithm.clip_high",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.lam": "algorithm.advantage.lambd",
    "critic.optim.lr": "critic.learning_rate",
    "trainer.total_training_steps": "run.steps",
}
ESTIMATORS = {"grpo": "group_norm", "gae": "gae", "rloo": "rloo"}  # of `algorithm.adv_estimator`


@dataclass
class Mapped:
    """A command of another framework. settings: recipe keys that its simple settings set; unmapped: its other settings."""

    framework: str
    settings: JsonObject = field(default_factory=dict)
    unmapped: list[str] = field(default_factory=list)

    def text(self, command: Sequence[str]) -> str:
        """Say where the page is, and show the settings as a recipe."""
        lines = [f"`{shlex.join(command)[:80]}` is a command of {self.framework}, which is not run here. {PAGE} maps its settings."]
        if self.settings:
            lines += [
                "its simple ones as a recipe, to which a reward and the others are to be added:",
                "",
                write_yaml(nested(self.settings)),
            ]
        if self.unmapped:
            lines.append(f"not mapped here, see the page: {' '.join(self.unmapped)}")
        return "\n".join(lines)


def other_framework(argv: Sequence[str]) -> Mapped | None:
    """Return what a command of TRL or verl sets, or None for another command. A script is only searched for such a command."""
    for place, word in enumerate(argv):
        if VERL.fullmatch(word) and (word.startswith("-m") or argv[place - 1] == "-m"):
            return _verl(argv[place + 1 :])
        if Path(word).name == "trl" and argv[place + 1 : place + 2] and argv[place + 1] in TRL_COMMANDS:
            return _trl(argv[place + 1], argv[place + 2 :])
    for before, word in pairwise(["", *argv]):
        script = Path(word)
        if (word.endswith(".sh") or Path(before).name in ("bash", "sh")) and script.is_file():
            text = script.read_text(encoding="utf-8", errors="replace")
            if "openrlhf" not in text and (found := IN_SCRIPT.search(text)):
                return Mapped("verl" if "verl" in found[0] else "TRL")
    return None


def _verl(words: Sequence[str]) -> Mapped:
    found = Mapped("verl")
    for word in words:
        key, equals, text = word.lstrip("+").partition("=")
        if not equals:
            continue
        if OF_VERL.get(key):
            found.settings[OF_VERL[key]] = _read(text)
        elif key == "algorithm.adv_estimator" and text in ESTIMATORS:
            found.settings["algorithm.advantage.estimator"] = ESTIMATORS[text]
        else:
            found.unmapped.append(key)
    return found


def _trl(command: str, words: Sequence[str]) -> Mapped:
    found = Mapped("TRL", {"task": STAGES[command]} if command in STAGES else {})
    known = {**OF_BOTH, **(OF_TRL_STAGES if command in STAGES else OF_TRL)}
    for name, text in _flags(words):
        if name in known and text:
            found.settings[known[name]] = _read(text)
        else:
            found.unmapped.append(f"--{name}")
    return found


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield flags with their values, an empty one for a switch."""
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--") and word != "--":
            name, equals, text = word[2:].partition("=")
            yield name.replace("-", "_"), text if equals else "" if following.startswith("--") else following


def _read(text: str) -> object:
    """Read a value: a number, or a text. Hydra writes a list of one file in brackets."""
    value = read_yaml(text) if text else ""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int | float) else str(value)
