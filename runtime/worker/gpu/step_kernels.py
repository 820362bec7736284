"""StepKernels: one step's kernels, from packed rows to sampled tokens. Steps launch them, or graphs capture them.

A step without adapters launches no kernel for them, so steps with adapters have their own graphs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.kernels.attention.paged_attention import PagedBatch, PagedRows
from runtime.kernels.sampling.pinned import pin_samples
from runtime.kernels.step.state_rows import StateRows
from runtime.kernels.step.step_inputs import Inputs, build_inputs
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import Embeds, ForwardBatch, GroupRows, Taps
from runtime.models.heads.head import DraftHead
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.device_slots import DeviceSlots
from runtime.worker.gpu.graph_runner import DecodeShape
from runtime.worker.gpu.step_rows import MixedShape
from runtime.worker.kv_cache import KVCache


class StepKernels:
    """One forward pass and its sampling, on the state in `slots`."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        slots: DeviceSlots,
        sampler: DeviceSampler,
        max_rows: int,
    ) -> None:
        self.decoder, self.cache, self.slots, self.sampler, self.max_rows = decoder, cache, slots, sampler, max_rows
        self.head: DraftHead | None = None  # takes features of all tokens; set by GpuHead
        self.layers = cache.layers[: decoder.spec.num_layers]  # a head's follow
        self.graph_logits = torch.empty(0, device=cache.device)  # [num_tokens, own_ids] the last replay's
        self.graph_hidden = torch.empty(0, device=cache.device)  # [num_samples, hidden] the last replay with prompts
        self.graph_features = torch.empty(0, device=cache.device)  # [num_tokens, width] the last replay's, for a head
        self.num_groups = len(cache.spec.groups)
        self.rope_deltas = slots.rope_deltas if decoder.spec.rope_has_sections else None
        self.row_numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=cache.device)

    def allocate_outputs(self, num_samples: int, num_tokens: int) -> None:
        """Make room for the logits, hidden states and features that graphs leave behind."""
        device, numerics = self.cache.device, self.decoder.numerics
        shape = num_samples, len(self.sampler.split.own_ids)
        self.graph_logits = torch.empty(shape, dtype=torch.float32, device=device)
        shape = num_samples, self.decoder.spec.hidden_size
        self.graph_hidden = torch.empty(shape, dtype=numerics.dtype, device=device)
        if self.head is not None:
            shape = num_tokens, self.head.spec.feature_width
            self.graph_features = torch.empty(shape, dtype=numerics.dtype, device=device)

    def taps(self, num_tokens: int, out: torch.Tensor | None = None) -> Taps | None:
        """Room for features, in `out` if given. None if they are the normed hidden states, or no head takes them."""
        if self.head is None or not self.head.spec.taps:
            return None
        if out is None:
            shape, dtype = (num_tokens, self.head.spec.feature_width), self.decoder.numerics.dtype
            out = torch.empty(shape, dtype=dtype, device=self.cache.device)
        return Taps(self.head.spec.taps, out[:num_tokens])

    def _leave_features(self, hidden: torch.Tensor) -> None:
        """Leave a graph's features, unless its forward pass has left them."""
        if self.head is not None and not self.head.spec.taps:
            self.graph_features[: len(hidden)].copy_(self.decoder.normed(hidden))

    def forward(
        self,
        shape: MixedShape,
        rows: torch.Tensor,
        has_adapters: bool,
        embeds: Embeds | None = None,
        rope_positions: torch.Tensor | None = None,  # [3, num_tokens] where the step reaches images
        last_visible: torch.Tensor | None = None,  # [num_tokens] likewise
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """The tokens' hidden states in prompts and decoding rows, [num_tokens, hidden]."""
        batch = self.mixed_batch(shape, rows, has_adapters, last_visible)
        batch.embeds, batch.rope_positions, batch.taps = embeds, rope_positions, taps
        return self.decoder.forward(batch, self.layers)

    def mixed_batch(
        self,
        shape: MixedShape,
        rows: torch.Tensor,
        has_adapters: bool = False,
        last_visible: torch.Tensor | None = None,
    ) -> ForwardBatch:
        """The batch of prompts and decoding rows."""
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
        return self._batch(inputs, num_tokens, attending, states)

    def decode_batch(
        self,
        slots: torch.Tensor,
        starts: torch.Tensor,
        count: int,  # tokens in a row; the first `own_counts` are its own
        own_counts: torch.Tensor,
        has_adapters: bool = False,
        last_keys: torch.Tensor | None = None,  # [num_rows] positions to attend from, in place of the tokens'
    ) -> ForwardBatch:
        """The batch of rows with equal length. Earlier steps have computed their prefixes."""
        size, adapters = len(slots), self.slots.adapters if has_adapters else None
        firsts, num_tokens = self.firsts(size + 1, count), size * count
        inputs = build_inputs(
            slots, starts, firsts, self.slots.tokens, self.slots.tables, self.cache.block_size, num_tokens, count,
            None if count == 1 else own_counts, adapters, self.num_groups, self.rope_deltas,
        )  # fmt: skip
        if last_keys is not None:
            inputs, starts = (inputs[0], last_keys, *inputs[2:]), last_keys
        max_len, tables = self.slots.max_model_len, self.slots.tables_of_groups[0]
        rows = PagedRows(slots, starts, firsts, tables, size, num_tokens, count, max_len, prefix_ready=True)
        states = StateRows(slots, starts, firsts, self.slots.places, size, num_tokens, count, steps_only=True)
        return self._batch(inputs, num_tokens, [rows], states)

    def firsts(self, num_rows: int, count: int) -> torch.Tensor:
        """[num_rows] the first token of each row with `count` tokens."""
        firsts = self.row_numbers[:num_rows]
        return firsts if count == 1 else firsts * count

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
        tokens, params = self.slots.tokens, self.slots.params
        token_ids = self.sampler.sample(logits, slots, positions, tokens, params, filters, penalties)
        if (mean := self.sampler.pinned_acceptance) is not None:
            pin_samples(token_ids, slots, positions, tokens, self.slots.drafts, mean)
        return token_ids

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
        hidden = self.forward(shape, graph_rows, has_adapters, taps=self.taps(shape.num_tokens, self.graph_features))
        self._leave_features(hidden)
        hidden = torch.index_select(hidden, 0, sampled, out=self.graph_hidden[: shape.num_samples])
        logits = self.decoder.logits(hidden, out=self.graph_logits[: shape.num_samples])
        return self.sample(logits, slots, positions, filters=True, penalties=True)

    def decode(self, shape: DecodeShape, graph_rows: torch.Tensor, has_adapters: bool = False) -> torch.Tensor:
        """A sample after each token in rows of equal length."""
        slots, own_counts, sample_slots, starts, _, positions = shape.split(graph_rows)
        batch = self.decode_batch(slots, starts, shape.row_len, own_counts, has_adapters)
        batch.taps = self.taps(shape.num_tokens, self.graph_features)
        hidden = self.decoder.forward(batch, self.layers)
        self._leave_features(hidden)
        logits = self.decoder.logits(hidden, out=self.graph_logits[: shape.num_tokens])
        return self.sample(logits, sample_slots, positions, filters=True, penalties=True)
