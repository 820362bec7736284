"""ImagePositions: the rotary positions of images' tokens and later ones, and the last position that each token sees.

Both follow from a slot's spans, so a request that moves or restarts has them again. Keys and values, causality, noise
and states keep the token's index as its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.core.plan import NewSlot, StepPlan


class Seen(NamedTuple):
    """A slot's tokens up to the end of its last image."""

    rotary: Int32s  # [3, n] positions by frame, row and column; n is 0 without M-RoPE
    last: Int32s  # [n] the last position that each token sees; n is 0 for a causal model


_NOTHING = Seen(np.zeros((3, 0), np.int32), np.zeros(0, np.int32))


class ImagePositions:
    """What the decoder needs to know about images in slots, for a model with M-RoPE or with whole images."""

    def __init__(self, spec: DecoderSpec, num_slots: int) -> None:
        self.has_sections, self.sees_whole = spec.rope_has_sections, spec.whole_images
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        self._seen: dict[int, Seen] = {}  # slots with images
        self.ends = np.zeros(self.num_slots, np.int32)  # index after each slot's last image
        self.deltas = np.zeros(self.num_slots, np.int32)  # rotary position minus index, behind the last image

    def add(self, new: NewSlot) -> None:
        self.remove(new.slot)
        if not len(new.spans) or not (self.has_sections or self.sees_whole):
            return
        end = int(new.spans[-1, :2].sum())
        rotary, last = _NOTHING
        if self.has_sections:
            rotary, self.deltas[new.slot] = rotary_positions(new.spans)
        if self.sees_whole:
            last = np.arange(end, dtype=np.int32)
            for begin, count in new.spans[:, :2].tolist():
                last[begin : begin + count] = begin + count - 1
        self._seen[new.slot], self.ends[new.slot] = Seen(rotary, last), end

    def remove(self, slot: int) -> None:
        if self._seen.pop(slot, None) is not None:
            self.ends[slot] = self.deltas[slot] = 0

    def reach(self, plan: StepPlan) -> bool:
        """True if a row of the plan begins before its slot's last image ends."""
        return bool(self._seen) and bool((plan.num_computed < self.ends[plan.slots]).any())

    def shifted(self, slots: NDArray[Any], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rotary positions [n] of tokens behind images in their `slots` [n]."""
        return positions + self.deltas[slots] if self._seen and self.has_sections else positions

    def for_rows(self, slots: Int32s, starts: Int32s, counts: Int32s) -> tuple[Int32s | None, Int32s | None]:
        """Rotary positions [3, num_tokens], and the last position that each token sees [num_tokens], for rows in this
        order. None where the model lacks them, or no row reaches an image.

        No row ends within a whole image, but that of a warm-up step may: its tokens see the row."""
        if not self._seen or not (starts < self.ends[slots]).any():
            return None, None
        rotary, last = [], []
        for slot, start, end in zip(slots.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True):
            index, seen = np.arange(start, end, dtype=np.int32), self._seen.get(slot, _NOTHING)
            positions, visible = np.tile(index + self.deltas[slot], (3, 1)), index.copy()
            known, whole = seen.rotary[:, start:end], seen.last[start:end]
            positions[:, : known.shape[1]] = known
            visible[: len(whole)] = np.minimum(whole, end - 1)
            rotary.append(positions)
            last.append(visible)
        return (
            np.concatenate(rotary, 1) if self.has_sections else None,
            np.concatenate(last) if self.sees_whole else None,
        )


def rotary_positions(spans: Int32s | Sequence[Sequence[int]]) -> tuple[Int32s, int]:
    """Return positions [3, n] up to the last span's end, and what later tokens add to their index, at most 0.

    A span is (begin, number of tokens, frames, rows, columns). It counts by frame, row and column from the position
    behind the text before it. Text behind it continues after the larger side (arXiv 2409.12191)."""
    parts, at, position = [_NOTHING.rotary], 0, 0
    for begin, count, frames, rows, columns in np.asarray(spans).tolist():
        text = np.arange(position, position + begin - at, dtype=np.int32)
        position += begin - at
        grid = np.indices((frames, rows, columns), np.int32).reshape(3, -1)
        parts += [np.broadcast_to(text, (3, len(text))), grid + np.int32(position)]
        at, position = begin + count, position + max(rows, columns)
    return np.concatenate(parts, 1), position - at
