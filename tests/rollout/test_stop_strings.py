"""Stop words in what was generated."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

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


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 2's and Mistral's: characters beyond its vocabulary, and line breaks, are written as bytes."""
    made = Tokenizer(models.BPE({name: number for number, name in enumerate([*BYTES, "a"])}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("character", ["é", "한", "🦜"])
@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_a_word_after_many_characters_of_several_bytes_is_found(character: str, count: int) -> None:
    """The newest tokens may begin within a character, and such a tokenizer then shows none of the bytes that follow."""
    words, tokenizer = StopStrings(byte_fallback), byte_fallback()
    response = [256, *f"{character * count}\n\n".encode()]
    assert tokenizer.decode(response) == f"a{character * count}\n\n"
    for cut in range(len(response)):
        assert words.has_completed(response[cut:], ("\n\n",), before=response[:cut]), "a cut changes no end"
    assert not any(words.has_completed(response[:size], ("\n\n",)) for size in range(len(response)))
