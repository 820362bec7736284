"""From image marks in a prompt's token ids to the tokens of each image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from runtime.base.images import Image, ImageSpan
from runtime.base.types import CallboardError
from runtime.media.rule import ImageMarks, ImageRule


class Vocabulary(Protocol):
    """The part of a Tokenizer that an image processor needs."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_to_id(self, token: str) -> int | None: ...

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
        self._mark = _id(vocabulary, rule.marks.mark)
        self._encode = lru_cache(maxsize=256)(lambda text: tuple(vocabulary.encode(text, False)))

    def expand(self, ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Replace the k-th mark by the k-th image's tokens. Raises CallboardError if their numbers differ."""
        num_marks = sum(token == self._mark for token in ids)
        if num_marks != len(images):
            raise CallboardError(
                f"The prompt has {num_marks} image marks ({self._rule.marks.mark}) for {len(images)} images; "
                "leave the mark out of texts, and use a chat template that writes one mark for each image."
            )
        expanded: list[int] = []
        spans: list[ImageSpan] = []
        begin = 0
        for image in images:
            at = _index(ids, self._mark, begin)
            expanded += ids[begin:at]
            begin = at + 1
            spans.append(self._append(expanded, image))
            if self._rule.marks.end.endswith("\n"):
                begin += self._join_newlines(expanded, ids[begin : begin + 1])
        return expanded + list(ids[begin:]), tuple(spans)

    def _append(self, expanded: list[int], image: PreparedImage) -> ImageSpan:
        """Append one image's tokens, and return their span."""
        first = last = -1
        for piece in _pieces(self._rule, image):
            if isinstance(piece, int):
                first = len(expanded) if first < 0 else first
                expanded += [self._rule.token_id] * piece
                last = len(expanded)
            elif piece.startswith("\n") and first < 0:
                newlines = piece[: len(piece) - len(piece.lstrip("\n"))]
                self._join_newlines(expanded, self._encode(newlines))
                expanded += self._encode(piece[len(newlines) :])
            else:
                expanded += self._encode(piece)
        rows, columns = self._rule.grid(image.image.sizes[0])
        grid = (1, rows, columns) if len(image.image.sizes) == 1 else (1, 1, image.num_embeddings)
        return ImageSpan(first, last - first, image.image, grid)

    def _join_newlines(self, expanded: list[int], following: Sequence[int]) -> int:
        """Append `following` as the tokenizer would: newlines on both sides of the seam become one token.

        Returns how many tokens it appended; none if there is nothing to join and `following` is text."""
        if not following:
            return 0
        before = self._newlines(expanded[-1:])
        after = self._newlines(following)
        if before and after:
            expanded[-1:] = self._encode(before + after)
            return len(following)
        if after:
            expanded += following
            return len(following)
        return 0

    def _newlines(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` if it is newlines alone."""
        text = self._vocabulary.decode(list(ids), skip_special_tokens=False)
        return text if not text.strip("\n") else ""


def _pieces(rule: ImageRule, image: PreparedImage) -> Iterator[str | int]:
    """Yield an image's texts and, as integers, the numbers of embeddings between them."""
    marks, sizes = rule.marks, image.image.sizes
    if image.tiles == (0, 0) or not (marks.tile or marks.thumbnail):
        yield marks.begin
        yield from _rows(marks, rule.grid(sizes[0])) if marks.row_break else (image.num_embeddings,)
        yield marks.end
        return
    text = marks.tiles_begin
    num_rows, num_columns = image.tiles
    for number, size in enumerate(sizes[: num_rows * num_columns]):
        row, column = divmod(number, num_columns)
        yield text + marks.tile.format(row=row + 1, column=column + 1)
        yield rule.num_embeddings((size,))
        text = marks.row_end if column == num_columns - 1 else ""
    if len(sizes) > num_rows * num_columns:
        yield text + marks.thumbnail
        yield rule.num_embeddings(sizes[-1:])
        text = ""
    yield text + marks.end


def _rows(marks: ImageMarks, grid: tuple[int, int]) -> Iterator[str | int]:
    rows, columns = grid
    for row in range(rows):
        yield columns
        if row < rows - 1:
            yield marks.row_break


def _id(vocabulary: Vocabulary, token: str) -> int:
    found = vocabulary.token_to_id(token)
    if found is None:
        raise CallboardError(f"The model's tokenizer has no token {token}, which its images need.")
    return found


def _index(ids: Sequence[int], token: int, begin: int) -> int:
    return next(at for at in range(begin, len(ids)) if ids[at] == token)
