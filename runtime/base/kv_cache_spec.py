"""KVCacheSpec: the layout of a model's KV cache as plain data; memory plan, allocation and block tables derive from it.

Layers with the same shape and lifetime of keys and values are a group. Every group has its own block tables. All
groups draw from one pool. A block holds `block_size` tokens for one group's layers, and has the bytes that the largest
group needs.

Layers without attention have a fixed-size state for each request in place of keys and values.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import lcm

# EngineConfig.kv_cache_dtype, but for auto and none -> a group's (dtype, scale_dtype).
QUANTIZED_DTYPES = {"fp8": ("float8_e4m3fn", None), "int8": ("int8", "float16")}
CHUNK = 64  # prompt tokens that a layer with a state computes at once, from a multiple of CHUNK on
RING = 16  # last tokens with inputs in a layer with a state, by position modulo RING; a power of two
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that store their keys and values alike and keep them equally long."""

    layers: tuple[int, ...]  # their numbers in the model, rising
    num_kv_heads: int
    head_dim: int
    dtype: str  # the stored values' type, a key in DTYPE_BYTES
    scale_dtype: str | None = None  # type of the scales per token and head, for K and V; None without scales
    # Positions that a token attends to, itself included; None for all. Older positions are not kept.
    window: int | None = None
    vectors: int = 2  # stored for a token and head: k and v; 1 for a latent, which is both

    @property
    def row_bytes(self) -> int:
        """A key or a value of one head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Keys, values and their scales, in all layers of the group."""
        scale = 0 if self.scale_dtype is None else DTYPE_BYTES[self.scale_dtype]
        return self.vectors * len(self.layers) * self.num_kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + scale)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of `block_size` tokens."""
        return block_size * self.bytes_per_token

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds, if its rows have up to `max_chunk` tokens.

        Its largest row reads and writes them. The first and the last may be used in part, and the blocks stay that
        rows after the last full block would read."""
        needed = -(-num_tokens // block_size)
        if self.window is None:
            return needed
        return min(needed, -(-(self.window - 1 + max_chunk) // block_size) + 2)

    def num_dead_blocks(self, num_computed: int, block_size: int) -> int:
        """Return the number of leading blocks that rows from position `num_computed` on never read."""
        return 0 if self.window is None else max(0, num_computed - self.window + 1) // block_size


@dataclass(frozen=True, slots=True)
class StateGroupSpec:
    """Layers that summarize a request in a state of fixed size (kernels/step/state_rows.py)."""

    layers: tuple[int, ...]  # their numbers in the model, rising
    channels: int  # convolution channels; their last inputs are kept
    dtype: str  # type of these inputs, a key in DTYPE_BYTES
    heads: int = 0  # heads in the gated delta rule; 0 for layers that are only a convolution
    key_dim: int = 0  # rows in a head's state
    value_dim: int = 0  # columns in a head's state
    chunk: int = CHUNK  # prompt tokens that are computed at once; snapshots are at its multiples

    @property
    def bytes_per_state(self) -> int:
        """A request's states in all layers, or a snapshot of them. Inputs and positions included."""
        inputs = RING * self.channels * DTYPE_BYTES[self.dtype]
        return len(self.layers) * (inputs + self.heads * (self.key_dim * self.value_dim + 1) * 4)

    @property
    def bytes_per_slot(self) -> int:
        """The updates of a request's last tokens in all layers, which its state does not have yet."""
        return len(self.layers) * self.heads * RING * (self.key_dim + self.value_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The groups in a model's KV cache, in the block tables' order."""

    groups: tuple[KVGroupSpec, ...]
    states: StateGroupSpec | None = None  # the layers without attention
    # The layer that stores each layer's keys and values; () if each stores its own.
    sources: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """All layers: in groups, with states, and with another layer's keys and values."""
        if self.sources:
            return len(self.sources)
        num_states = 0 if self.states is None else len(self.states.layers)
        return num_states + sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in the cache, with a place in every group."""
        return len(self.groups) * self.bytes_per_block(1)

    @property
    def is_mixed(self) -> bool:
        """True if groups differ in the shape of their keys and values."""
        return len({(group.num_kv_heads, group.head_dim) for group in self.groups}) > 1

    @property
    def rows_per_token(self) -> tuple[int, ...]:
        """For each group, one head's keys and values that a token's share of a block holds; mixed groups only.

        The share has whole rows for every group."""
        unit = lcm(*(group.row_bytes for group in self.groups))
        largest = max(2 * len(group.layers) * group.num_kv_heads * group.row_bytes for group in self.groups)
        size = -(-largest // unit) * unit
        return tuple(size // group.row_bytes for group in self.groups)

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a request with `num_tokens` holds in all groups (KVGroupSpec.most_blocks)."""
        return sum(group.most_blocks(num_tokens, block_size, max_chunk) for group in self.groups)

    def most_tokens(self, num_blocks: int, block_size: int, max_chunk: int) -> int:
        """Return the tokens in the longest request that `num_blocks` blocks hold, a multiple of `block_size`.

        No request is longer than one that all blocks hold in one group."""
        sizes = range(1, max(0, num_blocks) + 1)
        return block_size * bisect_right(
            sizes, num_blocks, key=lambda size: self.most_blocks(size * block_size, block_size, max_chunk)
        )

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block in the pool, which any group may hold."""
        if not self.is_mixed:
            return max(group.bytes_per_block(block_size) for group in self.groups)
        first, rows = self.groups[0], self.rows_per_token
        # Each row count has its own scales: two for a key, and a value's places are not used.
        scales = 0 if first.scale_dtype is None else 2 * DTYPE_BYTES[first.scale_dtype] * sum(set(rows))
        return block_size * (rows[0] * first.row_bytes + scales)

    def total_bytes(self, num_blocks: int, block_size: int) -> int:
        """Bytes of a pool with `num_blocks` blocks."""
        return num_blocks * self.bytes_per_block(block_size)

    def place_of(self, layer: int) -> tuple[int, int]:
        """Return the number of the group that stores a layer's keys and values, and the layer's index in it."""
        layer = self.sources[layer] if self.sources else layer
        return next((g, group.layers.index(layer)) for g, group in enumerate(self.groups) if layer in group.layers)
