"""Stop words of requests: the engine has tokens only, so the ends of what it generates are turned into text and looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

BEYOND = 8  # tokens that are looked at beside those that a word's bytes could be


class StopStrings:
    def __init__(self, load: Callable[[], Any] | None) -> None:
        """`load` gives the tokenizer; it is called with the first request that has stop words."""
        self._load = load
        self._tokenizer: Any = None

    def found(self, token_ids: Sequence[int], words: tuple[str, ...], before: Sequence[int] = (), min_tokens: int = 0) -> bool:
        """Whether the newest tokens hold one of the words; `before`: those that stand before `token_ids`. A token has a byte of text at
        least, so a word that the last token completes lies in as many tokens as it has bytes: however long the response, no more
        are looked at. As in vLLM, a word that the first `min_tokens` tokens complete is none. Raises RuntimeError without a
        tokenizer."""
        if self._load is None:
            raise RuntimeError("this engine has no tokenizer to find stop words with")
        if not token_ids and not before:
            return False
        if self._tokenizer is None:
            self._tokenizer = self._load()
        most = max(len(word.encode()) for word in words) + BEYOND
        newest = list(token_ids[-most:])
        if len(newest) < most:
            newest = [*before[-(most - len(newest)) :], *newest]
        text = self._tokenizer.decode(newest, skip_special_tokens=False)
        free = newest[: max(0, min_tokens - (len(before) + len(token_ids) - len(newest)))]
        done = len(self._tokenizer.decode(free, skip_special_tokens=False)) if free else 0
        return any(text.find(word, max(0, done - len(word) + 1)) >= 0 for word in words)
