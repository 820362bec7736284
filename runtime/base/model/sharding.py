"""How the ranks in a tensor-parallel group divide a parameter among themselves (Megatron-LM, arXiv 1909.08053).

The rule follows from a parameter's role, not from its storage. A weight format receives the rank's parts of a
parameter, and finds the same parts in its own tensors."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.shard import NUM_LEAVES, Shard, Share


class Sharding(Enum):
    """One rank's share. Linear weights are [out, in]."""

    REPLICATED = "replicated"  # the whole parameter
    COLUMN = "column"  # some outputs: rows of the weight, its bias, and a norm over all outputs
    ROW = "row"  # some inputs: columns of the weight. Results are summed over the ranks, then the bias is added once
    VOCABULARY = "vocabulary"  # some tokens: rows of the embedding and the output head
    EXPERT_INNER = "expert-inner"  # some intermediate values of each expert: gate and up rows, down columns


class Part(NamedTuple):
    """A range in one dimension of a parameter."""

    dim: int
    start: int
    stop: int


_DIVIDED_DIM = {
    "q": 0, "k": 0, "v": 0, "qkv": 0, "gate": 0, "up": 0, "gate_up": 0, "out": 1, "down": 1, "q_heads_norm": 0,
    "k_heads_norm": 0, "gated_q": 0, "q_gate": 0, "sinks": 0, "dense_gate": 0, "dense_up": 0, "dense_down": 1,
    "mix_qkv": 0, "mix_z": 0, "mix_b": 0, "mix_a": 0, "mix_qkvz": 0, "mix_ba": 0, "mix_in": 0, "mix_out": 1,
    "q_b": 0, "kv_b": 0, "k_b": 0, "v_b": 0, "conv": 0, "conv_bias": 0, "decay_log": 0, "decay_bias": 0,
}  # fmt: skip

# A map with rows that the checkpoint groups by head -> the maps that loading makes from it (models/linear_maps.py)
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
    """Return a name's last part: q in layers.3.q.weight, q_heads_norm in layers.3.q_heads_norm."""
    return parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def parts_of(spec: DecoderSpec, parameter: str) -> tuple[Part, ...]:
    """Return a parameter's ranges that a spec's rank (`DecoderSpec.of_rank`) holds, rising; () for the whole parameter.

    A tensor with several fused maps has one range per map."""
    if spec.shard.size == 1 or sharding_of(parameter) is Sharding.REPLICATED:
        return ()
    dim, divided = _divided(spec, parameter)
    return tuple(Part(dim, before + own.start, before + own.stop) for before, own, _ in divided)


def place_in_tensor(spec: DecoderSpec, parameter: str) -> Part | None:
    """Return a shared expert's range in the tensor that checkpoints have for all shared experts.

    None for a parameter with its own tensor."""
    experts = spec.experts
    if experts is None or experts.shared < 2 or ".experts." not in parameter:
        return None
    _, layer, _, expert, _ = parameter.split(".", 4)
    index, size = int(expert) - experts.num_experts, spec.whole.layers[int(layer)].ffn.size
    return None if index < 0 else Part(_DIVIDED_DIM[_part_of(parameter)], index * size, (index + 1) * size)


def stored_shape(spec: DecoderSpec, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor that checkpoints have for a parameter with this shape."""
    if (place := place_in_tensor(spec, parameter)) is None:
        return shape
    assert spec.experts is not None
    return tuple(size * (spec.experts.shared if dim == place.dim else 1) for dim, size in enumerate(shape))


def ungrouped(parameter: str) -> list[str]:
    """Return the names of rows that the checkpoint groups by head, in the kernels' order, or the name itself."""
    layer, _, part = parameter.removesuffix(".weight").rpartition(".")
    return [f"{layer}.{name}.weight" for name in UNGROUPED.get(part, ())] or [parameter]


def leaves_of(spec: DecoderSpec, parameter: str) -> list[Part]:
    """Return a parameter's leaves that a spec's rank holds, rising. Each fused map has its own.

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
    maps, places, before = _shares(spec, parameter), list[tuple[int, range, int]](), 0
    for own, length in maps:
        places.append((before, own, length))
        before += length
    return _DIVIDED_DIM.get(_part_of(parameter), 0), places


def _shares(spec: DecoderSpec, parameter: str) -> list[Share]:
    """Return the rank's share of each map in a parameter."""
    whole, part = spec.whole, _part_of(parameter)
    if part in ("embed", "head", "layer_embed"):
        return [Share(spec.token_ids, whole.vocab_size)]
    # every rank has these maps whole
    whole_sizes = {"layer_gate": whole.layer_embed_size, "layer_out": whole.hidden_size}
    whole_sizes["layer_embed_map"] = whole.layer_embed_size * whole.num_layers
    if part in whole_sizes:
        return [Share(range(whole_sizes[part]), whole_sizes[part])]
    index = int(parameter.split(".")[1])
    layer, whole_layer = spec.layers[index], whole.layers[index]
    if part in ("gate", "up", "gate_up", "down"):
        size = whole_layer.ffn.size
        inner = Share(spec.shard.inner(size, whole.ffn_unit(index)), size)
        return [inner, inner] if part == "gate_up" else [inner]
    if part.startswith("dense_"):
        return [spec.shard.share(layer.ffn.beside)]
    return layer.mixer.shares(whole_layer.mixer, spec.shard, part)  # type: ignore[arg-type]  # both have one kind
