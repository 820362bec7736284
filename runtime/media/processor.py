"""ImageProcessor: from a client's pictures to pixels for the tower, and from marks in a prompt to image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.base.images import Image, ImageSpan
from runtime.media.expand import Expander, PreparedImage, Vocabulary
from runtime.media.families import image_rule
from runtime.media.rule import Detail, ImageRule


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a server accepts. A request beyond them is an error that names the limit."""

    max_images: int = 20  # a request
    max_image_bytes: int = 20 << 20  # encoded
    max_image_pixels: int = 32_000_000  # as the file has them
    max_image_tokens: int = 4096  # larger pictures are scaled down, or refused with detail "original"
    max_request_pixels: int = 64_000_000  # after resizing, all images of a request
    image_urls: tuple[str, ...] = ()  # hosts that https URLs may name; ("any",) for all public ones


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A client's picture: an encoded file, or a URL (https: or data:) if `data` is empty."""

    data: bytes = b""
    url: str = ""
    detail: Detail = "auto"


class ImageProcessor:
    """One model's processing of pictures. Threads may share it; Pillow runs in child processes."""

    def __init__(self, rule: ImageRule, vocabulary: Vocabulary, limits: ImageLimits) -> None:
        self.rule, self.limits = rule, limits
        self._expander = Expander(rule, vocabulary)

    @classmethod
    def of(cls, folder: Path, vocabulary: Vocabulary, limits: ImageLimits) -> ImageProcessor | None:
        """Return the processor of a model folder; None for a model that takes no images."""
        rule = image_rule(folder)
        return None if rule is None else cls(rule, vocabulary, limits)

    def prepare(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """Return the sources' pixels. Blocks; a fault in a picture raises CallboardError with the picture's number."""
        raise NotImplementedError

    def expand(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Replace the k-th mark in `ids` by the k-th image's tokens. Raises CallboardError if their numbers differ."""
        return self._expander.expand(ids, images)
