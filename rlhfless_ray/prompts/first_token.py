"""The token that begins a text, which a sequence has once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfless_ray.common.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FirstToken:
    """The tokenizer's beginning-of-text token. `is_added`: whether the tokenizer puts it before each text, and the recipe allows it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, allowed: bool) -> None:
        self.id: int | None = getattr(tokenizer, "bos_token_id", None)
        self.text: str = (getattr(tokenizer, "bos_token", None) or "") if self.id is not None else ""
        self.is_added = allowed and self.id is not None and tokenizer("")["input_ids"][:1] == [self.id]

    def begins(self, text: str) -> bool:
        """Return whether a text begins with the token itself, after blanks."""
        return bool(self.text) and text.lstrip().startswith(self.text)

    def ready(self, text: str) -> str:
        """Return a text without blanks before the token that it begins with."""
        return text.lstrip() if self.begins(text) else text

    def cut(self, text: str) -> str:
        """Return a text without the token at its beginning."""
        while self.begins(text):
            text = text.lstrip()[len(self.text) :]
        return text

    def put(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a whole text. They begin with this token once if it is added, whether or not the text has it."""
        return self.once([self.id, *tokens]) if self.is_added and self.id is not None else tokens

    def once(self, tokens: list[int]) -> list[int]:
        """Return tokens that do not begin with this token twice."""
        while self.id is not None and tokens[:2] == [self.id, self.id]:
            tokens = tokens[1:]
        return tokens

    def template_writes_it(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether texts of the chat template begin with the token."""
        try:
            turns = [{"role": "user", "content": "a"}]
            return self.begins(str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)))
        except Exception:  # a template may raise anything
            return False

    def cut_turns(self, turns: list[JsonObject]) -> list[JsonObject]:
        """Return turns whose contents do not begin with the token."""
        return [{**turn, "content": self.cut(turn["content"])} if isinstance(turn.get("content"), str) else turn for turn in turns]
