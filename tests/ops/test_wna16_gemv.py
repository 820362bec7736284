"""The instructions by which one row is multiplied with integers on a GPU, carried out one by one. Tests without a GPU
run the plain branch instead of them."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.kernels.quantized import wna16_gemv

WORD = st.integers(0, 2**32 - 1)
MAGIC = 12582912.0


def carry_out(text: str, operands: dict[str, int]) -> dict[str, int]:
    """The registers after the instructions of `text`, as the PTX ISA has them; words of 32 bits, unsigned."""
    registers = dict(operands)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"^(\w[\w.]* [^;]*);", text, re.MULTILINE):
        name, _, rest = line.partition(" ")
        out, *names = (part.strip() for part in rest.split(","))
        match name.split("."):
            case ["prmt", "b32"]:
                data = b"".join(value(n).to_bytes(4, "little") for n in names[:2])
                result = sum(data[value(names[2]) >> 4 * i & 7] << 8 * i for i in range(4))
            case ["dp4a", first, second]:
                pairs = zip(bytes_of(value(names[0]), first), bytes_of(value(names[1]), second), strict=True)
                result = sum(a * b for a, b in pairs) + value(names[2])
            case ["mad", "lo", "s32"]:
                result = value(names[0]) * value(names[1]) + value(names[2])
            case ["mov", "b32"]:
                result = value(names[0])
            case other:
                raise AssertionError(f"{other} is no instruction that this test knows")
        registers[out] = result % 2**32
    return registers


def bytes_of(word: int, kind: str) -> list[int]:
    return np.frombuffer(word.to_bytes(4, "little"), {"s32": np.int8, "u32": np.uint8}[kind]).tolist()


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@given(st.lists(st.integers(-32768, 32767), min_size=4, max_size=4))
def test_limbs(numbers):
    bits = np.array([n + MAGIC for n in numbers], np.float32).view(np.uint32).tolist()
    text = wna16_gemv._LIMBS.value.replace(".reg .b32 a, b;", "")
    found = carry_out(text, {f"${2 + i}": bits[i] for i in range(4)})
    high, low = bytes_of(found["$0"], "s32"), bytes_of(found["$1"], "u32")
    assert [256 * h + b for h, b in zip(high, low, strict=True)] == numbers


@given(*(st.lists(WORD, min_size=4, max_size=4) for _ in range(3)), st.integers(-(2**24), 2**24))
def test_products(codes, high, low, start):
    operands = {f"${4 + i}": word for i, word in enumerate([*codes, *high, *low])} | {"$16": start % 2**32}
    for text, kind in zip(wna16_gemv._DOTS.value, ("u32", "s32"), strict=True):
        found = carry_out(re.sub(r"\.reg [^;]*;", "", text), operands)
        want = start
        for i in range(4):
            parts = zip(bytes_of(codes[i], kind), bytes_of(high[i], "s32"), bytes_of(low[i], "u32"), strict=True)
            want += sum(code * (256 * h + b) for code, h, b in parts)
        assert signed(found["$0"]) == want
        assert found["$1"] == found["$2"] == found["$3"] == 0
