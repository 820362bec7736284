"""Pictures, a vocabulary and rules for tests of images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from runtime.media.families import rule_of
from runtime.media.rule import ImageRule

SIZES = ((300, 500), (1000, 333), (64, 64), (777, 1023), (1, 1), (2000, 1500), (40, 1900), (513, 512), (1080, 1920))


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A picture of (height, width) with noise and slopes."""
    height, width = size
    noise = np.random.default_rng(seed).integers(0, 120, (height, width, 3))
    slope = np.arange(height)[:, None, None] * 60 // height + np.arange(width)[None, :, None] * 60 // width
    return Image.fromarray((noise + slope).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def rule(model_type: str, processor: dict[str, Any] | None = None, **config: Any) -> ImageRule:
    config = {"model_type": model_type, "vision_config": {"model_type": "any"}, **config}
    found = rule_of(config, processor or {})
    assert found is not None
    return found


class Letters:
    """A vocabulary of special tokens, newlines and characters. Up to three newlines are one token."""

    def __init__(self, *special: str) -> None:
        self.tokens = ["\n", "\n\n", "\n\n\n", *special]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            token = max((t for t in self.tokens if text.startswith(t)), key=len, default=text[0])
            ids.append(self.tokens.index(token) if token in self.tokens else 1000 + ord(token))
            text = text[len(token) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(
            self.tokens[i] if i < len(self.tokens) else chr(i - 1000) if 1000 < i < 2000 else f"<{i}>" for i in ids
        )
