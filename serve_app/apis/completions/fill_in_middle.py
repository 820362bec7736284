"""The prompt of a fill-in-the-middle completion, for tokenizers with marks for it."""

from __future__ import annotations

from runtime.output.fields import invalid
from runtime.text.tokenizer import Tokenizer

# Marks of prefix, suffix and middle: Qwen-Coder and CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek; CodeLlama.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)


def between(tokenizer: Tokenizer, before: list[int], after: list[int]) -> list[int]:
    """Return the token ids of a prompt for the text between two texts; raises FieldError."""
    for marks in _MARKS:
        first, second, last = (tokenizer.token_to_id(mark) for mark in marks)
        if first is not None and second is not None and last is not None:
            return [first, *before, second, *after, last]
    raise invalid("suffix", "is not supported: this model's tokenizer lacks fill-in-the-middle marks; leave it out")
