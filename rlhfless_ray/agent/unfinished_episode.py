"""Episodes that outlive a step: the policy's turns so far, kept as a completion, and the versions that drew a finished one.

The agent plays an episode again from the beginning, and gets the same replies from the policy as before.
"""

from __future__ import annotations

from itertools import accumulate, groupby

import numpy as np

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.agent.messages import Drawn
from rlhfless_ray.types import UNFINISHED, Completion


def unfinished_episode(key: int, drawn: Drawn, newest: int) -> Completion:
    """Return the turns as a completion, without what the agent wrote. `newest`: version, in case there is no turn."""
    tokens = [token for _, reply, _ in drawn for token in reply.token_ids]
    logprobs = [value for _, reply, _ in drawn for value in reply.logprobs]
    versions = tuple((version, len(reply.token_ids)) for _, reply, version in drawn)
    turns = tuple((context, len(reply.token_ids), reply.finish_reason) for context, reply, _ in drawn)
    version = versions[-1][0] if versions else newest
    return Completion(key, np.array(tokens, np.int32), np.array(logprobs, np.float32), UNFINISHED, version, versions, turns)


def replies_of(completion: Completion) -> tuple[tuple[tuple[int, ...], PolicyReply], ...]:
    """Return (context, reply) of each turn of an unfinished episode."""
    ends = accumulate(tokens for _, tokens, _ in completion.turns)
    parts = [(context, slice(end - tokens, end), reason) for (context, tokens, reason), end in zip(completion.turns, ends, strict=True)]
    ids, logprobs = completion.token_ids, completion.logprobs
    return tuple((context, PolicyReply(ids[part].tolist(), "", logprobs[part].tolist(), reason)) for context, part, reason in parts)


def versions_of_turns(completion: Completion) -> list[int]:
    """Return the version of each turn of an unfinished episode."""
    return [version for (version, _), _ in zip(completion.versions, completion.turns, strict=False)]


def token_versions(episode: Episode, drawn: Drawn) -> tuple[tuple[int, int], ...]:
    """Return the weight versions of the tokens after the first observation, as (version, number of tokens) in order.

    The agent's tokens get the version of the turn before them. So does a turn that is not where the policy drew it.
    """
    if not drawn:
        return ()
    first, tokens = episode.prompt_tokens, episode.token_ids.tolist()
    of_token = np.full(len(tokens) - first, drawn[0][2])
    for context, reply, version in drawn:
        if tokens[: len(context) + len(reply.token_ids)] == [*context, *reply.token_ids]:
            of_token[max(0, len(context) - first) :] = version
    return tuple((version, len(list(run))) for version, run in groupby(of_token.tolist()))
