"""Read which turns of a conversation say that they are not to be trained."""

from __future__ import annotations

import re

from rlhfless_ray.prompts.conversations import Turn
from rlhfless_ray.recipe import yaml_text

TRAINS = re.compile(
    "(is|should|do|to|with|has|use|calc|calculate|compute)?(train(ed|able|ing)?(on(turn|this)?)?|learn(ed|able)?|loss(weight|scale|mask)?)"
    "|steploss(mask|weight)|weight"
)
"""Keys of turns that are 1 or true where the turn is trained. Data for axolotl has `train`, for ms-swift `loss`, for OpenAI `weight`."""
MASKS = re.compile("(is)?(masked|ignored?|untrained)|(mask|ignore|skip|no|excludefrom)(loss|train(ing)?)")
"""Keys that are true where the turn is not trained. torchtune has `masked`."""
UNSUPPORTED = {
    "mask": "may mean that the turn is trained or that it is not; write `train` true or false",
    "train_detail": "trains parts of a turn, which is not supported; remove it",
}
SWITCHES = {"1": True, "1.0": True, "0": False, "0.0": False, **yaml_text.SWITCHES}


def is_flag(key: str) -> bool:
    """Return whether a key says something of a turn's training, in whatever case and with or without `_`."""
    return key in UNSUPPORTED or any(pattern.fullmatch(_letters(key)) for pattern in (TRAINS, MASKS))


def trained(turn: Turn) -> tuple[bool | None, str]:
    """Return whether a turn says that it is trained, None if it says nothing, and the words with which it says so.

    Raises:
        ValueError: For a value that is not supported, and for two keys that contradict each other.
    """
    found, said = None, ""
    for key, value in turn.items():
        if value in (None, "", [], {}) or not is_flag(key):
            continue
        words = f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        if key in UNSUPPORTED:
            raise ValueError(f"has `{words}`, which {UNSUPPORTED[key]}")
        says = _switch(value, words) != bool(MASKS.fullmatch(_letters(key)))
        if found is not None and says != found:
            raise ValueError(f"has `{said}` and `{words}`, which contradict each other; remove one")
        if found is None:
            found, said = says, words
    return found, said


def _letters(key: str) -> str:
    return re.sub(r"[\W_]", "", key).lower()


def _switch(value: object, words: str) -> bool:
    says = SWITCHES.get(str(value).strip().lower())
    if says is None:
        raise ValueError(f"has `{words}`, and only 0 and 1 (or false and true) are supported; change or remove it")
    return says
