"""A tokenizer for a built-in task: one token per symbol."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhfless_ray.prompts.tasks import Task

PAD, EOS = "<pad>", "<eos>"


def build_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Pad is token 0, end-of-sequence token 1, then the task's symbols; there is no beginning-of-sequence token.

    Encoding and decoding are exact inverses. A character that is not a symbol of the task is an error: there is no
    unknown token it could silently turn into.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *task.symbols])}
    core = Tokenizer(models.WordLevel(vocabulary))
    long = sorted((re.escape(symbol) for symbol in task.symbols if len(symbol) > 1), key=len, reverse=True)
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*long, r"[\s\S]"])), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
