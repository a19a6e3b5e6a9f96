"""Give vLLM images that are processed already, so that it computes with the pixel values of the learner.

vLLM would build the model folder's own processor, for images and videos, which needs torchvision. Prompts come with the image's tokens
and its pixel values, so all that it asks of a processor is how many tokens an image may have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.multimodal.registry import _ProcessorFactories

from rlhfless_ray.types import PromptImage
from rlhfless_ray.vision.image_processor import ImageProcessor

ARGUMENTS = {
    "skip_mm_profiling": True,
    "mm_device_do_normalize": False,
    "mm_processor_cache_gb": 0,
    "limit_mm_per_prompt": {"image": 999, "video": 0},
}


class ReadyImagesInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}


class NoDummies(BaseDummyInputsBuilder[ReadyImagesInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: object) -> Any:
        return {}


class ReadyImages(BaseMultiModalProcessor[ReadyImagesInfo]):
    requires_tokenizer = False

    def _get_mm_fields_config(self, hf_inputs: object, hf_processor_mm_kwargs: object) -> Mapping[str, MultiModalFieldConfig]:
        return {}

    def _get_prompt_updates(self, mm_items: object, hf_processor_mm_kwargs: object, out_mm_kwargs: object) -> Sequence[Any]:
        return ()


def load_model_class(architecture: str) -> type:
    """Import a model's class from vLLM, and let it take processed images. `architecture`: one of `image_processor.FAMILIES`."""
    if find_spec("torchvision") is None:  # vLLM's files import a function from transformers' file for torchvision
        folder = "transformers.models.qwen2_vl.image_processing_"
        sys.modules[f"{folder}qwen2_vl"] = import_module(f"{folder}pil_qwen2_vl")
    found: Any = ModelRegistry.models[architecture].load_model_cls()
    found._processor_factory = _ProcessorFactories(info=ReadyImagesInfo, processor=ReadyImages, dummy_inputs=NoDummies)
    return found


class ImageItems:
    """The images of requests in the form that vLLM's engine core takes."""

    def __init__(self, config: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """`files`: see `image_files`."""
        self.processor = ImageProcessor(config, files)

    def prompt(self, token_ids: list[int], salt: str, pictures: Sequence[PromptImage]) -> dict[str, Any]:
        """Return a prompt with images, as vLLM's renderer would. The salt names the weights under which images are encoded."""
        return {
            "type": "multimodal",
            "prompt_token_ids": token_ids,
            "mm_kwargs": MultiModalKwargsItems({"image": [self._item(picture) for picture in pictures]}),
            "mm_hashes": {"image": [f"{salt} {picture.digest} {picture.grid}" for picture in pictures]},
            "mm_placeholders": {"image": [PlaceholderRange(offset=picture.offset, length=picture.tokens) for picture in pictures]},
            "cache_salt": salt,
        }

    def _item(self, picture: PromptImage) -> MultiModalKwargsItem:
        values, grid = self.processor.pixels(picture)
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(values)])),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        inputs: Any = {"pixel_values": torch.from_numpy(values), "image_grid_thw": torch.from_numpy(grid)[None]}
        return MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"][0]
