"""Find stop strings: the engine has tokens only, so the newest ones are decoded and searched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

EXTRA_TOKENS = 8  # decoded in addition to the bytes of the longest word


class StopStrings:
    def __init__(self, load: Callable[[], Any] | None) -> None:
        """`load`: loads the tokenizer; called for the first request with stop words. None: there is no tokenizer."""
        self._load = load
        self._tokenizer: Any = None

    def has_completed(self, token_ids: Sequence[int], words: tuple[str, ...], before: Sequence[int] = (), min_tokens: int = 0) -> bool:
        """Return whether the newest tokens complete one of the words. `before`: the response's tokens before `token_ids`.

        A token has at least one byte of text. A word that the last token completes therefore has at most as many tokens as bytes,
        and few more are decoded. More are only if they begin within a character: a tokenizer with byte fallback, such as Llama 2's, then
        shows no byte up to its next whole token. As in vLLM, words that the first `min_tokens` tokens complete do not count. Raises
        RuntimeError without a tokenizer.
        """
        if self._load is None:
            raise RuntimeError("this engine has no tokenizer to find stop words with")
        if self._tokenizer is None:
            self._tokenizer = self._load()
        max_tokens = max(len(word.encode()) for word in words) + EXTRA_TOKENS
        while True:
            newest = list(token_ids[-max_tokens:])
            if len(newest) < max_tokens:
                newest = [*before[-(max_tokens - len(newest)) :], *newest]
            text = self._tokenizer.decode(newest, skip_special_tokens=False)
            if not text.startswith("\ufffd") or len(newest) == len(before) + len(token_ids):
                break
            max_tokens *= 2
        free = newest[: max(0, min_tokens - (len(before) + len(token_ids) - len(newest)))]
        done = len(self._tokenizer.decode(free, skip_special_tokens=False)) if free else 0
        return any(text.find(word, max(0, done - len(word) + 1)) >= 0 for word in words)
