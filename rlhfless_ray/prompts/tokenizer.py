"""A tokenizer for a built-in task: one token per symbol."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.prompts.task import Task

PAD, EOS = "<pad>", "<eos>"


def build_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """Pad is token 0, end-of-sequence token 1, then the task's symbols; there is no beginning-of-sequence token.

    Encoding and decoding are exact inverses over the task's symbols. It is of Qwen2's own class, a byte-level BPE without
    merges, because AutoTokenizer (transformers 5.19) reads the tokenizer of any Qwen2 folder as one; symbols of several
    characters are added tokens, which are found before the text is cut any further.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    characters, several = _tokens(task)
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(characters)},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # annotated str; every character of a task has a token
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in several])
    return tokenizer


def _tokens(task: Task) -> tuple[list[str], list[str]]:
    """By id: the two special ones and all characters that occur, then the symbols of several characters."""
    single = [symbol for symbol in task.symbols if len(symbol) == 1]
    several = [symbol for symbol in task.symbols if len(symbol) > 1]
    return [PAD, EOS, *single, *sorted({c for symbol in several for c in symbol} - set(single))], several


class TaskTokenizer:
    """What a driver asks of `build_tokenizer(task)`, answered in the same way without transformers: characters that no token has
    are passed over."""

    chat_template = None
    bos_token_id = None
    pad_token_id, eos_token_id = 0, 1

    def __init__(self, task: Task) -> None:
        characters, several = _tokens(task)
        self.tokens = [*characters, *several]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.longest_first = re.compile("|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True))))

    def __call__(self, text: str | list[str], add_special_tokens: bool = False) -> dict[str, list]:
        """{"input_ids": of the text, or of each text}; there are no special tokens to add."""
        return {"input_ids": self._encoded(text) if isinstance(text, str) else [self._encoded(one) for one in text]}

    def _encoded(self, text: str) -> list[int]:
        return [self.ids[token] for token in self.longest_first.findall(text)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        left_out = (self.pad_token_id, self.eos_token_id) if skip_special_tokens else ()
        return "".join(self.tokens[i] for i in token_ids if i not in left_out)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)
