"""Positions of patches: learned grids at any size, and rotary positions in two dimensions.

A learned grid is sampled along each axis by a matrix [size, side], so every kind is one function of sizes. All is made
on the device: threads of a CPU would take longer to start than an image takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from runtime.base.model.tower_spec import TowerSpec


def _identity(size: int, side: int, device: torch.device) -> torch.Tensor:
    return torch.eye(size, side, device=device)


def _buckets(size: int, side: int, device: torch.device) -> torch.Tensor:
    """Each patch has the position of the bucket that its place between 0 and 1 falls into (Idefics)."""
    places = (torch.arange(size, dtype=torch.float32, device=device) * (1.0 / size)).clamp(max=1.0 - 1e-6)
    buckets = torch.bucketize(places, torch.arange(1 / side, 1.0, 1 / side, device=device), right=True)
    return torch.nn.functional.one_hot(buckets.clamp(max=side - 1), side).float()


def _bilinear(size: int, side: int, device: torch.device) -> torch.Tensor:
    """Linear between two neighbours; the first and last positions are the corners'."""
    return _hat(torch.linspace(0, side - 1, size, device=device), side)


def _resized(size: int, side: int, device: torch.device) -> torch.Tensor:
    """Linear between two neighbours, with antialias if the grid shrinks (SigLIP 2)."""
    scale = side / size
    weights = _hat((torch.arange(size, device=device) + 0.5) * scale - 0.5, side, max(scale, 1.0))
    return weights / weights.sum(1, keepdim=True)


def _hat(centers: torch.Tensor, side: int, support: float = 1.0) -> torch.Tensor:
    return (1 - (torch.arange(side, device=centers.device) - centers[:, None]).abs() / support).clamp(min=0)


def _bicubic(size: int, side: int, device: torch.device) -> torch.Tensor:
    """Cubic convolution with a = -0.75 over four neighbours; those outside repeat the border (`grid_sample`)."""
    places = (torch.arange(size, device=device) + 0.5) * (side / size) - 0.5
    x = (torch.arange(-2, side + 2, device=device) - places[:, None]).abs().clamp(max=2)
    near, far = (1.25 * x - 2.25) * x * x + 1, ((-0.75 * x + 3.75) * x - 6) * x + 3
    weights = torch.where(x <= 1, near, far)
    weights[:, 2] += weights[:, :2].sum(1)
    weights[:, -3] += weights[:, -2:].sum(1)
    return weights[:, 2:-2]


_AXES: dict[str, Callable[[int, int, torch.device], torch.Tensor]] = {
    "learned": _identity, "buckets": _buckets, "bilinear": _bilinear, "resized": _resized, "bicubic": _bicubic,
}  # fmt: skip


def learned_positions(spec: TowerSpec, table: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns, hidden] in float32 of a table [side * side, hidden], or [2, side, hidden] with one for each
    axis."""
    if spec.positions == "tables":
        by_column, by_row = table.float().unbind()
        return by_row[:rows, None] + by_column[:columns]
    side = round(table.shape[0] ** 0.5)
    along_rows, along_columns = (_AXES[spec.positions](size, side, table.device) for size in (rows, columns))
    by_row = along_rows @ table.float().view(side, -1)
    return along_columns @ by_row.view(rows, side, -1)


@lru_cache(8)
def _frequencies(size: int, theta: float, device: torch.device) -> torch.Tensor:
    """[size / 2] float32. They are copied once: a copy from the host waits for the device."""
    return (1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))).to(device)


def rotary_positions(spec: TowerSpec, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return cos and sin, [rows * columns, 1, parts, dim], in float32.

    A head has `parts` parts, each of two halves with `dim` elements."""
    size = spec.head_dim if spec.rope == "interleaved" else spec.head_dim // 2
    frequencies = _frequencies(size, spec.rope_theta, device)
    is_mixed = spec.rope == "interleaved"
    row_wise, column_wise = (frequencies[0::2], frequencies[1::2]) if is_mixed else (frequencies, frequencies)
    by_row = torch.outer(torch.arange(rows, device=device).float(), row_wise)[:, None].expand(-1, columns, -1)
    by_column = torch.outer(torch.arange(columns, device=device).float(), column_wise).expand(rows, -1, -1)
    angles = torch.stack((by_column, by_row), 2) if spec.rope == "axes" else torch.cat((by_row, by_column), 2)
    angles = angles.reshape(rows * columns, 1, 2 if spec.rope == "axes" else 1, -1)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, positions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Turn [..., num_patches, heads, head_dim] by `rotary_positions`."""
    cos, sin = positions
    first, second = x.float().unflatten(-1, (cos.shape[-2], -1)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)
