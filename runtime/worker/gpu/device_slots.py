"""DeviceSlots: the requests' state on the device, one int32 row for each slot.

    state[slot] = [ token ids: max_model_len | block tables: num_groups * max_blocks | sampling parameters: NUM_PARAMS
                    | adapter | places of states: 4 | rope delta ]

With a head, each slot's draft tokens follow all rows (kernels/step/draft_rows.py).

The last row, the null slot, belongs to graphs' padding. Its table and its parameters remain zero, so that padded
rows compute into the null block. Its tokens count as prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.core.plan import DEVICE_DRAFT, StepPlan, last_tokens
from runtime.kernels.sampling.sample import NUM_PARAMS
from runtime.kernels.step.draft_rows import DRAFT_WIDTH
from runtime.kernels.step.scatter_writes import scatter_writes

NO_WRITES: Int32s = np.zeros(1, np.int32)  # layout: kernels/step/scatter_writes.py


class DeviceSlots:
    """Token ids, block tables, sampling parameters and adapters. Plans change them by lists of writes."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        table_factors: Sequence[int] = (1,),  # factor of block ids in each layer group's table
        has_head: bool = False,
    ) -> None:
        self.num_slots, self.max_model_len = num_slots, max_model_len
        max_blocks, self._factors = -(-max_model_len // block_size), np.array(table_factors, np.int32)
        self.table_at, self.params_at = max_model_len, max_model_len + len(table_factors) * max_blocks
        self.places_at = self.params_at + NUM_PARAMS + 1
        self.stride = -(-(self.places_at + 5) // 4) * 4
        self.drafts_at, width = (num_slots + 1) * self.stride, DRAFT_WIDTH if has_head else 0
        size = self.drafts_at + (num_slots + 1) * width
        self.flat_state = torch.zeros(size, dtype=torch.int32, device=device)
        self.state = self.flat_state[: self.drafts_at].view(num_slots + 1, self.stride)
        self.drafts = self.flat_state[self.drafts_at :].view(num_slots + 1, width)
        self.tokens = self.state[:, :max_model_len]
        # The layer groups' tables one after another, and each group's own.
        self.tables = self.state[:, self.table_at : self.params_at]
        self.tables_of_groups = self.tables.split(max_blocks, 1)
        self.params = self.state[:, self.params_at : self.params_at + NUM_PARAMS]
        self.adapters = self.state[:, self.params_at + NUM_PARAMS]
        self.places = self.state[:, self.places_at : self.places_at + 4]  # kernels/step/state_rows.py
        self.rope_deltas = self.state[:, self.places_at + 4]
        self.adapter_of = np.zeros(num_slots, np.int32)  # the adapters, on the host
        self.prompt_ends = np.zeros(num_slots, np.int32)  # positions of the prompts' last tokens, on the host

    def reset(self) -> None:
        """Forget all requests."""
        self.flat_state.zero_()
        self.places[-1, 1].fill_(self.max_model_len)  # an assignment would copy from the host, and wait
        self.adapter_of[:] = 0
        self.prompt_ends[:] = 0

    def writes(self, plan: StepPlan, params: Int32s, rope_deltas: Int32s) -> list[Int32s]:
        """The plan's state changes: block tables, new requests with their rows in `params` and `rope_deltas`, draft
        tokens but for a head's. The arrays, end to end, have the layout in kernels/step/scatter_writes.py."""
        if not (plan.new or plan.block_table_writes.shape[1] or len(plan.draft_token_ids) or plan.snapshots.size):
            return [NO_WRITES]
        taken = {slot: place for slot, *place in plan.snapshots.T.tolist()}
        slots, index, blocks = plan.block_table_writes
        blocks = blocks * self._factors[index // self.tables_of_groups[0].shape[1]]
        # A plan may write an entry twice. The last write counts; kernels write in any order, so a dict keeps one.
        tables = dict(zip((slots * self.stride + self.table_at + index).tolist(), blocks.tolist(), strict=True))
        at, values = np.fromiter(tables, np.int32, len(tables)), [np.fromiter(tables.values(), np.int32, len(tables))]
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)  # neighbours are one write
        places: list[int] = at[first].tolist()
        lengths: list[int] = np.diff(first, append=len(at)).tolist()
        for new in plan.new:
            row = new.slot * self.stride
            place = new.state, new.prompt_len - 1, *taken.pop(new.slot, (0, 0))
            last = new.adapter, *place, rope_deltas[new.slot]
            places += (row, row + self.params_at)
            lengths += (len(new.token_ids), NUM_PARAMS + len(last))
            values += (new.token_ids, params[new.slot], np.array(last, np.int32))
            self.adapter_of[new.slot], self.prompt_ends[new.slot] = new.adapter, new.prompt_len - 1
        for slot, place in taken.items():
            places.append(slot * self.stride + self.places_at + 2)
            lengths.append(2)
            values.append(np.array(place, np.int32))
        if len(plan.draft_token_ids):
            for own_places, own_lengths, token_ids in self._draft_writes(plan):
                places += own_places
                lengths += own_lengths
                values.append(token_ids)
        return [np.array([len(places), *places, *lengths], np.int32), *values]

    def _draft_writes(self, plan: StepPlan) -> list[tuple[list[int], list[int], Int32s]]:
        """Places, lengths and values of the draft tokens that come with the plan."""
        rows, positions = last_tokens(plan, plan.draft_lens)
        is_here = plan.draft_token_ids != DEVICE_DRAFT  # the same for all tokens of a row
        given = np.unique(rows[is_here])
        places = (plan.slots * self.stride + plan.ends - plan.draft_lens)[given]
        found = [(places.tolist(), plan.draft_lens[given].tolist(), plan.draft_token_ids[is_here])]
        if self.drafts.numel():  # the head compares them with the samples
            kept = is_here & (plan.num_samples[rows] > 1)
            at = self.drafts_at + plan.slots[rows] * DRAFT_WIDTH + positions % DRAFT_WIDTH
            found.append((at[kept].tolist(), [1] * int(kept.sum()), plan.draft_token_ids[kept]))
        return found

    def restore_drafts(self, plan: StepPlan, upload: Callable[..., torch.Tensor]) -> None:
        """Write a head's draft tokens into the plan's rows again, over their samples; 0 for a missing one."""
        rows, positions = last_tokens(plan, plan.draft_lens)
        is_head = plan.draft_token_ids == DEVICE_DRAFT
        if is_head.any():
            slots, positions = plan.slots[rows][is_head], positions[is_head]
            at = upload(slots, positions, positions % DRAFT_WIDTH).view(3, -1).long()
            self.tokens[at[0], at[1]] = self.drafts[at[0], at[2]].clamp(min=0)

    def apply(self, writes: list[Int32s], upload: Callable[..., torch.Tensor]) -> None:
        """Apply writes outside of a graph."""
        if num_writes := int(writes[0][0]):
            scatter_writes(self.flat_state, upload(*writes), num_writes)

    def has_prompts(self, plan: StepPlan) -> bool:
        """True if a row of the plan has a token before its prompt's last one."""
        return bool((plan.num_computed < self.prompt_ends[plan.slots]).any())

    def has_adapters(self, plan: StepPlan) -> bool:
        """True if a row of the plan has an adapter."""
        return bool(self.adapter_of[plan.slots].any())
