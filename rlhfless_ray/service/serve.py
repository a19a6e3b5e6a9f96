"""Start the server: models, keys, Ray, and a tenant for each key."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import uvicorn

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.functions.pool_client import join_pool
from rlhfless_ray.local.cluster import RayCluster
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.recipe.reading import apply_override
from rlhfless_ray.runtime.worker_pools import check_kv, make_leases
from rlhfless_ray.service.app import Service
from rlhfless_ray.service.tenant import ServedModel, Tenant
from rlhfless_ray.weights.load_policy import check_family, context_tokens, policy_tokenizer, read_model, text_config
from rlhfless_ray.weights.model_folder import parameter_count

LONGEST = 4096  # tokens of a sequence, unless `rollout.max_total_tokens` says it, or the model's context is shorter
DEFAULTS = {
    "learner": {"micro_batch_tokens": 8192, "gradient_checkpointing": False},
    "rollout": {"prefix_kv": "off", "speculation": "off"},
    "checkpoint": {"memory_every_steps": 1},
    "evaluate": {"prompts": 0},
}


# the client says the rank of adapters; a model has one rank and one slot
FIXED = {"lora.rank": 0, "learner.ranks": 1, "learner.zero_stage": 0, "rollout.tensor_parallel": 1, "rollout.engine": "exact"}


def base_model(name: str, folder: Path, overrides: Sequence[str] = ()) -> ServedModel:
    """Read a model folder. `overrides`: keys of a recipe, which say how engines and learners work. Raises UserError."""
    files = read_model(folder, "--model")
    check_family(files, "--model")
    tree: JsonObject = {"policy": {"path": str(folder)}, "prompts": {"task": "chain"}, "reward": {"function": "task"}, **deepcopy(DEFAULTS)}
    for override in overrides:
        apply_override(tree, override, Recipe)
    recipe = Recipe.parse(tree, "serve")
    for key, only in FIXED.items():
        section, _, field = key.partition(".")
        if (given := getattr(getattr(recipe, section), field)) != only:
            raise UserError(f"{key}: {given} is not served; leave it out")
    context = min(recipe.rollout.max_total_tokens or LONGEST, context_tokens(files) or LONGEST)
    end = policy_tokenizer(recipe, files).eos_token_id
    return ServedModel(name, folder, recipe, files, context, int(text_config(files)["vocab_size"]), end)


def serve(bases: Sequence[ServedModel], keys: Mapping[str, str], root: Path, host: str, port: int, idle_s: float) -> None:
    """Serve until interrupted.

    Args:
        keys: key → name of the tenant.
        root: folder of all checkpoints and ledgers; a tenant's are in its own folder there.
        idle_s: seconds after which a tenant without requests gives its slot back.
    """
    if wrong := [name for key, name in keys.items() if not key.startswith("tml-") or not name.isidentifier()]:
        raise UserError(f"--key: {wrong[0]}: expected NAME=tml-…, with a name of letters, digits and underscores")
    first = bases[0].recipe
    cluster = RayCluster(first, max(parameter_count(base.files) for base in bases), architectures=())
    with cluster.running(), contextlib.ExitStack() as stack:
        resource = cluster.resource()
        for base in bases:
            if resource == "cpu":
                check_kv(base.recipe, base.files, base.context - base.recipe.rollout.max_tokens)
        tenants = {}
        for key, name in keys.items():
            folder = root / name
            shared = None
            if not cluster.private and first.cluster.pool:
                shared = join_pool(first.cluster, first.price, resource, 1, folder, False, print)
            leases = make_leases(first, resource, folder, cluster.node_name, shared, print, private=False)
            tenants[key] = Tenant(name, folder, {base.name: base for base in bases}, leases, idle_s, private=cluster.private)
            stack.callback(tenants[key].close)
        app = Service(tenants, {base.name: base for base in bases}).app()
        print(f"serving {', '.join(base.name for base in bases)} at http://{host}:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)).run()
