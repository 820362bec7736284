"""Decodes and resizes one picture. This runs in a child process, the only place that imports Pillow."""

from __future__ import annotations

import io
import math
import re
import resource
from typing import Any

from PIL import Image, UnidentifiedImageError

from runtime.base.images import Image as Picture
from runtime.media.expand import PreparedImage
from runtime.media.identity import digest
from runtime.media.rule import Detail, ImageRule, ResizePlan
from runtime.media.source import NO_VIDEOS, ImageFault, TooManyPixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
MAX_RATIO = 200  # the longer side to the shorter
_CPU_S = 4  # most CPU seconds for a picture
_STRIP = 256  # rows that become RGB at a time, so that a large picture is in memory about twice
_ORIENTATION = 0x0112  # EXIF's tag; other metadata is ignored
# MP4, WebM and AVI, but not HEIF. That is a picture's.
_VIDEO = re.compile(rb"....ftyp(?!hei|hev|mif|msf|avi)|\x1a\x45\xdf\xa3|RIFF....AVI ", re.DOTALL)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # `_check` has a lower limit, and a sentence with the sizes


def warm_up() -> None:
    """Import the decoders."""
    Image.init()


def decode_within_limits(*args: Any) -> PreparedImage:
    """Like `decode`, in a process that ends if a picture takes too much time."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + _CPU_S, resource.RLIM_INFINITY))
    return decode(*args)


def decode(
    data: bytes, rule: ImageRule, detail: Detail, max_pixels: int, max_tokens: int, may_shrink: bool = True
) -> PreparedImage:
    """Return the pixels of an encoded picture. Raises ImageFault."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            _check(opened, max_pixels)
            opened.load()
            picture = _as_rgb(_turned(opened))
    except UnidentifiedImageError:
        if _VIDEO.match(data):
            raise ImageFault(f"is a video, but {NO_VIDEOS}") from None
        raise ImageFault("is not a PNG, JPEG, WebP, GIF or AVIF file") from None
    except (ImageFault, MemoryError):
        raise
    except Exception as e:  # decoders raise errors of many kinds for broken files
        raise ImageFault(f"cannot be decoded: {str(e)[:200].rstrip('.') or type(e).__name__}") from None
    plan = rule.resize.plan((picture.height, picture.width), detail, max_tokens)
    if not may_shrink and (seen := plan.reduced((picture.height, picture.width), rule.unit)) is not None:
        sees = f"the model sees {seen[1]} x {seen[0]} (oversized_image)"
        raise TooManyPixels(f"has {picture.width} x {picture.height} pixels, but {sees}", max(seen))
    num_tokens = rule.num_embeddings(plan.parts)
    if num_tokens > max_tokens:
        raise ImageFault(
            f"has {picture.width} x {picture.height} pixels and needs {num_tokens:,} tokens, "
            f"more than the limit of {max_tokens:,}"
        )
    pixels = b"".join(part.tobytes() for part in _parts(picture, plan, Image.Resampling(rule.resample)))
    image = Picture(digest(rule, plan.tiles, plan.parts, pixels), plan.parts, pixels)
    return PreparedImage(image, plan.tiles, num_tokens)


def _check(picture: Image.Image, max_pixels: int) -> None:
    """Refuse a picture by its header."""
    width, height = picture.size
    if width * height > max_pixels:
        raise TooManyPixels(
            f"has {width} x {height} pixels, more than the limit of {max_pixels:,}", math.isqrt(max_pixels)
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageFault(f"has {width} x {height} pixels; one side may have at most {MAX_RATIO} times the other's")
    if picture.format != "MPO" and getattr(picture, "is_animated", False):  # cameras store previews in an MPO file
        raise ImageFault("has several frames; send one frame as a picture")


def _turned(picture: Image.Image) -> Image.Image:
    """Apply the EXIF orientation. A broken one is ignored."""
    try:
        turn = _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:
        turn = None
    return picture if turn is None else picture.transpose(turn)


def _as_rgb(picture: Image.Image) -> Image.Image:
    """Return the picture in RGB, on white where it is transparent."""
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    rgb = Image.new("RGB", picture.size)
    for top in range(0, picture.height, _STRIP):
        strip = picture.crop((0, top, picture.width, min(top + _STRIP, picture.height)))
        if strip.mode.startswith("I"):  # 16 bits; Pillow's conversion clips them
            strip = strip.point(lambda value: value * (1 / 256)).convert("L")
        if "A" in strip.getbands() or "a" in strip.getbands() or "transparency" in picture.info:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, (255, 255, 255, 255)), strip)
        rgb.paste(strip.convert("RGB"), (0, top))
    return rgb


def _parts(picture: Image.Image, plan: ResizePlan, resample: Image.Resampling) -> list[Image.Image]:
    resized = picture
    for height, width in plan.sizes:
        resized = resized.resize((width, height), resample)
    if plan.tiles == (0, 0):
        return [resized]
    rows, columns = plan.tiles
    height, width = resized.height // rows, resized.width // columns
    parts = [
        resized.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
        for row in range(rows)
        for column in range(columns)
    ]
    if plan.thumbnail is not None:
        whole = picture if plan.thumbnail_of_source else resized
        parts.append(whole.resize((plan.thumbnail[1], plan.thumbnail[0]), resample))
    return parts
