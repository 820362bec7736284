"""StepKernels: one step's kernels, from packed rows to sampled tokens. Steps launch them, or graphs capture them.

A step without adapters launches no kernel for them, so steps with adapters have their own graphs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.kernels.attention.paged_attention import PagedBatch, PagedRows
from runtime.kernels.step.state_rows import StateRows
from runtime.kernels.step.step_inputs import Inputs, build_inputs
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import Embeds, ForwardBatch, GroupRows
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.device_slots import DeviceSlots
from runtime.worker.gpu.graph_runner import DecodeShape
from runtime.worker.gpu.step_rows import MixedShape
from runtime.worker.kv_cache import KVCache


class StepKernels:
    """One forward pass and its sampling, on the state in `slots`."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, slots: DeviceSlots, sampler: DeviceSampler, max_rows: int
    ) -> None:
        self.decoder, self.cache, self.slots, self.sampler = decoder, cache, slots, sampler
        self.graph_logits = torch.empty(0, device=cache.device)  # [num_tokens, own_ids] the last replay's
        self.graph_hidden = torch.empty(0, device=cache.device)  # [num_samples, hidden] the last replay with prompts
        self.num_groups = len(cache.spec.groups)
        self.rope_deltas = slots.rope_deltas if decoder.spec.rope_has_sections else None
        self.row_numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=cache.device)

    def allocate_outputs(self, num_samples: int) -> None:
        """Make room for the logits and hidden states that graphs leave behind."""
        device, numerics = self.cache.device, self.decoder.numerics
        shape = num_samples, len(self.sampler.split.own_ids)
        self.graph_logits = torch.empty(shape, dtype=torch.float32, device=device)
        shape = num_samples, self.decoder.spec.hidden_size
        self.graph_hidden = torch.empty(shape, dtype=numerics.dtype, device=device)

    def forward(
        self,
        shape: MixedShape,
        rows: torch.Tensor,
        has_adapters: bool,
        embeds: Embeds | None = None,
        rope_positions: torch.Tensor | None = None,  # [3, num_tokens] where the step reaches images
        last_visible: torch.Tensor | None = None,  # [num_tokens] likewise
    ) -> torch.Tensor:
        """The tokens' hidden states in prompts and decoding rows, [num_tokens, hidden]."""
        slots, starts, q_starts, *_ = shape.split(rows)
        adapters = self.slots.adapters if has_adapters else None
        num_tokens, num_short, num_long, _, max_count, max_len = shape
        inputs = build_inputs(
            slots, starts, q_starts, self.slots.tokens, self.slots.tables, self.cache.block_size, num_tokens, max_count,
            None, adapters, self.num_groups, self.rope_deltas,
        )  # fmt: skip
        tables = self.slots.tables_of_groups[0]
        attending = []
        for first, size, tokens, most in ((0, num_short, num_short, 1), (num_short, num_long, num_tokens, max_count)):
            if size:
                part = slice(first, first + size)
                q_starts_of_part = q_starts[first : first + size + 1]
                attending.append(
                    PagedRows(
                        slots[part],
                        starts[part],
                        q_starts_of_part,
                        tables,
                        size,
                        tokens,
                        most,
                        max_len,
                        last_visible=last_visible,
                    )
                )
        states = StateRows(slots, starts, q_starts, self.slots.places, len(slots), num_tokens, max_count)
        batch = self._batch(inputs, num_tokens, attending, states)
        batch.embeds, batch.rope_positions = embeds, rope_positions
        return self.decoder.forward(batch, self.cache.layers[: self.decoder.spec.num_layers])

    def _batch(self, inputs: Inputs, num_tokens: int, parts: list[PagedRows], states: StateRows) -> ForwardBatch:
        """A step's batch. `parts` have the first group's tables."""
        token_ids, positions, kv_indices, adapters = inputs
        groups = [
            GroupRows(kv_index, PagedBatch(num_tokens, [replace(part, tables=tables) for part in parts]))
            for kv_index, tables in zip(kv_indices, self.slots.tables_of_groups, strict=True)
        ]
        return ForwardBatch(token_ids, positions, groups, adapters, states)

    def sample(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, filters: bool, penalties: bool
    ) -> torch.Tensor:
        """Token ids [num_samples] of the first pass, which are in the slots, too."""
        return self.sampler.sample(logits, slots, positions, self.slots.tokens, self.slots.params, filters, penalties)

    def step(
        self, shape: DecodeShape | MixedShape, graph_rows: torch.Tensor, has_adapters: bool = False
    ) -> torch.Tensor:
        """The step that a graph captures: from its input's rows to its samples' token ids."""
        if isinstance(shape, DecodeShape):
            return self.decode(shape, graph_rows, has_adapters)
        return self.prefill(shape, graph_rows, has_adapters)

    def prefill(self, shape: MixedShape, graph_rows: torch.Tensor, has_adapters: bool = False) -> torch.Tensor:
        """Prompts and decoding rows together."""
        *_, sampled, slots, positions = shape.split(graph_rows)
        hidden = self.forward(shape, graph_rows, has_adapters)
        hidden = torch.index_select(hidden, 0, sampled, out=self.graph_hidden[: shape.num_samples])
        logits = self.decoder.logits(hidden, out=self.graph_logits[: shape.num_samples])
        return self.sample(logits, slots, positions, filters=True, penalties=True)

    def decode(self, shape: DecodeShape, graph_rows: torch.Tensor, has_adapters: bool = False) -> torch.Tensor:
        """A sample after each token in rows of equal length."""
        (count, size), num_tokens = shape, shape.num_tokens
        slots, own_counts, sample_slots, starts, _, positions = shape.split(graph_rows)
        tokens, tables, adapters = self.slots.tokens, self.slots.tables, self.slots.adapters if has_adapters else None
        firsts = self.row_numbers[: size + 1]
        firsts = firsts if count == 1 else firsts * count
        inputs = build_inputs(
            slots, starts, firsts, tokens, tables, self.cache.block_size, num_tokens, count,
            None if count == 1 else own_counts, adapters, self.num_groups, self.rope_deltas,
        )  # fmt: skip
        tables = self.slots.tables_of_groups[0]
        rows = PagedRows(
            slots, starts, firsts, tables, size, num_tokens, count, self.slots.max_model_len, prefix_ready=True
        )
        states = StateRows(slots, starts, firsts, self.slots.places, size, num_tokens, count, steps_only=True)
        batch = self._batch(inputs, num_tokens, [rows], states)
        hidden = self.decoder.forward(batch, self.cache.layers[: self.decoder.spec.num_layers])
        logits = self.decoder.logits(hidden, out=self.graph_logits[:num_tokens])
        return self.sample(logits, sample_slots, positions, filters=True, penalties=True)
