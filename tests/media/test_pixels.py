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
