"""Turn images into the pixel values of a policy's vision tower, the same in engines and learners.

The three families share one image processor. transformers' version of it for Pillow is used everywhere, because the one for torchvision
resizes a little differently.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.types import PromptImage
from rlhfless_ray.vision.read_image import decoded, image_bytes

FAMILIES = {  # model type → architecture
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
FILES = ("preprocessor_config.json", "processor_config.json")  # older and newer model folders
MOST_CACHED_BYTES = 256 * 2**20  # of pixel values that a process keeps


class Pixels(NamedTuple):
    """An image as the vision tower takes it.

    Attributes:
        values: (patches, channels · frames · patch size²) float32.
        grid: (3,) int64: frames, rows and columns of patches.
    """

    values: np.ndarray
    grid: np.ndarray


def reads_images(config: Mapping[str, object]) -> bool:
    """Return whether prompts of the policy with this config.json may have images."""
    return config.get("model_type") in FAMILIES


def image_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a model folder that describe its image processor."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


class ImageProcessor:
    """Read images, count their tokens, and make their pixel values, which a process keeps by the image's digest."""

    def __init__(self, config: Mapping[str, Any], files: Mapping[str, Any], max_pixels: int | None = None) -> None:
        """`config`: the policy's config.json. `files`: those of `image_files`. `max_pixels`: `read` makes larger images smaller."""
        self.config, self.files, self.max_pixels = config, files, max_pixels
        self.kept: OrderedDict[tuple[str, tuple[int, int]], Pixels] = OrderedDict()
        self.kept_bytes = 0

    @cached_property
    def processor(self) -> Any:
        """transformers' image processor. Raises UserError if the folder has none."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**_settings(self.files))

    def read(self, cell: object) -> PromptImage:
        """Return an image of a row, without its place. Raises ValueError with what is wrong with it."""
        content = image_bytes(cell)
        width, height = decoded(content).size
        return PromptImage(xxhash.xxh3_128_hexdigest(content), self._grid(height, width), content)

    def place(self, token_ids: Sequence[int], pictures: Sequence[PromptImage]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Repeat the image token of each image as often as it has tokens. Raises ValueError if there are more or fewer of either."""
        image_token = self.config["image_token_id"]
        there = sum(token == image_token for token in token_ids)
        if there != len(pictures):
            raise ValueError(f"the prompt has {there} places for images, and the row has {len(pictures)} images")
        ids: list[int] = []
        placed, left = [], iter(pictures)
        for token in token_ids:
            if token == image_token:
                picture = replace(next(left), offset=len(ids))
                placed.append(picture)
                ids += [token] * picture.tokens
            else:
                ids.append(token)
        return ids, tuple(placed)

    def pixels(self, picture: PromptImage) -> Pixels:
        """Return the pixel values of an image, resized to its grid. In a run its bytes come from the object store."""
        if (known := self.kept.get(picture.key)) is not None:
            self.kept.move_to_end(picture.key)
            return known
        content = picture.content
        if not isinstance(content, bytes):
            import ray

            content = ray.get(content)
        (rows, columns), factor = picture.grid, self.factor
        image = decoded(content).resize((columns * factor, rows * factor), self.processor.resample)
        made = self.processor.preprocess(image, do_resize=False, return_tensors="np")
        found = Pixels(made["pixel_values"].astype(np.float32, copy=False), made["image_grid_thw"][0])
        self.kept[picture.key] = found
        self.kept_bytes += found.values.nbytes
        while self.kept_bytes > MOST_CACHED_BYTES and len(self.kept) > 1:
            self.kept_bytes -= self.kept.popitem(last=False)[1].values.nbytes
        return found

    @property
    def factor(self) -> int:
        """Width and height in pixels of what becomes one token."""
        return int(self.processor.patch_size * self.processor.merge_size)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of tokens of an image of this size. Raises ValueError for one that is far longer than wide."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        least, most = self.processor.size["shortest_edge"], self.processor.size["longest_edge"]
        most = min(most, self.max_pixels or most)
        try:
            high, wide = smart_resize(height, width, self.factor, min(least, most), most)
        except ValueError:
            raise ValueError(f"has {width} × {height} pixels, and one side must be less than 200 times the other") from None
        return high // self.factor, wide // self.factor


def _settings(files: Mapping[str, Any]) -> JsonObject:
    """Return the settings of the image processor in a model folder."""
    name = next((name for name in FILES if name in files), None)
    found = json.loads(bytes(files[name])) if name is not None else {}
    found = found.get("image_processor", found) if name == FILES[1] else found
    if not found:
        raise UserError(
            f"policy.path: the folder has no image processor ({FILES[0]}), and prompts have images; copy the whole model folder"
        )
    return {key: value for key, value in found.items() if not key.endswith(("_type", "_class"))}
