"""An image's digest: a hash of its pixels, its sizes, and the rule that made them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from runtime.base.images import DIGEST_BYTES
from runtime.media.rule import ImageRule, Size

_VERSION = 1  # raise it when equal pixels get another meaning


def digest(rule: ImageRule, tiles: tuple[int, int], sizes: Sequence[Size], pixels: bytes) -> bytes:
    """Return the digest of an image's uint8 pixels. No client can choose it: files, URLs and metadata are not in it."""
    processor = f"{_VERSION} {rule.name} {rule.unit} {rule.mean} {rule.std}".encode()
    numbers = [*tiles, len(sizes), *(side for size in sizes for side in size)]
    hashed = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=DIGEST_BYTES, key=_key(processor))
    hashed.update(pixels)
    return hashed.digest()


def _key(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
