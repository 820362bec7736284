"""From image marks in a prompt's token ids to the tokens of each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.base.images import Image, ImageSpan
from runtime.base.types import CallboardError
from runtime.media.rule import ImageRule, Size


class Vocabulary(Protocol):
    """The part of a Tokenizer that an image processor needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image as the tower gets it."""

    image: Image
    tiles: tuple[int, int]  # rows and columns; (0, 0) for a whole picture
    num_embeddings: int


class Expander:
    """Replaces one model's image marks. Threads may share it."""

    def __init__(self, rule: ImageRule, vocabulary: Vocabulary) -> None:
        self._rule, self._vocabulary = rule, vocabulary

    def expand(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Replace the k-th mark by the k-th image's tokens. Raises CallboardError if their numbers differ."""
        marks = self._rule.marks
        places = [place for place, token in enumerate(ids) if token == marks.mark]
        if len(places) != len(images):
            spelled = self._vocabulary.decode([marks.mark], skip_special_tokens=False)
            raise CallboardError(
                f"The prompt has {len(places)} image marks ({spelled}) for {len(images)} images; "
                "leave the mark out of texts, and use a chat template that writes one for each image."
            )
        if not images:
            return list(ids), ()
        tokens = _Tokens(self._rule.token_id, self._vocabulary)
        spans, begin = [], 0
        for place, image in zip(places, images, strict=True):
            tokens.add(ids[begin:place])
            spans.append(self._append(tokens, image))
            begin = place + 1
        tokens.add(ids[begin:])
        return tokens.ids, tuple(spans)

    def _append(self, tokens: _Tokens, image: PreparedImage) -> ImageSpan:
        """Append one image's tokens, and return their span."""
        rule, sizes = self._rule, image.image.sizes
        tokens.add_newlines(rule.marks.newlines)
        tokens.begin_span()
        if image.tiles == (0, 0):
            tokens.add_text(rule.marks.begin)
            _add_rows(tokens, rule, sizes[0])
        else:
            _add_tiles(tokens, rule, image)
        num_tokens = tokens.span_end - tokens.span_begin
        tokens.add_text(rule.marks.end)
        tokens.add_newlines(rule.marks.newlines)
        grid = rule.grid(sizes[0]) if len(sizes) == 1 else (1, image.num_embeddings)
        return ImageSpan(tokens.span_begin, num_tokens, image.image, (1, *grid))


def _add_rows(tokens: _Tokens, rule: ImageRule, size: Size) -> None:
    rows, columns = rule.grid(size)
    if not rule.marks.row_break:
        tokens.add_embeddings(rows * columns)
        return
    for row in range(rows):
        if row:
            tokens.add_text(rule.marks.row_break)
        tokens.add_embeddings(columns)


def _add_tiles(tokens: _Tokens, rule: ImageRule, image: PreparedImage) -> None:
    marks, sizes = rule.marks, image.image.sizes
    num_rows, num_columns = image.tiles
    tokens.add_text(marks.tiles_begin)
    for row in range(num_rows):
        for column in range(num_columns):
            tokens.add_text(marks.tile.format(row=row + 1, column=column + 1))
            tokens.add_embeddings(rule.num_embeddings(sizes[:1]))
        tokens.add_text(marks.row_end)
    if len(sizes) > num_rows * num_columns:
        tokens.add_text(marks.thumbnail)
        tokens.add_embeddings(rule.num_embeddings(sizes[-1:]))


class _Tokens:
    """Token ids that grow. Neighbouring texts are encoded together, as if they were one."""

    def __init__(self, token_id: int, vocabulary: Vocabulary) -> None:
        self.ids: list[int] = []
        self.span_begin = self.span_end = -1  # first and last embedding's place since begin_span
        self._token_id, self._vocabulary = token_id, vocabulary
        self._text = ""
        self._join = False  # the ids end with newlines of an image

    def add(self, ids: Sequence[int]) -> None:
        self._flush()
        if self._join:
            count = next((i for i, token in enumerate(ids) if not self._newlines(token)), len(ids))
            self.add_newlines("".join(map(self._newlines, ids[:count])))
            ids = ids[count:]
            self._join = not ids
        self.ids += ids

    def add_text(self, text: str | int) -> None:
        if isinstance(text, str):
            self._text += text
        else:
            self.add([text])

    def add_newlines(self, newlines: str) -> None:
        """Append newlines. With newlines before them, they are encoded as one text."""
        self._flush()
        if newlines:
            while self.ids and (before := self._newlines(self.ids[-1])):
                newlines += before
                self.ids.pop()
            self.ids += self._vocabulary.encode(newlines, False)
            self._join = True

    def add_embeddings(self, num_embeddings: int) -> None:
        self._flush()
        self._join = False
        if self.span_begin < 0:
            self.span_begin = len(self.ids)
        self.ids += [self._token_id] * num_embeddings
        self.span_end = len(self.ids)

    def begin_span(self) -> None:
        self.span_begin = -1

    def _flush(self) -> None:
        if self._text:
            self.ids += self._vocabulary.encode(self._text, False)
            self._text, self._join = "", False

    def _newlines(self, token: int) -> str:
        """Return a token's text if it is newlines alone."""
        text = self._vocabulary.decode([token], skip_special_tokens=False)
        return "" if text.strip("\n") else text
