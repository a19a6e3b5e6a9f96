"""Agent files of every contract play the same game and give the same episode."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode import BadEpisode, Episode
from rlhfless_ray.agent.episode_samples import sample_of
from rlhfless_ray.agent.load_agent import AgentSource, Player
from rlhfless_ray.agent.messages import EpisodeEnd
from rlhfless_ray.agent.multi_turn_loop import SAMPLING_DEFAULTS, UNSUPPORTED, AgentError, check_sampling
from rlhfless_ray.agent.sampling_params import SamplingParams
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.types import Prompt, SampleId

# The game: after each action the feedback is `[+n]`, n the number of the turn; it ends after two turns; a turn's reward is n.
GAMES = {
    "0.8.0": """
import torch
turn = 0
async def step(state, action, label, **kwargs):
    global turn
    turn += 1
    return torch.tensor([float(turn)]), state + action + f"[+{turn}]", turn == 2, {}
""",
    "0.8.3": """
import torch
turn = 0
async def step(observation, action, label, **kwargs):
    global turn
    turn += 1
    return {"rewards": torch.tensor([float(turn)]), "scores": torch.tensor([turn / 4]), "done": turn == 2, "sampling_params":
            kwargs.get("sampling_params", None), "next_observation": observation + action + f"[+{turn}]", "extra_logs": {"turn": turn}}
""",
    "0.8.7": """
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turn = 0
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        self.turn += 1
        assert states["observation_text"].startswith("ask") and states["label"] == "label"
        return {"rewards": torch.tensor([float(self.turn)]), "scores": torch.tensor(self.turn / 4), "done": self.turn == 2,
                "environment_feedback": f"[+{self.turn}]", "sampling_params": states.get("sampling_params", None),
                "extra_logs": {"turn": torch.tensor(self.turn)}}

class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
""",
}
GAMES["0.9.1"] = (
    GAMES["0.8.7"]
    .replace("AgentExecutorBase", "MultiTurnAgentExecutor")
    .split("class AgentExecutor(")[0]
    .replace("async def __init__", "def __init__")
    + """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
)
GAMES["0.8.7, own generate"] = (
    GAMES["0.8.7"]
    + """
    async def generate(self, prompt_ids, sampling_params):
        final = None
        async for output in self.llm_engine.generate({"prompt_token_ids": prompt_ids}, sampling_params, "request"):
            final = output
        return final
"""
)
GAMES["own executor"] = """
from openrlhf.utils.agent import AgentExecutorBase
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens, ranges, logprobs = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"], [], None
        logprobs = [0.0] * len(tokens)
        for turn in (1, 2):
            sampling_params.max_tokens = max_length - len(tokens)
            out = (await llm_engine.generate(tokens, sampling_params)).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(out.token_ids)))
            feedback = hf_tokenizer(f"[+{turn}]", add_special_tokens=False)["input_ids"]
            logprobs += [one[token].logprob for token, one in zip(out.token_ids, out.logprobs)] + [0.0] * len(feedback)
            tokens = tokens + out.token_ids + feedback
        return {"prompt": prompt, "label": label, "observation_tokens": tokens, "reward": 3.0, "scores": 0.5,
                "extra_logs": {"turn": 2}, "action_ranges": ranges, "rollout_log_probs": logprobs}
"""


class Characters:
    """A tokenizer: a character's number is its token."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


class Policy:
    """Answers `<n>` to a context of n tokens, cut at max_tokens; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, token_ids: list[int], params: Any) -> PolicyReply:
        self.asked.append(("".join(map(chr, token_ids)), params.max_tokens))
        await asyncio.sleep(0)
        whole = f"<{len(token_ids)}>"
        text = whole[: params.max_tokens]
        ids = [ord(c) for c in text]
        return PolicyReply(ids, text, [-i / 10 - len(token_ids) for i in range(len(ids))], "stop" if text == whole else "length")


def source(folder: Path, text: str) -> AgentSource:
    file = folder / "agent.py"
    file.write_text(text)
    return pickle.loads(pickle.dumps(AgentSource.load(str(file))))


def params() -> SamplingParams:
    return SamplingParams(temperature=1.0, logprobs=1, max_tokens=None)


def played(folder: Path, text: str, prompts: tuple[str, ...] = ("ask",), max_length: int = 40, policy: Any = None) -> list[Episode | str]:
    async def all_at_once() -> list[Episode | str]:
        player = Player(source(folder, text), Characters(), max_length)
        return await asyncio.gather(*(player.play(prompt, "label", params(), policy or Policy()) for prompt in prompts))

    return asyncio.run(all_at_once())


def one(folder: Path, text: str, **more: Any) -> Episode:
    (episode,) = played(folder, text, **more)
    assert isinstance(episode, Episode), episode
    return episode


@pytest.mark.parametrize("version", GAMES)
def test_every_contract_plays_the_same_game(tmp_path: Path, version: str) -> None:
    policy = Policy()
    episode = one(tmp_path, GAMES[version], policy=policy)
    assert policy.asked == [("ask", 37), ("ask<3>[+1]", 30)], "each turn may take all that is left"
    assert "".join(map(chr, episode.token_ids)) == "ask<3>[+1]<10>", "the last feedback is answered by nobody"
    assert episode.prompt_tokens == 3 and episode.turns == 2 and not episode.truncated
    assert "".join(".#"[int(a)] for a in episode.action) == "###....####"
    np.testing.assert_allclose(episode.logprobs, [-3, -3.1, -3.2, 0, 0, 0, 0, -10, -10.1, -10.2, -10.3], rtol=1e-6)
    assert episode.reward == 3.0
    assert episode.score == (3.0 if version == "0.8.0" else 0.5) and episode.extra_logs == ({} if version == "0.8.0" else {"turn": 2.0})


@pytest.mark.parametrize("version", GAMES)
def test_concurrent_samples_are_independent(tmp_path: Path, version: str) -> None:
    episodes = played(tmp_path, GAMES[version], ("ask", "ask more", "ask a"))
    texts = ["".join(map(chr, e.token_ids)) if isinstance(e, Episode) else e for e in episodes]
    assert texts == ["ask<3>[+1]<10>", "ask more<8>[+1]<15>", "ask a<5>[+1]<12>"]


@pytest.mark.parametrize("version", ["0.8.0", "0.8.3", "0.8.7", "0.9.1"])
def test_an_episode_ends_at_the_token_limit(tmp_path: Path, version: str) -> None:
    episode = one(tmp_path, GAMES[version], max_length=12)
    assert "".join(map(chr, episode.token_ids)) == "ask<3>[+1]<1" and episode.truncated and episode.turns == 2
    episode = one(tmp_path, GAMES[version], max_length=9)  # the feedback does not fit: no second turn
    assert "".join(map(chr, episode.token_ids)) == "ask<3>" and not episode.truncated and episode.action.all() and episode.reward == 1.0
    (error,) = played(tmp_path, GAMES[version], max_length=3)
    assert error == "the first observation has 3 tokens, which leaves no room for an action within 3"


def test_an_episode_becomes_a_sample_for_the_learner(tmp_path: Path) -> None:
    prompt = Prompt(7, "ask", tuple(map(ord, "ask")), {"answer": "label"})
    sample = sample_of(EpisodeEnd(58, one(tmp_path, GAMES["0.9.1"])), prompt, SampleId(0, 1, 2), 4)
    assert sample.prompt is prompt and sample.id.number == 2 and sample.reward == 3.0 and sample.score == 0.5
    assert sample.completion.key == 58 and sample.completion.versions == ((4, 11),) and sample.completion.finish_reason == "stop"
    assert sample.action_mask is not None and int(sample.action_mask.sum()) == 7
    assert len(sample.completion.token_ids) == len(sample.completion.logprobs) == len(sample.action_mask) == 11
    changed = GAMES["0.9.1"].replace('states["observation"]}', '"ask: " + states["observation"]}')
    sample = sample_of(EpisodeEnd(0, one(tmp_path, changed)), prompt, SampleId(0, 1, 0), 0)
    assert "".join(map(chr, sample.prompt.token_ids)) == "ask: ask" and sample.prompt.index == 7
    short = EpisodeEnd(0, one(tmp_path, GAMES["0.9.1"].replace("turn == 2", "turn == 1")))
    assert sample_of(short, prompt, SampleId(0, 1, 0), 0).action_mask is None
    assert one(tmp_path, GAMES["0.9.1"].replace("torch.tensor([float(self.turn)])", "self.turn == 2")).reward == 1.0, "a truth value"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("self.turn += 1", "self.turn += 1 / 0", "ZeroDivisionError: division by zero (agent.py, line 11)"),
        ('"environment_feedback"', '"feedback"', "turn 1: `step` returned a dict without `environment_feedback`"),
        ('"environment_feedback": f"[+{self.turn}]"', '"environment_feedback": 3', "turn 1: `environment_feedback` is int, not text"),
        ("torch.tensor([float(self.turn)])", "'x'", "turn 1: `rewards` is str 'x', not a number"),
        ("torch.tensor([float(self.turn)])", "torch.tensor([float('nan')])", "`extra_logs` is nan, not a finite number"),
        ('{"observation": states["observation"]}', "states['observation']", "`reset` must return a dict with the text `observation`"),
        ('"extra_logs"', '"environment_images": [1], "extra_logs"', "turn 1: `step` returned images"),
        ("self.turn += 1", "self.turn += 1; states['sampling_params'].temperature = 0.5", "`sampling_params` with another temperature"),
        (
            'states.get("sampling_params", None)',
            "type(states['sampling_params'])(temperature=0.5, logprobs=1)",
            "turn 1: `sampling_params` with another temperature (0.5 instead of 1.0); keep the recipe's, which the policy is trained with",
        ),
    ],
)
def test_mistakes_become_the_samples_error(tmp_path: Path, old: str, new: str, error: str) -> None:
    assert old in GAMES["0.9.1"]
    (found,) = played(tmp_path, GAMES["0.9.1"].replace(old, new, 1))
    assert isinstance(found, str) and error.replace("agent.py", str(tmp_path / "agent.py")) in found


def test_limits_and_stop_words_may_change_from_turn_to_turn(tmp_path: Path) -> None:
    stops: list[Any] = []

    class Watching(Policy):
        async def __call__(self, token_ids: list[int], given: Any) -> PolicyReply:
            stops.append(given.stop)
            return await super().__call__(token_ids, given)

    text = GAMES["0.9.1"].replace("self.turn += 1", "self.turn += 1; states['sampling_params'].stop = ['!']")
    one(tmp_path, text, policy=Watching())
    assert stops == [None, ["!"]]


def test_step_functions_get_the_sampling_parameters_if_they_accept_them(tmp_path: Path) -> None:
    text = GAMES["0.8.3"].replace("turn += 1", "turn += 1; assert kwargs['sampling_params'].temperature == 1.0")
    assert one(tmp_path, text).reward == 3.0
    assert one(tmp_path, GAMES["0.8.0"].replace(", **kwargs", "")).reward == 3.0


@pytest.mark.engine
def test_agents_may_create_sampling_parameters(tmp_path: Path) -> None:
    """With vLLM's own class, whose defaults say nothing in other words than ours."""
    turn = "sampling_params.max_tokens ="
    own = GAMES["own executor"].replace(turn, f"sampling_params = mine(sampling_params); {turn}")
    text = "from vllm import SamplingParams\ndef mine(given):\n    return SamplingParams(temperature=given.temperature, logprobs=1)\n" + own
    assert one(tmp_path, text).reward == 3.0
    import vllm

    given = params()
    check_sampling(given, vllm.SamplingParams(temperature=1.0, top_k=-1, max_tokens=5, stop=["x"], seed=3))
    refused = {
        "min_p": 0.1,
        "top_p": 0.9,
        "logit_bias": {1: 2.0},
        "bad_words": ["x"],
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "thinking_token_budget": 9,
    }
    for name, value in refused.items():
        with pytest.raises(AgentError, match=name):
            check_sampling(given, vllm.SamplingParams(temperature=1.0, **{name: value}))
    # of each that vLLM has it is known whether a request carries it, it is refused, or it only changes how the answer is reported
    carried = {"max_tokens", "min_tokens", "stop", "stop_token_ids"}
    reporting = {
        "seed", "logprobs", "flat_logprobs", "prompt_logprob_start", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "extra_args",
        "skip_reading_prefix_cache", "routed_experts_prompt_start",
    }  # fmt: skip
    theirs = {name for name in vllm.SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert theirs - {*SAMPLING_DEFAULTS, *UNSUPPORTED, *carried, *reporting} == set()


def test_text_that_is_rewritten_cannot_be_trained_on(tmp_path: Path) -> None:
    text = GAMES["0.8.3"].replace('observation + action + f"[+{turn}]"', '"rewritten"')
    (error,) = played(tmp_path, text)
    assert error == "the next observation must begin with the observation and the action: what was sampled is trained"
    assert one(tmp_path, text.replace("turn == 2", "True")).reward == 1.0, "after the last action it does not matter"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def step(a, b, c): 0", "has neither a class `AgentExecutor` nor `async def step`"),
        ("async def step(a): 0", r"`step\(a\)` cannot take \(observation, action, label\)"),
        ("class AgentExecutor: ...", "`AgentExecutor` must inherit from AgentExecutorBase"),
        (
            "from openrlhf.utils.agent import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase):\n    def __init__(self, a): 0",
            r"`AgentExecutor\(a\)` needs arguments that are not passed",
        ),
        ("from openrlhf.utils.agent import Agent", "line 1 failed when it was loaded: ImportError: cannot import name 'Agent'"),
        ("import nowhere", "line 1 imports `nowhere`"),
    ],
)
def test_files_of_no_contract_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^agent.path .*agent.py: .*{words}"):
        source(tmp_path, text)
    with pytest.raises(UserError, match="no such file"):
        AgentSource.load(str(tmp_path / "nowhere.py"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"action_ranges": []}, "the policy wrote nothing"),
        ({"action_ranges": [(0, 2)]}, "begins at token 0"),
        ({"action_ranges": [(1, 3), (2, 4)]}, "must ascend without overlap within the 5 observation tokens"),
        ({"action_ranges": [(1, 6)]}, "must ascend"),
        ({"action_ranges": [(2, 2)]}, "must ascend"),
        ({"observation_tokens": [1, 2, -100, 4, 5]}, "`observation_tokens` has -100, which is not a token id"),
        ({"observation_tokens": [1, 2**40, 3, 4, 5]}, "`observation_tokens` has 1099511627776, which is not a token id"),
        ({"rollout_log_probs": [0.0]}, "`rollout_log_probs` has 1 values for 5 observation tokens"),
        ({"rollout_log_probs": [np.nan, -1.0, np.nan, 0.0, -1.0]}, "`rollout_log_probs` has nan for action token 2"),
        ({"reward": None}, "a dict without `reward`"),
        ({"reward": "x"}, "is str 'x', not a number"),
    ],
)
def test_results_of_custom_executors_are_checked(change: dict[str, Any], words: str) -> None:
    good = {"observation_tokens": [1, 2, 3, 4, 5], "action_ranges": [(1, 3), (4, 5)], "rollout_log_probs": None, "reward": np.float32(0.5)}
    episode = Episode.of(good)
    assert episode.logprobs is None and episode.reward == 0.5 and episode.action.tolist() == [True, True, False, True]
    with pytest.raises(BadEpisode) as caught:
        Episode.of({**good, **change})
    assert words in str(caught.value)
    with pytest.raises(BadEpisode, match="returned NoneType, not a dict"):
        Episode.of(None)
