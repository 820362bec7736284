"""Pixels of each family, equal to transformers' PIL processors before they normalize."""

from typing import Any

import numpy as np
import pytest

from runtime.media.decode import decode
from runtime.media.expand import PreparedImage
from runtime.media.rule import Detail, ImageRule
from tests.media.support import SIZES, encoded, picture, rule

transformers = pytest.importorskip("transformers")


def decoded(rule: ImageRule, size: tuple[int, int], detail: Detail = "auto", max_tokens: int = 16_384) -> PreparedImage:
    return decode(encoded(picture(size)), rule, detail, 32_000_000, max_tokens)


def parts(prepared: PreparedImage) -> list[np.ndarray]:
    """uint8 [height, width, 3] of each part."""
    pixels, begin, found = np.frombuffer(prepared.image.pixels, np.uint8), 0, []
    for height, width in prepared.image.sizes:
        found.append(pixels[begin : begin + height * width * 3].reshape(height, width, 3))
        begin += height * width * 3
    assert begin == len(pixels)
    return found


def processed(name: str, picture_size: tuple[int, int], **settings: Any) -> Any:
    settings |= {"do_rescale": False, "do_normalize": False}
    return getattr(transformers, name)(**settings)(images=[picture(picture_size)], return_tensors="np")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("longest", [1540, 280])
def test_pixtral_pixels(size: tuple[int, int], longest: int):
    settings = {"size": {"longest_edge": longest}}
    ours = decoded(rule("mistral3", settings, vision_config={"patch_size": 14, "image_size": 1540}), size)
    theirs = processed("PixtralImageProcessorPil", size, patch_size=28, **settings)
    assert [list(s) for s in ours.image.sizes] == theirs["image_sizes"].tolist()
    assert np.array_equal(parts(ours)[0].transpose(2, 0, 1), theirs["pixel_values"][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("longest", [2048, 1024, 512])
@pytest.mark.parametrize("split", [True, False])
def test_smolvlm_pixels(size: tuple[int, int], longest: int, split: bool):
    settings = {
        "size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": split,
    }  # fmt: skip
    ours = decoded(rule("smolvlm", settings, vision_config={"patch_size": 16}, scale_factor=4), size)
    theirs = processed("SmolVLMImageProcessorPil", size, return_row_col_info=True, **settings)
    assert ours.tiles == (theirs["rows"][0][0], theirs["cols"][0][0])
    assert np.array_equal(np.stack(parts(ours)).transpose(0, 3, 1, 2), theirs["pixel_values"][0])
    assert ours.num_embeddings == 64 * len(ours.image.sizes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("model_type", "name", "settings"), [
    ("qwen3_5", "Qwen2VL", {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}),
    ("qwen3_vl", "Qwen2VL", {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 200_000}}),
    ("qwen2_5_vl", "Qwen2VL", {"patch_size": 14, "min_pixels": 3136, "max_pixels": 1_003_520}),
    ("glm4v", "Glm4v", {"size": {"shortest_edge": 12_544, "longest_edge": 1_000_000}}),
])  # fmt: skip
def test_pixels_in_blocks_of_patches(size: tuple[int, int], model_type: str, name: str, settings: dict[str, Any]):
    ours = decoded(rule(model_type, settings, vision_config={"patch_size": settings.get("patch_size", 14)}), size)
    theirs = processed(f"{name}ImageProcessorPil", size, **settings)
    patch, merge = settings.get("patch_size", 14), 2
    [[_, rows, columns]] = theirs["image_grid_thw"].tolist()
    assert ours.image.sizes == ((rows * patch, columns * patch),)
    blocks = theirs["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
    whole = blocks[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
    assert np.array_equal(parts(ours)[0], whole)
    assert ours.num_embeddings == rows * columns // 4


@pytest.mark.parametrize("size", SIZES)
def test_gemma3_pixels(size: tuple[int, int]):
    ours = decoded(rule("gemma3", vision_config={"image_size": 896}), size)
    theirs = processed("Gemma3ImageProcessorPil", size, size={"height": 896, "width": 896})
    assert np.array_equal(parts(ours)[0].transpose(2, 0, 1), theirs["pixel_values"][0])
    assert ours.num_embeddings == 256


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [70, 280, 1120])
def test_gemma4_pixels(size: tuple[int, int], tokens: int):
    ours = decoded(rule("gemma4", {"max_soft_tokens": tokens}), size)
    theirs = processed("Gemma4ImageProcessorPil", size, max_soft_tokens=tokens)
    [(height, width)] = ours.image.sizes
    patches = parts(ours)[0].reshape(height // 16, 16, width // 16, 16, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 768)
    assert theirs["num_soft_tokens_per_image"] == [ours.num_embeddings]
    assert np.array_equal(patches, theirs["pixel_values"][0, : len(patches)])


@pytest.mark.parametrize("size", SIZES)
def test_internvl_pixels(size: tuple[int, int]):
    settings = {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12}
    ours = decoded(rule("internvl", settings), size)
    theirs = processed("GotOcr2ImageProcessorPil", size, **settings)
    assert np.array_equal(np.stack(parts(ours)).transpose(0, 3, 1, 2), theirs["pixel_values"])
    assert ours.num_embeddings == 256 * len(ours.image.sizes)
