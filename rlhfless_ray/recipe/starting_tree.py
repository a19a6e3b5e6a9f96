"""The recipe with which `rlhfless init` and `rlhfless plan MODEL` begin."""

from __future__ import annotations

from rlhfless_ray.common.json_types import JsonObject

FIRST_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
FIRST_DATA, FIRST_COLUMN = "openai/gsm8k@main", "question"


def starting_tree(model: str, data: str = FIRST_DATA, column: str = FIRST_COLUMN, reward: JsonObject | None = None) -> JsonObject:
    """Return GRPO on chat prompts as a recipe's tree. `reward`: its section; `math` by default."""
    return {
        "policy": {"path": model},
        "prompts": {"path": data, "prompt_column": column, "template": "chat", "batch_prompts": 32},
        "rollout": {"samples_per_prompt": 8, "max_tokens": 512},
        "reward": reward or {"function": "math"},
        "learner": {"learning_rate": 1e-6},
        "run": {"steps": 100},
    }
