"""A small language for CPU kernels: Python that is traced into LLVM IR, as Triton traces its kernels.

A kernel is a Python function of `Value` objects. Python's own `for` and `if` run while it is traced: they unroll and
select. `loop` and `when` are the loop and the branch of the compiled code:

    for i in loop(0, n, 16):
        total += x.load(i, 16) * y.load(i, 16)

`variable` makes a value that a loop may change. Operators work on numbers and on vectors; a scalar is repeated for a
vector. A float operation rounds once, and only `fused` is a fused one. So a kernel gives the same bits on every CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from llvmlite import ir


@dataclass(frozen=True, slots=True)
class Type:
    """A number or a vector of numbers: i is signed, u is unsigned, f is IEEE and b is bfloat16."""

    kind: str
    bits: int
    lanes: int = 1

    def __call__(self, lanes: int) -> Type:
        """A vector of this type."""
        return replace(self, lanes=lanes)

    @property
    def ir(self) -> Any:
        scalar: Any = ir.IntType(self.bits)
        if self.kind == "f":
            scalar = ir.FloatType() if self.bits == 32 else ir.HalfType()
        elif self.kind == "b":
            scalar = ir.IntType(16)  # converted by shifts
        return scalar if self.lanes == 1 else ir.VectorType(scalar, self.lanes)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def bytes(self) -> int:
        return self.bits // 8


i8, i16, i32, i64 = (Type("i", bits) for bits in (8, 16, 32, 64))
u8, u16, u32 = (Type("u", bits) for bits in (8, 16, 32))
f16, f32, bf16, bit = Type("f", 16), Type("f", 32), Type("b", 16), Type("i", 1)

_LINE = 64  # bytes per cache line


class Trace:
    """The function that is traced now."""

    builder: Any = None  # llvmlite.ir.IRBuilder
    module: Any = None

    @staticmethod
    def intrinsic(name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Call an LLVM intrinsic or a C function by name."""
        function = Trace.module.globals.get(name)
        if function is None:
            function = ir.Function(Trace.module, ir.FunctionType(result, [x.type for x in arguments]), name)
        return Trace.builder.call(function, arguments)


class Value:
    """A number or a vector in a register."""

    def __init__(self, register: Any, type: Type) -> None:
        self._register, self.type = register, type

    @property
    def ir(self) -> Any:
        return self._register

    # -- arithmetic -------------------------------------------------------------------------------------------------
    def _binary(self, other: Any, whole: str, floating: str, swap: bool = False) -> Value:
        a, b = _matched(self, other)
        if swap:
            a, b = b, a
        name = floating if a.type.is_float else whole
        assert name, f"no such operation for {a.type}"
        return Value(getattr(Trace.builder, name)(a.ir, b.ir), a.type)

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub", swap=True)

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary(other, "", "fdiv", swap=True)

    def __floordiv__(self, other: Any) -> Value:
        return self._binary(other, "sdiv" if self.type.kind == "i" else "udiv", "")

    def __mod__(self, other: Any) -> Value:
        return self._binary(other, "srem" if self.type.kind == "i" else "urem", "")

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and_", "")

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or_", "")

    def __xor__(self, other: Any) -> Value:
        return self._binary(other, "xor", "")

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl", "")

    def __rshift__(self, other: Any) -> Value:
        return self._binary(other, "ashr" if self.type.kind == "i" else "lshr", "")

    __radd__, __rmul__ = __add__, __mul__

    # -- comparisons ------------------------------------------------------------------------------------------------
    def _compare(self, other: Any, operator: str) -> Value:
        a, b = _matched(self, other)
        builder = Trace.builder
        compare = builder.fcmp_ordered if a.type.is_float else builder.icmp_signed
        if a.type.kind == "u":
            compare = builder.icmp_unsigned
        return Value(compare(operator, a.ir, b.ir), bit(a.type.lanes))

    def __lt__(self, other: Any) -> Value:
        return self._compare(other, "<")

    def __le__(self, other: Any) -> Value:
        return self._compare(other, "<=")

    def __gt__(self, other: Any) -> Value:
        return self._compare(other, ">")

    def __ge__(self, other: Any) -> Value:
        return self._compare(other, ">=")

    def equals(self, other: Any) -> Value:
        return self._compare(other, "==")

    # -- conversions ------------------------------------------------------------------------------------------------
    def to(self, type: Type) -> Value:
        """The nearest value of another type, in as many lanes."""
        target, own = type(self.type.lanes), self.type
        if target == own:
            return self
        if own.kind == "b":
            wide = Value(Trace.builder.zext(self.ir, u32(own.lanes).ir), u32(own.lanes)) << 16
            return wide.bitcast(f32(own.lanes)).to(type)
        if target.kind == "b":
            return _rounded_to_bfloat16(self.to(f32))
        return Value(getattr(Trace.builder, _conversion(own, target))(self.ir, target.ir), target)

    def bitcast(self, type: Type) -> Value:
        return Value(Trace.builder.bitcast(self.ir, type.ir), type)

    def address(self, type: Type) -> Pointer:
        """This 64-bit number as the address of elements with a type."""
        return Pointer(Trace.builder.inttoptr(self.ir, ir.PointerType()), type)

    # -- lanes ------------------------------------------------------------------------------------------------------
    def repeat(self, lanes: int) -> Value:
        """A vector of this number."""
        vector = self.type(lanes)
        if isinstance(self.ir, ir.Constant):
            return Value(ir.Constant(vector.ir, [self.ir.constant] * lanes), vector)
        undefined = ir.Constant(vector.ir, ir.Undefined)
        first = Trace.builder.insert_element(undefined, self.ir, ir.Constant(ir.IntType(32), 0))
        return Value(_shuffle(first, undefined, [0] * lanes), vector)

    def lanes(self, order: Sequence[int]) -> Value:
        """A vector of these lanes."""
        undefined = ir.Constant(self.type.ir, ir.Undefined)
        return Value(_shuffle(self.ir, undefined, order), self.type(len(order)))

    def lanes_with(self, other: Value, order: Sequence[int]) -> Value:
        """A vector with these lanes from this vector and another; the other's lanes are counted on."""
        return Value(_shuffle(self.ir, other.ir, order), self.type(len(order)))

    def __getitem__(self, lane: int) -> Value:
        return Value(Trace.builder.extract_element(self.ir, ir.Constant(ir.IntType(32), lane)), self.type(1))

    def with_lane(self, lane: int, value: Value) -> Value:
        """This vector with another number in one lane."""
        at = ir.Constant(ir.IntType(32), lane)
        return Value(Trace.builder.insert_element(self.ir, value.ir, at), self.type)

    def split(self, parts: int) -> list[Value]:
        """Neighbouring lanes as vectors of equal size."""
        size = self.type.lanes // parts
        return [self.lanes(range(i * size, (i + 1) * size)) for i in range(parts)]

    def reduce(self, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined into one number, halves with halves: the order is the same on every CPU."""
        value = self
        while value.type.lanes > 1:
            value = combine(*value.split(2))
        return value


class Variable(Value):
    """A value that compiled code may change. `+=` and `set` change it."""

    def __init__(self, first: Value) -> None:
        self.type = first.type
        with Trace.builder.goto_entry_block():
            self._slot = Trace.builder.alloca(first.type.ir)
        self.set(first)

    @property
    def ir(self) -> Any:
        return Trace.builder.load(self._slot, typ=self.type.ir)

    @property
    def now(self) -> Value:
        """The present value, which later changes do not alter."""
        return Value(self.ir, self.type)

    def set(self, value: Any) -> None:
        Trace.builder.store(_matched(self, value)[1].ir, self._slot)

    def __iadd__(self, other: Any) -> Variable:
        self.set(self + other)
        return self


class Pointer:
    """The address of elements with one type. Offsets count elements."""

    def __init__(self, register: Any, type: Type) -> None:
        self.ir, self.type = register, type

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(Trace.builder.gep(self.ir, [number(offset, i64).ir], source_etype=self.type.ir), self.type)

    def of(self, type: Type) -> Pointer:
        """The same address, for elements with another type."""
        return Pointer(self.ir, type)

    def load(self, offset: Any = 0, lanes: int = 1) -> Value:
        type = self.type(lanes)
        return Value(Trace.builder.load((self + offset).ir, typ=type.ir, align=self.type.bytes), type)

    def store(self, offset: Any, value: Value) -> None:
        Trace.builder.store(value.to(self.type).ir, (self + offset).ir, align=self.type.bytes)

    def prefetch(self, offset: Any) -> None:
        """Bring the line of an address near, for one use."""
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 2, 1)]  # read, keep in L2, data
        Trace.intrinsic("llvm.prefetch.p0", ir.VoidType(), [(self + offset).ir, *flags])


# Annotations for kernel parameters: numbers, and elements in memory.
Int = Annotated[Value, i64]
Float = Annotated[Value, f32]
I8s = Annotated[Pointer, i8]
I16s = Annotated[Pointer, i16]
U8s = Annotated[Pointer, u8]
I32s = Annotated[Pointer, i32]
I64s = Annotated[Pointer, i64]
F16s = Annotated[Pointer, f16]
F32s = Annotated[Pointer, f32]


def number(value: Any, type: Type) -> Value:
    """A Python number, or a value, as a value of a type."""
    if isinstance(value, Value):
        return value
    scalar = Value(ir.Constant(type(1).ir, float(value) if type.is_float else int(value)), type(1))
    return scalar if type.lanes == 1 else scalar.repeat(type.lanes)


def lane_numbers(lanes: int) -> Value:
    """0, 1, 2 and so on, int32."""
    return Value(ir.Constant(i32(lanes).ir, list(range(lanes))), i32(lanes))


def zeros(type: Type) -> Value:
    return number(0, type)


def variable(first: Value) -> Variable:
    return Variable(first)


def array(type: Type, count: int) -> Pointer:
    """Memory on the stack for one call of the kernel, aligned to a cache line, with any content."""
    with Trace.builder.goto_entry_block():
        memory = Trace.builder.alloca(type.ir, count)
    memory.align, memory.type = _LINE, ir.PointerType()
    return Pointer(memory, type)


def _matched(a: Value, b: Any) -> tuple[Value, Value]:
    """Two operands with equal numbers of lanes."""
    other = number(b, a.type)
    if other.type.lanes != a.type.lanes:
        if other.type.lanes == 1:
            return a, other.repeat(a.type.lanes)
        return a.repeat(other.type.lanes), other
    return a, other


def _shuffle(a: Any, b: Any, order: Sequence[int]) -> Any:
    if len(order) == 1:
        return Trace.builder.extract_element(a, ir.Constant(ir.IntType(32), order[0]))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order))
    return Trace.builder.shuffle_vector(a, b, mask)


def joined(*parts: Value) -> Value:
    """Vectors of equal size, one after the other."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    low, high = joined(*parts[:half]), joined(*parts[half:])
    return Value(_shuffle(low.ir, high.ir, range(2 * low.type.lanes)), low.type(2 * low.type.lanes))


def _conversion(own: Type, target: Type) -> str:
    """The instruction that converts numbers of one type to another."""
    if own.is_float and target.is_float:
        return "fpext" if target.bits > own.bits else "fptrunc"
    if own.is_float:
        return "fptosi" if target.kind == "i" else "fptoui"
    if target.is_float:
        return "sitofp" if own.kind == "i" else "uitofp"
    if target.bits == own.bits:
        return "bitcast"  # only the sign differs
    if target.bits < own.bits:
        return "trunc"
    return "sext" if own.kind == "i" and own.bits > 1 else "zext"


def _rounded_to_bfloat16(value: Value) -> Value:
    """float32 to bfloat16, to nearest even; NaN stays NaN."""
    lanes = value.type.lanes
    raw = value.bitcast(u32(lanes))
    rounded = (raw + (((raw >> 16) & 1) + 0x7FFF)) >> 16
    is_nan = (raw & 0x7FFFFFFF) > 0x7F800000
    whole = where(is_nan, (raw >> 16) | 0x40, rounded)
    return Value(Trace.builder.trunc(whole.ir, bf16(lanes).ir), bf16(lanes))


def where_to(condition: Value, a: Pointer, b: Pointer) -> Pointer:
    """a if the condition holds, else b."""
    return Pointer(Trace.builder.select(condition.ir, a.ir, b.ir), a.type)


def where(condition: Value, a: Any, b: Any) -> Value:
    """a in the lanes where the condition holds, else b."""
    if not isinstance(a, Value):
        a = number(a, b.type)
    a, b = _matched(a, b)
    return Value(Trace.builder.select(condition.ir, a.ir, b.ir), a.type)


def maximum(a: Value, b: Any) -> Value:
    a, b = _matched(a, b)
    return where(a > b, a, b)


def minimum(a: Value, b: Any) -> Value:
    a, b = _matched(a, b)
    return where(a < b, a, b)


def _unary(name: str, value: Value) -> Value:
    suffix = f"v{value.type.lanes}f32" if value.type.lanes > 1 else "f32"
    return Value(Trace.intrinsic(f"llvm.{name}.{suffix}", value.type.ir, [value.ir]), value.type)


def absolute(value: Value) -> Value:
    return _unary("fabs", value)


def fused(a: Value, b: Any, c: Any) -> Value:
    """a * b + c, rounded once: the same bits on all CPUs, but slow on one without such an instruction."""
    a, b = _matched(a, b)
    a, c = _matched(a, c)
    suffix = f"v{a.type.lanes}f32" if a.type.lanes > 1 else "f32"
    return Value(Trace.intrinsic(f"llvm.fma.{suffix}", a.type.ir, [a.ir, b.ir, c.ir]), a.type)


def square_root(value: Value) -> Value:
    return _unary("sqrt", value)


def rounded(value: Value) -> Value:
    """The nearest whole number, half to even."""
    return _unary("rint", value)


def loop(begin: Any, end: Any, step: Any = 1) -> Iterator[Value]:
    """A compiled loop; the body of the Python loop is traced once."""
    builder = Trace.builder
    body, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    first, last = number(begin, i64), number(end, i64)
    before = builder.block
    builder.cbranch((first < last).ir, body, done)
    builder.position_at_end(body)
    index = builder.phi(i64.ir)
    index.add_incoming(first.ir, before)
    yield Value(index, i64)
    following = Value(index, i64) + step
    index.add_incoming(following.ir, builder.block)
    builder.cbranch((following < last).ir, body, done)
    builder.position_at_end(done)


@contextmanager
def when(condition: Value) -> Iterator[None]:
    """Compiled code that runs where the condition holds."""
    with Trace.builder.if_then(condition.ir):
        yield


def share(total: Any, part: Value, parts: Value, unit: int = 1) -> tuple[Value, Value]:
    """Begin and end of one share of a range, among `parts` equal ones in whole units."""
    units = (number(total, i64) + (unit - 1)) // unit
    begin, end = units * part // parts * unit, units * (part + 1) // parts * unit
    return begin, minimum(end, total)
