"""Completions → samples, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhfless_ray.types import Completion, Prompt, Sample


class ResponseSamples:
    """The samples of a rollout by request key: key k answers prompt k // `count`, as its sample k % `count`."""

    def __init__(self, prompts: list[Prompt], count: int, tokenizer: Any) -> None:
        self.prompts, self.count, self.tokenizer = prompts, count, tokenizer
        self.made: dict[int, Sample] = {}

    def add(self, completions: Iterable[Completion]) -> list[Sample]:
        """Those that are new, as samples with text and without reward."""
        new = [c for c in completions if c.key not in self.made]
        texts = self.tokenizer.batch_decode([c.token_ids for c in new], skip_special_tokens=True) if new else []
        found = []
        for completion, text in zip(new, texts, strict=True):
            prompt, number = divmod(completion.key, self.count)
            found.append(Sample(self.prompts[prompt], number, completion, text))
            self.made[completion.key] = found[-1]
        return found

    def all(self) -> list[Sample]:
        """In the order of their keys."""
        return [self.made[key] for key in sorted(self.made)]
