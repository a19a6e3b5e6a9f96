"""What every section of a recipe is, and types that several use."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

MOST_ROWS = 1_000_000  # that a built-in task generates: half a minute's work
NUMBERS = (int, float, int | None, float | None)
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
ScheduleName = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls: type[Self], value: Any, info: ValidationInfo) -> Any:
        """Python takes `true` for 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in NUMBERS:
            raise ValueError("a number is wanted, not true or false")
        return value


def _yaml_word(value: Any) -> Any:
    """YAML reads bare `on` and `off` as true and false; where a setting has the words, the words are meant."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


OffIsAWord = BeforeValidator(_yaml_word)
