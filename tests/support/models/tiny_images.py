"""A tiny tower, and images for prompts of random tokens."""

from __future__ import annotations

import numpy as np

from runtime.base.images import Image, ImageSpan
from runtime.base.model.tower_spec import Step, TowerSpec

TOKEN_ID = 1  # DummySource.image_token_id
_SIDE = 8  # pixels of an embedding


def tiny_tower(out_size: int) -> TowerSpec:
    """A tower with patches of 4 x 4 pixels. Four patches become one embedding."""
    return TowerSpec(
        num_layers=2, hidden_size=24, ffn_size=40, num_heads=2, head_dim=12, out_size=out_size, patch_size=4, merge=2,
        projector=(Step("blocks"), Step("linear", "projection", (out_size, 96), True)), names={}, rope="halves",
    )  # fmt: skip


def image_of(seed: int, rows: int, columns: int) -> Image:
    """An image with `rows` x `columns` embeddings."""
    height, width = rows * _SIDE, columns * _SIDE
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image(b"%06d%05d%05d" % (seed, rows, columns), ((height, width),), pixels.tobytes())


def span_of(begin: int, seed: int, rows: int, columns: int) -> ImageSpan:
    """A span in which each token has an embedding."""
    return ImageSpan(begin, rows * columns, image_of(seed, rows, columns), (1, rows, columns))
