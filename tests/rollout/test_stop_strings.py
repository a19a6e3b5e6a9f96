"""Stop words in what was generated."""

from __future__ import annotations

from rlhfless_ray.engine.stop_strings import EXTRA_TOKENS, StopStrings


class Letters:
    """A token is a letter."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.read.append(len(token_ids))
        return "".join(map(chr, token_ids))


def test_a_stop_word_within_the_minimum_length_does_not_end_a_response() -> None:
    """As vLLM has it: also not when later tokens are looked at; a word that ends after them counts wherever it begins."""
    words = StopStrings(Letters)
    for count in range(1, 9):
        assert not words.has_completed([*b"endxxxxxx"][:count], ("end",), min_tokens=3)
    assert words.has_completed([*b"end"], ("end",), min_tokens=2) and words.has_completed([*b"d"], ("end",), before=(*b"en",), min_tokens=2)
    assert not words.has_completed([*b"x"], ("end",), before=(*b"end",), min_tokens=3)
    assert words.has_completed([*b"xend"], ("end",), before=(*b"end",), min_tokens=3)
    long = [ord("x")] * 100
    assert words.has_completed([*long, *b"end"], ("end",), min_tokens=102)
    assert not words.has_completed([*long, *b"end"], ("end",), min_tokens=103)


def test_only_the_newest_tokens_of_a_long_response_are_searched() -> None:
    letters = Letters()
    words = StopStrings(lambda: letters)
    long = [ord("x")] * 10_000
    assert words.has_completed([*long, *b"end"], ("end", "no")) and not words.has_completed([*b"end", *long], ("end",))
    assert words.has_completed([*b"nd"], ("end",), before=(*long, ord("e"))), "it began on another engine"
    assert words.has_completed([], ("end",), before=(*long, *b"end")) and not words.has_completed([], ("end",))
    assert max(letters.read) == len("end") + EXTRA_TOKENS
