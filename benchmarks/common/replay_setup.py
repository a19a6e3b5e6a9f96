"""What a replayed run needs on disk: a policy folder with a script in it, prompts, and a reward that costs next to nothing."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.replay import Script, prompt_key
from rlhfless_ray.local.laptop.forked_workers import ForkServer, worker_prefix
from rlhfless_ray.local.laptop.local_ray import WORKER_PREFIX, local_ray
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.model_folder import write_folder
from rlhfless_ray.weights.tiny_model import scratch_policy

REWARD = '''def reward(prompt, response, row):
    """Varies, so that groups have advantages; what it is does not matter here."""
    return float(len(response) % 2)
'''


@dataclass(frozen=True)
class ReplaySetup:
    policy: Path
    prompts: Path
    reward: Path


def synthetic_lengths(prompts: int, samples: int, max_tokens: int, seed: int) -> np.ndarray:
    """(prompts, samples) response tokens: log-normal with median 300, 65 % of the variance of the log between prompts."""
    rng = np.random.default_rng(seed)
    log = np.log(300) + 0.7 * (np.sqrt(0.65) * rng.standard_normal((prompts, 1)) + np.sqrt(0.35) * rng.standard_normal((prompts, samples)))
    return np.clip(np.round(np.exp(log)), 8, max_tokens).astype(int)


def build(
    folder: Path, lengths: np.ndarray, *, base_s: float, per_seq_s: float, start_s: float, learn_s: float, clock: float
) -> ReplaySetup:
    """Write the world of a replayed run. lengths (prompts, samples): what the responses to each prompt measure."""
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"hidden_size": 32, "layers": 1}})
    chain = task("chain")
    files = scratch_policy(recipe, chain)
    config = json.loads(files["config.json"])
    config["max_position_embeddings"] = 2**16
    files["config.json"] = json.dumps(config).encode()
    policy = write_folder(folder / "policy", files)
    from rlhfless_ray.weights.load_policy import load_tokenizer

    tokenizer = load_tokenizer(files, False)
    rows = chain.rows(3 * len(lengths), 0, "train")  # short ones repeat
    texts = list(dict.fromkeys(row["prompt"] for row in rows))[: len(lengths)]
    ids = tokenizer(texts)["input_ids"]
    table = {prompt_key(tuple(one)): row.tolist() for one, row in zip(ids, lengths, strict=True)}
    Script(table, base_s, per_seq_s, start_s, learn_s, clock).write(policy)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    return ReplaySetup(policy, prompts, reward)


@contextmanager
def forking_workers() -> Iterator[None]:
    """Have the workers of Rays that start inside the block forked, as they are on a private Ray: a hundred replayed engines that import
    everything would measure this machine's cores."""
    with ExitStack() as stack:
        if WORKER_PREFIX not in os.environ:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhfless-")))
            server = ForkServer(folder, (), engines=True)
            stack.callback(server.close)
            os.environ[WORKER_PREFIX] = worker_prefix(server.address)
            stack.callback(os.environ.pop, WORKER_PREFIX)
        yield


@contextmanager
def logical_gpus(count: int, store_mb: int = 512) -> Iterator[None]:
    """Run a local Ray with so many GPUs that are only numbers."""
    import ray

    with forking_workers():
        with local_ray():
            ray.init(
                address="local",
                num_cpus=4,
                num_gpus=count,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=store_mb * 2**20,
            )
        try:
            yield
        finally:
            ray.shutdown()


def recipe_for(
    world: ReplaySetup, folder: Path, *, steps: int, prompts: int, samples: int, actors: int, max_tokens: int, **sections: Any
) -> Recipe:
    tree: dict[str, Any] = {
        "run": {"name": "replayed", "root": str(folder / "runs"), "steps": steps},
        "policy": {"path": str(world.policy)},
        "prompts": {"path": str(world.prompts), "prompt_column": "prompt", "answer_column": "", "batch_prompts": prompts},
        "evaluate": {"prompts": 0},
        "rollout": {"samples_per_prompt": samples, "max_tokens": max_tokens, "max_actors": actors},
        # what the replayed learner takes is one number for all of an update: nothing of it can be done before
        "learner": {"overlap": "off"},
        "reward": {"function": f"{world.reward}:reward"},
        "checkpoint": {"every_steps": 10**6},
        "watch": {"progress": "off", "tensorboard": False, "wandb": "off"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Recipe.parse(tree)
