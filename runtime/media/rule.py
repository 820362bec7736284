"""ImageRule: how a model family turns a picture into pixels and tokens, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

# "low" has the family's fewest tokens; "auto" and "high" the checkpoint's number. "original" does not scale down.
Detail = Literal["low", "auto", "high", "original"]
DETAILS: tuple[Detail, ...] = ("low", "auto", "high", "original")

Size = tuple[int, int]  # height, width


@dataclass(frozen=True, slots=True)
class ResizePlan:
    """A picture is resized to each size in turn, then perhaps cut into tiles."""

    sizes: tuple[Size, ...]
    tiles: tuple[int, int] = (0, 0)  # rows and columns; (0, 0) keeps the picture whole
    thumbnail: Size | None = None  # the whole picture's size after the tiles
    thumbnail_of_source: bool = False  # resized from the picture before `sizes`, not after

    @property
    def parts(self) -> tuple[Size, ...]:
        """Size of each part that the tower gets."""
        if self.tiles == (0, 0):
            return self.sizes[-1:]
        (rows, columns), (height, width) = self.tiles, self.sizes[-1]
        parts = ((height // rows, width // columns),) * (rows * columns)
        return parts if self.thumbnail is None else (*parts, self.thumbnail)

    def reduced(self, size: Size, unit: int) -> Size | None:
        """Return the size to which a picture of `size` is reduced; None if each side loses little.

        Sides become whole embeddings of `unit` pixels, so that even a small picture may lose some."""
        height, width = (min(sides) for sides in zip(*self.sizes, strict=True))
        losses = (size[0] - height, size[0]), (size[1] - width, size[1])
        return (height, width) if any(loss >= max(unit, side / 8) for loss, side in losses) else None


class Resize(Protocol):
    """A family's rule for sizes. Implementations are in resize.py."""

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        """Return the plan for a picture of `size` after rotation, with at most `max_tokens` embeddings."""


@dataclass(frozen=True, slots=True)
class ImageMarks:
    """The tokens around an image's embeddings: texts with special tokens spelled out, or a token id.

    A whole picture is `begin`, its embeddings and `end`. Its rows are separated by `row_break` if that is set.
    Tiles are `tiles_begin`, then each tile's mark and embeddings, with `row_end` after each row of tiles; then
    `thumbnail`, its embeddings and `end`."""

    mark: int  # token id that a template writes for an image
    begin: str | int = ""
    end: str | int = ""
    newlines: str = ""  # before and after all that; the tokenizer joins them with the newlines around
    row_break: str = ""
    tiles_begin: str = ""
    tile: str = ""  # contains {row} and {column}, which count from 1
    row_end: str = ""
    thumbnail: str = ""


@dataclass(frozen=True, slots=True)
class ImageRule:
    """A family's processing of pictures. The tower applies `mean` and `std` to pixels in 0 to 1."""

    name: str  # names the processor in each image's digest
    token_id: int  # stands in a prompt for each embedding
    unit: int  # pixels a side of one embedding
    resize: Resize
    marks: ImageMarks
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resample: int = 3  # Pillow's number of the filter: 1 Lanczos, 2 bilinear, 3 bicubic

    def num_embeddings(self, parts: tuple[Size, ...]) -> int:
        return sum(self.grid(part)[0] * self.grid(part)[1] for part in parts)

    def grid(self, part: Size) -> tuple[int, int]:
        """Return the rows and columns of a part's embeddings."""
        return part[0] // self.unit, part[1] // self.unit
