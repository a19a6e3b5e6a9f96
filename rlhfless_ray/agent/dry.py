"""An agent is played twice before the first step, in a process of its own and with a made-up policy, so that a run does not find
out in its first rollout that the file is not of the contract."""

from __future__ import annotations

import os
from typing import Any

from rlhfless_ray.agent.engine import Reply
from rlhfless_ray.agent.load import KEY, AgentSource
from rlhfless_ray.agent.messages import Answered, Asked, Opening, Played, Stuck
from rlhfless_ray.dry import answer, answer_of
from rlhfless_ray.errors import UserError
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.types import Prompt
from rlhfless_ray.weights.folder import without_weights

TURNS = 3  # of the policy: an agent that is content until then is of the contract


def dry_play(recipe: Recipe, source: AgentSource, prompts: list[Prompt], files: dict[str, bytes]) -> None:
    """The first prompts, answered by nothing and by the label itself. Raises UserError when the agent's executor cannot be made, and
    when both episodes fail, hang or end the process; an agent that fails for one of them may be right to."""
    where, section, column = f"{KEY} {source.file.path}", recipe.agent, recipe.answer_column
    longest = recipe.longest_tokens(max(len(prompt.token_ids) for prompt in prompts))
    asked = [(prompts[k % len(prompts)].text, prompts[k % len(prompts)].row.get(column, "") if column else "") for k in range(2)]
    made = source, without_weights(files), recipe.policy.trust_remote_code, longest, section.timeout_s
    errors = answer_of(__name__, (made, asked), 2 * (TURNS + 1) * section.timeout_s, where, "a dry play", "end")
    if all(errors):
        raise UserError(f"{where}: it fails in a dry play with made-up turns of the policy: {errors[0]}")


def errors_of(made: tuple[Any, ...], asked: list[tuple[str, Any]]) -> list[str | None]:
    """What went wrong with each episode."""
    from rlhfless_ray.agent.actor import AgentActor

    actor = AgentActor(*made)
    end = [actor.tokenizer.eos_token_id] if actor.tokenizer.eos_token_id is not None else []
    return [_error(actor, number, prompt, label, end) for number, (prompt, label) in enumerate(asked)]


def _error(actor: Any, number: int, prompt: str, label: Any, end: list[int]) -> str | None:
    words = [int(t) for t in actor.tokenizer(str(label), add_special_tokens=False)["input_ids"]] if number else []
    for events in actor.play(number + 1, [Opening(number, prompt, label, 1.0)]):
        for event in events:
            if isinstance(event, Played):
                return event.result if isinstance(event.result, str) else None
            if isinstance(event, Stuck):
                return f"the agent held its process for {event.seconds:.0f} s"
            if not isinstance(event, Asked):
                continue
            if event.turn == TURNS:
                return None
            tokens = ([*words, *end] or [event.token_ids[-1]])[: event.max_tokens]
            reply = Reply(tokens, "", [-1.0] * len(tokens), "stop")
            actor.answer(number + 1, [Answered(number, event.turn, reply)])
    return None


if __name__ == "__main__":
    answer(errors_of)
    os._exit(0)  # whatever the agent left running
