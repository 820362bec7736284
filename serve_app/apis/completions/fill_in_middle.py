"""The prompt of a text that is to be written between two others, for models whose tokenizer has marks for it."""

from __future__ import annotations

from runtime.output.fields import invalid
from runtime.text.tokenizer import Tokenizer

# Marks before what comes first, before what comes after, and before what the model writes: Qwen-Coder and CodeGemma;
# StarCoder and Granite; SantaCoder; DeepSeek; CodeLlama.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)


def between(tokenizer: Tokenizer, before: list[int], after: list[int]) -> list[int]:
    """The token ids of a prompt whose completion goes between two texts; raises FieldError."""
    for marks in _MARKS:
        first, second, last = (tokenizer.token_to_id(mark) for mark in marks)
        if first is not None and second is not None and last is not None:
            return [first, *before, second, *after, last]
    raise invalid("suffix", "is not supported: this model's tokenizer has no marks to fill in a text; leave it out")
