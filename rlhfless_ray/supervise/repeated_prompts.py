"""Find out whether responses repeat the prompt that stands in a column of its own."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfless_ray.prompts.conversations import Turn, reads

BEFORE_RESPONSE = ("system", "developer", "user")
FEW = 0.1  # share of rows up to which a prompt at the beginning of a response is a quotation
QUOTING_ROWS = 20  # rows of a data set that can tell so


def comparable(turns: Sequence[Turn], template: str) -> list[Turn]:
    """Return turns without keys that the chat template does not read, such as a time or a score."""
    found = []
    for turn in turns:
        kept = {key: value for key, value in turn.items() if value and (key in ("role", "content") or reads(key, template))}
        found.append({key: value.strip() if isinstance(value, str) else value for key, value in kept.items()})
    return found


def split(prompt: list[Turn], side: list[Turn], template: str) -> tuple[list[Turn], list[Turn]]:
    """Return the prompt's turns and those of the response, which may repeat the prompt or its last turns.

    The system turn may be in one of them only.

    Raises:
        ValueError: If the response begins with turns that are no response and not the prompt. The message says why.
    """
    if not side or side[0].get("role") not in BEFORE_RESPONSE:
        return prompt, side
    asked, said = comparable(prompt, template), comparable(side, template)
    for count in range(min(len(asked), len(said)), 0, -1):
        if said[:count] == asked[-count:] and any(turn.get("role") == "user" for turn in said[:count]):
            return prompt, _rest(side, count)
    system = sum(turn.get("role") in ("system", "developer") for turn in said[:1])
    if system and asked and asked[0].get("role") not in ("system", "developer") and said[1 : 1 + len(asked)] == asked:
        return side[: 1 + len(asked)], _rest(side, 1 + len(asked))
    if asked and asked[-1].get("role") not in BEFORE_RESPONSE and said[0].get("role") == "user":
        return prompt, side  # a conversation that goes on
    raise ValueError(f"begins with a turn of role `{side[0].get('role')}` that is not the prompt, so it is no response to it")


def _rest(side: list[Turn], count: int) -> list[Turn]:
    if len(side) == count:
        raise ValueError("repeats the prompt and has no response")
    return side[count:]


def repeats(prompt: object, response: object) -> bool:
    """Return whether a text begins with the prompt's text, as a whole."""
    if not isinstance(prompt, str) or not isinstance(response, str) or not prompt.strip() or len(response) <= len(prompt):
        return False
    return response.startswith(prompt) and not (prompt[-1].isalnum() and response[len(prompt)].isalnum())


def decide(rows: Sequence[tuple[str, object, Sequence[object]]]) -> tuple[bool, str, int]:
    """Decide for a data set of texts whether its responses repeat their prompts.

    `rows`: name, prompt and responses of each. Returns whether all do, and the first row in which one does and the number of such rows.

    Raises:
        ValueError: If some do and others do not, which tells nothing. The message names a row of each kind.
    """
    texts = [(name, [repeats(prompt, response) for response in responses]) for name, prompt, responses in rows]
    repeating = [name for name, found in texts if any(found)]
    others = [name for name, found in texts if not all(found)]
    if repeating and others and (len(texts) < QUOTING_ROWS or len(repeating) > FEW * len(texts)):
        raise ValueError(
            f"{repeating[0]}: a response begins with the prompt's text, and {others[0]} has one that does not, so it cannot be told "
            "whether the prompt is part of the response; remove it from all responses, or name no prompt column"
        )
    return bool(repeating) and not others, repeating[0] if repeating else "", len(repeating)
