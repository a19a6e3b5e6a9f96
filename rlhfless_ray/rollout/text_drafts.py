"""Draft from text: the continuations of a sequence's last tokens in responses of this engine and those that it was sent."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable

import numpy as np
from arctic_inference.suffix_decoding._C import SuffixTree

from placement.drafting import NOTHING, Draft

DEPTH = 24  # tokens of a match and of what follows it
MATCH_TOKENS = 8  # number of last tokens that are looked up, at most: the time of a look-up grows with its square
KEPT_TOKENS = 400_000  # newest tokens that are kept. A token takes about 300 bytes, so these take some 120 MB
PROMPT_TOKENS = 512  # last tokens of a prompt that are drafted from
PER_MATCHED = 2.0  # drafted tokens per matched token, at most
LEAST_ESTIMATE = 0.1
LAG = 8  # tokens of a response that are added to the tree at once, because single ones take longer


class TextSource:
    """A suffix tree over prompts and responses, which may be of earlier steps. A wrong draft costs time and changes no token."""

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        self.tree = SuffixTree(DEPTH)
        self.kept_tokens = kept_tokens
        self.numbers = itertools.count()  # numbers of texts in the tree
        self.known: dict[Hashable, int] = {}  # by text that may grow: tokens of the response that the tree has
        self.texts: dict[Hashable, tuple[int, int]] = {}  # by text, oldest first: number and size in tokens
        self.total = 0  # tokens in the tree

    def propose(self, name: Hashable, prompt_tokens: int, tokens: np.ndarray, most: int) -> Draft:
        """Return a draft that follows `tokens` (n,) int32, of which the first `prompt_tokens` are the request's prompt."""
        known = self.known.get(name)
        if known is None:
            prompt = tokens[max(0, prompt_tokens - PROMPT_TOKENS) : prompt_tokens]
            if (key := prompt.tobytes()) not in self.texts:
                self._extend(key, prompt)
            self._drop(name)  # the text of a preempted request, which starts again
            known = self.known[name] = 0
        if len(tokens) - prompt_tokens - known >= LAG:
            self.add(name, tokens[prompt_tokens + known :])
        if most <= 0:
            return NOTHING
        match = SuffixTree.speculate_ndarray(
            self.tree, np.ascontiguousarray(tokens[-MATCH_TOKENS:]), most, PER_MATCHED, 0.0, LEAST_ESTIMATE, False
        )
        return Draft(match.token_ids, match.probs, match.match_len)

    def add(self, name: Hashable, tokens: np.ndarray) -> None:
        """Add the next tokens of a response."""
        self._extend(name, tokens)
        self.known[name] = self.known.get(name, 0) + len(tokens)

    def finish(self, name: Hashable, response: np.ndarray) -> None:
        """Add the missing tokens of a finished response."""
        self._extend(name, response[self.known.pop(name, 0) :])

    def _extend(self, name: Hashable, tokens: np.ndarray) -> None:
        if not len(tokens):
            return
        number, size = self.texts.get(name) or (next(self.numbers), 0)
        # The tree takes no read-only arrays, and arrays that come through Ray are read-only.
        SuffixTree.extend_ndarray(self.tree, number, np.require(tokens, np.int32, ["C", "W"]))
        self.texts[name] = number, size + len(tokens)
        self.total += len(tokens)

    def forget_all_but(self, names: Collection[Hashable]) -> None:
        """Close texts of other names, and drop the oldest texts beyond `kept_tokens`."""
        for name in self.known.keys() - set(names):
            del self.known[name]
        while self.total > self.kept_tokens and len(self.texts) > 1:
            self._drop(next(iter(self.texts)))

    def _drop(self, name: Hashable) -> None:
        if name in self.texts:
            number, size = self.texts.pop(name)
            self.total -= size
            self.tree.remove(number)
