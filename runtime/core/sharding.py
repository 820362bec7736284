"""How the ranks of a tensor-parallel group divide a parameter among themselves (Megatron-LM, arXiv 1909.08053).

The rule follows from what a parameter does, not from how it is stored: a weight format is told which parts of the
parameter a rank holds, and finds the same parts of its own tensors."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from runtime.core.decoder_spec import DecoderSpec

# The pieces of a parameter that have the same bounds in groups of 1, 2, 4 and 8 ranks, each of which has some of them.
NUM_LEAVES = 8


class Shard(NamedTuple):
    """A rank and the size of its group."""

    rank: int = 0
    size: int = 1

    def vocabulary(self, vocab_size: int) -> range:
        """The token ids whose rows of the embedding and of the head a rank has: on all as many as on the first, but
        fewer on the last ones where the vocabulary does not divide evenly."""
        share = -(-vocab_size // self.size)
        if NUM_LEAVES % self.size == 0:
            share = -(-vocab_size // NUM_LEAVES) * (NUM_LEAVES // self.size)
        return range(min(self.rank * share, vocab_size), min((self.rank + 1) * share, vocab_size))


ALONE = Shard()  # all of a model


class Sharding(Enum):
    """The share of a rank; weights of linear maps are [out, in]."""

    REPLICATED = "replicated"  # the whole parameter
    COLUMN = "column"  # some outputs: rows of the weight and of its bias
    ROW = "row"  # some inputs: columns of the weight. Results are summed over the ranks, then the bias is added once
    VOCABULARY = "vocabulary"  # some tokens: rows of the embedding and of the output head
    EXPERT_INNER = "expert-inner"  # some of each expert's intermediate values: rows of gate and up, columns of down


class Part(NamedTuple):
    """A range of one dimension of a parameter."""

    dim: int
    start: int
    stop: int


_DIVIDED_DIM = {"q": 0, "k": 0, "v": 0, "qkv": 0, "gate": 0, "up": 0, "gate_up": 0, "out": 1, "down": 1}


def sharding_of(parameter: str) -> Sharding:
    """The rule for a parameter of `DecoderSpec.shapes`."""
    *_, part, kind = ("", *parameter.split("."))
    if kind in ("embed", "head"):
        return Sharding.VOCABULARY
    if part not in _DIVIDED_DIM or (kind == "bias" and _DIVIDED_DIM[part] == 1):
        return Sharding.REPLICATED
    if ".experts." in parameter:
        return Sharding.EXPERT_INNER
    return Sharding.ROW if _DIVIDED_DIM[part] else Sharding.COLUMN


def parts_of(spec: DecoderSpec, parameter: str) -> tuple[Part, ...]:
    """The part of a parameter that the rank of a spec (`DecoderSpec.of_rank`) holds, as ranges in rising order; () is
    the whole.

    There are several where the checkpoint has maps fused into one tensor, each of which is divided by itself."""
    if spec.shard.size == 1 or sharding_of(parameter) is Sharding.REPLICATED:
        return ()
    part = parameter.split(".")[-2] if "." in parameter else parameter
    whole, rank, head_dim = spec.whole, spec.shard.rank, spec.head_dim
    # Of what a map divides: the first one of the rank, how many it has, and how many there are.
    heads = rank * spec.num_heads * head_dim, spec.num_heads * head_dim, whole.num_heads * head_dim
    kv_heads = spec.first_kv_head * head_dim, spec.num_kv_heads * head_dim, whole.num_kv_heads * head_dim
    inner = rank * spec.ffn_size, spec.ffn_size, whole.ffn_size
    tokens = spec.token_ids.start, spec.vocab_size, whole.vocab_size
    divided = {
        "q": [heads], "k": [kv_heads], "v": [kv_heads], "qkv": [heads, kv_heads, kv_heads], "out": [heads],
        "gate": [inner], "up": [inner], "gate_up": [inner, inner], "down": [inner],
        "embed": [tokens], "head": [tokens],
    }  # fmt: skip
    parts, before = [], 0
    for first, count, length in divided[part]:
        parts.append(Part(_DIVIDED_DIM.get(part, 0), before + first, before + first + count))
        before += length
    return tuple(parts)
