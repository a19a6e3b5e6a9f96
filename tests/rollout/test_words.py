"""Stop words in what was generated."""

from __future__ import annotations

from rlhfless_ray.rollout.words import BEYOND, StopWords


class Letters:
    """A token is a letter."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.read.append(len(token_ids))
        return "".join(map(chr, token_ids))


def test_however_long_a_response_its_newest_tokens_are_looked_at() -> None:
    letters = Letters()
    words = StopWords(lambda: letters)
    long = [ord("x")] * 10_000
    assert words.found([*long, *b"end"], ("end", "no")) and not words.found([*b"end", *long], ("end",))
    assert words.found([*b"nd"], ("end",), before=(*long, ord("e"))), "it began on another engine"
    assert words.found([], ("end",), before=(*long, *b"end")) and not words.found([], ("end",))
    assert max(letters.read) == len("end") + BEYOND
