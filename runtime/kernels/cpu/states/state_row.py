"""A step's row as state kernels read it (state_rows.py)."""

from __future__ import annotations

from runtime.kernels.llvm.language import I32s, Int, Value, i64


class StateRow:
    """Numbers of one row, int64."""

    def __init__(self, row: Value, slots: I32s, starts: I32s, q_starts: I32s, places: I32s, place_stride: Int) -> None:
        self.slot, self.start = slots.load(row).to(i64), starts.load(row).to(i64)
        self.first = q_starts.load(row).to(i64)  # its first token in the step
        self.count = q_starts.load(row + 1).to(i64) - self.first
        self.end = self.start + self.count  # the position behind its last token
        place = places + self.slot * place_stride
        self.own, self.prompt_end, self.snapshot_end, self.snapshot = (place.load(i).to(i64) for i in range(4))

    def takes_snapshot(self, end: Value) -> Value:
        """True if the snapshot's position is behind the start, and not behind `end`."""
        return (self.snapshot_end > self.start) & (self.snapshot_end <= end)
