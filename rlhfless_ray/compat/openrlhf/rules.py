"""What a flag of a launcher means in a recipe. The rules are in flag_table.py, supervised_table.py and inference_table.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Generic, Literal, Protocol, TypeVar

from rlhfless_ray.compat.openrlhf.flag_semantics import Settings

Kind = Literal["exact", "hint", "noop", "cond", "maybe", "absent", "error"]
KINDS: dict[Kind, str] = {
    "exact": "honoured exactly",
    "hint": "resource hint",
    "noop": "no effect here",
    "cond": "honoured or refused by name",
    "maybe": "honoured, or a hint",
    "absent": "not supported yet",
    "error": "refused",
}


class FlagValues(Protocol):
    """The values of a command line, by the flags' newest names."""

    def __getitem__(self, name: str, /) -> Any: ...


V = TypeVar("V", bound=FlagValues)


@dataclass(frozen=True)
class Rule(Generic[V]):
    """Meaning of one flag. Functions of (x, v) get the flag's value and all values."""

    name: str
    """The newest version's flag without its dashes."""
    kind: Kind
    sets: str = ""
    """Recipe keys that it may set, separated by spaces."""
    make: Callable[[Any, V], Settings] | None = None
    """Converts the value to settings. None: the first key gets `value`."""
    _: KW_ONLY
    value: Callable[[Any, V], object] = lambda x, v: x
    when: Callable[[Any, V], object] = lambda x, v: True
    """Returns whether the flag sets anything."""
    idle: Callable[[V], str] = lambda v: ""
    """Returns why the flag has no effect on a command line in OpenRLHF, or an empty string if it has one."""
    refuses: Callable[[Any, V], str] = lambda x, v: ""
    """Returns why a value is refused, or an empty string."""
    reading: str | Callable[[V], str] = ""
    """How a hint is read, why a flag has no effect here, or why a value is refused."""

    @cached_property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.sets.split())

    def settings(self, v: V) -> Settings:
        x = v[self.name]
        if not self.keys or not self.when(x, v):
            return {}
        return self.make(x, v) if self.make is not None else {self.keys[0]: self.value(x, v)}

    def reason(self, v: V) -> str:
        """Return the `reading` for a command line."""
        return self.reading if isinstance(self.reading, str) else self.reading(v)
