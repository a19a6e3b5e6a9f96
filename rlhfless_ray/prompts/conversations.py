"""Read conversations from cells of rows, and render them with a chat template. Used for prompts and for supervised rows."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.read_rows import TableRow, without_null_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = JsonObject

MEDIA = ("audio", "video")
WORD = re.compile(r"[^\W\d_]{4,}")  # shorter ones are in many texts by chance
ROLES = ("system", "user", "assistant", "tool")  # words that a template writes by itself
WRAPPERS = ("messages", "conversations", "conversation", "turns")  # keys of objects with a conversation
OTHER_NAMES = {"human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "ai": "assistant"}
"""Roles of other data formats → the role that chat templates know. Most templates would write them as they are."""
LIKE_TURNS = re.compile(r"""\ufeff?\s*[\[(]?\s*\{\s*["'](role|content|from|value)["']\s*:""")
NAMES_TURNS = re.compile(r"""\ufeff?\s*["\[({].*["'](role|from)\\*["']\s*:""", re.DOTALL)


@dataclass
class RowCounts:
    """Count the rows in which something was found, and keep the name of the first."""

    rows: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def count(self, found: Iterable[str], row: str) -> None:
        for name in found:
            self.rows[name] = self.rows.get(name, 0) + 1
            self.first.setdefault(name, row)

    def shown(self, of: int) -> str:
        """Return what was found in `of` rows, for a message."""
        return ", ".join(f"`{name}` ({rows} of {of} rows, first {self.first[name]})" for name, rows in self.rows.items())


def cell_of(row: JsonObject, column: str) -> Any:
    """Return a cell, as a list of turns if it is a conversation, also one that is JSON or Python text.

    In a table's conversation each call has the arguments of all calls, so those that are null are left out.

    Raises:
        ValueError: For a text that begins like turns and cannot be read. The message says what is wrong.
    """
    cell = row[column]
    is_padded = isinstance(row, TableRow) and not isinstance(cell, str)
    turns = _parsed(cell, column) if isinstance(cell, str) else cell
    if isinstance(turns, dict) and "role" in turns:
        turns = [turns]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return cell
    return [{key: _calls(value, is_padded) if key == "tool_calls" else value for key, value in turn.items()} for turn in turns]


def is_conversation(cell: object) -> bool:
    return isinstance(cell, list) and bool(cell) and all(isinstance(turn, dict) for turn in cell)


def _parsed(text: str, column: str) -> object:
    """Return the turns that a text lists, or the text."""
    if not NAMES_TURNS.match(text):
        return text
    try:
        found = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(text.lstrip("\ufeff").strip())  # a table of Python objects that was saved as CSV has their `repr`
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            if not LIKE_TURNS.match(text):
                return text
            raise ValueError(f"column `{column}` begins like a list of turns, and is neither JSON nor a Python list") from None
    if isinstance(found, str):  # JSON text within JSON text
        inner = _parsed(found, column)
        return text if inner is found else inner
    turns = [found] if isinstance(found, dict) else list(found) if isinstance(found, tuple) else found
    if isinstance(found, dict) and (name := next((name for name in WRAPPERS if _are_turns(found.get(name))), "")):
        raise ValueError(f"column `{column}` has an object with the conversation in its `{name}`; put that list itself into the column")
    return turns if _are_turns(turns) else text  # JSON that is no conversation is a prompt like others


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in value)


def _calls(calls: object, is_padded: bool) -> object:
    if isinstance(calls, str):
        try:
            calls = json.loads(calls) if calls.strip() else None
        except ValueError:
            return calls
    return without_null_values(calls) if is_padded else calls


def turn_problem(turns: Sequence[Turn], template: str, media: Sequence[str] = ("image", *MEDIA)) -> str:
    """Return which turn of a conversation lacks what a chat template reads or has what is not read here, or an empty string.

    A template renders a missing role or content as nothing, or as the word None, and an image as a placeholder. `media`: kinds of parts
    that are not read.
    """
    for number, turn in enumerate(turns, 1):
        parts, role = turn.get("content"), turn.get("role")
        kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if other := next((kind for kind in kinds if any(medium in kind for medium in media)), None):
            return f"turn {number} has a part of type `{other}`, and only text {'' if 'image' in media else 'and images '}is read"
        for key in ("role", "content"):
            is_call = key == "content" and turn.get("tool_calls") and reads("tool_calls", template)
            if turn.get(key) is None and key in template and not is_call:
                return f"turn {number} has no `{key}`" + (
                    "" if key in turn else f", only {', '.join(f'`{name}`' for name in turn) or 'an empty turn'}"
                )
        if parts is not None and not isinstance(parts, (str, list, dict)):
            return f"turn {number} has {parts!r} as `content`, which is no text; give it a string"
        if role is not None and not isinstance(role, str):
            return f"turn {number} has {role!r} as `role`, which is no text"
        if isinstance(role, str) and not re.search(rf"(['\"]){re.escape(role)}\1", template):
            known = OTHER_NAMES.get(role.lower(), role.lower().strip())
            if known != role and known in ROLES:
                return f"turn {number} has the role `{role}`, which the chat template does not know; name it `{known}`"
    return ""


def without_nulls(turns: Sequence[Turn], without: Iterable[str] = ()) -> list[Turn]:
    """Return the turns without the keys `without` and those that are null, except content: in Arrow's tables each has the keys of all.

    A chat template would take a null `name` or `tool_calls` for one that is there.
    """
    return [{k: value for k, value in turn.items() if k not in without and (value is not None or k == "content")} for turn in turns]


def reads(key: str, template: str) -> bool:
    """Return whether a chat template may read a key of turns: it has the word."""
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


def rendering_problem(turns: Sequence[Turn], text: str, template: str, *, refuse_calls: bool = True) -> str:
    """Return which turn `text`, the rendered conversation, garbles or lacks, or an empty string.

    A chat template for plain text writes a list of parts as Python code. With `refuse_calls` a turn that has nothing but tool calls must
    not be rendered by a template that reads none: it would write an empty turn.
    """
    for number, turn in enumerate(turns, 1):
        content = turn.get("content")
        if isinstance(content, (list, dict)) and content and str(content) in text:
            kind = type(content).__name__
            return f"turn {number} has a {kind} as `content`, which the chat template writes as Python code; give it a string"
        is_empty = not (content.strip() if isinstance(content, str) else content)
        if refuse_calls and is_empty and turn.get("tool_calls") and not reads("tool_calls", template):
            return f"turn {number} has `tool_calls` only, and the chat template reads none; remove the turn, or use another template"
    return ""


def lost_roles(turns: Sequence[Turn], text: str) -> set[str]:
    """Return the roles of turns that `text`, the rendered conversation, lacks. Many chat templates know two roles only.

    A turn is lost if it has words and the text has none of them: a template may edit what a turn says. Of the assistant's turns only lists
    of parts are looked at, because templates leave out what it thought.
    """
    lost = set[str]()
    for turn in turns:
        role, content = str(turn.get("role")), turn.get("content")
        if role in lost or (role == "assistant" and isinstance(content, str)):
            continue
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        words = [word for word in WORD.findall(content) if word.lower() not in ROLES] if isinstance(content, str) else []
        if words and not any(word in text for word in words):
            lost.add(role)
    return lost


class Lost(NamedTuple):
    """What the rendered text of one conversation lacks. `as_assistant`: roles whose turns it has as if they were the assistant's."""

    keys: set[str]
    roles: set[str]
    as_assistant: set[str]


class BadTurns(ValueError):
    """Turns that cannot be rendered as they are."""


class ChatRenderer:
    """Render conversations with a tokenizer's chat template, and count what the text lacks.

    Args:
        tokenizer: It has a chat template.
        is_own: Tells keys of turns that the caller reads, besides role and content.
        refuse_calls: Whether to refuse a turn that has tool calls only, if the template reads none.
        reads_images: Whether turns may have parts with images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        is_own: Callable[[str], bool] | None = None,
        refuse_calls: bool = True,
        reads_images: bool = False,
    ) -> None:
        self.tokenizer, self.template = tokenizer, str(tokenizer.chat_template)
        self.is_own = is_own or (lambda key: False)
        self.refuse_calls, self.media = refuse_calls, MEDIA if reads_images else ("image", *MEDIA)
        self.read_keys = set[str]()  # keys that changed a text
        self.as_assistant = dict[str, bool]()  # role → whether its turns are written as the assistant's
        self.rows = 0
        self.keys, self.roles, self.confused = RowCounts(), RowCounts(), RowCounts()

    def render(self, turns: Sequence[Turn], tools: list[JsonObject] | None, *, prompts: bool) -> str:
        """Return the text of a conversation. `prompts`: whether the assistant's next turn begins at its end.

        Raises:
            BadTurns: For turns that the text would garble or lack. The message says which.
            Exception: What the template raises.
        """
        if wrong := turn_problem(turns, self.template, self.media):
            raise BadTurns(f"{wrong}; fix or remove the row")
        text = self._apply(without_nulls(turns), tools, prompts)
        if wrong := rendering_problem(turns, text, self.template, refuse_calls=self.refuse_calls):
            raise BadTurns(wrong)
        return text

    def _apply(self, turns: list[Turn], tools: list[JsonObject] | None, prompts: bool) -> str:
        return str(self.tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompts))

    def lost(self, turns: Sequence[Turn], text: str, tools: list[JsonObject] | None, *, prompts: bool) -> Lost:
        """Return what `text`, the rendered conversation, lacks."""
        said = {key for turn in turns for key, value in turn.items() if value not in (None, "", [], {}) and not self.is_own(key)}
        said -= {"role", "content"}
        keys = set[str]()
        for key in sorted(said - self.read_keys):
            if reads(key, self.template) and self._changes(text, without_nulls(turns, (key,)), tools, prompts):
                self.read_keys.add(key)
            else:
                keys.add(key)
        roles = lost_roles(turns, text)
        others = {str(turn.get("role")) for turn in turns} - {"user", "assistant"} - roles
        for role in sorted(others - self.as_assistant.keys()):
            swapped = [{**turn, "role": "assistant"} if turn.get("role") == role else turn for turn in without_nulls(turns)]
            self.as_assistant[role] = not self._changes(text, swapped, tools, prompts)
        return Lost(keys, roles, {role for role in others if self.as_assistant[role]})

    def _changes(self, text: str, turns: list[Turn], tools: list[JsonObject] | None, prompts: bool) -> bool:
        try:
            return self._apply(turns, tools, prompts) != text
        except Exception:  # a template may raise anything, so it reads what was changed
            return True

    def count(self, lost: Lost, row: str) -> None:
        self.rows += 1
        for counts, found in ((self.keys, lost.keys), (self.roles, lost.roles), (self.confused, lost.as_assistant)):
            counts.count(sorted(found), row)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about all conversations that were counted."""
        for key in self.read_keys & self.keys.rows.keys():  # a template may leave it out of some turns
            del self.keys.rows[key]
        found = (
            (self.keys, "keys of turns that the chat template does not read: "),
            (self.roles, "roles of turns of which no word is in the text that the chat template writes: "),
            (self.confused, "roles of turns that the chat template writes as if they were the assistant's: "),
        )
        return tuple(f"{what}{counts.shown(self.rows)}" for counts, what in found if counts.rows)
