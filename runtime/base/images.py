"""Images in prompts: what identifies an image, and which tokens stand for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A picture as a client sends it: its file's bytes, or an address to fetch it from."""

    data: bytes = b""
    url: str = ""  # https: or data:, if there are no bytes
    detail: str = "auto"  # one of DETAILS


DETAILS = "auto", "low", "high", "original"  # how much of its size a picture keeps


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


class ImageProcessor(Protocol):
    """Makes a model's images from pictures. Threads may share it. Its errors are CallboardErrors."""

    @property
    def limits(self) -> Any: ...

    def prepare(self, sources: Sequence[ImageSource]) -> list[Any]:
        """Return what `expand` needs of each picture. This waits for a child process, and for addresses."""

    def expand(self, token_ids: list[int], prepared: Sequence[Any]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return a prompt with the k-th image's tokens at its k-th mark; raises an error for another number of marks."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What engine and fronts need to know about a model that takes images."""

    token_id: int  # stands in a prompt for each embedding of an image
    pool_rows: int  # embeddings that the runner keeps
    stays_whole: bool = False  # an image's tokens see each other, so that no row ends within one (Gemma 3)
    max_tokens: int = 4096  # most embeddings of one image
