"""A tokenizer for a built-in task: one token per symbol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhfless_ray.prompts.tasks import Task

PAD, EOS = "<pad>", "<eos>"


def build_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """Pad is token 0, end-of-sequence token 1, then the task's symbols; there is no beginning-of-sequence token.

    Encoding and decoding are exact inverses over the task's symbols. It is of Qwen2's own class, a byte-level BPE without
    merges, because AutoTokenizer (transformers 5.19) reads the tokenizer of any Qwen2 folder as one; symbols of several
    characters are added tokens, which are found before the text is cut any further.
    """
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    single = [symbol for symbol in task.symbols if len(symbol) == 1]
    several = [symbol for symbol in task.symbols if len(symbol) > 1]
    parts = sorted({character for symbol in several for character in symbol} - set(single))
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate([PAD, EOS, *single, *parts])},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # annotated str; every character of a task has a token
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(symbol, normalized=False) for symbol in several])
    return tokenizer
