"""Episodes that outlive a step: turns kept for the next one, and the version of each token."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rlhfless_ray.agent.engine_api import Reply
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.agent.unfinished_episode import replies_of, token_versions, unfinished_episode, versions_of_turns
from rlhfless_ray.runtime.sample_state import as_json, from_json
from rlhfless_ray.types import UNFINISHED, Prompt, Sample

pytestmark = pytest.mark.pure

FIRST = ((1, 2), Reply([5, 6], "", [-0.5, -0.25], "stop"), 3)
SECOND = ((1, 2, 5, 6, 9), Reply([7], "", [-1.0], "length"), 4)  # the agent wrote token 9 between them


def test_turns_survive_a_checkpoint_and_give_the_same_replies() -> None:
    kept = unfinished_episode(8, (FIRST, SECOND), newest=4)
    assert kept.finish_reason == UNFINISHED and kept.versions == ((3, 2), (4, 1)) and kept.token_ids.tolist() == [5, 6, 7]
    prompt = Prompt(0, "", (1, 2))
    restored = from_json(json.loads(json.dumps(as_json(Sample(prompt, 0, kept)))), [prompt]).completion
    assert replies_of(restored) == tuple((context, reply) for context, reply, _ in (FIRST, SECOND))
    assert versions_of_turns(restored) == [3, 4]
    nothing = unfinished_episode(8, (), newest=4)
    assert not len(nothing.token_ids) and replies_of(nothing) == () and versions_of_turns(nothing) == []


def test_an_agents_first_observation_survives_a_checkpoint() -> None:
    prompt = Prompt(0, "asked", (1, 2))
    seen = replace(prompt, text="observed", token_ids=(1, 2, 3))
    done = replace(unfinished_episode(0, (FIRST,), newest=3), finish_reason="stop", turns=())
    restored = from_json(json.loads(json.dumps(as_json(Sample(seen, 0, done, turns=(("policy", "x"),))))), [prompt])
    assert restored.prompt == seen


def test_each_token_has_the_version_of_its_turn() -> None:
    action = np.array([True, True, False, True])
    episode = Episode(np.array([1, 2, 5, 6, 9, 7], np.int32), 2, action, None, 2, False, 1.0)
    assert token_versions(episode, (FIRST, SECOND)) == ((3, 3), (4, 1)), "what the agent wrote counts with the turn before it"
    other = (SECOND[0], Reply([8], "", [-1.0], "stop"), 4)
    assert token_versions(episode, (FIRST, other)) == ((3, 4),), "a turn that is not in the episode counts as the one before it"
    assert token_versions(episode, ()) == ()
