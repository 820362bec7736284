"""build_input: the rows of a plan as a ForwardBatch, made without a loop over tokens or decode rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.base.kv_cache_spec import KVGroupSpec
from runtime.core.plan import StepPlan, last_tokens
from runtime.kernels.attention.attention_torch import AttentionShape, decode_bucket, plan_attention
from runtime.kernels.attention.tiled_rows import TiledRows, attention_tiles
from runtime.models.forward_batch import AttentionMetadata, ForwardBatch, GroupRows
from runtime.worker.cpu.slots import Slots
from runtime.worker.image_positions import ImagePositions


@dataclass(slots=True)
class StepInput:
    """One step's tokens, row after row. Tiled rows are in the plan's order. Else decode rows come
    first, by rising number of positions. `last` and `sampled` are in the plan's order."""

    batch: ForwardBatch
    last: NDArray[np.int64]  # [num_rows] each row's last token's index, in the plan's order
    sampled: NDArray[np.int64]  # [num_sampled] index of the token before each sample, in the plan's order
    sampled_slots: Int32s  # [num_sampled]
    sampled_positions: Int32s  # [num_sampled] position of the token to be sampled


def build_input(
    plan: StepPlan,
    slots: Slots,
    shapes: Sequence[AttentionShape],  # each group's shape
    tiled: bool,  # inputs for compiled kernels' attention
    groups: Sequence[KVGroupSpec],  # KV cache groups
    images: ImagePositions,
) -> StepInput:
    """`plan` has at least one row, and its table writes are in `slots`."""
    order = np.arange(len(plan.slots)) if tiled else _row_order(plan)
    rows, starts, counts = plan.slots[order], plan.num_computed[order], plan.num_tokens[order]
    ends = np.cumsum(counts)
    row_of = np.repeat(np.arange(len(rows)), counts)
    slot_of = rows[row_of].astype(np.int64)
    positions = np.arange(ends[-1]) + (starts - (ends - counts))[row_of]
    size, device = shapes[0].block_size, shapes[0].device
    kv_index = slots.tables[:, slot_of, positions // size].astype(np.int64) * size + positions % size
    token_index = torch.from_numpy(slot_of * slots.max_model_len + positions).to(device)

    rotary, last_visible = images.for_rows(rows, starts, counts)
    attention: list[AttentionMetadata]
    if tiled:
        tiles = torch.from_numpy(attention_tiles(starts, counts, rows))
        seen = None if last_visible is None else torch.from_numpy(last_visible)
        attention = [TiledRows(int(ends[-1]), tiles, tables, seen) for tables in slots.all_tables]
    else:
        attention = [
            plan_attention(_live_blocks(tables[rows], starts, group.window, size), starts, counts, shape, last_visible)
            for tables, group, shape in zip(slots.tables, groups, shapes, strict=True)
        ]
    first = np.empty(len(rows), np.int64)  # the index that each row's token at position 0 would have
    first[order] = ends - (starts + counts)
    sampling, sampled_after = last_tokens(plan, plan.num_samples)
    batch = ForwardBatch(
        token_ids=slots.flat_tokens.index_select(0, token_index).long(),
        positions=torch.from_numpy(images.shifted(slot_of, positions)).to(device),
        groups=list(map(GroupRows, torch.from_numpy(np.ascontiguousarray(kv_index)).to(device), attention)),
        adapters=torch.from_numpy(slots.adapters[slot_of]).to(device) if slots.adapters[rows].any() else None,
        states=slots.state_rows(rows, starts, counts),
        rope_positions=None if rotary is None else torch.from_numpy(rotary).to(device),
    )
    return StepInput(
        batch,
        last=first + plan.ends - 1,
        sampled=first[sampling] + sampled_after,
        sampled_slots=plan.slots[sampling],
        sampled_positions=sampled_after + 1,
    )


def build_decode_input(plan: StepPlan, slots: Slots, block_size: int, images: ImagePositions) -> StepInput:
    """`build_input` for rows of one token each, in the plan's order, for compiled kernels."""
    rows, positions = plan.slots, plan.num_computed.astype(np.int64)
    tokens = slots.tokens.numpy()[rows, positions]
    places = slots.tables[:, rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    index = np.arange(len(rows))
    tiles = np.stack((index, np.ones_like(index), rows, positions), 1).astype(np.int32)
    inputs = torch.from_numpy(np.stack((tokens, images.shifted(rows, positions), *places)).astype(np.int64))
    attention = [TiledRows(len(rows), torch.from_numpy(tiles), tables) for tables in slots.all_tables]
    sampling, _ = last_tokens(plan, plan.num_samples)
    states = slots.state_rows(rows, positions, plan.num_tokens, True)
    return StepInput(
        ForwardBatch(inputs[0], inputs[1], list(map(GroupRows, inputs[2:], attention)), states=states),
        last=index,
        sampled=index[sampling],
        sampled_slots=rows[sampling],
        sampled_positions=plan.num_computed[sampling] + 1,
    )


def _live_blocks(tables: Int32s, starts: Int32s, window: int | None, block_size: int) -> Int32s:
    """Tables with the null block in place of what the rows no longer see: it may belong to another request (C9)."""
    if window is None:
        return tables
    num_dead = np.maximum(starts - window + 1, 0) // block_size
    return np.where(np.arange(tables.shape[1]) < num_dead[:, None], 0, tables)


def _row_order(plan: StepPlan) -> NDArray[np.int64]:
    """Decode rows by rising bucket, then the others; stable."""
    key = np.where(plan.num_tokens == 1, decode_bucket(plan.num_computed), 64)
    return np.argsort(key, kind="stable")
