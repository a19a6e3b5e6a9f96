"""Images in prompts: where they may come from, how many tokens they take, and a sentence for each that cannot be read."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.prompts.given_rows import keep_rows
from rlhfless_ray.prompts.load_prompts import load_prompts
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.vision.read_image import decoded
from tests.vision_policy import drawn, vision_policy, vision_tokenizer

pytestmark = pytest.mark.pure
PLACES = 28 * 28  # pixels of a token
TOKENIZER = vision_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return vision_policy("qwen2_5_vl", tmp_path_factory.mktemp("policy"))


@pytest.fixture
def load(policy, tmp_path):
    own = {file.name: file.read_bytes() for file in policy.iterdir()}

    def loaded(rows, files=None, **prompts):
        path = rows if isinstance(rows, str) else str(keep_rows(rows, tmp_path, "rows")[0])
        tree = {"policy": {"path": "model"}, "rollout": {"max_tokens": 8}, "evaluate": {"prompts": 0}, "reward": {"function": "math"}}
        section = {"path": path, "batch_prompts": 1, "answer_column": "", **prompts}
        return load_prompts(Recipe.parse({**tree, "prompts": section}), TOKENIZER, None, own if files is None else files).train

    return loaded


def refused(load, rows, **more):
    with pytest.raises(UserError) as caught:
        load(rows, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def picture(width=84, height=56, mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, options.pop("format", "png"), **options)
    return file.getvalue()


def test_sources_forms_and_sizes(load, tmp_path):
    (tmp_path / "a.png").write_bytes(drawn(84, 56))
    uri = "data:image/png;base64," + base64.b64encode(drawn(84, 56)).decode()
    ways = [
        str(tmp_path / "a.png"),
        drawn(84, 56),
        Image.open(tmp_path / "a.png"),
        uri,
        [str(tmp_path / "a.png")],
        {"bytes": None, "path": uri},
    ]
    prompts = load([{"question": "<image>what?", "images": way} for way in ways])
    assert {prompt.token_ids for prompt in prompts} == {prompts[0].token_ids}
    image_token = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
    assert all(prompt.token_ids.count(image_token) == 6 == prompt.pictures[0].tokens for prompt in prompts)
    assert all(prompt.pictures[0].offset == prompt.token_ids.index(image_token) for prompt in prompts)
    assert not any(isinstance(prompt.row["images"], bytes) or "base64" in str(prompt.row["images"]) for prompt in prompts)


def test_image_feature_of_a_data_set(load, tmp_path):
    import datasets

    rows = {
        "question": ["<image> and <image>", "none"],
        "images": [[{"bytes": drawn(28, 28), "path": None}, {"bytes": drawn(56, 28), "path": None}], []],
    }
    features = datasets.Features({"question": datasets.Value("string"), "images": datasets.Sequence(datasets.Image())})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    first, second = load(str(tmp_path / "set"))
    assert [p.grid for p in first.pictures] == [(1, 1), (1, 2)] and not second.pictures


def test_turns_with_parts_and_marks(load, tmp_path):
    (tmp_path / "a.png").write_bytes(drawn(28, 28))
    parts = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "and"}, {"type": "image"}]
    rows = [
        {"question": [{"role": "user", "content": parts}], "images": [drawn(56, 28)]},
        {"question": [{"role": "user", "content": "<image>and<image>"}], "images": [drawn(28, 28), drawn(56, 28)]},
    ]
    first, second = load(rows, template="chat")
    assert first.token_ids == second.token_ids
    assert [p.digest for p in first.pictures] == [p.digest for p in second.pictures]


def test_max_pixels_makes_images_smaller(load):
    row = {"question": "<image>", "images": drawn(280, 280)}
    assert load([row])[0].pictures[0].tokens == 16  # the policy's own limit
    assert load([row], max_pixels=4 * PLACES)[0].pictures[0].grid == (2, 2)


def test_places_and_images_must_match(load, policy):
    image = drawn(28, 28)
    assert "is bytes or an image, not a string" in refused(load, [{"question": b"what?"}])
    assert "1 more images than the prompt has `<image>`" in refused(load, [{"question": "none", "images": image}])
    assert "line 2" in refused(load, [{"question": "<image>", "images": image}, {"question": "<image><image>", "images": [image]}])
    assert "more `<image>` than column `images`" in refused(load, [{"question": "<image>"}])
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "<image>"}]
    assert "more `<image>` than" in refused(load, [{"question": turns, "images": [image]}], template="chat")
    assert "0 images" in refused(load, [{"question": "<|vision_start|><|image_pad|><|vision_end|>"}])
    assert "the policy sees none" in refused(
        load, [{"question": "<image>", "images": image}], files={"config.json": b'{"model_type": "qwen2"}'}
    )
    without = {"config.json": (policy / "config.json").read_bytes()}
    assert "no image processor" in refused(load, [{"question": "<image>", "images": image}], files=without)
    long = [{"question": "<image>", "images": drawn(280, 280)}]
    assert "max_prompt_tokens" in refused(load, long, max_prompt_tokens=8)
    assert "is not cut" in refused(load, long, max_prompt_tokens=8, overlong="cut_left")


def damaged() -> dict[str, bytes]:
    """100 images, each damaged in one way."""
    found: dict[str, bytes] = {}
    for file_format in ("png", "jpeg", "gif", "bmp", "webp", "tiff"):
        whole = drawn(64, 48, file_format=file_format) if file_format != "gif" else picture(64, 48, "P", format="gif")
        for share in (0.02, 0.2, 0.4, 0.6, 0.8, 0.9):
            found[f"{file_format} cut at {share}"] = whole[: max(4, int(len(whole) * share))]
        for length in (1, 2, 4, 8):
            found[f"{file_format} with {length} wrong bytes first"] = b"\xff\x00" * (length // 2) + b"?" + whole[length + 1 :]
    for k in range(20):
        found[f"noise {k}"] = np.random.default_rng(k).bytes(10 * k + 1)
    for k, size in enumerate([(0, 5), (5, 0), (60_000, 60_000), (30_000, 30_000), (14_000, 14_000)]):
        header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
        chunk = b"IHDR" + header
        body = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
        found[f"size {k}"] = b"\x89PNG\r\n\x1a\n" + body
    for k, (width, height) in enumerate([(600, 2), (1, 300), (401, 2)]):
        found[f"shape {k}"] = picture(width, height)
    frames = [Image.open(io.BytesIO(drawn(30, 30, k))) for k in range(4)]
    for file_format in ("gif", "webp", "png", "tiff"):
        file = io.BytesIO()
        frames[0].save(file, file_format, save_all=True, append_images=frames[1:])
        found[f"animated {file_format}"] = file.getvalue()
    found |= {"html": b"<html>not found</html>", "text": b"no image", "empty": b"", "float": picture(mode="F", format="tiff")}
    found |= {f"zeros {k}": bytes(2**k) for k in range(4)}
    return found


def test_each_of_100_damaged_images_is_named_by_its_row(load):
    cases = damaged()
    assert len(cases) == 100
    accepted = []
    for name, content in cases.items():
        rows = [{"question": "fine"}, {"question": "<image>", "images": content}]
        try:
            load(rows)
        except UserError as error:
            assert "line 2: column `images`: image 1 " in str(error) and "\n" not in str(error), name
        else:
            accepted.append(name)
    assert accepted == []


def test_colours_orientation_and_transparency_are_kept():
    red = Image.new("RGB", (2, 1), "red")
    red.putpixel((1, 0), (0, 0, 255))

    def read(image, file_format, **options):
        file = io.BytesIO()
        image.save(file, file_format, **options)
        return decoded(file.getvalue())

    cmyk = read(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "jpeg").getpixel((4, 4))
    assert cmyk[0] > 200 and max(cmyk[1:]) < 60
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise
    assert read(red, "png", exif=exif).size == (1, 2)
    assert read(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "png").getpixel((0, 0)) == (255, 255, 255)
    assert read(Image.new("LA", (2, 2), (0, 0)), "png").getpixel((0, 0)) == (255, 255, 255)
    grey = Image.fromarray(np.full((2, 2), 2**15, np.uint16))
    assert read(grey, "png").getpixel((0, 0))[0] in (127, 128)
    assert read(Image.new("1", (2, 2), 1), "png").getpixel((0, 0)) == (255, 255, 255)


def test_preprocessing_is_that_of_transformers(policy):
    """Resizing to the grid that was counted gives the processor's own pixel values."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rlhfless_ray.vision.image_processor import ImageProcessor, image_files

    processor = ImageProcessor(json.loads((policy / "config.json").read_bytes()), image_files(policy))
    for width, height in ((100, 70), (33, 200), (20, 20), (500, 300)):
        content = drawn(width, height)
        found = processor.pixels(processor.read(content))
        own = Qwen2VLImageProcessorPil.from_pretrained(policy)(decoded(content), return_tensors="np")
        assert np.array_equal(found.values, own["pixel_values"]) and np.array_equal(found.grid, own["image_grid_thw"][0])


def test_drawn_pictures_show_what_is_counted_and_noise_does_not():
    from rlhfless_ray.prompts.builtin_tasks import CELL, task

    rows, held = (task("pictures").rows(40, 0, split) for split in ("train", "heldout"))
    assert not {row["images"] for row in rows} & {row["images"] for row in held}
    noise = task("noise_pictures").rows(40, 0, "train")
    for row in (*rows, *held):
        bright = np.asarray(decoded(row["images"])).min(-1) >= 150
        cells = bright.reshape(2, CELL, 2, CELL).any((1, 3)).sum()
        assert cells == int(row["answer"]) and task("pictures").verify(row["answer"], row) == 1
    assert {row["answer"] for row in rows} == {row["answer"] for row in noise} == set("1234")
    assert all((np.asarray(decoded(row["images"])).min(-1) >= 150).any() for row in noise)
