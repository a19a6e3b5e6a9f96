"""The server as a process: plain HTTP with two tenants, and the public SDK where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from rlhfless_ray.learn.process_group import free_port
from rlhfless_ray.service.wire import CLASSES, PROTOBUF
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import ROOT, environment

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.learner]
MODEL = "Qwen/tiny"
SDK = os.environ.get("RLHFLESS_TINKER_PYTHON", "")
IDLE_S = 2.0


class Client:
    def __init__(self, address: str, key: str) -> None:
        self.address, self.key = address, key

    def send(self, path: str, body: dict[str, Any] | bytes | None = None, method: str = "") -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = PROTOBUF if isinstance(body, bytes) else "application/json"
        headers = {"X-API-Key": self.key, "Content-Type": kind}
        asked = Request(f"{self.address}/api/v1/{path}", content, headers, method=method or ("GET" if body is None else "POST"))
        try:
            with urlopen(asked, timeout=60) as reply:
                found = reply.read()
                return reply.status, found if reply.headers["content-type"] == PROTOBUF else json.loads(found)
        except HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def wait(self, promise: dict[str, Any]) -> Any:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            status, reply = self.send("retrieve_future", {"request_id": promise["request_id"]})
            if status != 408:
                return reply
            assert reply["type"] == "try_again"
        raise AssertionError("no result in time")

    def call(self, route: str, **body: Any) -> Any:
        status, promise = self.send(route, body)
        assert status == 200, promise
        return self.wait(promise)


def passes(model: str, number: int, tokens: list[int], forward_only: bool = False, loss: str = "cross_entropy") -> bytes:
    message = CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=number, loss_fn=loss, forward_only=forward_only)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
    targets = {"dense": np.array(tokens[1:], np.int64).tobytes(), "dtype": 2, "shape": [len(tokens) - 1]}
    datum.loss_fn_inputs.add(key="target_tokens", value=CLASSES["Tensor"](**targets))
    return message.SerializeToString()


def loss_of(content: bytes) -> float:
    return {one.key: one.value for one in CLASSES["ForwardBackwardOutput"].FromString(content).metrics}["loss:sum"]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from rlhfless_ray.prompts.builtin_tasks import task
    from rlhfless_ray.recipe import Recipe
    from rlhfless_ray.weights.tiny_model import scratch_policy

    folder = tmp_path_factory.mktemp("service")
    tree = {"prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"hidden_size": 64, "layers": 2}}
    write_folder(folder / "tiny", scratch_policy(Recipe.parse(tree), task("chain")))
    port = free_port("127.0.0.1")
    given = ["--model", f"{MODEL}={folder / 'tiny'}", "--key", "alice=tml-alice", "--key", "bob=tml-bob", "--port", str(port)]
    settings = ["rollout.max_total_tokens=64", "rollout.kv_cache_mb=64", "rollout.max_running=64"]
    command = [sys.executable, "-m", "rlhfless_ray", "serve", "--tinker", *given, "--root", str(folder / "root"), "--idle-s", str(IDLE_S)]
    log = (folder / "log").open("w")
    server = subprocess.Popen([*command, *settings], stdout=log, stderr=log, cwd=ROOT, env=environment())
    where = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and server.poll() is None:
            try:
                urlopen(f"{where}/api/v1/healthz", timeout=5).read()
                break
            except OSError:
                time.sleep(0.2)
        else:
            raise AssertionError((folder / "log").read_text())
        yield where
    finally:
        server.terminate()
        server.wait(60)
        log.close()
        print((folder / "log").read_text())


TOKENS = [2, 3, 4, 5, 6, 7]


def train(client: Client, session: str, **create: Any) -> tuple[str, list[float]]:
    """Four supervised steps on one sequence. Returns the model and the loss before each."""
    model = client.call("create_model", session_id=session, model_seq_id=0, base_model=MODEL, **create)["model_id"]
    losses = []
    for step in range(4):
        status, promise = client.send("forward_backward", passes(model, 2 * step + 1, TOKENS))
        assert status == 200, promise
        losses.append(loss_of(client.wait(promise)))
        done = client.call("optim_step", model_id=model, seq_id=2 * step + 2, adam_params={"learning_rate": 0.01})
        assert done["metrics"]["grad_norm:mean"] > 0, done
    return model, losses


@pytest.fixture(scope="module")
def trained(address: str) -> tuple[Client, str, list[float]]:
    client = Client(address, "tml-alice")
    session = client.send("create_session", {})[1]["session_id"]
    return client, *train(client, session)


def test_model_learns_all_its_weights(trained: tuple[Client, str, list[float]]) -> None:
    assert trained[2][-1] < trained[2][0] / 2


def test_request_with_the_same_number_is_done_once(trained: tuple[Client, str, list[float]]) -> None:
    client, model, losses = trained
    assert loss_of(client.wait(client.send("forward_backward", passes(model, 1, TOKENS))[1])) == losses[0]


def test_requests_are_done_in_the_order_of_their_numbers(trained: tuple[Client, str, list[float]]) -> None:
    client, model, _ = trained
    later = client.send("forward_backward", passes(model, 10, TOKENS, forward_only=True))[1]
    early = client.send("forward_backward", passes(model, 9, TOKENS, forward_only=True))[1]
    assert loss_of(client.wait(early)) == loss_of(client.wait(later))


def test_weights_are_saved_loaded_and_sampled_from(trained: tuple[Client, str, list[float]]) -> None:
    client, model, _ = trained
    before = loss_of(client.wait(client.send("forward_backward", passes(model, 11, TOKENS, forward_only=True))[1]))
    path = client.call("save_weights", model_id=model, seq_id=12, path="first")["path"]
    assert path == f"tinker://{model}/weights/first"
    for_sampler = client.call("save_weights_for_sampler", model_id=model, seq_id=13, path="first")["path"]
    params = {"max_tokens": 4, "temperature": 0.0}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:2]}]}
    content = client.call("asample", model_path=for_sampler, prompt=prompt, num_samples=2, sampling_params=params)
    assert isinstance(content, bytes), content
    for one in CLASSES["SampleResponse"].FromString(content).sequences:
        assert np.frombuffer(one.tokens, np.int32).tolist() == TOKENS[2:]
        assert len(np.frombuffer(one.logprobs, np.float32)) == 4
    loaded = client.call("load_weights", session_id="again", model_seq_id=1, path=path, optimizer=True)["model_id"]
    assert loss_of(client.wait(client.send("forward_backward", passes(loaded, 1, TOKENS, forward_only=True))[1])) == pytest.approx(before)
    listed = [one["tinker_path"] for one in client.send(f"training_runs/{model}/checkpoints")[1]["checkpoints"]]
    assert listed == [path, for_sampler]
    assert client.send(f"training_runs/{model}/checkpoints/weights/first", method="DELETE")[0] == 200
    assert client.send(f"training_runs/{model}/checkpoints")[1]["checkpoints"][0]["tinker_path"] == for_sampler


def test_tenants_side_by_side_learn_the_same_as_one_alone(trained: tuple[Client, str, list[float]], address: str) -> None:
    other = Client(address, "tml-bob")
    with ThreadPoolExecutor() as both:
        begun = [both.submit(train, client, session) for client, session in ((other, "other"), (trained[0], "beside"))]
        (model, losses), (_, of_first) = [one.result() for one in begun]
    assert losses == of_first == trained[2]
    status, reply = trained[0].send("get_info", {"model_id": model})
    assert (status, reply["category"]) == (422, "user")
    assert other.send("checkpoints")[1] == {"checkpoints": []}


def test_idle_tenant_holds_no_slot_and_has_a_bill(trained: tuple[Client, str, list[float]]) -> None:
    client = trained[0]
    end = time.monotonic() + IDLE_S + 30
    while (bill := client.send("bill")[1])["held_slots"] and time.monotonic() < end:
        time.sleep(0.2)
    assert (bill["key"], bill["held_slots"]) == ("alice", 0)
    assert bill["full_slot_s"] > 0


@pytest.mark.long
@pytest.mark.skipif(not SDK, reason="RLHFLESS_TINKER_PYTHON names no Python with the `tinker` SDK")
def test_public_sdk_learns_from_examples_and_rewards(address: str) -> None:
    variables = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-alice", "PYTHONPATH": ""}
    ran = subprocess.run(
        [SDK, str(Path(__file__).with_name("sdk_loops.py")), MODEL], env=variables, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    print(ran.stdout)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["losses"][-1] < 0.7 * found["losses"][0]
    assert max(found["rewards"][-2:]) > found["rewards"][0]
