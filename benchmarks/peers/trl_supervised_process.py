"""TRL's SFTTrainer or DPOTrainer, in TRL's own environment: `python trl_supervised_process.py SETTINGS.json`.

Imports nothing of this project. Writes the times, tokens and losses of all steps to the file that the settings name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(settings: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(settings["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"])
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    micro = settings["micro_rows"]
    common: dict[str, Any] = {
        "output_dir": settings["scratch"],
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "max_steps": settings["steps"],
        "bf16": settings["bf16"],
        "gradient_checkpointing": settings["checkpointing"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": settings["batch_rows"] // micro,
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_length": settings["max_tokens"],
        "train_sampling_strategy": "sequential",
    }
    steps: list[dict[str, Any]] = []
    tokens = [0]
    times: dict[str, float] = {}

    class SupervisedTimes(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            times.setdefault("ready_s", time.time())
            times["began"] = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append({"step_s": time.perf_counter() - times["began"], "tokens": tokens[0]})
            tokens[0] = 0

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                steps[-1]["loss"] = logs["loss"]

    data = Dataset.from_list(rows)
    shared = {"model": model, "train_dataset": data, "processing_class": tokenizer, "callbacks": [SupervisedTimes()]}
    if settings["task"] == "sft":
        trainer: Any = SFTTrainer(args=SFTConfig(**common, completion_only_loss=True), **shared)
    else:
        trainer = DPOTrainer(args=DPOConfig(**common, beta=settings["beta"], precompute_ref_log_probs=True), **shared)
    inner = trainer.training_step

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens[0] += int(inputs["attention_mask"].sum())
        return inner(model, inputs, *args, **kwargs)

    trainer.training_step = counted
    trainer.train()
    from importlib.metadata import version

    names = ("trl", "transformers", "torch", "accelerate")
    result = {"start_up_s": times["ready_s"] - settings["spawned_s"], "steps": steps, "versions": {name: version(name) for name in names}}
    Path(settings["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
