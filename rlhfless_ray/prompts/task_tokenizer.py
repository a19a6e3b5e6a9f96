"""Tokenizers for a built-in task, with one token per symbol."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.prompts.builtin_tasks import Task

PAD, EOS = "<pad>", "<eos>"


def build_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """Build a transformers tokenizer: pad is token 0, end-of-sequence token 1, then the task's symbols.

    Encoding and decoding are exact inverses over the task's symbols. There is no beginning-of-sequence token. The class is
    Qwen2's, a byte-level BPE without merges, because AutoTokenizer (transformers 5.19) reads the tokenizer of any Qwen2
    folder as one. Symbols of several characters are added tokens, which are matched first.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    characters, multi_character = _tokens(task)
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(characters)},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # annotated str; every character of a task has a token
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in multi_character])
    return tokenizer


def _tokens(task: Task) -> tuple[list[str], list[str]]:
    """Return tokens by id: the special ones and all single characters, and then symbols of several characters."""
    single = [symbol for symbol in task.symbols if len(symbol) == 1]
    multi_character = [symbol for symbol in task.symbols if len(symbol) > 1]
    return [PAD, EOS, *single, *sorted({c for symbol in multi_character for c in symbol} - set(single))], multi_character


class TaskTokenizer:
    """A tokenizer equivalent to `build_tokenizer(task)` without transformers, for the driver. Unknown characters are dropped."""

    chat_template = None
    bos_token_id = None
    pad_token_id, eos_token_id = 0, 1

    def __init__(self, task: Task) -> None:
        characters, multi_character = _tokens(task)
        self.tokens = [*characters, *multi_character]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.longest_first = re.compile("|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True))))

    def __call__(self, text: str | list[str], add_special_tokens: bool = False) -> dict[str, list]:
        """Return {"input_ids": ids of the text, or of each text}. There are no special tokens to add."""
        return {"input_ids": self._encode(text) if isinstance(text, str) else [self._encode(one) for one in text]}

    def _encode(self, text: str) -> list[int]:
        return [self.ids[token] for token in self.longest_first.findall(text)]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        skipped = (self.pad_token_id, self.eos_token_id) if skip_special_tokens else ()
        return "".join(self.tokens[i] for i in token_ids if i not in skipped)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)
