"""Play two episodes with a made-up policy before the first step, in a process of its own.

A file that violates the contract is found before the first rollout.
"""

from __future__ import annotations

import os
from typing import Any

from rlhfless_ray.agent.engine_api import PolicyReply
from rlhfless_ray.agent.episode_source import EpisodeSource
from rlhfless_ray.agent.messages import AgentHung, EpisodeEnd, EpisodeStart, TurnReply, TurnRequest
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.local.isolated_call import call_begins, isolated_main, run_isolated
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.model_folder import without_weights
from rlhfless_ray.weights.tensor_file import Files

TURNS = 3  # turns of the policy per episode: an agent that gets this far fulfils the contract


def dry_play(recipe: Recipe, source: EpisodeSource, prompts: list[Prompt], files: Files) -> None:
    """Play two episodes with the first prompts. The policy's turns are empty in one of them, and the label in the other.

    Raises UserError if the executor cannot be created, or if both episodes fail, hang or end the process. An agent may fail
    one of them for a good reason.
    """
    where, section, column = source.where, recipe.agent, recipe.answer_column
    longest = recipe.longest_tokens(max(len(prompt.token_ids) for prompt in prompts))
    tasks = [(prompts[k % len(prompts)].text, source.label(prompts[k % len(prompts)].row, column)) for k in range(2)]
    arguments = source, without_weights(files), recipe.policy.trust_remote_code, longest, section.timeout_s
    errors = run_isolated(__name__, (arguments, tasks), (TURNS + 2) * section.timeout_s, where, "a dry run", "end")
    if all(errors):
        raise UserError(f"{where}: it fails in a dry run with made-up turns of the policy: {errors[0]}")


def errors_of(arguments: tuple[Any, ...], tasks: list[tuple[str, Any]]) -> list[str | None]:
    """Return each episode's error message, or None."""
    from rlhfless_ray.agent.agent_actor import AgentActor

    actor = AgentActor(*arguments)
    end = [actor.tokenizer.eos_token_id] if actor.tokenizer.eos_token_id is not None else []
    return [_error(actor, number, prompt, label, end) for number, (prompt, label) in enumerate(tasks)]


def _error(actor: Any, number: int, prompt: str, label: Any, end: list[int]) -> str | None:
    call_begins()
    words = [int(t) for t in actor.tokenizer(str(label), add_special_tokens=False)["input_ids"]] if number else []
    for events in actor.play(number + 1, [EpisodeStart(number, prompt, label, 1.0)]):
        for event in events:
            if isinstance(event, EpisodeEnd):
                return event.result if isinstance(event.result, str) else None
            if isinstance(event, AgentHung):
                return f"the agent held its process for {event.seconds:.0f} s"
            if not isinstance(event, TurnRequest):
                continue
            if event.turn == TURNS:
                return None
            tokens = ([*words, *end] or [event.token_ids[-1]])[: event.max_tokens]
            reply = PolicyReply(tokens, "", [-1.0] * len(tokens), "stop")
            actor.answer(number + 1, [TurnReply(number, event.turn, reply)])
    return None


if __name__ == "__main__":
    isolated_main(errors_of)
    os._exit(0)  # do not wait for threads that the agent left running
