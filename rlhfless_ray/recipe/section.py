"""The base class of a recipe's sections, and types that several of them use."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    field_validator,
)

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.recipe.mistakes import describe_mistake
from rlhfless_ray.recipe.yaml_text import Word, as_texts, switch

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

LEAST_KV_MB = 16  # of the KV cache of an engine on CPU
MAX_ROWS = 1_000_000  # rows that a built-in task generates, in half a minute
NUMBERS = (int, float, int | None, float | None, Literal[0, 1, 2, 3])
ESCAPES = re.compile(r"(\\[nrt])+")
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]


class FreeWord:
    """Marks a text that may be any word, also one that looks like a switch, such as `off`."""


Name = Annotated[str, FreeWord()]
RunName = Annotated[Name, Field(pattern=r"^(\w[\w.-]*)?$")]


class _ByConstructor(ModelMetaclass):
    def __call__(cls, *arguments: object, **settings: object) -> Any:
        """Make a section from keywords. Raises UserError for the first mistake, as reading a file does."""
        if arguments:
            advice = "; read a dict with its method `parse`, and a file with `load`" if hasattr(cls, "load") else ""
            raise UserError(f"{cls.__name__}: expected keys as keyword arguments, not {type(arguments[0]).__name__}{advice}")
        try:
            return super().__call__(**settings)
        except ValidationError as error:
            raise UserError(f"{cls.__name__}: {describe_mistake(cast(type[BaseModel], cls), error)}") from None


class Section(BaseModel, metaclass=_ByConstructor):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_by_type(cls: type[Self], value: object, info: ValidationInfo) -> object:
        """Give a key for texts the text of a number. Reject `true` for a number, which Python takes for 1, and `off` for a text."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and field.annotation in NUMBERS:
            raise ValueError("expected a number, not true or false")
        if isinstance(value, Word) and field.annotation in NUMBERS:
            raise ValueError(f"expected a number, not the word `{value}`")
        is_text = takes_text(field.annotation)
        if is_text and isinstance(value, bool | Word) and not (isinstance(value, Word) and FreeWord in map(type, field.metadata)):
            raise ValueError(f"expected a text, not the switch `{str(value).lower()}`; leave it empty for none, or write a text in quotes")
        return as_texts(value) if is_text or _has_texts_only(field.annotation) else value


def takes_text(annotation: object) -> bool:
    """Return whether a key takes one text, and nothing else but None."""
    return _leaves(annotation) - {NoneType} == {str} and typing.get_origin(annotation) not in (list, dict)


def _has_texts_only(annotation: object) -> bool:
    """Return whether all values in a list or mapping are texts."""
    return _leaves(annotation) - {NoneType} == {str}


@cache
def _leaves(annotation: object) -> frozenset[object]:
    """Return the types of which an annotation is made."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        arguments = arguments[:1]
    return frozenset({annotation} if not arguments else set().union(*map(_leaves, arguments)))


def raise_first(*checks: Callable[[], Iterator[str]]) -> None:
    """Raise ValueError with the first sentence that these checks yield, if there is one. Each names the key to change.

    A check runs only if the earlier ones found nothing, so it may rely on them.
    """
    for check in checks:
        for mistake in check():
            raise ValueError(mistake)


def _on_or_off(value: object) -> object:
    """Convert true, `yes` and the like to `on`, and false to `off`."""
    return {True: "on", False: "off"}[value] if isinstance(value := switch(value), bool) else value


OffIsAWord = BeforeValidator(_on_or_off)


def _count_or_auto(value: object, least: int = 1) -> object:
    """Reject other values in one sentence: pydantic would report each member of the union."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return value
    raise ValueError(f"expected `auto` or a whole number of at least {least}")


class AutoCount(int):
    """A count that is `auto` in the recipe. As a number it is the smallest one, with which a run begins if that fits."""

    def __repr__(self) -> str:
        return "auto"

    __str__ = __repr__


class AutoStage(AutoCount):
    """A ZeRO stage that is `auto` in the recipe. As a number it is 0 until `preflight.memory_fit` has decided."""


def _zero_stage(value: object, check: Callable[[object], int]) -> int:
    if isinstance(value, AutoStage):
        return value
    return AutoStage(0) if value == "auto" else check(value)


def _rank_count(value: object, check: Callable[[object], int]) -> int:
    """Read `auto` as one rank. Sections whose ranks share a model or sequences begin with more."""
    if isinstance(value, AutoCount):
        return value
    return AutoCount(1) if value == "auto" else check(value)


def _number_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
        return value
    raise ValueError("expected `auto` or a number")


def _switch_or_auto(value: object) -> object:
    if (value := switch(value)) == "auto" or isinstance(value, bool):
        return value
    raise ValueError("expected `auto`, true or false")


def _one_or_several(value: object) -> object:
    """Read one text as a list of it, and an empty one as an empty list."""
    return ([value] if value else []) if isinstance(value, str) else value


def _stop_words(value: object) -> object:
    """Read one word as a list of it. Reject other values in one sentence: pydantic would name a place in the list."""
    words = [value] if isinstance(value, str) else value
    if isinstance(words, list | tuple) and all(isinstance(word, str) and word for word in words):
        if unread := next((word for word in words if ESCAPES.fullmatch(word)), None):
            raise ValueError(f'`{unread}` is a backslash and a letter here, not a line break; write it in double quotes, as ["{unread}"]')
        return list(words)
    raise ValueError('expected texts that are not empty, each in quotes, such as ["</answer>"], or [] for none')


_AS_READ = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
StopWords = Annotated[list[str], BeforeValidator(_stop_words), _AS_READ]
Texts = Annotated[list[str], BeforeValidator(_one_or_several), _AS_READ]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
KvSizeOrAuto = Annotated[int | Literal["auto"], BeforeValidator(partial(_count_or_auto, least=LEAST_KV_MB))]
RankCount = Annotated[
    int,
    Field(ge=1),
    WrapValidator(_rank_count),
    PlainSerializer(lambda count: "auto" if isinstance(count, AutoCount) else count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
ZeroStage = Annotated[
    Literal[0, 1, 2, 3], WrapValidator(_zero_stage), PlainSerializer(lambda stage: "auto" if isinstance(stage, AutoStage) else stage)
]
NumberOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
SwitchOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_switch_or_auto)]
