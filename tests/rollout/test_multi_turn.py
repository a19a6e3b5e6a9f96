"""Agents and real engines in processes of their own: what is played does not depend on how many engines there are, on which of them
draft tokens, nor on which process dies on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from asking import SETTINGS, weights_of

from rlhfless_ray.agent.agent_actor import AgentActor
from rlhfless_ray.agent.agent_processes import AgentProcesses, start_agent
from rlhfless_ray.agent.load_agent import AgentSource
from rlhfless_ray.functions.failure_budget import FailureBudget
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.prompts.builtin_tasks import task
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Prompt, Sample
from rlhfless_ray.weights.channel import stored_version
from rlhfless_ray.weights.model_folder import without_weights
from rlhfless_ray.weights.tiny_model import scratch_policy
from tests.conftest import two_engines
from tests.rollout_drivers import driver_of
from tests.run_files import step_requests

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(600)]

TURN, TURNS, COUNT = 6, 4, 2
RECIPE = Recipe.parse({
    "prompts": {"task": "chain"}, "reward": {"function": "task"}, "policy": {"hidden_size": 32, "layers": 1},
    "rollout": {"samples_per_prompt": COUNT},
})  # fmt: skip
AGENT = """
import asyncio, os, random
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Game(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        self.turn = 0
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        if self.turn == 2 and states["label"] == "dies":
            await asyncio.sleep(0.2)
            os._exit(3)
        if states["label"] == "stops":
            states["sampling_params"].stop = ["1", "2"]
        await asyncio.sleep(0.05 * random.random())
        feedback = str(sum(map(ord, states["action_text"])))  # whatever was sampled decides what comes next
        return {"rewards": len(set(states["action_text"])) / 10, "environment_feedback": f"{feedback};", "done": self.turn == TURNS,
                "sampling_params": states["sampling_params"]}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
""".replace("TURNS", str(TURNS))


def engine_class() -> type:
    from rlhfless_ray.engine.exact_actor import ExactEngineActor

    class Known(ExactEngineActor):
        def pid(self) -> int:
            return os.getpid()

        def tried_drafts(self) -> float:
            """Return how many drafted tokens this engine has verified."""
            drafter = self.engine.drafter
            return 0.0 if drafter is None else float(drafter.learned.acceptance.tried.sum())

    return Known


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return scratch_policy(RECIPE, task("chain"))


@pytest.fixture(scope="module")
def pool(ray_cluster: None, files: dict[str, bytes]) -> Iterator[WorkerPool]:
    plain = replace(SETTINGS, max_model_len=128)
    with two_engines(engine_class(), files, plain, replace(plain, speculation="on")) as made:
        yield made


@pytest.fixture(scope="module")
def play(pool: WorkerPool, files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Sample]]]:

    from rlhfless_ray.rollout.multi_turn import EpisodeTurns
    from rlhfless_ray.rollout.request_source import WantedResponses
    from rlhfless_ray.rollout.shared_drafts import SharedDrafts

    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(AGENT)
    weights = weights_of(files)
    version = stored_version(1, weights)
    own = (AgentSource.load(str(path)), without_weights(files), False, 100, 20.0, TURN)
    agents = AgentProcesses(lambda: start_agent(AgentActor, *own), 1, 20.0, FailureBudget(5), 120.0, pool.ledger)
    agents.start()
    agents.check()
    pool.ledger.prices = replace(pool.ledger.prices, core_per_hour=3600.0)

    def run(shares: list[list[int]], labels: list[str] | None = None, on_progress: Any = lambda *_: None, **sampling: Any) -> list[Sample]:
        rows = task("chain").rows(4, 5, "train")
        tokenizer = _tokenizer(files)
        prompts = [Prompt(k, r["prompt"], tuple(tokenizer(r["prompt"])["input_ids"])) for k, r in enumerate(rows)]
        requests = [replace(one, **sampling) for one in step_requests(RECIPE, 3, prompts)]
        source = EpisodeTurns(agents, lambda row: "", WantedResponses(requests, prompts, np.full(8, 24.0), 1))
        source.openings = [replace(start, label=(labels or [""] * 8)[start.key]) for start in source.openings]
        options: dict[str, Any] = {"needed_next": 2, "plugins": [SharedDrafts()], "interval_s": 0.05, "silence_s": 120.0}
        driver = driver_of(pool, source, version, on_progress=on_progress, **options)
        driver.run([np.array(s) for s in shares], deadline_s=300.0)
        return source.samples.all()

    yield run
    agents.close()


def _tokenizer(files: dict[str, bytes]) -> Any:
    from rlhfless_ray.weights.load_policy import load_tokenizer

    return load_tokenizer(files, False)


@pytest.fixture(scope="module")
def alone(play: Callable[..., list[Sample]]) -> list[Sample]:
    """By one engine, which drafts nothing."""
    return play([list(range(8))])


def assert_same(found: list[Sample], wanted: list[Sample]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.error is None and one.turns == other.turns and one.reward == other.reward
        np.testing.assert_array_equal(one.completion.token_ids, other.completion.token_ids)
        np.testing.assert_allclose(one.completion.logprobs, other.completion.logprobs, rtol=1e-4, atol=1e-5)


def test_several_turns_are_played(alone: list[Sample], files: dict[str, bytes]) -> None:
    tokenizer = _tokenizer(files)
    assert [s.completion.key for s in alone] == list(range(8)) and len({s.text for s in alone}) == 8
    for sample in alone:
        assert [who for who, _ in sample.turns] == ["policy", "agent"] * (TURNS - 1) + ["policy"]
        assert sample.action_mask is not None and sample.text == tokenizer.decode(sample.completion.token_ids)
        ids, flags = sample.completion.token_ids, sample.action_mask
        runs = np.split(ids, np.flatnonzero(np.diff(flags)) + 1)
        assert [tokenizer.decode(run) for run in runs] == [text for _, text in sample.turns] and flags[0]
        assert all(len(run) <= TURN for run in runs[::2]) and sample.written_tokens == sum(map(len, runs[::2]))
        assert (sample.completion.logprobs[flags] < 0).all() and (sample.completion.logprobs[~flags] == 0).all()
        for (_, action), (_, feedback) in zip(sample.turns[::2], sample.turns[1::2], strict=False):
            assert feedback == f"{sum(map(ord, action))};"
    turns = [text for s in alone for _, text in s.turns[::2]]
    assert len(set(turns)) > 0.9 * len(turns), "every turn has noise of its own"


def test_cpu_time_of_agents_is_billed_without_a_lease(pool: WorkerPool, play: Callable[..., list[Sample]], alone: list[Sample]) -> None:
    ledger, first = pool.ledger, len(pool.ledger.rows)
    play([list(range(8))])
    [row] = [row for row in ledger.rows[first:] if row.kind == "agent"]
    assert row.activity == "unleased" and row.slots == 0 and row.instance.startswith("agent-") and not row.lease
    assert 0 < row.seconds <= (os.cpu_count() or 1) * (row.to_s - row.from_s) and row.money == pytest.approx(row.seconds, abs=1e-5)
    assert ledger.unleased_core_s("agent", first) == row.seconds


def test_episodes_do_not_depend_on_the_number_of_engines(pool: WorkerPool, play: Callable[..., list[Sample]], alone: list[Sample]) -> None:
    """The second engine drafts tokens, the first does not."""
    import ray

    assert_same(play([[0, 3, 4, 7], [1, 2, 5, 6]]), alone)
    plain, drafting = ray.get([instance.actor.tried_drafts.remote() for instance in pool.working], timeout=60)
    assert not plain and drafting > 10


def test_every_turn_uses_the_sampling_parameters_of_the_sample(play: Callable[..., list[Sample]]) -> None:
    """A nucleus of one token is the greedy one."""
    found, greedy = play([list(range(8))], top_p=1e-6), play([list(range(8))], temperature=0.0)
    assert [s.turns for s in found] == [s.turns for s in greedy] and found[0].turns == found[1].turns


def test_stop_words_end_turns(play: Callable[..., list[Sample]], alone: list[Sample]) -> None:
    found = play([[0, 3, 4, 7], [1, 2, 5, 6]], ["stops"] * 8)
    assert [s.turns[0] for s in found] == [s.turns[0] for s in alone], "they were asked for after the first turn"
    turns = [text for s in found for who, text in s.turns[1:] if who == "policy"]
    assert len(turns) == 8 * (TURNS - 1) and any(text[-1] in "12" for text in turns)
    assert not any("1" in text[:-1] or "2" in text[:-1] for text in turns)


def test_only_the_agent_that_ended_its_process_gets_no_reward(
    pool: WorkerPool, play: Callable[..., list[Sample]], alone: list[Sample]
) -> None:
    first = len(pool.ledger.rows)
    lost = next(row.instance for row in reversed(pool.ledger.rows) if row.kind == "agent")
    found = play([list(range(8))], ["", "", "", "dies", "", "", "", ""])
    assert found[3].error is not None and "the agent's process died and was replaced" in found[3].error and found[3].reward is None
    assert_same(found[:3] + found[4:], alone[:3] + alone[4:])
    assert any(row.instance == lost and row.money > 0 for row in pool.ledger.rows[first:]), "what a lost process did is paid for"


def test_an_engine_that_is_killed_costs_no_sample(pool: WorkerPool, play: Callable[..., list[Sample]], alone: list[Sample]) -> None:
    import ray

    pid, before = ray.get(pool.working[1].actor.pid.remote()), pool.replacements
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        if not killed and pool.working[1].state.value == "ready":
            killed.append(pid)
            time.sleep(0.1)  # in the middle of a turn, or between two
            os.kill(pid, signal.SIGKILL)

    assert_same(play([[0, 3, 4, 7], [1, 2, 5, 6]], on_progress=kill), alone)
    assert killed and pool.replacements == before + 1
