"""Programs that play episodes over HTTP, with OpenAI's client and with bare requests: what they get, and what their mistakes cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.agent.agent_actor import AgentActor
from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.agent.messages import EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.door.command_agent import CommandSource
from rlhfless_ray.weights.tensor_file import Files
from tests.agent.policy_files import policy_files

OPENAI = """
import json, sys
from openai import OpenAI
client = OpenAI(max_retries=0)
for line in sys.stdin:
    episode = json.loads(line)
    assert client.models.list().data[0].max_model_len == 60
    messages = [{"role": "user", "content": episode["prompt"]}]
    ask = lambda **more: client.chat.completions.create(model="any", messages=messages, **more)
    first = ask(logprobs=True).choices[0]
    assert first.message.content == "03" and first.finish_reason == "stop", first
    assert [one.logprob for one in first.logprobs.content] == [-0.5] * 3
    messages += [first.message, {"role": "user", "content": "5"}]
    parts = [part.choices[0] for part in ask(stream=True, max_completion_tokens=2)]
    second = "".join(part.delta.content or "" for part in parts)
    assert second == "07" and parts[-1].finish_reason == "length", parts
    messages += [{"role": "assistant", "content": second}, {"role": "user", "content": "6"}]
    text = client.completions.create(model="any", prompt="1", logprobs=0).choices[0]
    assert text.text == "01" and text.logprobs.token_logprobs == [-0.5] * 3
    print("noise that is no reward")
    print(json.dumps({"reward": 0.5, "score": 1, "metrics": {"depth": 2, "answer": int(episode["row"]["answer"])}}), flush=True)
"""
BARE = """
import json, os, sys, time, http.client, urllib.parse
row = json.loads(sys.stdin.readline())
mode = row["row"]["mode"]
def post(path, body, key=row["api_key"], **headers):
    http_ = http.client.HTTPConnection(urllib.parse.urlsplit(row["base_url"]).netloc)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    http_.request("POST", path, data, {"Authorization": "Bearer " + key, **headers})
    answer = http_.getresponse()
    return answer.status, json.loads(answer.read())
chat = lambda **body: post("/v1/chat/completions", {"messages": [{"role": "user", "content": "12="}], **body})
if mode == "crash":
    chat(); sys.exit("a mistake of mine")
if mode == "silent":
    time.sleep(60)
if mode == "nothing":
    print('{"reward": 1}')
if mode == "no number":
    chat(); print('{"reward": "good"}')
if mode == "tokens":
    status, answer = post("/inference/v1/generate", {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 2, "logprobs": 1}})
    choice = answer["choices"][0]
    assert status == 200 and len(choice["token_ids"]) == 2 and choice["finish_reason"] == "length", answer
    assert [(one["token"], one["token_id"]) for one in choice["logprobs"]["content"]] == [(f"token_id:{t}", t) for t in choice["token_ids"]]
    more = [*answer["prompt_token_ids"], *choice["token_ids"], 6]
    assert post("/inference/v1/generate", {"token_ids": more})[0] == 200
    print('{"reward": 1}')
if mode == "retry":
    first, again, other = chat(), None, None
    body = json.dumps({"messages": [{"role": "user", "content": "12="}]}).encode()
    again = post("/v1/chat/completions", body, **{"x-stainless-retry-count": "1"})
    assert again[1]["id"] == first[1]["id"], (first, again)
    print('{"reward": 1}')
if mode == "hostile":
    codes = [chat(**body)[0] for body in ({"temperature": 0.1}, {"n": 2}, {"max_tokens": "9"}, {"stop": 7}, {"tools": 7}, {"messages": 7},
        {"response_format": {"type": "json_object"}}, {"tool_choice": "required"}, {"top_logprobs": 3}, {"max_tokens": -1},
        {"messages": [{"role": "user", "content": "1" * 99}]}, {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})]
    assert codes == [400] * 13, codes
    for body in (b"{", b"[]", b'"\\\\ud800"', b'{"messages": "\\\\ud800"}', b"[" * 100000, b"\\xff"):
        status, answer = post("/v1/chat/completions", body)
        assert status == 400 and set(answer["error"]) == {"message", "type", "param", "code"}, answer
    assert post("/v1/completions", {"prompt": [10 ** 9]})[0] == post("/v1/completions", {"prompt": None})[0] == 400
    assert post("/inference/v1/generate", {"token_ids": [-1]})[0] == 400
    assert post("/v1/chat/completions", {}, key="sk-other")[0] == 401 and post("/v2", {})[0] == 404
    assert post("/v1/chat/completions", b" " * (33 * 2 ** 20))[0] == 413
    status, answer = chat()
    assert status == 200
    print('{"reward": 1}')
"""


@pytest.fixture(scope="module")
def files() -> Files:
    return policy_files()


@pytest.fixture
def made(tmp_path: Path, files: Files) -> Iterator[Callable[..., AgentActor]]:
    actors = []

    def make(program: str, timeout_s: float = 30.0, programs: int = 4) -> AgentActor:
        (tmp_path / "program.py").write_text(program)
        actors.append(AgentActor(CommandSource.load(f"python {tmp_path / 'program.py'}", programs), files, False, 60, timeout_s))
        return actors[-1]

    yield make
    for actor in actors:
        asyncio.run_coroutine_threadsafe(_close(actor), actor.loop).result(30)
        actor.loop.call_soon_threadsafe(actor.loop.stop)


async def _close(actor: AgentActor) -> None:
    player: Any = actor.player
    for program in player.idle:
        await program.kill()
    await player.server.close()


def play(actor: AgentActor, *rows: dict[str, Any], epoch: int = 1) -> tuple[list[Episode | str], list[TurnRequest]]:
    """The policy writes the number of tokens it sees, in two digits, and then ends."""
    ends, requests = dict[int, EpisodeEnd](), []
    for events in actor.play(epoch, [EpisodeStart(key, "12=", row, 1.0) for key, row in enumerate(rows)]):
        for event in events:
            if isinstance(event, EpisodeEnd):
                ends[event.key] = event
            elif isinstance(event, TurnRequest):
                requests.append(event)
                tokens = [*actor.tokenizer(f"{len(event.token_ids):02}", add_special_tokens=False)["input_ids"], 1][: event.max_tokens]
                reply = PolicyReply(tokens, "", [-0.5] * len(tokens), "stop" if len(tokens) == 3 else "length")
                threading.Thread(target=actor.answer, args=(epoch, [TurnReply(event.key, event.turn, reply)])).start()
    return [ends[key].result for key in range(len(rows))], requests


def test_openai_client_plays_and_every_sampled_token_counts(made: Callable[..., AgentActor]) -> None:
    actor = made(OPENAI, programs=2)
    episodes, _ = play(actor, {"answer": "7"}, {"answer": "8"}, {"answer": "9"})
    for answer, episode in zip((7, 8, 9), episodes, strict=True):
        assert isinstance(episode, Episode), episode
        assert actor.tokenizer.decode(episode.token_ids) == "12=03<eos>507", "the tokens that were sampled, with what ended the turn"
        assert "".join(".#"[int(x)] for x in episode.action) == "###.##" and episode.turns == 2 and episode.truncated
        assert episode.logprobs is not None and episode.logprobs.tolist() == [-0.5] * 3 + [0] + [-0.5] * 2
        assert (episode.reward, episode.score) == (0.5, 1.0)
        assert episode.extra_logs == {"depth": 2.0, "answer": float(answer)}
        (branch,) = episode.branches
        assert actor.tokenizer.decode(branch.token_ids) == "101<eos>" and branch.action.tolist() == [True] * 3


def test_mistake_of_a_program_costs_its_sample(made: Callable[..., AgentActor]) -> None:
    modes = ["crash", "silent", "nothing", "no number", "tokens", "retry"]
    (crash, silent, nothing, number, tokens, retry), requests = play(made(BARE, timeout_s=5.0), *({"mode": mode} for mode in modes))
    assert crash == "the program ended with code 1 without a line of JSON with `reward`: a mistake of mine"
    assert silent == "the agent took longer than agent.timeout_s = 5 s"
    assert nothing == "the program has requested no turn of the policy"
    assert isinstance(number, str) and number.startswith("the program's `reward`, `score` or `metrics` is ")
    assert isinstance(tokens, Episode) and "".join(".#"[int(x)] for x in tokens.action) == "##.###"
    assert isinstance(retry, Episode) and len([one for one in requests if one.key == 5]) == 1, "a retry draws no second turn"


def test_hostile_requests_get_errors_and_the_episode_goes_on(made: Callable[..., AgentActor]) -> None:
    (episode,), _ = play(made(BARE), {"mode": "hostile"})
    assert isinstance(episode, Episode) and episode.reward == 1.0, episode


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program x", "there is no program `no-such-program`"),
        ("python no_such.py", "there is no file no_such.py"),
        ("python 'x", "is not a command line"),
        (" ", "name a program"),
    ],
)
def test_command_that_cannot_run_is_refused(command: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        CommandSource.load(command, 1)
