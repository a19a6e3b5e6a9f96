"""Turn completions into samples as they finish."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlhfless_ray.types import Completion, Prompt, Request, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseSamples:
    """The samples of a rollout, by the keys of its requests."""

    def __init__(self, requests: Sequence[Request], prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
        """`prompts`: of all requests, in any order."""
        self.ids, self.tokenizer = [request.id for request in requests], tokenizer
        self.prompts = {prompt.index: prompt for prompt in prompts}
        self.made: dict[int, Sample] = {}

    def add(self, completions: Iterable[Completion]) -> list[Sample]:
        """Return samples of the new completions, with text and without reward."""
        new = [c for c in completions if c.key not in self.made]
        texts = self.tokenizer.batch_decode([c.token_ids for c in new], skip_special_tokens=True) if new else []
        for completion, text in zip(new, texts, strict=True):
            name = self.ids[completion.key]
            self.made[completion.key] = Sample(self.prompts[name.row], name, completion, text)
        return [self.made[completion.key] for completion in new]

    def all(self) -> list[Sample]:
        """Return all samples in the order of their requests."""
        return [self.made[key] for key in sorted(self.made)]
