"""Clients' pictures, what a server accepts of them, and why it refuses one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runtime.base.images import MAX_TOKENS
from runtime.base.types import CallboardError
from runtime.media.rule import Detail

NO_VIDEOS: Final = "models here read no videos; send some of its frames as images"


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a server accepts. A request beyond them is an error that names the limit."""

    max_images: int = 20  # a request
    max_image_bytes: int = 20 << 20  # encoded
    max_image_pixels: int = 32_000_000  # before resizing
    max_image_tokens: int = MAX_TOKENS  # larger pictures are scaled down, or refused with detail "original"
    max_request_pixels: int = 64_000_000  # after resizing, all images of a request
    image_urls: tuple[str, ...] = ()  # hosts that https URLs may name; ("any",) for all public ones


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A client's picture: an encoded file, or a URL (https: or data:) if `data` is empty."""

    data: bytes = b""
    url: str = ""
    detail: Detail = "auto"
    may_shrink: bool = True  # False refuses a picture that is larger than the model sees


class ImageFault(CallboardError):
    """A picture cannot be used. The text is a predicate; the caller adds the subject."""


class TooManyPixels(ImageFault):
    """A picture is larger than `max_image_pixels`, or than the model sees."""

    def __init__(self, problem: str, max_side: int) -> None:
        """`max_side` is a width and height with which the picture is accepted."""
        super().__init__(problem, max_side)  # pickle needs both
        self.max_side = max_side

    def __str__(self) -> str:
        return str(self.args[0])
