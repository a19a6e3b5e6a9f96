"""Put the images of prompts into the object store, once each, so that neither the driver nor any message holds their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ray

from rlhfless_ray.prompts.load_prompts import PromptSet
from rlhfless_ray.types import Prompt, PromptImage


def in_object_store(prompts: PromptSet) -> PromptSet:
    """Return the prompts with references in place of their images' bytes. The driver owns the objects, as long as it has the prompts."""
    refs: dict[str, Any] = {}

    def stored(rows: Iterable[Prompt]) -> list[Prompt]:
        return [replace(prompt, pictures=tuple(map(put, prompt.pictures))) if prompt.pictures else prompt for prompt in rows]

    def put(picture: PromptImage) -> PromptImage:
        if picture.digest not in refs:
            refs[picture.digest] = ray.put(picture.content)
        return replace(picture, content=refs[picture.digest])

    return replace(prompts, train=stored(prompts.train), heldout=stored(prompts.heldout))
