"""Find the images of a row, and put places for them into its prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.prompts.conversations import Turn
from rlhfless_ray.types import PromptImage
from rlhfless_ray.vision.image_processor import ImageProcessor, reads_images

MARK = "<image>"  # in a prompt's text, as data sets have it
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"  # that all families of `image_processor` read
LONGEST_CELL = 1000  # characters of a path that a row keeps; bytes and data URIs are left to the object store


class RowImages:
    """The images of one row after the other. Call `begin`, then `placed` or `placed_in_turns` for its prompt, then `read`."""

    def __init__(self, column: str, files: Mapping[str, Any], max_pixels: int | None) -> None:
        """`column`: of the images. `files`: the policy's, which may be none. `max_pixels`: see `ImageProcessor`."""
        config = json.loads(bytes(files.get("config.json", b"{}")))
        self.column, self.are_seen = column, reads_images(config)
        self.processor = ImageProcessor(config, files, max_pixels)
        self.cells: list[object] = []  # of the row's column, then without those that have a place
        self.named: list[tuple[str, object]] = []  # images in the order of their places, with their names for messages

    def begin(self, row: JsonObject) -> None:
        """Take the images of a row's column."""
        cell = row.get(self.column) if self.column else None
        self.cells = [] if cell in (None, "") else list(cell) if isinstance(cell, (list, tuple)) else [cell]
        self.named = []
        if self.cells and not self.are_seen:
            raise ValueError(
                f"column `{self.column}` has images, and the policy sees none; take one that does, or empty prompts.image_column"
            )

    def placed(self, text: str) -> str:
        """Return a prompt's text with the family's own place for each `<image>`."""
        if not self.are_seen:
            return text
        self._take(text.count(MARK))
        return text.replace(MARK, PLACE)

    def placed_in_turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return turns in which each `<image>` of a text is a part. A part with an image of its own takes none of the column."""
        if not self.are_seen:
            return list(turns)
        return [{**turn, "content": self._parts(turn.get("content"))} if "content" in turn else turn for turn in turns]

    def read(self) -> tuple[PromptImage, ...]:
        """Return the images of the row in the order of their places. Raises ValueError, which names the damaged one."""
        if self.cells:
            raise ValueError(
                f"column `{self.column}` has {len(self.cells)} more images than the prompt has `{MARK}`; fix or remove the row"
            )
        pictures = []
        for name, cell in self.named:
            try:
                pictures.append(self.processor.read(cell))
            except ValueError as error:
                raise ValueError(f"{name} {error}; fix or remove the row") from None
        return tuple(pictures)

    def _take(self, count: int) -> None:
        """Give the next `count` images of the column their places."""
        if count > len(self.cells):
            raise ValueError(f"the prompt has more `{MARK}` than column `{self.column}` has images; fix or remove the row")
        first = len([name for name, _ in self.named if name.startswith("column")])
        self.named += [(f"column `{self.column}`: image {first + k + 1}", cell) for k, cell in enumerate(self.cells[:count])]
        del self.cells[:count]

    def _parts(self, content: object) -> object:
        if isinstance(content, str):
            if MARK not in content:
                return content
            texts = content.split(MARK)
            self._take(len(texts) - 1)
            parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
            return [part for part in parts if part.get("text") != ""]
        if not isinstance(content, list):
            return content
        return [self._part(part) if isinstance(part, dict) and "image" in str(part.get("type")) else part for part in content]

    def _part(self, part: JsonObject) -> JsonObject:
        """Give the image of a part its place: its own, or the next one of the column."""
        own = next((part[key] for key in ("image", "image_url", "url", "path", "bytes") if part.get(key)), None)
        if own is None:
            self._take(1)
        else:
            self.named.append((f"image {len(self.named) + 1} of the turns", own))
        return {"type": "image"}

    def expand(self, token_ids: list[int], pictures: tuple[PromptImage, ...]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return a prompt's tokens with room for its images, and these with their places. Raises ValueError, see `ImageProcessor.place`."""
        return self.processor.place(token_ids, pictures) if self.are_seen else (token_ids, ())

    def without_bytes(self, row: JsonObject, pictures: tuple[PromptImage, ...]) -> JsonObject:
        """Return a row whose images are paths or digests, because the object store has their bytes."""
        if not pictures or self.column not in row:
            return row
        cells = row[self.column] if isinstance(row[self.column], (list, tuple)) else [row[self.column]]
        short = [isinstance(cell, str) and len(cell) <= LONGEST_CELL for cell in cells]
        named = [cell if keeps else picture.digest for cell, keeps, picture in zip(cells, short, pictures, strict=False)]
        return {**row, self.column: named}
