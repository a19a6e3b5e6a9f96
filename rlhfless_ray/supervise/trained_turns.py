"""Read which turns of a conversation say that they are not to be trained."""

from __future__ import annotations

from typing import Any

from rlhfless_ray.prompts.conversations import Turn

TRAINS = ("train", "trainable", "training", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "weight")
"""Keys of turns that are 1 or true where the turn is trained. Data for axolotl has `train`, for ms-swift `loss`, for OpenAI `weight`."""
MASKS = ("masked",)  # true where the turn is not trained, as in torchtune
UNSUPPORTED = {
    "mask": "may mean that the turn is trained or that it is not; write `train` true or false",
    "train_detail": "trains parts of a turn, which is not supported; remove it",
}
FLAGS = (*TRAINS, *MASKS, *UNSUPPORTED)
SWITCHES = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}


def trained(turn: Turn) -> tuple[bool | None, str]:
    """Return whether a turn says that it is trained, None if it says nothing, and the words with which it says so.

    Raises:
        ValueError: For a value that is not supported, and for two keys that contradict each other.
    """
    found, said = None, ""
    for key in FLAGS:
        value = turn.get(key)
        if value in (None, "", [], {}):
            continue
        words = f"{key}: {str(value).lower() if isinstance(value, bool) else value}"
        if key in UNSUPPORTED:
            raise ValueError(f"has `{words}`, which {UNSUPPORTED[key]}")
        says = _switch(value, words) != (key in MASKS)
        if found is not None and says != found:
            raise ValueError(f"has `{said}` and `{words}`, which contradict each other; remove one")
        if found is None:
            found, said = says, words
    return found, said


def _switch(value: Any, words: str) -> bool:
    says = SWITCHES.get(str(value).strip().lower())
    if says is None:
        raise ValueError(f"has `{words}`, and only 0 and 1 (or false and true) are supported; change or remove it")
    return says
