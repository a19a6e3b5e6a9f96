"""The routes over tenants without slots: keys, mistakes and hostile input never reach a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.functions.ledger import Ledger
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.service import app
from rlhfless_ray.service.app import Service
from rlhfless_ray.service.serve import base_model
from rlhfless_ray.service.tenant import ServedModel, Tenant
from rlhfless_ray.service.wire import PROTOBUF
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import command_here
from tests.learn.tiny_policy import tiny_policy

pytestmark = pytest.mark.pure
MODEL = "Qwen/tiny"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TestClient]:
    """Alice has a checkpoint, bob has none."""
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "reward": {"function": "task"}})
    bases = {MODEL: ServedModel(MODEL, tmp_path, recipe, {}, 64, 61, 1)}
    ledger = Ledger("cpu")
    leases: Any = SimpleNamespace(held={}, pending={}, others_wait=lambda: False, ledger=ledger, release=lambda leases: None)
    tenants = {f"tml-{name}": Tenant(name, tmp_path / name, bases, leases, 1.0, private=True) for name in ("alice", "bob")}
    saved = tmp_path / "alice" / "m" / "weights" / "first"
    saved.mkdir(parents=True)
    about = {"path": "tinker://m/weights/first", "model": "m", "base_model": MODEL, "lora_rank": 8, "time_s": 0.0}
    (saved / "checkpoint.json").write_text(json.dumps(about))
    yield TestClient(Service(tenants, bases).app(), headers={"X-API-Key": "tml-alice"})
    for tenant in tenants.values():
        tenant.requests.close()
        tenant.thread.join(10)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "none"}, "base_model"),
        ("create_model", {"session_id": "s", "base_model": MODEL}, "model_seq_id"),
        ("create_model", {"session_id": "s", "model_seq_id": "1", "base_model": MODEL}, "model_seq_id"),
        ("create_model", {"session_id": "../s", "model_seq_id": 1, "base_model": MODEL}, "session_id"),
        ("create_model", {"session_id": "s", "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 0}}, "lora_config.rank"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {"beta1": 2}}, "adam_params.beta1"),
        ("optim_step", {"model_id": "x", "seq_id": 1}, "model_id"),
        ("asample", {"base_model": MODEL, "prompt": {"chunks": [{"tokens": [61]}]}}, "prompt.chunks.tokens"),
        ("asample", {"base_model": MODEL, "prompt": {"chunks": [{"tokens": [1]}]}, "prompt_logprobs": True}, "prompt_logprobs"),
        ("asample", {"base_model": MODEL, "prompt": {"chunks": [{"tokens": [1] * 64}]}}, "sampling_params.max_tokens"),
        ("asample", {"model_path": "tinker://m/sampler_weights/first"}, "path"),
        ("load_weights", {"model_id": "x", "path": "tinker://m/weights/..", "optimizer": True}, "path"),
        ("load_weights", {"model_id": "x", "path": "tinker://../weights/first", "optimizer": True}, "path"),
        ("load_weights", {"model_id": "x", "path": "tinker://m/weights/first", "optimizer": True}, "model_id"),
        ("retrieve_future", {"id": "x"}, "request_id"),
    ],
)
def test_mistake_names_its_field(server: TestClient, path: str, body: dict[str, Any], field: str) -> None:
    reply = server.post(f"/api/v1/{path}", json=body)
    assert (reply.status_code, reply.json()["category"]) == (422, "user")
    assert reply.json()["error"].startswith(field)


def test_key_sees_its_own_checkpoints_only(server: TestClient) -> None:
    [found] = server.get("/api/v1/training_runs/m/checkpoints").json()["checkpoints"]
    assert (found["tinker_path"], found["checkpoint_type"]) == ("tinker://m/weights/first", "training")
    other = {"X-API-Key": "tml-bob"}
    assert server.get("/api/v1/checkpoints", headers=other).json() == {"checkpoints": []}
    load = {"session_id": "s", "model_seq_id": 0, "path": "tinker://m/weights/first", "optimizer": True}
    assert server.post("/api/v1/load_weights", json=load, headers=other).status_code == 422
    assert server.delete("/api/v1/training_runs/m/checkpoints/weights/first", headers=other).status_code == 422
    assert server.delete("/api/v1/training_runs/m/checkpoints/weights/first").status_code == 200
    assert server.get("/api/v1/checkpoints").json() == {"checkpoints": []}


@pytest.mark.parametrize("key", ["", "tml-eve", "tml-alice2", "\xff"])
def test_unknown_key_is_refused(server: TestClient, key: str) -> None:
    assert server.post("/api/v1/create_session", json={}, headers={"X-API-Key": key.encode("latin-1")}).status_code == 401


def test_body_that_is_no_message_is_refused(server: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = server.post("/api/v1/forward_backward", content=b"\xff\xff\xff", headers={"Content-Type": PROTOBUF})
    assert (torn.status_code, torn.json()["category"]) == (422, "user")
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
        assert server.post("/api/v1/optim_step", content=content).status_code == 400
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 100)
    assert server.post("/api/v1/optim_step", content=b" " * 101).status_code == 413


@pytest.mark.parametrize("setting", ["lora.rank=8", "learner.ranks=2", "rollout.engine=stock"])
def test_setting_that_is_not_served_is_refused(tmp_path: Path, setting: str) -> None:
    folder = write_folder(tmp_path / "tiny", tiny_policy() | {"tokenizer.json": b"{}"})
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        base_model(MODEL, folder, [setting])


@pytest.mark.parametrize(
    ("arguments", "option"), [([], "--tinker"), (["--tinker"], "--model"), (["--tinker", "--model", "x=y", "--key", "k"], "--key")]
)
def test_command_names_what_is_missing(arguments: list[str], option: str) -> None:
    result = command_here("serve", *arguments)
    assert (result.returncode, option in result.stderr) == (2, True), result.stderr


def test_unknown_promise_has_expired(server: TestClient) -> None:
    assert server.post("/api/v1/retrieve_future", json={"request_id": "none"}).status_code == 410
