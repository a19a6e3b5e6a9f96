"""TRL's side of the comparison. Runs in TRL's own environment: `python trl_process.py SETTINGS.json`.

It imports nothing of this project but the settings' reward (a file, or a built-in task's verifier, which is pure Python).
Writes the times of every step to the file that the settings name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def reward_function(settings: dict[str, Any]) -> Callable[..., list[float]]:
    """A TRL reward function from `path/to/file.py` with `reward(prompt, response, row)`, or from `task:<name>`."""
    if settings["reward"].startswith("task:"):
        sys.path.insert(0, settings["root"])
        task = importlib.import_module("rlhfless_ray.prompts.builtin_tasks").task(settings["reward"].removeprefix("task:"))

        def one(prompt: str, response: str, row: dict) -> float:
            return task.verify(response, row)
    else:
        spec = importlib.util.spec_from_file_location("benchmark_reward", settings["reward"])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        one = module.reward

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        names = [name for name in settings["columns"] if name in columns]
        rows = [{name: columns[name][i] for name in names} for i in range(len(prompts))]
        return [float(one(*item)) for item in zip(prompts, completions, rows, strict=True)]

    return reward


class Clock:
    """Seconds of wrapped methods since the last `take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


def main(settings: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    imported_s = time.time()
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"])
    rows = [json.loads(line) for line in Path(settings["prompts"]).read_text().splitlines()]
    samples = settings["prompts_per_step"] * settings["group"]
    alike = {"bf16": False, "gradient_checkpointing": False} if settings["alike"] else {}
    micro = settings["micro_sequences"] if settings["alike"] else GRPOConfig.per_device_train_batch_size
    if samples % micro:
        raise SystemExit(f"{micro} sequences per micro-batch do not divide {samples} samples per step")
    config = GRPOConfig(
        output_dir=settings["scratch"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=settings["seed"],
        max_steps=settings["steps"],
        **alike,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=samples // micro,
        num_generations=settings["group"],
        max_completion_length=settings["max_tokens"],
        shuffle_dataset=False,
        temperature=settings["temperature"],
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        learning_rate=settings["learning_rate"],
        **{"epsilon": 0.2, "weight_decay": 0.0, "max_grad_norm": 1.0, **settings["config"]},
    )
    clock = Clock()
    steps: list[dict[str, Any]] = []
    last_step: dict[str, Any] = {}

    class GRPOTimes(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began_s = self.last = time.perf_counter()
            self.ready_s = time.time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            seconds = clock.take()
            prepare_s = seconds.get("prepare", 0.0)
            wall_s, self.last = now - self.last, now
            steps.append(
                {
                    "step_s": wall_s,
                    "generate_s": seconds.get("generate", 0.0),
                    "score_s": seconds.get("score", 0.0),
                    "prepare_s": prepare_s,
                    "learn_s": wall_s - prepare_s,
                    "time_s": now - self.began_s,
                    **last_step,
                }
            )

    times = GRPOTimes()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_function(settings),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    calculate, generate = trainer._calculate_rewards, trainer._generate

    def rewards(*args: Any, **kwargs: Any) -> Any:
        found = calculate(*args, **kwargs)
        last_step["reward_mean"] = float(found.mean())
        return found

    def generated(*args: Any, **kwargs: Any) -> Any:
        found = generate(*args, **kwargs)
        last_step["tokens"] = sum(len(ids) for ids in found[1])
        return found

    trainer._calculate_rewards, trainer._generate = rewards, generated
    clock.around(trainer, "_generate", "generate")
    clock.around(trainer, "_calculate_rewards", "score")
    clock.around(trainer, "_generate_and_score_completions", "prepare")
    trainer.train()
    from importlib.metadata import version

    result = {
        "import_s": imported_s - settings["spawned_s"],
        "start_up_s": times.ready_s - settings["spawned_s"],
        "steps": steps,
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
    }
    Path(settings["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
