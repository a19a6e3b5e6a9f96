"""Turn completions into samples as they finish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhfless_ray.types import Completion, Prompt, Sample


class ResponseSamples:
    """The samples of a rollout by request key: key k is sample k % `count` of prompt k // `count`."""

    def __init__(self, prompts: list[Prompt], count: int, tokenizer: Any) -> None:
        self.prompts, self.count, self.tokenizer = prompts, count, tokenizer
        self.made: dict[int, Sample] = {}

    def add(self, completions: Iterable[Completion]) -> list[Sample]:
        """Return samples of the new completions, with text and without reward."""
        new = [c for c in completions if c.key not in self.made]
        texts = self.tokenizer.batch_decode([c.token_ids for c in new], skip_special_tokens=True) if new else []
        added = []
        for completion, text in zip(new, texts, strict=True):
            prompt, number = divmod(completion.key, self.count)
            added.append(Sample(self.prompts[prompt], number, completion, text))
            self.made[completion.key] = added[-1]
        return added

    def all(self) -> list[Sample]:
        """Return all samples in the order of their keys."""
        return [self.made[key] for key in sorted(self.made)]
