"""Before the first step a reward file is called once: what is wrong with it is one sentence."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local import isolated_call as module
from rlhfless_ray.reward import preflight_reward as dry
from rlhfless_ray.reward.http_reward import HttpSource
from rlhfless_ray.reward.openrlhf_reward import QuerySource
from rlhfless_ray.reward.preflight_reward import check_references, dry_call, find_server
from rlhfless_ray.reward.reward_functions import RewardSource
from rlhfless_ray.reward.user_file import UserFile
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.load_policy import load_tokenizer
from tests.conftest import lives
from tests.reward.reward_models import tokenizer_files

PROMPTS = [Prompt(i, f"w{3 + i}", (3 + i,), {"answer": "w9"}) for i in range(2)]
GOOD = """
def reward_func(queries, prompts, labels):
    assert all(q.split()[:1] == p.split() for q, p in zip(queries, prompts)), (queries, prompts)
    assert set(labels) == {"w9"} and queries[0].split() in (["w3"], ["w4", "w9"]), queries
    print("hello")
    return [1.0] * len(queries)
"""


def called(text: str, batch_samples: int = 1, timeout_s: float = 30.0) -> None:
    source = QuerySource(UserFile("mine.py", text), "reward_func", "answer", batch_samples)
    dry_call(source, PROMPTS, load_tokenizer(tokenizer_files(), False), timeout_s)


@pytest.mark.parametrize("batch_samples", [1, 4])
def test_a_good_file_passes(batch_samples: int, capfd: pytest.CaptureFixture[str]) -> None:
    called(GOOD, batch_samples)
    assert "hello" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return {'reward': [0.0]}", r"`reward_func` returned a dict with the key `reward`: write `rewards`"),
        ("return {'rewards': [0.0, 1.0], 'scores': [1.0]}", r"returned 2 values in `rewards` for 1 query"),
        ("return None", r"returned NoneType, neither rewards nor a dict"),
        ("return labels[7]", r"IndexError: list index out of range \(mine.py, line 2\)"),
        ("import time; time.sleep(60)", r"took longer than reward.timeout_s = 0.3 s"),
        ("import os; os._exit(7)", r"its process ended with code 7 in a dry call"),
    ],
)
def test_what_fails_for_every_response_is_named(body: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^reward.function mine.py:reward_func: .*{words}"):
        called(f"def reward_func(queries, prompts, labels):\n    {body}\n", timeout_s=0.3 if "sleep" in body else 30.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(99)",
        "while True:\n        try: time.sleep(99)\n        except BaseException: pass",
    ],
    ids=["blocks signals", "catches everything"],
)
def test_a_function_that_nothing_interrupts_is_given_up_soon_after_its_limit(body: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(UserError, match=r"a dry call did not return within 6.2 s"):
        called(f"import signal, time\ndef reward_func(q, p, l):\n    {body}", timeout_s=0.3)
    assert time.monotonic() - began_s < 40, "long before the limit of the process's start"


def test_what_a_file_starts_and_leaves_is_not_waited_for_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker of proofs, say: it has the process's output open for as long as it lives."""
    monkeypatch.setattr(module, "START_S", 60.0)
    note = tmp_path / "helper"
    called(f"""
import subprocess
with open({str(note)!r}, "a") as file:
    file.write(f"{{subprocess.Popen(['sleep', '300']).pid}} ")
{GOOD}""")
    started = [int(one) for one in note.read_text().split()]
    end = time.monotonic() + 90
    while (left := [one for one in started if lives(one)]) and time.monotonic() < end:
        time.sleep(0.01)
    assert started and not left


@pytest.mark.parametrize("body", ["return [1.0] * len(queries)", "import os; os._exit(3)", "import os; os.abort()"])
@pytest.mark.parametrize("command", [["sleep", "300"], ["setsid", "--fork", "sh", "-c", "echo $$ >> helper; exec sleep 300"]])
def test_processes_in_a_session_of_their_own_end_with_a_dry_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, command: list[str]
) -> None:
    """Also those that have no environment and no parent any more, as sandboxes for code start them."""
    monkeypatch.setattr(module, "START_S", 60.0)
    note = tmp_path / "helper"
    file = f"""
import subprocess
def reward_func(queries, prompts, labels):
    helper = subprocess.Popen({command!r}, start_new_session=True, env={{"PATH": "/usr/bin:/bin"}}, cwd={str(tmp_path)!r})
    with open({str(note)!r}, "a") as file:
        file.write(f"{{helper.pid}}\\n")
    helper.wait() if {command[0] == "setsid"} else None
    {body}
"""
    with contextlib.suppress(UserError):
        called(file)
    started = [int(one) for one in note.read_text().split()]
    assert started and not any(lives(one) for one in started)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_what_the_file_of_a_forked_call_leaves_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_what_a_file_starts_and_leaves_is_not_waited_for_and_ends(tmp_path, monkeypatch)


def test_a_function_may_fail_for_some_responses() -> None:
    called("def reward_func(q, p, l):\n    return [1.0 / q[0].count('w9')]")


def test_one_server_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry, "POLL_S", 0.01)
    with socket.socket() as there, socket.socket() as deaf:
        for one in (there, deaf):
            one.bind(("127.0.0.1", 0))
        port, away = (one.getsockname()[1] for one in (there, deaf))
        dead = f"http://127.0.0.1:{away}/get_reward"
        with pytest.raises(UserError, match=rf"^reward.url: there is no server at {dead} \(Connection refused\); start it first"):
            dry_call(HttpSource.load([dead], "answer", 0.05, 1), PROMPTS, None, 1.0)
        waited = iter(range(5))

        def rest(_: float) -> None:
            if next(waited) == 2:
                there.listen()

        monkeypatch.setattr(dry.time, "sleep", rest)
        dry_call(HttpSource.load([dead, f"http://127.0.0.1:{port}"], "answer", 60.0, 1), PROMPTS, None, 1.0)
        assert next(waited) == 3


def test_a_host_that_nobody_knows_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(address: object, timeout: float) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(dry.socket, "create_connection", unknown)
    with pytest.raises(UserError, match=r"there is no server at https://nowhere/r \(Name or service not known\)"):
        find_server(["https://nowhere/r"], 1e9)


def test_a_prompt_without_a_reference_answer_is_named() -> None:
    math = RewardSource("math", "math_reward", answer_column="answer")
    check_references(math, PROMPTS)
    with pytest.raises(
        UserError, match=r"`math` cannot score prompt '\.{79}w': the reference answer in column `answer` is empty; fix or remove"
    ):
        check_references(math, [*PROMPTS, Prompt(2, "system" + "." * 79 + "w", (5,), {"answer": " "})])


def test_references_that_math_does_not_read_are_counted_before_the_run() -> None:
    math = RewardSource("math", "math_reward", answer_column="answer")
    rows = ["7", "\\int_0^2 f", "yes", "\\overline{PQ}"]
    prompts = [Prompt(i, "?", (5,), {"answer": answer}) for i, answer in enumerate(rows)]
    note = check_references(math, prompts)
    assert note is not None and "compares 2 of 4 reference answers only as text; the first is '\\\\int_0^2 f'" in note
    with pytest.raises(UserError, match=r"cannot read the reference answer '7/0': it has no value; fix or remove the row"):
        check_references(math, [*prompts, Prompt(4, "?", (5,), {"answer": "7/0"})])


def test_the_verifier_of_a_task_is_not_called() -> None:
    dry_call(RewardSource("task", "no-such-task"), PROMPTS, None, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('gold')", r"KeyError: 'gold' \(mine.py, line 2\)"),
        ("return float('nan')", r"`brief` returned nan, not a finite number"),
        ("import time; time.sleep(60)", r"took longer than reward.timeout_s = 0.3 s"),
    ],
)
def test_a_function_for_one_sample_that_always_fails_is_named(body: str, words: str) -> None:
    source = RewardSource("file", "brief", file=UserFile("mine.py", f"def brief(prompt, response, row):\n    {body}\n"))
    with pytest.raises(UserError, match=rf"^reward.function mine.py:brief: it fails in a dry call with made-up responses: .*{words}"):
        dry_call(source, PROMPTS, None, 0.3 if "sleep" in body else 30.0)


def test_a_function_for_one_sample_may_fail_for_an_empty_response() -> None:
    text = "def brief(prompt, response, row):\n    assert response == row['answer'] and prompt == 'w3'\n    return 1.0\n"
    dry_call(RewardSource("file", "brief", file=UserFile("mine.py", text)), PROMPTS, None, 30.0, "answer")
