"""The word order of 4-bit values: a model of the upcasts' instructions finds every value where it must be."""

import re
from dataclasses import replace

import pytest
import torch

from runtime.kernels.experts.moe_wna16_words import in_tile_order, with_word_scales
from runtime.kernels.numerics import Numerics
from runtime.kernels.quantized.upcast import E2M1
from runtime.kernels.quantized.word_order import in_word_order, raw_instructions, word_instructions
from runtime.quant.checkpoint_layouts import Plain
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.triton_format import TritonFormat

ONES = 0xFFFFFFFF
FUNCTIONS = {
    "and": lambda a, b: a & b,
    "shl": lambda a, n: a << n & ONES,
    "shr": lambda a, n: a >> n,
    "shf": lambda low, high, n: (high << n | low >> 32 - n) & ONES,
    "lop3": lambda a, b, c, _: a & b | c,
}


def outputs_of(instructions: str, word: int) -> list[int]:
    """What the integer instructions make of a word."""
    values = {"$4": word}
    for line in re.findall(r"^(?:and|shl|shr|shf|lop3).*$", instructions, re.M):
        name, operands = line.rstrip(";").split(" ", 1)
        target, *sources = operands.split(", ")
        values[target] = FUNCTIONS[name.split(".")[0]](*(values[s] if s in values else int(s, 0) for s in sources))
    return [values[f"${i}"] for i in range(4)]


def as_bfloat16(pair: int) -> list[float]:
    return torch.tensor([pair & 0xFFFF, pair >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16).tolist()


@pytest.mark.parametrize("encoding", ["e2m1", "int4", "uint4"])
def test_upcasts_return_low_then_high_nibbles(encoding):
    torch.manual_seed(0)
    nibbles = torch.randint(0, 16, (32, 8), dtype=torch.uint8)
    packed = nibbles[:, :4] | nibbles[:, 4:] << 4
    words = in_word_order(packed, encoding).view(torch.int32).flatten().tolist()
    for word, values in zip(words, nibbles.tolist(), strict=True):
        raw = [n for pair in outputs_of(raw_instructions(encoding), word & ONES) for n in as_bfloat16(pair)]
        upcast = [n for pair in outputs_of(word_instructions(encoding), word & ONES) for n in as_bfloat16(pair)]
        if encoding == "e2m1":
            assert raw == [E2M1[v] * 2.0**-126 for v in values]
            assert upcast == raw  # before the factor
        else:
            assert raw == [v * 2.0**-133 for v in values]
            assert upcast == [128.0 + v for v in values]


@pytest.mark.parametrize(("name", "group_size"), [("int4", 32), ("int4", 128), ("fp4", 16), ("fp4", 32), ("int8", 32)])
def test_planned_bytes_are_those_of_an_experts_weight(name, group_size):
    layout, shape = Plain(QuantizationScheme("plain", name, group_size=group_size)), (48, 384)
    numerics = Numerics(torch.bfloat16, torch.device("cuda"), "triton", packed=False, deterministic=False)
    kept = TritonFormat(layout, layout.encoding(shape), numerics, True)
    weight = in_tile_order(kept.operand([kept.encode(torch.randn(shape))], 48))
    stacked = replace(weight, scales=weight.scales[None])
    if weight.zero_points is not None:
        stacked = replace(stacked, zero_points=weight.zero_points[None])
    stacked = with_word_scales(stacked)
    held = [t for t in (stacked.values, stacked.scales, stacked.zero_points) if t is not None]
    planned = kept.device_bytes(shape, numerics)
    assert sum(t.nbytes for t in held) <= planned
    assert planned == sum(t.nbytes for t in held) or name == "int8"
