"""The best keys of rows of logits, by the kernel of `draw.py`."""

from __future__ import annotations

import torch

from runtime.kernels.cpu.draw import TILE, draw
from runtime.kernels.cpu.launcher import Launcher, kernel


class BestKeys:
    """`drawn_keys_torch` as one kernel."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        first: int,
        checked: bool,
    ) -> torch.Tensor:
        num_rows, vocab = logits.shape
        keys = torch.empty(num_rows, max(1, -(-vocab // TILE)), dtype=torch.int64)
        arguments = (logits, temperatures, seeds, positions, keys, num_rows, vocab, logits.stride(0), first)
        parts = self._launcher.parts(keys.numel(), 16 * num_rows * vocab)
        self._launcher.launch(kernel(draw, checked=checked), arguments, parts)
        return keys.amax(1)
