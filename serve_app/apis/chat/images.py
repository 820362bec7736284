"""A chat's pictures: refused, or made the images that the model gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runtime.base.images import ImageSpan
from runtime.base.types import CallboardError
from runtime.media.expand import PreparedImage
from runtime.media.processor import ImageProcessor
from runtime.media.source import ImageFault, TooManyPixels
from runtime.output.fields import FieldError, invalid, shown
from serve_app.apis.chat.messages import ImagePart
from serve_app.apis.chat.request import ChatRequest
from serve_app.protocol.errors import ImagesTooLarge
from serve_app.protocol.prepared_request import ServedModel
from serve_app.protocol.shapes import kinds_in

_MAX_TRIES = 32  # messages that are left out in turn, to find one at fault

Encode = Callable[[list[dict[str, Any]]], list[int]]  # messages for the template to token ids


def unseen(where: str, request: ChatRequest, model: ServedModel) -> tuple[str, ...]:
    """Return the kinds of pictures that the model does not see, safe for a header; raises FieldError for a new one."""
    parts = [] if model.images is not None else request.images()
    for part in parts:
        if part.is_new:
            problem = f"is {shown(part.type)}, but the model {shown(model.name)} takes no images"
            raise invalid(f"{part.path}.type", f"{problem}{model.why_no_images}; leave it out")
    return tuple(kinds_in(where, (part.type for part in parts)))


def with_images(
    request: ChatRequest, model: ServedModel, ids: list[int], encode: Encode, where: str
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return a prompt's token ids with its pictures' tokens, and the places of the pictures.

    Raises FieldError for an unusable picture. This waits for a child process that decodes pictures, and for
    addresses."""
    images, parts = model.images, request.images()
    if images is None or not parts:
        return ids, ()
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if (value := getattr(request, name)) is not None:
            raise invalid(name, f"is {shown(value)}, which no prompt with images has; leave it out")
    if len(parts) > (most := images.limits.max_images):
        raise invalid(parts[most].path, f"is image {most + 1} of {len(parts)}; this server allows {most} (max_images)")
    prepared = _prepared(parts, images)
    try:
        found, spans = images.expand(ids, prepared)
    except CallboardError as e:
        at = _message_at_fault(request, images, prepared, encode, model.tokenizer.id_to_token(images.rule.marks.mark))
        raise FieldError(at or where, f"{at or where}: {e}") from e
    num_pixels, most = sum(len(span.image.pixels) // 3 for span in spans), images.limits.max_request_pixels
    if num_pixels > most:
        raise invalid(where, f"has images of {num_pixels} pixels in all; this server allows {most}")
    return found, spans


def _prepared(parts: list[ImagePart], images: ImageProcessor) -> list[PreparedImage]:
    prepared: list[PreparedImage] = []
    too_large: dict[str, TooManyPixels] = {}  # each part's problem, by path
    for part in parts:
        try:
            prepared.append(part.image(images.prepare_one))
        except TooManyPixels as e:
            too_large[part.path] = e
        except ImageFault as e:
            raise invalid(part.path, str(e)) from e
    if too_large:
        path, problem = next(iter(too_large.items()))
        raise ImagesTooLarge(f"{path} {problem}.", [*too_large], min(each.max_side for each in too_large.values()))
    return prepared


def _message_at_fault(
    request: ChatRequest,
    images: ImageProcessor,
    prepared: Sequence[PreparedImage],
    encode: Encode,
    mark: str | None,
) -> str | None:
    """Return the field of the message without which a prompt has as many marks as images; None if none is found.

    A message may spell the mark, or the template may drop the message's pictures."""
    messages = request.template_messages(takes_images=True)
    begin = tries = 0
    for i, message in enumerate(request.messages):
        parts = message.images()
        end = begin + len(parts)
        if (parts or (mark and mark in message.text())) and (tries := tries + 1) <= _MAX_TRIES:
            rest = [*messages[:i], {**messages[i], "content": "-"}, *messages[i + 1 :]]
            try:
                images.expand(encode(rest), [*prepared[:begin], *prepared[end:]])
            except CallboardError:
                pass
            else:
                return parts[0].path if parts else f"messages.{i}.content"
        begin = end
    return None
