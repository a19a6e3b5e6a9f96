"""Draft from text: the continuations of a sequence's last tokens in responses of this engine and those that it was sent."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence

import numpy as np
from arctic_inference.suffix_decoding._C import SuffixTree

from placement.drafting.acceptance import SOURCES, Drafts

TEXT = SOURCES.index("text")
DEPTH = 24  # tokens of a match and of what follows it
MATCH_TOKENS = 8  # last tokens that are looked up, of which the tree matches at most all but one: its time grows with their square
KEPT_TOKENS = 400_000  # newest tokens that are kept. A token takes about 300 bytes, so these take some 120 MB
PROMPT_TOKENS = 512  # last tokens of a prompt that are drafted from
PER_MATCHED = 2.0  # drafted tokens per matched token, at most
LEAST_ESTIMATE = 0.1
LAG = 8  # tokens of a response that are added to the tree at once, because single ones take longer


class TextSource:
    """A suffix tree over prompts and responses, which may be of earlier steps. A wrong draft costs time and changes no token."""

    TAIL = np.arange(-MATCH_TOKENS, 0)

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        self.tree = SuffixTree(DEPTH)
        self.kept_tokens = kept_tokens
        self.numbers = itertools.count()  # numbers of texts in the tree
        self.known: dict[Hashable, int] = {}  # by text that may grow: tokens of the response that the tree has
        self.texts: dict[Hashable, tuple[int, int]] = {}  # by text, oldest first: number and size in tokens
        self.total = 0  # tokens in the tree

    def propose(
        self,
        names: Sequence[Hashable],
        prompt_tokens: Sequence[int],
        table: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        most: Sequence[int],
    ) -> Drafts:
        """Return a draft for each sequence.

        table: (rows, tokens) int32, with the sequences in `rows` and of these `lengths`, of which the first `prompt_tokens` are the
        request's prompt. most: tokens to draft.
        """
        tails = table[rows[:, None], np.maximum(lengths[:, None] + self.TAIL, 0)].tolist()
        drafts, known, speculate = Drafts([], [], [], [TEXT] * len(tails)), self.known, self.tree.speculate
        tokens, estimates, matches = drafts.tokens.append, drafts.estimates.append, drafts.matches.append
        for name, prompt, row, length, tail, count in zip(names, prompt_tokens, rows, lengths.tolist(), tails, most, strict=True):
            if name not in known:
                self._begin(name, table[row, max(0, prompt - PROMPT_TOKENS) : prompt])
            if length - prompt - known[name] >= LAG:
                self.add(name, table[row, prompt + known[name] : length])
            if count > 0:
                # The tree also takes arrays, but converting one takes longer than a look-up.
                match = speculate(tail[-length:], count, PER_MATCHED, 0.0, LEAST_ESTIMATE, False)
                tokens(match.token_ids)
                # The tree tells how often a token and all before it followed.
                estimates([both / before for before, both in itertools.pairwise((1.0, *match.probs))])
                matches(match.match_len)
            else:
                tokens([])
                estimates([])
                matches(0)
        return drafts

    def _begin(self, name: Hashable, prompt: np.ndarray) -> None:
        """Add the last tokens of a new sequence's prompt, unless another one has it."""
        if (key := prompt.tobytes()) not in self.texts:
            self._extend(key, prompt)
        self._drop(name)  # the text of a preempted request, which starts again
        self.known[name] = 0

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
        self.tree.extend(number, tokens.tolist())
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
