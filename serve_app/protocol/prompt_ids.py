"""A prompt text's token ids, at a cost bounded by the model's context.

Encoding takes microseconds and a hundred bytes for each character, so a text far beyond the context is not encoded to
its end. The number of characters does not bound tokens, since normalisers and special tokens absorb any number. So the
start of a long text is encoded, then twice as much, until it has too many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from serve_app.protocol.errors import ContextExceeded, PromptSize

_FIRST_CHARS = 64 << 10  # up to this length a text is encoded at once
_CHARS_PER_TOKEN = 16  # far above prose
_MARGIN = 1024  # tokens, since a cut changes a few tokens next to it


def prompt_ids(
    encode: Callable[[str, bool], list[int]],
    text: str,
    add_special_tokens: bool,
    limit: int,
    where: str,
    part: Literal["start", "end"] | None = None,
) -> list[int]:
    """Return the ids of `text`, the value in field `where`, by the function `encode`.

    For a text far above `limit` tokens, returns at least `limit` ids from its `part`, or raises the 400 without one."""
    num_chars = max(_FIRST_CHARS, _CHARS_PER_TOKEN * limit)
    while num_chars < len(text):
        ids = encode(text[-num_chars:] if part == "end" else text[:num_chars], add_special_tokens)
        if len(ids) > limit + _MARGIN:
            if part is not None:
                return ids
            raise ContextExceeded(PromptSize(where, limit, len(ids), is_cut=True))
        num_chars *= 2
    return encode(text, add_special_tokens)
