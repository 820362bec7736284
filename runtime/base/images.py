"""Images in prompts: what identifies an image, and which tokens stand for it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

DIGEST_BYTES = 16
MAX_TOKENS = 4096  # most embeddings of one image, by default


class Image(msgspec.Struct, frozen=True, array_like=True):
    """The pixels that a model's tower gets: a picture after rotation and resize, or its tiles."""

    digest: bytes  # hash of sizes and pixels, and of the rule that made them (media/identity.py)
    sizes: tuple[tuple[int, int], ...]  # (height, width) of the picture, or of each tile
    pixels: bytes = b""  # uint8 [height, width, 3] of each, in order; empty where a message names the image alone

    @property
    def key(self) -> str:
        """Identifies the image in messages."""
        return self.digest.hex()

    @property
    def named(self) -> Image:
        """The image without its pixels."""
        return Image(self.digest, self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels."""
        return len(self.pixels)


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one image: from the first to the last that has an embedding of it.

    Between these, a prompt may have other tokens, such as the ends of its rows."""

    begin: int  # index of the first token
    num_tokens: int
    image: Image
    grid: tuple[int, int, int] = (1, 1, 1)  # frames, rows and columns of its embeddings, for rotary positions

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.begin + self.num_tokens


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What engine and fronts need to know about a model that takes images."""

    token_id: int  # stands in a prompt for each embedding of an image
    pool_rows: int  # embeddings that the runner keeps
    max_tokens: int  # most embeddings of one image
    stays_whole: bool = False  # an image's tokens see each other, so that no row ends within one (Gemma 3)
