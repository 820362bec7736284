"""Slots: the live requests' state on a CPU, one row in every array for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.core.plan import NewSlot, StepPlan, last_tokens
from runtime.kernels.step.state_rows import StateRows

IntArray = NDArray[np.integer[Any]]


class Slots:
    """Token ids, block tables and adapters. A sampled token is written at its position, so a row's input is always
    `tokens[slot, start : start + count]`, and plans do not carry it."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        max_blocks: int,  # blocks in a table
        device: torch.device,
        has_states: bool = False,
        table_factors: Sequence[int] = (1,),  # factor of block ids in each layer group's table
    ) -> None:
        self.max_model_len, self.factors = max_model_len, np.array(table_factors, np.int32)
        self.tokens = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self.tables = np.zeros((len(table_factors), num_slots, max_blocks), np.int32)  # host, for gather indices
        self.all_tables = torch.from_numpy(self.tables)
        self.adapters = np.zeros(num_slots, np.int64)
        self.has_states = has_states
        self.places = torch.zeros((num_slots + 1, 4), dtype=torch.int32)  # state places (kernels/step/state_rows.py)

    def add(self, new: NewSlot) -> None:
        """A request enters with its known tokens. Its blocks come with the plan's table writes."""
        self.tokens[new.slot, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int32)
        self.tables[:, new.slot], self.adapters[new.slot] = 0, new.adapter
        self.places[new.slot] = torch.tensor((new.state, new.prompt_len - 1, 0, 0))

    def write_snapshots(self, taken: Int32s) -> None:
        """taken: [3, n] slot, position, row of the state cache (StepPlan.snapshots)."""
        self.places[torch.from_numpy(taken[0].astype(np.int64)), 2:] = torch.from_numpy(taken[1:].T.copy())

    def state_rows(self, rows: Int32s, starts: IntArray, counts: Int32s, steps_only: bool = False) -> StateRows | None:
        """The rows of a step, for layers with states; None for a model without states."""
        if not self.has_states:
            return None
        edges = np.concatenate(([0], np.cumsum(counts)))
        slots, firsts, ends = (torch.from_numpy(x.astype(np.int32)) for x in (rows, starts, edges))
        return StateRows(slots, firsts, ends, self.places, len(rows), int(edges[-1]), int(counts.max()), steps_only)

    def write_tables(self, writes: Int32s) -> None:
        """writes: [3, n] slot, index in the tables of all groups, block id."""
        groups, indices = np.divmod(writes[1], self.tables.shape[2])
        self.tables[groups, writes[0], indices] = writes[2] * self.factors[groups]

    def write_draft_tokens(self, plan: StepPlan) -> None:
        """Write the draft tokens of a plan at their positions."""
        rows, positions = last_tokens(plan, plan.draft_lens)
        at = plan.slots[rows].astype(np.int64) * self.max_model_len + positions
        ids = torch.from_numpy(plan.draft_token_ids.copy())
        self.flat_tokens[torch.from_numpy(at)] = ids.to(self.flat_tokens.device)

    def write_sampled(self, flat_positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens [n] at `slot * max_model_len + position` [n]; -1, a failed row, becomes 0."""
        self.flat_tokens.index_copy_(0, flat_positions, token_ids.clamp(min=0).to(torch.int32))
