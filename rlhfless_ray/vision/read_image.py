"""Read an image, in any form that a data set has it, and name what is wrong with it."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

DATA_URI = "data:image/"


def image_bytes(cell: object) -> bytes:
    """Return the encoded bytes of an image: of its path, bytes, data URI, PIL object, or dict of `bytes` and `path` as `datasets` has it.

    Raises ValueError with what is wrong.
    """
    if isinstance(cell, dict):
        cell = next((cell[key] for key in ("bytes", "path", "image", "url") if cell.get(key)), None)
        if isinstance(cell, dict):  # {"url": …} in a part of a turn
            return image_bytes(cell)
    if isinstance(cell, (bytes, bytearray)):
        return bytes(cell)
    if isinstance(cell, str) and cell.startswith(DATA_URI):
        try:
            return base64.b64decode(cell.partition(",")[2], validate=True)
        except binascii.Error:
            raise ValueError("is a data URI whose base64 is damaged") from None
    if isinstance(cell, str) and "://" in cell and not cell.startswith("file://"):
        raise ValueError(f"is the address {cell[:80]}, and only local files are read; download it")
    if isinstance(cell, str) and cell:
        try:
            return Path(cell.removeprefix("file://")).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot be read from {cell} ({error.strerror or type(error).__name__})") from None
    if hasattr(cell, "save"):
        return as_png(cell)
    raise ValueError("is empty" if cell in (None, "") else f"is of type {type(cell).__name__}, not a path, bytes or an image")


def as_png(image: object) -> bytes:
    """Return a PIL image as PNG. Modes that PNG lacks become RGB."""
    from PIL.Image import Image

    if not isinstance(image, Image):
        raise ValueError(f"is of type {type(image).__name__}, not a path, bytes or an image")
    file = io.BytesIO()
    (image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")).save(file, "png")
    return file.getvalue()


def as_data_uri(value: object) -> str:
    """Return a PIL image, or the bytes of an encoded one, as text that JSON can hold. Raises TypeError for anything else."""
    content = bytes(value) if isinstance(value, (bytes, bytearray)) else as_png(value) if hasattr(value, "save") else None
    if content is None:
        raise TypeError(type(value).__name__)
    return f"{DATA_URI}png;base64,{base64.b64encode(content).decode()}"


def decoded(content: bytes) -> Image:
    """Decode a still image to RGB, upright, on white where it is transparent. Raises ValueError with what is wrong."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)  # of damaged EXIF, without which an image is read
            image = Image.open(io.BytesIO(content))
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise ValueError(f"has {frames} frames, and only still images are read")
            image.load()
            upright = ImageOps.exif_transpose(image)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
    except Image.UnidentifiedImageError:
        raise ValueError(f"is in no known format ({len(content):,} bytes)") from None
    except (OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, ArithmeticError) as error:  # Pillow's decoders raise all these
        raise ValueError(f"is damaged ({str(error)[:120] or type(error).__name__})") from None
    if not all(upright.size):
        raise ValueError("has no pixels")
    if upright.mode.startswith(("I;16", "I")):  # 16 bits a value, which `convert` would clip to white
        upright = upright.convert("I").point(lambda value: value / 257).convert("L")
    if upright.mode == "F":
        raise ValueError("has floating-point pixels without a range; save it with 8 bits")
    if upright.has_transparency_data:
        over = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return upright.convert("RGB")
