"""How the ranks of a tensor-parallel group divide a parameter among themselves (Megatron-LM, arXiv 1909.08053).

The rule follows from a parameter's role, not from its storage. A weight format receives the rank's parts of a
parameter, and finds the same parts in its own tensors."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.mixer_spec import ShortConvSpec
from runtime.base.shard import NUM_LEAVES, Shard


class Sharding(Enum):
    """The share of one rank. Weights of linear maps are [out, in]."""

    REPLICATED = "replicated"  # the whole parameter
    COLUMN = "column"  # some outputs: rows of the weight and of its bias, and of a norm over all of them
    ROW = "row"  # some inputs: columns of the weight. Results are summed over the ranks, then the bias is added once
    VOCABULARY = "vocabulary"  # some tokens: rows of the embedding and of the output head
    EXPERT_INNER = "expert-inner"  # some of each expert's intermediate values: rows of gate and up, columns of down


class Part(NamedTuple):
    """A range of one dimension of a parameter."""

    dim: int
    start: int
    stop: int


_DIVIDED_DIM = {
    "q": 0, "k": 0, "v": 0, "qkv": 0, "gate": 0, "up": 0, "gate_up": 0, "out": 1, "down": 1, "q_heads_norm": 0,
    "k_heads_norm": 0, "gated_q": 0, "q_gate": 0, "sinks": 0, "dense_gate": 0, "dense_up": 0, "dense_down": 1,
    "mix_qkv": 0, "mix_z": 0, "mix_b": 0, "mix_a": 0, "mix_qkvz": 0, "mix_ba": 0, "mix_in": 0, "mix_out": 1,
    "q_b": 0, "kv_b": 0, "k_b": 0, "v_b": 0, "conv": 0, "conv_bias": 0, "decay_log": 0, "decay_bias": 0,
}  # fmt: skip

# A map with rows that the checkpoint groups by head -> the maps that loading makes of it (models/linear_maps.py)
UNGROUPED = {"gated_q": ("q_gate", "q"), "mix_qkvz": ("mix_qkv", "mix_z"), "mix_ba": ("mix_b", "mix_a")}


def sharding_of(parameter: str) -> Sharding:
    """Return the rule for a parameter of `DecoderSpec.shapes`."""
    part = _part_of(parameter)
    if part in ("embed", "head", "layer_embed"):
        return Sharding.VOCABULARY
    if part not in _DIVIDED_DIM or (parameter.endswith(".bias") and _DIVIDED_DIM[part] == 1):
        return Sharding.REPLICATED
    if ".experts." in parameter:
        return Sharding.EXPERT_INNER
    return Sharding.ROW if _DIVIDED_DIM[part] else Sharding.COLUMN


def _part_of(parameter: str) -> str:
    """Return the last part of a name: q of layers.3.q.weight, q_heads_norm of layers.3.q_heads_norm."""
    return parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def parts_of(spec: DecoderSpec, parameter: str) -> tuple[Part, ...]:
    """Return the ranges of a parameter that the rank of a spec (`DecoderSpec.of_rank`) holds, rising; () for all of it.

    A tensor of several fused maps has one range per map."""
    if spec.shard.size == 1 or sharding_of(parameter) is Sharding.REPLICATED:
        return ()
    dim, divided = _divided(spec, parameter)
    return tuple(Part(dim, before + own.start, before + own.stop) for before, own, _ in divided)


def place_in_tensor(spec: DecoderSpec, parameter: str) -> Part | None:
    """Return the range of a shared expert's map in the tensor that checkpoints have of all shared experts.

    None for a parameter with a tensor of its own."""
    experts = spec.experts
    if experts is None or experts.shared < 2 or ".experts." not in parameter:
        return None
    index, size = int(parameter.split(".")[3]) - experts.num_experts, spec.whole.ffn_size
    return None if index < 0 else Part(_DIVIDED_DIM[_part_of(parameter)], index * size, (index + 1) * size)


def stored_shape(spec: DecoderSpec, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that checkpoints have for a parameter of this shape."""
    if (place := place_in_tensor(spec, parameter)) is None:
        return shape
    assert spec.experts is not None
    return tuple(size * (spec.experts.shared if dim == place.dim else 1) for dim, size in enumerate(shape))


def ungrouped(parameter: str) -> list[str]:
    """Return the names of rows that the checkpoint groups by head, in the order of kernels, or the name itself."""
    layer, _, part = parameter.removesuffix(".weight").rpartition(".")
    return [f"{layer}.{name}.weight" for name in UNGROUPED.get(part, ())] or [parameter]


def leaves_of(spec: DecoderSpec, parameter: str) -> list[Part]:
    """Return the leaves of a parameter that the rank of a spec holds, rising. Each fused map has its own.

    Maps that the checkpoint groups by head have leaves by their names in UNGROUPED. A map that each rank has whole is
    one leaf."""
    dim, divided = _divided(spec, parameter)
    if sharding_of(parameter) is Sharding.REPLICATED:
        return [Part(dim, before, before + length) for before, _, length in divided]
    leaves = []
    for before, own, length in divided:
        for i in range(NUM_LEAVES):
            leaf = range(length * i // NUM_LEAVES, length * (i + 1) // NUM_LEAVES)
            if sharding_of(parameter) is Sharding.VOCABULARY:
                leaf = Shard(i, NUM_LEAVES).vocabulary(length)
            if leaf and own.start <= leaf.start and leaf.stop <= own.stop:
                leaves.append(Part(dim, before + leaf.start, before + leaf.stop))
    return leaves


def _divided(spec: DecoderSpec, parameter: str) -> tuple[int, list[tuple[int, range, int]]]:
    """Return the dimension that ranks divide, and for each map in the parameter its place along that dimension.

    A place is the map's offset, the rank's range within the map, and the map's length."""
    whole, rank = spec.whole, spec.shard.rank
    layer = int(parameter.split(".")[1]) if parameter.startswith("layers.") else 0
    num_kv_heads, head_dim = spec.heads(layer)

    def own(first: int, count: int, size: int) -> range:
        return range(first * size, (first + count) * size)

    heads = own(rank * spec.num_heads, spec.num_heads, head_dim), whole.num_heads * head_dim
    kv_heads = own(spec.first_kv_head(layer), num_kv_heads, head_dim), whole.heads(layer).num_kv_heads * head_dim
    inner = own(rank, 1, spec.ffn_size_of(layer)), whole.ffn_size_of(layer)
    dense = own(rank, 1, spec.dense_ffn_size), whole.dense_ffn_size
    if ".experts." in parameter:
        inner = spec.shard.inner(whole.ffn_size, whole.ffn_unit), whole.ffn_size
    tokens = spec.token_ids, whole.vocab_size
    width, part = whole.layer_embed_size, _part_of(parameter)
    of_all = {"layer_gate": width, "layer_out": whole.hidden_size, "layer_embed_map": width * whole.num_layers}
    if part in of_all:  # every rank has these maps whole
        return 0, [(0, range(of_all[part]), of_all[part])]
    if spec.latent is not None and (of_latent := _of_latent(spec, spec.latent, part)) is not None:
        return _DIVIDED_DIM.get(part, 0), [(0, *of_latent)]
    maps = {
        "q": [heads], "k": [kv_heads], "v": [kv_heads], "qkv": [heads, kv_heads, kv_heads], "out": [heads],
        "gate": [inner], "up": [inner], "gate_up": [inner, inner], "down": [inner],
        "dense_gate": [dense], "dense_up": [dense], "dense_down": [dense],
        "embed": [tokens], "head": [tokens], "layer_embed": [tokens],
        "q_heads_norm": [heads], "k_heads_norm": [kv_heads], "q_gate": [heads],
        "sinks": [(own(rank, 1, spec.num_heads), whole.num_heads)],
        "gated_q": [(own(rank * spec.num_heads, spec.num_heads, 2 * head_dim), 2 * whole.num_heads * head_dim)],
    }.get(part) or _of_mixer(spec, part)  # fmt: skip
    before = [sum(length for _, length in maps[:i]) for i in range(len(maps))]
    return _DIVIDED_DIM.get(part, 0), [(at, *one) for at, one in zip(before, maps, strict=True)]


def _of_latent(spec: DecoderSpec, latent: LatentSpec, part: str) -> tuple[range, int] | None:
    """Return the rank's range and the length of a map of latent attention; None for other maps."""
    of_head = {
        "q": spec.head_dim, "q_b": spec.head_dim, "kv_b": latent.expanded, "k_b": latent.rank, "v_b": latent.value_dim,
        "out": latent.value_dim,
    }  # fmt: skip
    if part in of_head:
        own = spec.num_heads * of_head[part]
        return range(spec.shard.rank * own, (spec.shard.rank + 1) * own), own * spec.shard.size
    whole = {"q_a": latent.q_rank, "kv_a": latent.stored}
    return (range(whole[part]), whole[part]) if part in whole else None


def _of_mixer(spec: DecoderSpec, part: str) -> list[tuple[range, int]]:
    """Return the rank's range and the length of each map in a parameter of a layer with a state."""
    size, rank, mixer = spec.shard.size, spec.shard.rank, spec.mixer

    def share(own: int) -> tuple[range, int]:
        return range(rank * own, (rank + 1) * own), own * size

    if isinstance(mixer, ShortConvSpec):
        return [share(mixer.channels)] * (3 if part == "mix_in" else 1)
    assert mixer is not None
    # Tiled value heads of a rank's key heads are several ranges.
    tiles = mixer.value_heads // mixer.key_heads if mixer.tiled else 1
    keys, values, heads = (
        share(mixer.key_heads * mixer.key_dim),
        [share(mixer.values // tiles)] * tiles,
        mixer.value_heads,
    )
    of_heads = [share(heads // tiles)] * tiles
    return {
        "mix_qkv": [keys, keys, *values], "conv": [keys, keys, *values], "mix_z": values, "mix_out": values,
        "mix_b": of_heads, "mix_a": of_heads, "decay_log": of_heads, "decay_bias": of_heads,
        "mix_qkvz": [share(mixer.channels + mixer.values)], "mix_ba": [share(2 * mixer.value_heads)],
    }[part]  # fmt: skip
