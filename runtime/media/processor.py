"""ImageProcessor: from a client's pictures to pixels for the tower, and from marks in a prompt to image tokens."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from runtime.base.images import ImageSpan
from runtime.base.types import CallboardError
from runtime.child import ChildPool, Overrun
from runtime.media.expand import Expander, PreparedImage, Vocabulary
from runtime.media.fetch import bytes_at
from runtime.media.rule import ImageRule
from runtime.media.source import ImageFault, ImageLimits, ImageSource

_MAX_CHILDREN = max(1, min(4, (os.cpu_count() or 1) // 2))
_MEMORY = 768 << 20  # bytes of a child: a WebP file with 32 million pixels needs 640 MiB
_DEADLINE_S = 20.0  # wall time; decode.py limits the CPU time


class ImageProcessor:
    """One model's processing of pictures. Threads may share it; Pillow runs in child processes."""

    def __init__(self, rule: ImageRule, vocabulary: Vocabulary, limits: ImageLimits) -> None:
        self.rule, self.limits = rule, limits
        self.mark = vocabulary.decode([rule.marks.mark], skip_special_tokens=False)  # stands in a prompt for an image
        self._expander = Expander(rule, vocabulary)

    @classmethod
    def of(cls, rule: ImageRule | None, vocabulary: Vocabulary, limits: ImageLimits) -> ImageProcessor | None:
        """Return the processor of a model's rule, with a child process; None for a model that takes no images."""
        if rule is None:
            return None
        _CHILDREN.start()  # it takes longer than most pictures
        return cls(rule, vocabulary, limits)

    def prepare(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """Return the sources' pixels. Blocks; a fault in a picture raises CallboardError with the picture's number."""
        limits = self.limits
        if len(sources) > limits.max_images:
            raise CallboardError(f"The request has {len(sources)} images; this server takes up to {limits.max_images}.")
        images: list[PreparedImage] = []
        num_pixels = 0
        for number, source in enumerate(sources, start=1):
            try:
                images.append(self.prepare_one(source))
            except ImageFault as e:
                raise CallboardError(f"Image {number} {e}.") from None
            num_pixels += len(images[-1].image.pixels) // 3
            if num_pixels > limits.max_request_pixels:
                raise CallboardError(
                    f"The request's images have over {limits.max_request_pixels:,} pixels after resizing, the limit; "
                    'send fewer images, or with detail "low".'
                )
        return images

    def expand(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Replace the k-th mark in `ids` by the k-th image's tokens. Raises CallboardError if their numbers differ."""
        return self._expander.expand(ids, images)

    def prepare_one(self, source: ImageSource) -> PreparedImage:
        """Return one source's pixels. Blocks. Raises ImageFault; its text is a predicate."""
        limits = self.limits
        data = source.data or bytes_at(source.url, limits)
        if len(data) > limits.max_image_bytes:
            raise ImageFault(f"has {len(data):,} bytes, more than the limit of {limits.max_image_bytes:,}")
        try:
            return _CHILDREN.run(
                _DEADLINE_S, _decode, data, self.rule, source.detail, limits.max_image_pixels, limits.max_image_tokens,
                source.may_shrink,
            )  # fmt: skip
        except Overrun as e:
            raise ImageFault(f"cannot be decoded: it {e}") from None


def _decode(*args: Any) -> PreparedImage:
    """Run in a child: only there is Pillow imported."""
    return importlib.import_module("runtime.media.decode").decode_within_limits(*args)  # type: ignore[no-any-return]


def _warm_up() -> None:
    importlib.import_module("runtime.media.decode").warm_up()


_CHILDREN = ChildPool(_MAX_CHILDREN, _MEMORY, 5, _warm_up)  # niceness 5: running streams go first
