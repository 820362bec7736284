"""Pictures in messages: the forms that APIs and Python programs have for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runtime.base.images import ImageInfo, ImageSpan
from runtime.base.types import CallboardError
from runtime.loading.gguf_towers import image_rule_of
from runtime.media.processor import ImageProcessor
from runtime.media.rule import DETAILS
from runtime.media.source import NO_VIDEOS, ImageLimits, ImageSource
from runtime.output.fields import invalid, shown
from runtime.text.tokenizer import Tokenizer

IMAGE_KINDS = frozenset(("image", "image_url", "input_image", "computer_screenshot"))  # types of parts


def source_of(path: str, part: Mapping[str, Any]) -> ImageSource:
    """Return the picture in a message's part, at the field `path`. Raises FieldError for an unknown form."""
    source = _source_with(path, part)
    match part:
        case {"image_url": str(url)} | {"image_url": {"url": str(url)}} | {"image": str(url)} | {"url": str(url)}:
            return source(url=url)
        case {"source": {"type": "url", "url": str(url)}}:
            return source(url=url)
        case {"source": {"type": "base64", "data": str(data)}} | {"type": "image", "data": str(data)}:
            return source(url=data_url(data))
        case {"file_id": str()} | {"source": {"type": "file"}}:
            raise invalid(path, "names a file, but this server keeps no pictures; send the picture itself as base64")
    raise invalid(path, "has no picture; send it as a data URL or as base64")


def data_url(text: str) -> str:
    """Return a picture in base64 as a URL."""
    return f"data:;base64,{text}"


def with_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[ImageSource]]:
    """Return messages with a plain part for each picture, as templates read them, and the pictures.

    Raises FieldError for a picture in an unknown form, and for a video."""
    sources: list[ImageSource] = []

    def marked(path: str, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and "video" in kind:
            raise invalid(f"{path}.type", f"is {shown(kind)}: {NO_VIDEOS}")
        if kind not in IMAGE_KINDS:
            return part
        sources.append(_local_source(path, part))
        return {"type": "image"}

    plain = list(messages)
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            parts = [marked(f"messages.{i}.content.{j}", part) for j, part in enumerate(content)]
            plain[i] = {**message, "content": parts}
    return plain, sources


def conversations_in(given: Sequence[Any]) -> Sequence[Sequence[Mapping[str, Any]]]:
    """Return one conversation or several as a list; empty for prompts without messages."""
    first = given[0] if len(given) else None
    if isinstance(first, Mapping):
        return [given]
    is_nested = isinstance(first, Sequence) and bool(first) and isinstance(first[0], Mapping)
    return given if is_nested else []


def processor_for(info: ImageInfo | None, folder: Path, tokenizer: Tokenizer) -> ImageProcessor | None:
    """Return the processor of pictures for a model in this process; None if it takes none."""
    if info is None:
        return None
    return ImageProcessor.of(image_rule_of(folder), tokenizer, ImageLimits(max_image_tokens=info.max_tokens))


def with_images(
    ids: list[int], sources: Sequence[ImageSource], processor: ImageProcessor | None
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return a prompt's token ids with its pictures' tokens, and the places of the pictures."""
    if not sources:
        return ids, ()
    if processor is None:
        raise CallboardError("This model takes no images here; leave them out of the messages.")
    return processor.expand(ids, processor.prepare(sources))


def _local_source(path: str, part: Mapping[str, Any]) -> ImageSource:
    """Return the picture in a part from this process: also a PIL image, an array, a file's path or its bytes."""
    given = part.get("image", part.get("image_url"))
    value = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(value, str) and not value.startswith(("data:", "https:", "http:", "file:")):
        value = Path(value)
    if value is None or isinstance(value, str):
        return source_of(path, part)
    return _source_with(path, part)(file_of(path, value))


def is_picture(value: Any) -> bool:
    """Return whether a value is a path, a PIL image or an array of pixels."""
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim == 3
    return isinstance(value, Path) or type(value).__module__.startswith("PIL.")


def file_of(path: str, value: Any) -> bytes:
    """Return an image file's bytes for a value of Python: these bytes, a path, a PIL image or a uint8 array."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Path):
        try:
            return value.read_bytes()
        except OSError as e:
            raise invalid(path, f"is the file {shown(str(value))}, which cannot be read: {e.strerror}") from e
    from PIL import Image  # slow to import

    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim not in (2, 3):
            raise invalid(path, f"is an array of {value.dtype} {list(value.shape)}; send uint8 [height, width, 3]")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise invalid(path, f"is a {type(value).__name__}; send a PIL image, an array, a path or a data URL")
    file = io.BytesIO()
    value.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _source_with(path: str, part: Mapping[str, Any]) -> Callable[..., ImageSource]:
    """Return ImageSource with the part's options. Raises FieldError."""
    given = part.get("image_url")
    detail = part.get("detail") or (given.get("detail") if isinstance(given, Mapping) else None) or "auto"
    if detail not in DETAILS:
        raise invalid(f"{path}.detail", f"is {shown(detail)}; it should be one of {', '.join(DETAILS)}")
    oversized = options.get("oversized_image") if isinstance(options := part.get("transformations"), Mapping) else None
    if oversized not in (None, "downsize", "error"):
        problem = f"is {shown(oversized)}; it should be downsize or error"
        raise invalid(f"{path}.transformations.oversized_image", problem)
    return partial(ImageSource, detail=detail, may_shrink=oversized != "error")
