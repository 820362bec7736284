"""Dot products of unsigned 8-bit values with int16 activations, by each CPU's instructions.

Activations are split into two int8 limbs, 256 * high + low. Sums are exact in int32, so every CPU gives the same bits.

- avx512vnni, avxvnni: `vpdpbusd` adds four products a lane in int32.
- avx2: `vpmaddubsw` adds pairs in int16, then `vpmaddwd` widens. 8-bit values are split into nibbles.
- neon: `sdot` is signed, so 8-bit values are moved by 128.
- generic: multiplications in int32, on any CPU.
"""

from __future__ import annotations

from functools import reduce
from operator import add

from llvmlite import ir

from runtime.kernels.cpu.linear.weight_form import E2M1_OFFSET, E2M1_VALUES
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import Trace, Type, Value, i8, i16, i32, joined, number, u8, where, zeros

_LARGEST_INT16 = 32767


class Dot:
    """The sum over quads: values times activations, for one row of x and `lanes` weight rows."""

    def __init__(self, target: Target, lanes: int, bits: int, limbs: int, is_scaled: bool = False) -> None:
        self.target, self.lanes, self.bits, self.limbs = target, lanes, bits, limbs
        self._sums: dict[tuple[int, int], Value] = {}  # (limb, shift of the value's part) -> a partial sum
        self._pairs: dict[tuple[int, int], int] = {}  # additions in int16 since the last widening
        self._wide: Value | None = None
        self._is_scaled, self._full = is_scaled, dict[int, list[Value]]()  # limb -> full sums of pairs, int16

    @property
    def moved(self) -> int:
        """The number by which `add` decreases values; the caller corrects the sum by it."""
        return 128 if self.target.dot == "neon" and self.bits == 8 else 0

    def add(self, values: Value, activations: list[Value]) -> None:
        """values: u8 [4 * lanes]; activations: of each limb, the high first, i8 [4 * lanes]."""
        if self.target.dot == "avx2":
            self._add_pairs(values, activations)
            return
        for limb, x in enumerate(activations):
            key = limb, 0
            total = self._sums.get(key, zeros(i32(self.lanes)))
            self._sums[key] = _multiply_add(self.target, total, values, x, self.moved)

    def scaled_totals(self, factors: Value) -> list[Value]:
        """Each limb's sum times a small factor, as `stored_factors` holds it: i32 [lanes]."""
        if self.target.dot != "avx2":
            return [self._sums[limb, 0] * factors for limb in range(self.limbs)]
        assert self.bits < 8, "values of 8 bits have two parts"
        pairs = factors.bitcast(i16(2 * self.lanes))
        sums = [[*self._full.get(limb, []), self._sums[limb, 0]] for limb in range(self.limbs)]
        return [reduce(add, (pair_dot(self.target, each, pairs) for each in own)) for own in sums]

    def total(self) -> Value:
        """i32 [lanes]."""
        if self.target.dot == "avx2":
            for key in list(self._sums):
                self._widen(key)
            assert self._wide is not None
            return self._wide
        if self.limbs == 1:
            return self._sums[0, 0]
        return (self._sums[0, 0] << 8) + self._sums[1, 0]

    def _add_pairs(self, values: Value, activations: list[Value]) -> None:
        parts, bits = [(0, values)], self.bits
        if bits == 8:
            words, bits = values.bitcast(i16(2 * self.lanes)), 4
            parts = [(0, _bytes(words & 0x0F0F)), (4, _bytes((words >> 4) & 0x0F0F))]
        largest = 2 * 128 * ((1 << bits) - 1)  # largest sum of two products
        for shift, part in parts:
            for limb, x in enumerate(activations):
                key = limb, shift
                products = _call("llvm.x86.avx2.pmadd.ub.sw", i16(2 * self.lanes), part, x)
                if key in self._sums and (self._pairs[key] + 1) * largest > _LARGEST_INT16:
                    self._leave(key)
                self._sums[key] = self._sums[key] + products if key in self._sums else products
                self._pairs[key] = self._pairs.get(key, 0) + 1

    def _leave(self, key: tuple[int, int]) -> None:
        """Set a full partial sum aside."""
        if not self._is_scaled:
            self._widen(key)
            return
        self._full.setdefault(key[0], []).append(self._sums.pop(key))
        self._pairs[key] = 0

    def _widen(self, key: tuple[int, int]) -> None:
        """Move a partial sum of pairs to int32, times the weight for its limb and its value part."""
        limb, shift = key
        factor = 1 << shift + (8 if limb == 0 and self.limbs == 2 else 0)
        factors = number(factor, i16(2 * self.lanes))
        wide = _call("llvm.x86.avx2.pmadd.wd", i32(self.lanes), self._sums.pop(key), factors)
        self._pairs[key] = 0
        self._wide = wide if self._wide is None else self._wide + wide


def _bytes(words: Value) -> Value:
    return words.bitcast(u8(2 * words.type.lanes))


def _call(name: str, result: Type, *arguments: Value) -> Value:
    return Value(Trace.intrinsic(name, result.ir, [x.ir for x in arguments]), result)


def stored_factors(target: Target, factors: Value) -> Value:
    """Small factors (i32 [lanes]) as `scaled_totals` takes them: pairs in int16 for AVX2."""
    return paired(factors, factors) if target.dot == "avx2" else factors


def paired(first: Value, second: Value) -> Value:
    """Two int16 of each lane (i32 [lanes]) in one word."""
    return (first & 0xFFFF) | (second << 16)


def pair_dot(target: Target, a: Value, b: Value) -> Value:
    """Each lane's two products of int16, added: i32 [lanes] for i16 [2 * lanes]."""
    lanes = a.type.lanes // 2
    if target.triple.startswith("x86_64") and 4 * lanes == target.vector_bytes:
        name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return _call(name, i32(lanes), a, b)
    products = a.to(i32) * b.to(i32)
    return products.lanes(range(0, 2 * lanes, 2)) + products.lanes(range(1, 2 * lanes, 2))


def _multiply_add(target: Target, total: Value, values: Value, x: Value, moved: int) -> Value:
    """total + the sum of each lane's four products."""
    lanes = total.type.lanes
    if target.dot in ("avx512vnni", "avxvnni"):
        return _call(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", total.type, total, values, x)
    if target.dot == "neon":
        signed = (values ^ 128 if moved else values).bitcast(i8(4 * lanes))
        parts = [
            _call("llvm.aarch64.neon.sdot.v4i32.v16i8", i32(4), *each)
            for each in zip(total.split(lanes // 4), signed.split(lanes // 4), x.split(lanes // 4), strict=True)
        ]
        return joined(*parts)
    products = values.to(i32) * x.to(i32)
    for quad in range(4):
        total = total + products.lanes(range(quad, 4 * lanes, 4))
    return total


def e2m1_values(indices: Value, target: Target | None = None) -> Value:
    """E2M1_VALUES for u8 [lanes], by the target's byte shuffle."""
    lanes, vector = indices.type.lanes, target.vector_bytes if target is not None else 0
    if target is not None and lanes == vector:
        table = ir.Constant(indices.type.ir, [E2M1_VALUES[i % 16] for i in range(lanes)])
        if target.triple.startswith("x86_64"):
            name = "llvm.x86.avx512.pshuf.b.512" if vector == 64 else "llvm.x86.avx2.pshuf.b"
            return Value(Trace.intrinsic(name, indices.type.ir, [table, indices.ir]), indices.type)
        if target.triple.startswith(("aarch64", "arm64")):
            found = Trace.intrinsic("llvm.aarch64.neon.tbl1.v16i8", indices.type.ir, [table, indices.ir])
            return Value(found, indices.type)
    low = indices & 7
    for above, more in ((4, 1), (5, 1), (6, 3)):  # twice the numbers are 0 to 4, 6, 8 and 12
        low = low + where((indices & 7) > above, more, zeros(indices.type))
    return where(indices > 7, E2M1_OFFSET - low, low + E2M1_OFFSET)


def repeated_quad(word: Value, lanes: int) -> Value:
    """Four activations (i32, four int8) for each of the lanes: i8 [4 * lanes]."""
    return word.repeat(lanes).bitcast(i8(4 * lanes))
