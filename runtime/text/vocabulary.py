"""The bytes of each token, and the tokens that end an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.base.model_info import ModelInfo
    from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """`tokens[i]` are the bytes that token i adds to a text: none for a special token or for padding of the
    output head. `eos_ids` follow a finished text only."""

    tokens: tuple[bytes, ...]  # [vocab_size]
    eos_ids: tuple[int, ...]
    has_channels: bool = False  # the model answers in channels (structured/channels.py)

    @classmethod
    def of(cls, tokenizer: Tokenizer, info: ModelInfo) -> Vocabulary:
        none = {*tokenizer.special_ids, *info.eos_token_ids}
        sizes = range(info.vocab_size)
        tokens = tuple(b"" if i in none else tokenizer.token_bytes(i) for i in sizes)
        return cls(tokens, info.eos_token_ids, tokenizer.token_to_id("<|channel|>") in tokenizer.special_ids)

    @property
    def num_words(self) -> int:
        """int32 words of a mask, one bit a token."""
        return -(-len(self.tokens) // 32)


BYTES = Vocabulary((*(bytes((i,)) for i in range(256)), b""), (256,))  # a token for each byte, and EOS
MOST_SPECIAL = 32
SPECIAL_BYTES = Vocabulary((*BYTES.tokens, *[b""] * MOST_SPECIAL), (256,))  # and special tokens, from 257 on
