"""A process of agents, run as a plain object: turns asked for and answered, time limits, and an agent that holds everybody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_ray.agent.agent_actor import AgentActor
from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.load_agent import AgentSource
from rlhfless_ray.agent.messages import AgentHung, CpuTime, EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.agent.multi_turn_loop import AgentError, check_sampling, min_tokens_of
from rlhfless_ray.agent.preflight_agent import dry_play
from rlhfless_ray.agent.sampling_params import SamplingParams
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.engine.stop_strings import StopStrings
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.tensor_file import Files
from tests.agent.policy_files import policy_files

AGENT = """
import asyncio, os, time
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Game(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        label = states["label"]
        if label == "sleep" and self.turn == 2:
            await asyncio.sleep(60)
        if label == "hold" and self.turn == 2:
            time.sleep(20)
        if label == "cancel":
            helper = asyncio.ensure_future(asyncio.sleep(60))
            helper.cancel()
            await helper
        if label == "raise":
            raise KeyError("no such move")
        params = states["sampling_params"]
        if label == "words":
            params.stop, params.include_stop_str_in_output, params.skip_special_tokens = [states["action_text"][1]], False, True
        if label == "stop":
            params.bad_words = ["#"]
        return {"rewards": 0.5, "environment_feedback": f"{self.turn};", "done": self.turn == 2, "sampling_params": params}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
"""
QUIET = """
from openrlhf.utils.agent import AgentExecutorBase
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        out = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
        ids = out.token_ids if label == "as it is" else hf_tokenizer("9" * len(out.token_ids), add_special_tokens=False)["input_ids"]
        return {"observation_tokens": tokens + ids, "action_ranges": [(len(tokens), len(tokens) + len(ids))], "reward": 1.0}
"""


@pytest.fixture(scope="module")
def files() -> Files:
    return policy_files()


@pytest.fixture
def made(tmp_path: Path, files: Files) -> Iterator[Callable[..., AgentActor]]:
    actors = []

    def make(text: str = AGENT, timeout_s: float = 20.0, **more: Any) -> AgentActor:
        (tmp_path / "agent.py").write_text(text)
        actors.append(AgentActor(AgentSource.load(str(tmp_path / "agent.py")), files, False, 40, timeout_s, **more))
        return actors[-1]

    yield make
    for actor in actors:
        asyncio.run_coroutine_threadsafe(end_loop(), actor.loop)


async def end_loop() -> None:
    """End what an episode has left in its loop, as soon as no agent holds that up."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for one in left:
        one.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    asyncio.get_running_loop().stop()


def play(actor: AgentActor, openings: list[EpisodeStart]) -> tuple[dict[int, EpisodeEnd], list[TurnRequest], list[AgentHung]]:
    """The policy writes the number of tokens it sees, in two digits, and then ends."""
    over: dict[int, EpisodeEnd] = {}
    asked, stuck = [], []
    worked = 0.0
    for first, *events in actor.play(1, openings):
        assert isinstance(first, CpuTime) and first.cpu_s >= worked
        worked = first.cpu_s
        for event in events:
            if isinstance(event, EpisodeEnd):
                over[event.key] = event
            elif isinstance(event, AgentHung):
                stuck.append(event)
            elif isinstance(event, TurnRequest):
                asked.append(event)
                tokens = [*actor.tokenizer(f"{len(event.token_ids):02}", add_special_tokens=False)["input_ids"], 1][: event.max_tokens]
                reply = PolicyReply(tokens, "", [-0.5] * len(tokens), "stop" if len(tokens) == 3 else "length")
                threading.Thread(target=actor.answer, args=(1, [TurnReply(event.key, event.turn, reply)])).start()  # as in Ray
        if stuck:
            break
    return over, asked, stuck


def test_episodes_are_played_concurrently(made: Callable[..., AgentActor]) -> None:
    over, asked, _ = play(made(), [EpisodeStart(7, "12=", "a", 1.0), EpisodeStart(9, "345=", "b", 1.0)])
    turns = {(one.key, one.turn, len(one.token_ids), one.max_tokens) for one in asked}
    assert turns == {(7, 0, 3, 37), (7, 1, 8, 32), (9, 0, 4, 36), (9, 1, 9, 31)}
    assert over[7].texts == (("policy", "03<eos>"), ("agent", "1;"), ("policy", "08<eos>")) and over[7].observation == "12="
    episode = over[9].result
    assert not isinstance(episode, str) and episode.reward == 1.0 and "".join(".#"[int(x)] for x in episode.action) == "###..###"
    assert episode.logprobs is not None and episode.logprobs.tolist() == [-0.5] * 3 + [0, 0] + [-0.5] * 3


def test_turns_have_their_own_limit(made: Callable[..., AgentActor]) -> None:
    over, asked, _ = play(made(turn_tokens=2), [EpisodeStart(0, "12=", "a", 1.0)])
    assert [one.max_tokens for one in asked] == [2, 2] and over[0].texts[0] == ("policy", "03")
    assert not isinstance(over[0].result, str) and over[0].result.truncated


def test_a_mistake_of_an_agent_becomes_the_error_of_its_sample(made: Callable[..., AgentActor]) -> None:
    labels = ["raise", "stop", "fine", "cancel"]
    over, _, _ = play(made(), [EpisodeStart(k, "12=", label, 1.0) for k, label in enumerate(labels)])
    assert str(over[0].result).startswith("KeyError: 'no such move' (") and "agent.py, line 22)" in str(over[0].result)
    assert "with bad_words=['#'], which is not supported here" in str(over[1].result)
    assert not isinstance(over[2].result, str)
    assert str(over[3].result).startswith("CancelledError: ") and "agent.py, line 20)" in str(over[3].result)


def test_an_agent_that_sleeps_times_out_alone(made: Callable[..., AgentActor]) -> None:
    over, _, stuck = play(made(timeout_s=1.0), [EpisodeStart(0, "12=", "sleep", 1.0), EpisodeStart(1, "12=", "a", 1.0)])
    assert over[0].result == "the agent took longer than agent.timeout_s = 1 s" and not isinstance(over[1].result, str) and not stuck


def test_an_agent_that_blocks_the_event_loop_is_identified(made: Callable[..., AgentActor]) -> None:
    _, _, stuck = play(made(timeout_s=1.0), [EpisodeStart(5, "12=", "a", 1.0), EpisodeStart(6, "12=", "hold", 1.0)])
    assert [one.key for one in stuck] == [6] and stuck[0].seconds > 1


def test_an_episode_is_not_blamed_for_one_of_an_abandoned_call(made: Callable[..., AgentActor]) -> None:
    actor = made(timeout_s=1.0)
    for _, request in actor.play(1, [EpisodeStart(0, "12=", "hold", 1.0)]):
        actor.answer(1, [TurnReply(0, request.turn, PolicyReply([1], "", [-0.5], "stop"))])
        if request.turn == 1:  # the agent blocks in the next step
            threading.Timer(0.3, actor.abandon, (1,)).start()
    _, stuck = next(actor.play(2, [EpisodeStart(0, "12=", "a", 1.0)]))
    assert isinstance(stuck, AgentHung) and stuck.key is None


def test_replies_of_the_policy_are_reused_in_a_replay(made: Callable[..., AgentActor]) -> None:
    first, asked, _ = play(made(), [EpisodeStart(0, "12=", "a", 1.0)])
    replies = tuple((one.token_ids, PolicyReply([5, 1], "", [-1.0, -2.0], "stop")) for one in asked[:1])
    again, asked, _ = play(made(), [EpisodeStart(0, "12=", "a", 1.0, earlier_replies=replies)])
    assert [one.turn for one in asked] == [1] and again[0].texts[0] != first[0].texts[0] and len(asked[0].token_ids) == 7


def test_stop_words_are_requested_and_removed_from_the_text(made: Callable[..., AgentActor]) -> None:
    actor = made()
    _, asked, _ = play(actor, [EpisodeStart(0, "12=", "words", 1.0)])
    assert [one.stop for one in asked] == [(), ("3",)]
    reply, plain = PolicyReply(actor.tokenizer("173", add_special_tokens=False)["input_ids"], "", [], "stop"), SamplingParams(stop=["7"])
    assert actor._reply_text(reply, plain, ("7",)) == "1"
    assert actor._reply_text(reply, SamplingParams(stop=["7"], include_stop_str_in_output=True), ("7",)) == "17"
    assert actor._reply_text(PolicyReply([*reply.token_ids, 1], "", [], "stop"), SamplingParams(), ()) == "173"
    shown = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert actor._reply_text(PolicyReply([*reply.token_ids, 1], "", [], "stop"), shown, ()) == "173<eos>"
    assert actor._reply_text(PolicyReply(reply.token_ids, "", [], "length"), plain, ("7",)) == "173", "it was not what ended it"
    again = PolicyReply(actor.tokenizer("1717", add_special_tokens=False)["input_ids"], "", [], "stop")
    assert [actor._reply_text(again, SamplingParams(stop=["7"], min_tokens=n), ("7",)) for n in (0, 1, 2, 3)] == ["1", "1", "171", "171"]


def test_the_minimum_length_of_a_turn_is_that_of_the_agent_or_the_recipe(made: Callable[..., AgentActor]) -> None:
    _, asked, _ = play(made(), [EpisodeStart(0, "12=", "a", 1.0, min_tokens=1)])
    assert [one.min_tokens for one in asked] == [1, 1]
    assert min_tokens_of(SamplingParams(min_tokens=3)) == 3 and min_tokens_of(SamplingParams()) == 0
    for wrong in (-1, 1.5, "2", True):
        with pytest.raises(AgentError, match="min_tokens"):
            min_tokens_of(SamplingParams(min_tokens=wrong))


def test_a_turn_has_the_recipes_stop_words_until_the_agent_sets_others(made: Callable[..., AgentActor]) -> None:
    actor = made()
    _, asked, _ = play(
        actor, [EpisodeStart(0, "12=", "a", 1.0, top_k=4, stop=("#", ";;")), EpisodeStart(1, "12=", "words", 1.0, stop=("#",))]
    )
    by_key = {key: [one.stop for one in sorted(asked, key=lambda one: one.turn) if one.key == key] for key in (0, 1)}
    assert by_key == {0: [("#", ";;")] * 2, 1: [("#",), ("3",)]}
    with pytest.raises(AgentError, match=r"another top_k \(7 instead of 4\)"):
        check_sampling(SamplingParams(top_k=4), SamplingParams(top_k=7))
    reply = PolicyReply(actor.tokenizer("12;;", add_special_tokens=False)["input_ids"], "", [], "stop")
    given = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert actor._reply_text(reply, given, (";;",)) == "12;;"


@pytest.mark.parametrize(("text", "word", "found"), [("12=", "=", True), ("12=", "2=", True), ("12=", "1", True), ("12=", "3", False)])
def test_stop_words_are_found_in_the_generated_text(made: Callable[..., AgentActor], text: str, word: str, found: bool) -> None:
    actor = made()
    ids = actor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert StopStrings(lambda: actor.tokenizer).has_completed(ids, (word,)) == found


def test_missing_log_probabilities_are_filled_from_the_replies(made: Callable[..., AgentActor]) -> None:
    over, _, _ = play(made(QUIET), [EpisodeStart(0, "12=", "as it is", 1.0), EpisodeStart(1, "12=", "another", 1.0)])
    assert not isinstance(over[0].result, str) and over[0].result.logprobs is not None and over[0].result.logprobs.tolist() == [-0.5] * 3
    assert "action token 3 is not what the policy generated there" in str(over[1].result)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("super().__init__(Game)", "super().__init__(Gone)", "its process ended with code 1 in a dry run: NameError: name 'Gone'"),
        ('"environment_feedback"', '"feedback"', "made-up turns of the policy: turn 1: `step` returned a dict without"),
        ("self.turn += 1", "os._exit(3)", "its process ended with code 3 in a dry run"),
    ],
)  # fmt: skip
def test_a_dry_run_finds_mistakes_before_the_run(tmp_path: Path, files: dict[str, bytes], old: str, new: str, error: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT.replace(old, new))
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "agent": {"path": str(tmp_path / "agent.py")}})
    with pytest.raises(UserError, match=r"^agent\.path .*agent\.py: ") as raised:
        dry_play(recipe, AgentSource.load(recipe.agent.path), [Prompt(0, "12=", (3, 4, 5), {"answer": "3"})], files)
    assert error in str(raised.value)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_a_dry_run_accepts_a_valid_agent(tmp_path: Path, files: Files) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    recipe = Recipe.parse({"prompts": {"task": "chain"}, "agent": {"path": str(tmp_path / "agent.py")}})
    dry_play(recipe, AgentSource.load(recipe.agent.path), [Prompt(0, "12=", (3, 4, 5), {"answer": "3"})], files)
