"""Compiled code that divides kernels among threads: a kernel tape, and threads that take parts of each kernel.

A tape is a 64-bit word array, eight words for each kernel:

- FUNCTION, ARGUMENTS: addresses of the kernel and its arguments
- PARTS: number of parts
- TICKET: run << 32, number of parts << 16, next part
- DONE: run << 32, finished parts
- FOLLOWING: number of kernels that follow

A thread takes a part by increasing the ticket, and moves to the next kernel when all parts of one are done. Only the
ticket decides: the other words may already belong to the next run. The caller takes parts, too, and does not wait for a
thread without a part. A suspended thread costs time only if it holds one. Tickets have the run's number, so a late
thread cannot take a part of another run.

A waiting thread spins for some microseconds, then yields its core at each look. After two milliseconds without a part
it sleeps (futex). A woken thread may need a millisecond to get a core, which is longer than the pause between two
steps. A thread also sleeps while kernels have one part."""

from __future__ import annotations

import sys
from collections.abc import Callable

from llvmlite import ir

from runtime.kernels.llvm.language import (
    I64s,
    Int,
    Pointer,
    Trace,
    Value,
    Variable,
    bit,
    i32,
    i64,
    loop,
    number,
    variable,
    when,
    zeros,
)

OP_WORDS = 8
FUNCTION, ARGUMENTS, PARTS, TICKET, DONE, FOLLOWING = range(6)
MAX_PARTS = (1 << 16) - 1
GENERATION, TAPE, SLEEPERS, STOP = range(4)  # words in a pool's control block; each has its own line
LINE = 8  # words
_SPINS = 1 << 8  # a waiting thread's spins, before it yields its core at each further look
_LOOKS = 1 << 12  # looks of a thread without a part, before it sleeps: about two milliseconds
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 128, 129  # private futexes


def run_tape(control: I64s, tape: I64s, num_ops: Int, run: Int, wakes: Int, part: Int, parts: Int) -> None:
    """The caller's side: start a run, take parts of it, and return when all are done."""
    for index in loop(0, num_ops):
        op = tape + index * OP_WORDS
        op.store(DONE, run << 32)
        _store(op + TICKET, (run << 32) | (op.load(PARTS) << 16))
    control.store(TAPE * LINE, _address(tape))
    _store(control + GENERATION * LINE, run)
    with when(wakes.equals(1) & (_load(control + SLEEPERS * LINE) > 0)):
        _futex(control + GENERATION * LINE, _WAKE, number((1 << 31) - 1, i64))
    _take_parts(tape, run)
    last = tape + (num_ops - 1) * OP_WORDS
    _wait_until(lambda: _load(last + DONE) >= (run << 32) + last.load(PARTS))


def serve(control: I64s, part: Int, parts: Int) -> None:
    """A pool thread: take parts of each run until the pool is closed."""
    seen, looks = variable(zeros(i64)), variable(zeros(i64))  # looks since this thread took a part
    repeat = _While()
    with repeat:
        waiting = _While()
        with waiting:
            _look_again(looks)
            waiting.go_on_if(_load(control + GENERATION * LINE).equals(seen.now) & (looks.now < _LOOKS))
        with when(_load(control + GENERATION * LINE).equals(seen.now)):
            _add(control + SLEEPERS * LINE, 1)
            _futex(control + GENERATION * LINE, _WAIT, seen.now)
            _add(control + SLEEPERS * LINE, -1)
        run = _load(control + GENERATION * LINE)
        is_open = _load(control + STOP * LINE).equals(0)
        with when(is_open & (run > seen.now)):
            seen.set(run)
            tape = Pointer(Trace.builder.inttoptr(control.load(TAPE * LINE).ir, ir.PointerType()), i64)
            taken = _take_parts(tape, run)
            with when(taken.now > 0):
                looks.set(0)
        repeat.go_on_if(is_open)


def _take_parts(tape: Pointer, run: Value) -> Variable:
    """Take parts of each kernel in turn. Return their number, early if the run is over."""
    index, taken = variable(zeros(i64)), variable(zeros(i64))
    ops = _While()
    with ops:
        op = tape + index.now * OP_WORDS
        total, is_current = variable(zeros(i64)), variable(zeros(bit))
        taking = _While()
        with taking:
            ticket = _load(op + TICKET)
            part = ticket & MAX_PARTS
            total.set((ticket >> 16) & MAX_PARTS)
            is_current.set((ticket >> 32).equals(run))
            has_parts = is_current.now & (part < total.now)
            with when(has_parts), when(_swap(op + TICKET, ticket, ticket + 1)):
                _call(op.load(FUNCTION), op.load(ARGUMENTS), part, total.now)
                _add(op + DONE, 1)
                taken += 1
            taking.go_on_if(has_parts)
        index += 1
        goes_on = is_current.now & (op.load(FOLLOWING) > 0)
        with when(goes_on):
            _wait_until(lambda: _load(op + DONE) >= (run << 32) + total.now)
        ops.go_on_if(goes_on)
    return taken


def _wait_until(condition: Callable[[], Value]) -> None:
    """Spin, then yield the core to others, until a condition holds."""
    spins = variable(zeros(i64))
    waiting = _While()
    with when(condition().equals(number(0, bit))), waiting:
        _look_again(spins)
        waiting.go_on_if(condition().equals(number(0, bit)))


class _While:
    """A loop that repeats while the condition of its last statement, `go_on_if`, holds."""

    def __enter__(self) -> None:
        self._body = Trace.builder.append_basic_block("while")
        Trace.builder.branch(self._body)
        Trace.builder.position_at_end(self._body)

    def go_on_if(self, condition: Value) -> None:
        self._condition = condition

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            return
        done = Trace.builder.append_basic_block("done")
        Trace.builder.cbranch(self._condition.ir, self._body, done)
        Trace.builder.position_at_end(done)


def _address(pointer: Pointer) -> Value:
    return Value(Trace.builder.ptrtoint(pointer.ir, i64.ir), i64)


def _load(pointer: Pointer) -> Value:
    return Value(Trace.builder.load_atomic(pointer.ir, "acquire", 8, typ=i64.ir), i64)


def _store(pointer: Pointer, value: Value) -> None:
    Trace.builder.atomic_rmw("xchg", pointer.ir, value.ir, "seq_cst")


def _add(pointer: Pointer, value: int) -> None:
    Trace.builder.atomic_rmw("add", pointer.ir, number(value, i64).ir, "seq_cst")


def _swap(pointer: Pointer, expected: Value, value: Value) -> Value:
    """Replace a word that has the expected value. True if it had."""
    pair = Trace.builder.cmpxchg(pointer.ir, expected.ir, value.ir, "seq_cst", "acquire")
    return Value(Trace.builder.extract_value(pair, 1), bit)


def _call(function: Value, *arguments: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [i64.ir] * len(arguments))
    pointer = Trace.builder.inttoptr(function.ir, kind.as_pointer())
    Trace.builder.call(pointer, [x.ir for x in arguments])


def _look_again(spins: Variable) -> None:
    """Wait for a moment: spin, or let another thread have the core."""
    spins += 1
    if Trace.module.triple.startswith("x86_64"):
        Trace.intrinsic("llvm.x86.sse2.pause", ir.VoidType(), [])
    with when(spins.now > _SPINS):
        Trace.intrinsic("sched_yield", i32.ir, [])


def _futex(word: Pointer, operation: int, value: Value) -> None:
    """Sleep while a word has a value, or wake sleepers; elsewhere than on Linux, yield the core."""
    machine = Trace.module.triple.split("-")[0]
    if not sys.platform.startswith("linux") or machine not in _FUTEX:
        Trace.intrinsic("sched_yield", i32.ir, [])
        return
    function = Trace.module.globals.get("syscall")
    if function is None:
        function = ir.Function(Trace.module, ir.FunctionType(i64.ir, [i64.ir], var_arg=True), "syscall")
    words = [number(_FUTEX[machine], i64), _address(word), number(operation, i64), value, number(0, i64)]
    Trace.builder.call(function, [x.ir for x in words])
