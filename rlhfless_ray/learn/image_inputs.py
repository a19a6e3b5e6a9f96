"""Images in the learner's passes: pixel values of a micro-batch, positions in three dimensions, and the vision tower."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.micro_batch_tensors import padded
from rlhfless_ray.types import PromptImage
from rlhfless_ray.vision.image_processor import ImageProcessor, image_files

TOWER = "visual"  # name of the module with vision tower and projector


def prompt_positions(length: int, pictures: Sequence[PromptImage]) -> np.ndarray:
    """Return the positions of a prompt's tokens in time, height and width, (3, length) int64 (Qwen2-VL, arXiv 2409.12191, section 2.1).

    A text token advances all three by one. An image's tokens have the position before it in time, and count rows and columns from there;
    the text goes on after the largest of them.
    """
    positions, at, place = np.empty((3, length), np.int64), 0, 0
    for picture in pictures:
        rows, columns = picture.grid
        text = picture.offset - place
        positions[:, place : picture.offset] = at + np.arange(text)
        at += text
        end = picture.offset + picture.tokens
        positions[:, picture.offset : end] = at + np.indices((1, rows, columns)).reshape(3, -1)
        at, place = at + max(rows, columns), end
    positions[:, place:] = at + np.arange(length - place)
    return positions


class PaddedWithImages:
    """`micro_batch_tensors.padded` for prompts with images. A text-only micro-batch is the same as there.

    With images the tensors have in addition:
        positions: (3, rows, longest).
        pixels, grids: (patches, values) float32 and (images, 3), of the distinct images.
        image_of: (places of images,) number of the image in each place, from row to row.
        in_image: (rows, longest) bool: tokens that stand for images. A policy may write the same token, which is text then.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: of the policy."""
        self.processor = ImageProcessor(json.loads((folder / "config.json").read_bytes()), image_files(folder))

    def __call__(self, batch: Batch, rows: Sequence[np.ndarray] | np.ndarray, device: torch.device) -> dict[str, Tensor]:
        tensors = padded(batch, rows, device)
        first = [int(np.atleast_1d(row)[0]) for row in rows]
        pictures = [() if batch.pictures is None else batch.pictures[i] for i in first]
        if not any(pictures):
            return tensors
        shape = tuple(tensors["ids"].shape)
        own = tensors["positions"].cpu().numpy() if "positions" in tensors else np.arange(shape[1])
        positions, in_image = np.broadcast_to(own, (3, *shape)).copy(), np.zeros(shape, bool)
        number_of: dict[tuple[str, tuple[int, int]], int] = {}
        image_of, pixels = [], []
        for row, i in enumerate(first):
            prompt = int(batch.prompt_lengths[i])
            of_prompt = prompt_positions(prompt, pictures[row])
            positions[:, row, prompt:] += of_prompt.max(initial=-1) + 1 - prompt
            positions[:, row, :prompt] = of_prompt
            for picture in pictures[row]:
                in_image[row, picture.offset : picture.offset + picture.tokens] = True
                if picture.key not in number_of:
                    number_of[picture.key] = len(number_of)
                    pixels.append(self.processor.pixels(picture))
                image_of.append(number_of[picture.key])
        arrays = {
            "positions": positions,
            "in_image": in_image,
            "image_of": np.array(image_of),
            "pixels": np.concatenate([values for values, _ in pixels]),
            "grids": np.stack([grid for _, grid in pixels]),
        }
        return tensors | {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


@contextmanager
def seen_images(base: Any, tensors: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `base`, a model without its head, sees the images of a micro-batch. Call it inside the block.

    The vision tower computes each distinct image once.
    """
    if "pixels" not in tensors:
        yield {}
        return
    found = base.get_image_features(tensors["pixels"], tensors["grids"], return_dict=True)
    image_of, in_image = tensors["image_of"].tolist(), tensors["in_image"][..., None]
    found.pooler_output = [found.pooler_output[number] for number in image_of]
    if getattr(found, "deepstack_features", None) is not None:  # Qwen3-VL adds features of earlier layers to the first decoder layers
        found.deepstack_features = [[of_layer[number] for number in image_of] for of_layer in found.deepstack_features]
    base.get_placeholder_mask = lambda *arguments, **more: (in_image, torch.zeros_like(in_image))
    try:
        yield {"mm_encoder_outputs": {"image": found}}
    finally:
        del base.get_placeholder_mask


def freeze_tower(base: Any) -> None:
    """Keep vision tower and projector as they are, if the model has them."""
    if hasattr(base, TOWER):
        getattr(base, TOWER).requires_grad_(False)
