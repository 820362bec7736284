"""The exact bytes of each token, derived from the decoder in a tokenizer.json.

A decoder in the `tokenizers` package maps a whole token list to text, too slow to repeat for each token of a
stream. But language models' decoders work token by token, except at the start of a text: some drop a space there that
encoding has added. So a text is the concatenated bytes of its tokens, with a rule for the start:

    ByteLevel                                        each character stands for a byte (GPT-2's table)
    Replace("▁"," ") ByteFallback Fuse [Strip(" ",1)]  "▁" is a space, "<0x0A>" a byte; a leading space is dropped
    Metaspace                                        "▁" is a space, and empty in the first token

One deviation is deliberate. If a run of byte tokens is not valid UTF-8, ByteFallback replaces every byte in it by
U+FFFD, also within whole characters. Here whole characters remain, as in other decoders. So a stream can send
each character when it is complete."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import tokenizers

from runtime.base.types import CallboardError

_MAX_GROWTH = 16  # limit for a token's growth by the decoder's replacements; in real models these only shorten
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table from characters to bytes: printable Latin-1 as itself, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


class Pieces(dict[int, bytes]):
    """Token id -> bytes, filled on demand. Ids without a token have empty bytes.

    `leading_spaces` is the number of spaces that are dropped where a text starts."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any]) -> None:
        super().__init__()
        self._backend = backend
        self._byte_level = self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._dropped_at_start = ""  # a character that is removed from the first token
        self.leading_spaces = 0
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        for at, step in enumerate(steps):
            match step:
                case {"type": "ByteLevel"} if len(steps) == 1:
                    self._byte_level = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    pass  # pieces are always joined; Fuse only makes Strip apply to the whole text
                case {"type": "Strip", "content": " ", "start": int(n), "stop": 0} if {"type": "Fuse"} in steps[:at]:
                    self.leading_spaces = n
                case {"type": "Metaspace", "replacement": str(space), "prepend_scheme": str(scheme)}:
                    self._replacements.append((space, " "))
                    self._dropped_at_start = "" if scheme == "never" else space
                case _:
                    raise CallboardError(
                        f"The tokenizer's decoder has the step {json.dumps(step)}, which cannot be streamed; "
                        "byte-level, byte-fallback and Metaspace decoders can."
                    )
        growth = math.prod(max(1.0, len(new) / len(old) if old else math.inf) for old, new in self._replacements)
        if growth > _MAX_GROWTH:
            raise CallboardError(
                f"The tokenizer's decoder makes tokens up to {growth:g} times as long; at most {_MAX_GROWTH} times is "
                "supported."
            )

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        piece = self[token_id] = b"" if token is None else self._bytes(token)
        return piece

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a text's first token, before `leading_spaces` are dropped."""
        token = self._backend.id_to_token(token_id) if self._dropped_at_start and token_id >= 0 else None
        return self[token_id] if token is None else self._bytes(token.replace(self._dropped_at_start, ""))

    def join(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of a whole text."""
        ids = (i for i in ids if self[i])
        first = next(ids, -1)
        text = self.first(first) + b"".join(self[i] for i in ids)
        return strip_spaces(text, self.leading_spaces)

    def _bytes(self, token: str) -> bytes:
        if self._byte_level:
            if all(c in BYTE_OF_CHAR for c in token):
                return bytes(BYTE_OF_CHAR[c] for c in token)
            return token.encode()  # an added token outside the alphabet stands for itself
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()


def strip_spaces(text: bytes, most: int) -> bytes:
    """Return `text` without its leading spaces, at most `most` of them."""
    return text[min(most, len(text) - len(text.lstrip(b" "))) :]


def pieces_of(backend: tokenizers.Tokenizer) -> Pieces:
    """Return the pieces of a tokenizer. Raises CallboardError if its decoder does not work token by token."""
    if backend.decoder is None:
        raise CallboardError(
            "The tokenizer has no decoder; byte-level, byte-fallback and Metaspace decoders are known."
        )
    return Pieces(backend, json.loads(backend.decoder.__getstate__()))
