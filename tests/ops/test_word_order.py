"""The word order of 4-bit values: a model of the upcasts' instructions finds every value where it must be."""

import re

import pytest
import torch

from runtime.kernels.quantized.upcast import E2M1
from runtime.kernels.quantized.word_order import in_word_order, raw_instructions, word_instructions

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
