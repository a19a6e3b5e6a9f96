"""The input of a supervised stage's ranks. Without torch, because the driver needs no more than this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe
from rlhfless_ray.supervise.examples import RowOrder

INBOX = "the actor that the ranks report to"
VISIBLE = "CUDA_VISIBLE_DEVICES"
MODEL = "model"  # folder of the model in the last checkpoint


@dataclass(frozen=True)
class RankStart:
    """The input of every rank.

    `data`: training rows and held-out rows. `model`: a folder that each node has, or its files. `others`: files of a model folder beside
    its weights, with `checkpoint.save_hf`. `sizes`: see `model_sizes`. `second`: folder of another reference, or of the teacher.
    """

    recipe: SupervisedRecipe
    order: RowOrder
    data: Any  # reference to list[Examples] in the object store
    model: Any  # Path, or reference to Files in the object store
    others: Any  # reference to Files in the object store, or None
    sizes: JsonObject
    second: Path | None
    reward_tokens: list[int] | None
    storage: Path  # folder of the checkpoints
    inbox: Any  # actor handle of an `Inbox`
    driver_node: str  # id of the node whose memory the driver watches
    device: str
    threads: int
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # on GPU: names of those that the pool leased, by node id
