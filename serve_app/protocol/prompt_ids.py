"""The token ids of a prompt's text, at a cost that is bounded by the model's context and not by the text.

Encoding takes microseconds and a hundred bytes for each character, so a text far beyond the context is not encoded to
its end only to be refused. Characters say little about tokens, since normalisers and special tokens swallow any number
of them; so the beginning of a long text is encoded, and twice as much until it has too many tokens.
"""

from __future__ import annotations

from typing import Literal

from runtime.text.tokenizer import Tokenizer
from serve_app.protocol.errors import ApiError

_FIRST_CHARS = 64 << 10  # so short a text is encoded at once
_CHARS_PER_TOKEN = 16  # far more than any prose has
_MARGIN = 1024  # tokens: where a text is cut, a few tokens beside the cut are other ones


def prompt_ids(
    tokenizer: Tokenizer,
    text: str,
    add_special_tokens: bool,
    limit: int,
    where: str,
    kept: Literal["start", "end"] | None = None,
) -> list[int]:
    """The ids of `text`, the value of the field `where`. Of one with clearly more than `limit` tokens at least the
    first or last `limit` ids, as `kept` says; without it, raises the 400."""
    num_chars = max(_FIRST_CHARS, _CHARS_PER_TOKEN * limit)
    while num_chars < len(text):
        ids = tokenizer.encode(text[-num_chars:] if kept == "end" else text[:num_chars], add_special_tokens)
        if len(ids) > limit + _MARGIN:
            if kept is not None:
                return ids
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens, but {where} has more; shorten {where}.",
                param=where,
                code="context_length_exceeded",
            )
        num_chars *= 2
    return tokenizer.encode(text, add_special_tokens)
