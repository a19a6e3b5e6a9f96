"""Episodes that outlive a step: turns kept for the next one, and the version of each token."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.scaling.resize_policy import Hold
from rlhfless_ray.agent.agent_processes import AgentProcesses
from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.agent.unfinished_episode import replies_of, token_versions, unfinished_episode, versions_of_turns
from rlhfless_ray.rollout.driver import RolloutDriver
from rlhfless_ray.rollout.live_rollout import DriverSettings, Ending
from rlhfless_ray.rollout.multi_turn import EpisodeTurns
from rlhfless_ray.rollout.request_source import WantedResponses
from rlhfless_ray.session.sample_state import as_json, from_json
from rlhfless_ray.types import UNFINISHED, UNNAMED, Completion, Prompt, Request, Sample, SampleId, Scored, WeightVersion

pytestmark = pytest.mark.pure

FIRST = ((1, 2), PolicyReply([5, 6], "", [-0.5, -0.25], "stop"), 3)
SECOND = ((1, 2, 5, 6, 9), PolicyReply([7], "", [-1.0], "length"), 4)  # the agent wrote token 9 between them


def test_turns_survive_a_checkpoint_and_give_the_same_replies() -> None:
    kept = unfinished_episode(8, (FIRST, SECOND), newest=4)
    assert kept.finish_reason == UNFINISHED and kept.versions == ((3, 2), (4, 1)) and kept.token_ids.tolist() == [5, 6, 7]
    prompt = Prompt(0, "", (1, 2))
    restored = from_json(json.loads(json.dumps(as_json(Sample(prompt, SampleId(prompt.index, 1, 0), kept)))), [prompt]).completion
    assert replies_of(restored) == tuple((context, reply) for context, reply, _ in (FIRST, SECOND))
    assert versions_of_turns(restored) == [3, 4]
    nothing = unfinished_episode(8, (), newest=4)
    assert not len(nothing.token_ids) and replies_of(nothing) == () and versions_of_turns(nothing) == []


def test_an_agents_first_observation_survives_a_checkpoint() -> None:
    prompt = Prompt(0, "asked", (1, 2))
    seen = replace(prompt, text="observed", token_ids=(1, 2, 3))
    done = replace(unfinished_episode(0, (FIRST,), newest=3), finish_reason="stop", turns=())
    restored = from_json(
        json.loads(json.dumps(as_json(Sample(seen, SampleId(seen.index, 1, 0), done, turns=(("policy", "x"),))))), [prompt]
    )
    assert restored.prompt == seen


def test_each_token_has_the_version_of_its_turn() -> None:
    action = np.array([True, True, False, True])
    episode = Episode(np.array([1, 2, 5, 6, 9, 7], np.int32), 2, action, None, 2, False, 1.0)
    assert token_versions(episode, (FIRST, SECOND)) == ((3, 3), (4, 1)), "what the agent wrote counts with the turn before it"
    other = (SECOND[0], PolicyReply([8], "", [-1.0], "stop"), 4)
    assert token_versions(episode, (FIRST, other)) == ((3, 4),), "a turn that is not in the episode counts as the one before it"
    assert token_versions(episode, ()) == ()


def test_a_rollout_with_enough_complete_groups_keeps_its_unfinished_episodes() -> None:
    """It ends before any episode begins. The processes still have replies of the rollout before, whose keys mean other episodes."""
    agents: Any = AgentProcesses(None, 0, 1.0, None, 1.0, None)  # type: ignore[arg-type]
    agents.replies = {1: [SECOND[:2]]}
    complete = Completion(0, np.array([3], np.int32), np.zeros(1, np.float32), "stop", 3)
    begun = unfinished_episode(1, (FIRST,), newest=3)
    requests = [Request(key, (1, 2), key, 8, 1.0) for key in range(3)]
    source = EpisodeTurns(
        agents,
        lambda row: "",
        WantedResponses(requests, [Prompt(UNNAMED.row, "", (1, 2))], np.full(3, 9.0), 4, {0: complete, 1: begun}, cuts=True),
    )
    settings = DriverSettings(1.0, 1.0, 1, lambda tail_s, needed: Hold(1, ""), lambda *_: None)
    pool: Any = SimpleNamespace(working=[None])
    rollout = RolloutDriver(pool, source, WeightVersion(4, ()), settings, Ending(lambda rollout: len(source.ended) >= 1))
    left = rollout.run([np.array([1, 2])], 9.0).unfinished
    assert [(one.key, one.token_ids.tolist(), one.turns) for one in left] == [(1, [5, 6], begun.turns), (2, [], ())]


def test_an_episode_is_saved_with_its_branches() -> None:
    prompt, seen = Prompt(0, "p", (1, 2)), Prompt(0, "", (1, 9))
    done = Completion(0, np.array([3], np.int32), np.zeros(1, np.float32), "stop", 3)
    branch = Scored(seen, SampleId(0, 1, 0, branch=1), done, reward=1.0, action_mask=np.ones(1, bool))
    whole = Scored(prompt, SampleId(0, 1, 0), done, "x", None, (("policy", "x"),), 1.0, branches=(branch,))
    restored = from_json(json.loads(json.dumps(as_json(whole))), [prompt])
    assert isinstance(restored, Scored) and [one.id for one in restored.branches] == [branch.id]
    assert restored.branches[0].prompt.token_ids == (1, 9) and restored.branches[0].reward == 1.0
