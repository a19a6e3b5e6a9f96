"""The base class of a recipe's sections, and types that several of them use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

LEAST_KV_MB = 16  # of the KV cache of an engine on CPU
MAX_ROWS = 1_000_000  # rows that a built-in task generates, in half a minute
NUMBERS = (int, float, int | None, float | None, Literal[0, 1, 2, 3])
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]


class FreeWord:
    """Marks a text that may be any word, also one that YAML reads as a boolean, such as `off`."""


Name = Annotated[str, FreeWord()]
RunName = Annotated[Name, Field(pattern=r"^(\w[\w.-]*)?$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls: type[Self], value: Any, info: ValidationInfo) -> Any:
        """Reject `true` for a number, which Python takes for 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in NUMBERS:
            raise ValueError("expected a number, not true or false")
        return value


def raise_first(*checks: Callable[[], Iterator[str]]) -> None:
    """Raise ValueError with the first sentence that these checks yield, if there is one. Each names the key to change.

    A check runs only if the earlier ones found nothing, so it may rely on them.
    """
    for check in checks:
        for mistake in check():
            raise ValueError(mistake)


def _yaml_word(value: Any) -> Any:
    """Convert true and false, as YAML reads bare `on` and `off`, back to the words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OffIsAWord = BeforeValidator(_yaml_word)


def _count_or_auto(value: Any, least: int = 1) -> Any:
    """Reject other values in one sentence: pydantic would report each member of the union."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    raise ValueError(f"expected `auto` or a whole number of at least {least}")


def _number_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
        return value
    raise ValueError("expected `auto` or a number")


def _switch_or_auto(value: Any) -> Any:
    if value == "auto" or isinstance(value, bool):
        return value
    raise ValueError("expected `auto`, true or false")


def _one_or_several(value: Any) -> Any:
    """Read one text as a list of it, and an empty one as an empty list."""
    return ([value] if value else []) if isinstance(value, str) else value


def _stop_words(value: Any) -> Any:
    """Read one word as a list of it. Reject other values in one sentence: pydantic would name a place in the list."""
    words = [value] if isinstance(value, str) else value
    if isinstance(words, list | tuple) and all(isinstance(word, str) and word for word in words):
        return list(words)
    raise ValueError('expected texts that are not empty, each in quotes, such as ["</answer>"], or [] for none')


StopWords = Annotated[list[str], BeforeValidator(_stop_words)]
Texts = Annotated[list[str], BeforeValidator(_one_or_several)]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
KvSizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(partial(_count_or_auto, least=LEAST_KV_MB))]
NumberOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
SwitchOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_switch_or_auto)]
