"""Sizes of resized pictures: one class a family. Floats are computed in transformers' order, for equal sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.media.rule import Detail, ResizePlan, Size


@dataclass(frozen=True, slots=True)
class LongestEdge:
    """Pixtral: scale down to a longest edge, then up to whole embeddings."""

    unit: int
    longest: int
    largest: int  # the longest edge that the tower has positions for

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        longest = self.largest if detail == "original" else self.longest
        if detail == "low":
            longest = min(longest, 16 * self.unit)
        height, width = self._scaled(size, longest)
        while detail != "original" and height * width > max_tokens * self.unit**2 and longest > self.unit:
            longest = max(self.unit, longest - self.unit)
            height, width = self._scaled(size, longest)
        return ResizePlan(((height, width),))

    def _scaled(self, size: Size, longest: int) -> Size:
        height, width = size
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return _up(max(height, 1), self.unit), _up(max(width, 1), self.unit)


@dataclass(frozen=True, slots=True)
class Area:
    """Qwen, GLM: whole embeddings, with a number of pixels between two bounds."""

    unit: int
    least: int  # pixels
    most: int
    enlarge: bool = False  # first scale a picture up to one embedding

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        most = min(self.most, max_tokens * self.unit**2)
        if detail == "low":
            most = min(most, max(256 * self.unit**2, self.least))
        elif detail == "original":
            most = max(self.most, size[0] * size[1] * 2)
        if self.enlarge and min(size) < self.unit:
            scale = self.unit / min(size)
            size = int(size[0] * scale), int(size[1] * scale)
        return ResizePlan((fitted(size, self.unit, min(self.least, most), most),))


@dataclass(frozen=True, slots=True)
class SquareTiles:
    """Idefics3, SmolVLM: scale to a longest edge, then up to whole tiles; the whole picture as one tile after them."""

    tile: int  # pixels a side
    longest: int
    tokens: int  # embeddings a tile
    split: bool = True

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        longest, square = self.longest, (self.tile, self.tile)
        while True:
            first = self._scaled(size, longest)
            second = self._whole_tiles(first)
            tiles = second[0] // self.tile, second[1] // self.tile
            if (tiles[0] * tiles[1] + 1) * self.tokens <= max_tokens or longest <= self.tile:
                break
            longest = max(self.tile, longest - self.tile)
        if not self.split or detail == "low":
            return ResizePlan((first, square))
        if tiles == (1, 1):
            return ResizePlan((first, second))
        return ResizePlan((first, second), tiles, square)

    def _scaled(self, size: Size, longest: int) -> Size:
        height, width = size
        aspect = width / height
        if width >= height:
            width, height = longest, int(longest / aspect)
            height += height % 2
        else:
            height, width = longest, int(longest * aspect)
            width += width % 2
        return max(height, 1), max(width, 1)

    def _whole_tiles(self, size: Size) -> Size:
        height, width = size
        aspect = width / height
        if width >= height:
            width = _up(width, self.tile)
            height = _up(int(width / aspect), self.tile)
        else:
            height = _up(height, self.tile)
            width = _up(int(height * aspect), self.tile)
        return height, width


@dataclass(frozen=True, slots=True)
class Square:
    """Gemma 3: one size for all pictures."""

    side: int

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        return ResizePlan(((self.side, self.side),))


@dataclass(frozen=True, slots=True)
class Budget:
    """Gemma 4: the largest size of whole embeddings within a budget. The model was trained with a few budgets."""

    patch: int
    pool: int  # patches a side of an embedding
    tokens: int
    budgets: tuple[int, ...] = (70, 140, 280, 560, 1120)

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        unit = self.patch * self.pool
        tokens = self.budgets[0] if detail == "low" else self.tokens
        if detail == "original":
            needed = math.ceil(size[0] / unit) * math.ceil(size[1] / unit)
            tokens = max(self.tokens, min((b for b in self.budgets if b >= needed), default=self.budgets[-1]))
        allowed = [budget for budget in self.budgets if budget <= min(tokens, max_tokens)]
        return ResizePlan((self._largest(size, unit, allowed[-1] if allowed else self.budgets[0]),))

    def _largest(self, size: Size, unit: int, tokens: int) -> Size:
        height, width = size
        factor = math.sqrt(tokens * self.pool**2 * self.patch**2 / (height * width))
        rows, columns = math.floor(factor * height / unit), math.floor(factor * width / unit)
        if rows == 0:
            rows, columns = 1, min(width // height, tokens)
        elif columns == 0:
            rows, columns = min(height // width, tokens), 1
        return rows * unit, columns * unit


@dataclass(frozen=True, slots=True)
class GridTiles:
    """LFM2-VL: whole embeddings; a large picture becomes the grid of tiles with the nearest ratio, and a thumbnail."""

    unit: int
    least: int  # embeddings of a whole picture
    most: int
    tile: int  # pixels a side
    min_tiles: int
    max_tiles: int
    tolerance: float
    thumbnail: bool = True

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        area = self.unit**2
        most = min(self.most, max_tokens)
        height, width = (max(self.unit, round(side / self.unit) * self.unit) for side in size)
        whole = fitted(size, self.unit, min(self.least, most) * area, most * area, at_least_one=True)
        max_tiles = min(self.max_tiles, (max_tokens - most) * area // self.tile**2)
        large = height * width > self.most * area * self.tolerance
        if not large or detail == "low" or max_tiles < max(self.min_tiles, 2):
            return ResizePlan((whole,))
        rows, columns = nearest_grid(size, self.tile, self.min_tiles, max_tiles)
        thumbnail = whole if self.thumbnail and rows * columns > 1 else None
        return ResizePlan(((rows * self.tile, columns * self.tile),), (rows, columns), thumbnail, True)


@dataclass(frozen=True, slots=True)
class SquareGrid:
    """InternVL: the grid of square tiles with the nearest ratio, and a square thumbnail."""

    tile: int  # pixels a side
    tokens: int  # embeddings a tile
    min_tiles: int
    max_tiles: int

    def plan(self, size: Size, detail: Detail, max_tokens: int) -> ResizePlan:
        square = (self.tile, self.tile)
        max_tiles = min(self.max_tiles, max(1, max_tokens // self.tokens - 1))
        rows, columns = nearest_grid(size, self.tile, min(self.min_tiles, max_tiles), max_tiles)
        if detail == "low" or (rows, columns) == (1, 1):
            return ResizePlan((square,))
        return ResizePlan(((rows * self.tile, columns * self.tile),), (rows, columns), square, True)


def fitted(size: Size, unit: int, least: int, most: int, at_least_one: bool = False) -> Size:
    """Return the size in whole units nearest to `size` with `least` to `most` pixels, and about its ratio.

    `at_least_one` counts a side below half a unit as one unit before the bounds apply."""
    height, width = size
    floor = unit if at_least_one else 0
    rounded = max(floor, round(height / unit) * unit), max(floor, round(width / unit) * unit)
    if rounded[0] * rounded[1] > most:
        scale = math.sqrt(height * width / most)
        return max(unit, _down(height / scale, unit)), max(unit, _down(width / scale, unit))
    if rounded[0] * rounded[1] < least:
        scale = math.sqrt(least / (height * width))
        return _up(height * scale, unit), _up(width * scale, unit)
    return rounded


def nearest_grid(size: Size, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return the grid of tiles, in rows and columns, with the ratio nearest to the picture's.

    Of equal ratios, the larger grid wins if the picture has more than half its pixels."""
    height, width = size
    grids = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    ]
    best, least = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        if difference < least or (difference == least and height * width > 0.5 * tile * tile * columns * rows):
            best, least = (rows, columns), difference
    return best


def _up(pixels: float, unit: int) -> int:
    return math.ceil(pixels / unit) * unit


def _down(pixels: float, unit: int) -> int:
    return math.floor(pixels / unit) * unit
