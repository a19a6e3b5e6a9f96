"""`serve_rm` and the HTTP client of it, together and apart."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.reward.http_reward import HttpSource
from rlhfless_ray.reward.reward_server import TextScorer, create_server
from rlhfless_ray.weights.model_folder import write_folder
from tests.conftest import ROOT, command_here, environment
from tests.reward.reward_models import reward_model
from tests.reward.test_model import by_transformers

MODULE = "rlhfless_ray.cli.serve_rm"
TEXTS = ["w3 w4", "w5", "w6 w7 w8 w9 w1", "w3 w3 w3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("reward_model"), reward_model(family="Llama", config={"mean": 1.0, "std": 2.0}))


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    return by_transformers(folder, [np.array([int(word[1:]) for word in text.split()], np.int32) for text in TEXTS])


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    made = create_server(TextScorer(folder, "score", "float32", "cpu", max_tokens=5), "127.0.0.1", 0)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/get_reward"
    made.shutdown()
    made.server_close()


def test_our_client_gets_what_transformers_gives(url: str, expected: np.ndarray) -> None:
    worker = HttpSource.load([url], "", 20.0, 3).worker(20.0)
    scores = sorted(worker.score([(i, text, "", "") for i, text in enumerate(TEXTS)], 20.0), key=lambda s: s.key)
    assert [s.error for s in scores] == [None] * len(TEXTS)
    np.testing.assert_allclose([s.reward for s in scores], expected, atol=2e-5)
    assert all(s.score == s.reward and s.extra_logs == {"dummy_scores": s.reward} for s in scores)


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_batches_statistics_and_cut_ends(
    folder: Path, expected: np.ndarray, batch_size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = TextScorer(folder, "score", "float32", "cpu", normalize=True, max_tokens=3, batch_size=batch_size)
    found = scorer.rewards([*TEXTS, "w3 w4", "w3 w3 w3 w9 w9"])
    np.testing.assert_allclose(np.array(found)[[0, 1, 3, 4]], (expected[[0, 1, 3, 0]] - 1.0) / 2.0, atol=2e-5)
    assert found[5] == pytest.approx(found[3], abs=2e-5)
    assert "2 of 6 texts are longer than 3 tokens" in capsys.readouterr().err


def refused(url: str, body: bytes) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=120)
    return caught.value.code, json.loads(caught.value.read())["error"]


def test_bad_requests_are_told_and_the_server_goes_on(url: str) -> None:
    assert refused(url, b"{")[0] == refused(url, b"[]")[0] == 400
    assert refused(url, b'{"queries": ["w3"]}') == (400, 'expected JSON such as {"query": ["prompt and response", …]}')
    assert refused(url, b'{"query": [1]}') == (400, "`query` must be a list of texts")
    assert refused(url, b'{"query": [""]}') == (400, "cannot score an empty text")
    assert refused(url.replace("get_reward", "other"), b"{}")[0] == 404
    with urllib.request.urlopen(urllib.request.Request(url, b'{"query": "w3", "prompts": [""], "labels": [""]}'), timeout=120) as answer:
        assert len(json.loads(answer.read())["rewards"]) == 1
    with pytest.raises(UserError, match=r"--host 127.0.0.1 --port \d+: Address already in use"):
        create_server(None, "127.0.0.1", int(url.split(":")[2].split("/")[0]))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_the_command_serves_on_loopback_with_flags_of_any_version(folder: Path, expected: np.ndarray) -> None:
    flags = ["--max_len", "64", "--flash_attn", "--ds.attn_implementation", "eager", "--ds.param_dtype", "fp32", "--port", "0"]
    command = forked([sys.executable, "-m", MODULE, "--reward_pretrain", str(folder), *flags])
    running = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith(f"serving {folder} at http://127.0.0.1:") and line.endswith("/get_reward\n"), running.communicate()[1]
        worker = HttpSource.load([line.split()[-1]], "", 20.0, 1).worker(20.0)
        assert worker.score([(0, TEXTS[0], "", "")], 20.0)[0].reward == pytest.approx(expected[0], abs=2e-5)
    finally:
        running.terminate()
        running.wait(20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reward_pretrain", "/nowhere"], "error: --reward.model_name_or_path: /nowhere is not a folder"),
        (["--reward_pretrain", "FOLDER", "--value_head_prefix", "v"], "no scalar head `v`; it has `score`"),
        (["--reward_pretrain", "FOLDER", "--load_in_4bit"], "error: --load_in_4bit is not supported"),
        ([], "the following arguments are required: --reward.model_name_or_path/--reward_pretrain"),
    ],
)
def test_mistakes_end_it_with_code_2(folder: Path, flags: list[str], words: str) -> None:
    done = command_here(*[str(folder) if flag == "FOLDER" else flag for flag in flags], module=MODULE)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
