"""Read YAML with decimal numbers and with words that stay words, and write YAML that every reader reads alike.

PyYAML reads YAML 1.1, in which `010` is 8, `1:30` is 90, `no` is false, `2026-11-29` is a date and `1e3` is a text. The types of YAML 1.2's
core schema replace these, except that numbers are decimal only and may have `_` between their digits.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any, ClassVar

import yaml

from rlhfless_ray.common.json_types import JsonObject

SWITCHES = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_INT = re.compile(rf"[-+]?{_DIGITS}\Z")
_NUMBER = rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?\Z"
_FLOAT = re.compile(rf"{_NUMBER}|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z")


class WrittenInt(int):
    """A whole number that keeps its text, for keys that take texts: `name: 008`."""

    text: str


class WrittenFloat(float):
    """A number that keeps its text, for keys that take texts: `name: 1e3`."""

    text: str


class Word(str):
    """A word without quotes, such as `off`, that may be meant as a switch."""


def switch(value: object) -> object:
    """Return the boolean that a word such as `off` means. Other values pass unchanged."""
    return SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def as_texts(value: object) -> object:
    """Return a value with the texts of YAML's numbers in place of the numbers, and of paths in place of Python's objects for them."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, WrittenInt | WrittenFloat):
        return value.text
    if isinstance(value, list):
        return [as_texts(item) for item in value]
    return {as_texts(key): as_texts(item) for key, item in value.items()} if isinstance(value, dict) else value


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # PyYAML has no types
    """Reject duplicate keys, of which YAML readers would silently keep the last one."""

    yaml_implicit_resolvers: ClassVar[JsonObject] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key `{key.value}` occurs twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> WrittenInt | WrittenFloat:
        text, is_int = self.construct_scalar(node), node.tag.endswith(":int")
        if not (_INT if is_int else _FLOAT).match(text):
            raise yaml.constructor.ConstructorError(None, None, f"`{text}` is not a decimal number", node.start_mark)
        digits = re.sub(r"\.(?=inf|nan)", "", text.lower())
        try:
            number = WrittenInt(digits) if is_int else WrittenFloat(digits)
        except ValueError:  # Python's limit of digits
            raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text):,} digits", node.start_mark) from None
        number.text = text
        return number

    def construct_word(self, node: object) -> object:
        text = self.construct_scalar(node)
        return switch(text) if text.lower() in ("true", "false") else Word(text)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # in C it takes a quarter of the time
    """Quote texts that YAML 1.1 or this module's reader would take for something else."""


_WORDS = "|".join(form for word in SWITCHES for form in (word, word.title(), word.upper()))
for _tag, _pattern, _first in (
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("bool", re.compile(rf"(?:{_WORDS})\Z"), list("tTfFyYnNoO")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("merge", re.compile(r"<<\Z"), ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_TAG + _tag, _pattern, _first)
for _kind in ("int", "float"):
    _Loader.add_constructor(_TAG + _kind, _Loader.construct_number)
_Loader.add_constructor(_TAG + "bool", _Loader.construct_word)
for _dumper in (_Dumper, yaml.SafeDumper):
    _dumper.add_representer(WrittenInt, lambda dumper, number: dumper.represent_int(int(number)))
    _dumper.add_representer(WrittenFloat, lambda dumper, number: dumper.represent_float(float(number)))
    _dumper.add_representer(Word, lambda dumper, word: dumper.represent_str(str(word)))


def read_yaml(text: str) -> Any:
    """Parse YAML without duplicate keys. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, TypeError, AttributeError) as error:  # of PyYAML's constructors, for explicit tags such as `!!timestamp x`
        raise yaml.YAMLError(f"a value does not fit its tag ({error})") from None
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


def write_yaml(tree: object) -> str:
    """Format a tree as YAML, its keys in order."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
