"""The prompt of a fill-in-the-middle completion, for tokenizers with marks for it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.output.fields import invalid
from runtime.text.tokenizer import Tokenizer
from serve_app.protocol.prompt_ids import prompt_ids

# Marks for prefix, suffix and middle: Qwen-Coder and CodeGemma; StarCoder and Granite; SantaCoder; DeepSeek; CodeLlama.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
# Marks before a repository's name and before a file's: Qwen-Coder; StarCoder 2; StarCoder and Granite; CodeGemma.
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<filename>", "<|file_separator|>")
_OTHER_ENDS = ("<|fim_pad|>", "<fim_pad>", "<|endoftext|>", "\u2581<EOT>")  # a text between two others ends there


def between(tokenizer: Tokenizer, before: list[int], after: list[int], field: str = "suffix") -> list[int]:
    """Return the token ids of a prompt for the text between two texts; raises FieldError for `field`."""
    for marks in _MARKS:
        first, second, last = (tokenizer.token_to_id(mark) for mark in marks)
        if first is not None and second is not None and last is not None:
            return [first, *before, second, *after, last]
    raise invalid(field, "is not supported: this model's tokenizer lacks fill-in-the-middle marks; leave it out")


def of_other_files(tokenizer: Tokenizer, files: Sequence[tuple[str, str]], room: int) -> list[int]:
    """Return the token ids of other files, which precede the prompt, in the form that the model was trained on.

    `files` are pairs: name and text. Without `room` for all tokens the first ones are left out."""
    repository, mark = (_first(tokenizer, marks) for marks in (_REPOSITORY, _FILE))
    head = [] if repository is None else [repository, *tokenizer.encode("repository\n", False)]
    end = [] if mark is None else [mark, *tokenizer.encode("file\n", False)]
    room -= len(head) + len(end)
    parts: list[list[int]] = []
    for name, text in reversed(files):
        ids = prompt_ids(tokenizer.encode, text, False, max(room, 0), "input_extra", "end")
        if mark is not None:
            ids = [mark, *tokenizer.encode(f"{name or 'file'}\n", False), *ids]
        if (room := room - len(ids)) < 0:
            break
        parts.insert(0, ids)
    return [*head, *(i for part in parts for i in part), *end] if parts else []


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text between two others."""
    marks = [mark for three in _MARKS for mark in three]
    ids = (tokenizer.token_to_id(mark) for mark in (*marks, *_REPOSITORY, *_FILE, *_OTHER_ENDS))
    return tuple(i for i in ids if i is not None)


def _first(tokenizer: Tokenizer, marks: Sequence[str]) -> int | None:
    return next((i for mark in marks if (i := tokenizer.token_to_id(mark)) is not None), None)
