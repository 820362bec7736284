"""Compiles kernels of `language.py` for this CPU, on first use.

A kernel's code is kept on disk, so that later processes load it in a millisecond. Kernels need AVX2, FMA and F16C on
x86, and nothing on ARM. `CALLBOARD_CPU_ISA` limits the instruction set: avx2, avxvnni, avx512, generic (without
instructions for dot products), or native, the default."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from runtime.kernels.llvm.language import Pointer, Trace, Value, i64

_LEVELS = {  # LLVM's CPU name and features
    "generic": ("x86-64-v3", "-avxvnni"),
    "avx2": ("x86-64-v3", ""),
    "avxvnni": ("x86-64-v3", "+avxvnni"),
    "avx512": ("x86-64-v4", "+avx512vnni"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The CPU for which kernels are compiled."""

    triple: str
    cpu: str
    features: str
    dot: str  # the instructions in `dot.py`: avx512vnni, avxvnni, avx2, neon or generic
    vector_bytes: int  # bytes per register

    @property
    def name(self) -> str:
        return f"{self.dot} ({self.cpu})"


@cache
def host() -> Target:
    """This CPU, within the limit of CALLBOARD_CPU_ISA."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, level = llvm.get_process_triple(), os.environ.get("CALLBOARD_CPU_ISA", "native")
    if level == "native":
        return target_of(triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
    if level not in _LEVELS:
        raise ValueError(f"CALLBOARD_CPU_ISA is {level}; it must be native or one of {', '.join(_LEVELS)}.")
    cpu, features = _LEVELS[level] if triple.startswith("x86_64") else ("generic", "")
    return target_of(triple, cpu, features)


def target_of(triple: str, cpu: str, features: str) -> Target:
    """A target with the instructions that its features allow."""
    has = set(features.split(","))
    if triple.startswith("x86_64"):
        if "+avx512vnni" in has and (cpu == "x86-64-v4" or "+avx512bw" in has):
            return Target(triple, cpu, features, "avx512vnni", 64)
        dot = "generic" if features == _LEVELS["generic"][1] else "avxvnni" if "+avxvnni" in has else "avx2"
        return Target(triple, cpu, features, dot, 32)
    elif triple.startswith(("aarch64", "arm64")) and "+dotprod" in has:
        return Target(triple, cpu, features, "neon", 16)
    return Target(triple, cpu, features, "generic", 16)


@cache
def _machine(target: Target) -> Any:
    found = llvm.Target.from_triple(target.triple)
    return found.create_target_machine(cpu=target.cpu, features=target.features, opt=3, jit=True)


_lock = threading.RLock()  # one thread traces and compiles at a time


def trace(function: Callable[..., None], constants: dict[str, Any], target: Target) -> str:
    """A kernel's LLVM IR.

    The compiled function reads parameters that are numbers or pointers from a 64-bit word array. A NamedTuple's fields
    are such parameters. `part` and `parts` are the share of the work, `target` is the target. Other parameters are
    constants while tracing."""
    with _lock:
        return _traced(function, constants, target)


def _traced(function: Callable[..., None], constants: dict[str, Any], target: Target) -> str:
    module = ir.Module()
    module.triple = target.triple
    pointer = ir.PointerType()
    compiled = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer, i64.ir, i64.ir]), "kernel")
    words, part, parts = compiled.args
    builder = ir.IRBuilder(compiled.append_basic_block("entry"))
    Trace.builder, Trace.module = builder, module
    loaded = count()

    def load(annotation: Any) -> Any:
        """The next word, or the words of a NamedTuple's fields."""
        if hasattr(annotation, "_fields"):
            return annotation(*map(load, get_type_hints(annotation, include_extras=True).values()))
        place = builder.gep(words, [ir.Constant(i64.ir, next(loaded))], source_etype=i64.ir)
        kind, (type,) = annotation.__origin__, annotation.__metadata__
        return kind(builder.load(place, typ=pointer if kind is Pointer else type.ir), type)

    arguments = constants | {"part": Value(part, i64), "parts": Value(parts, i64), "target": target}
    parameters = inspect.signature(function, eval_str=True).parameters
    arguments = {
        name: arguments[name] if name in arguments else load(parameter.annotation)
        for name, parameter in parameters.items()
    }
    body = builder.append_basic_block("body")
    builder.branch(body)
    builder.position_at_end(body)
    function(**arguments)
    Trace.builder.ret_void()
    return str(module)


def optimized(source: str, target: Target) -> Any:
    """A module of LLVM, verified and optimized."""
    module = llvm.parse_assembly(source)
    module.verify()
    machine = _machine(target)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return module


def assembly(function: Callable[..., None], target: Target, **constants: Any) -> str:
    """The instructions of a kernel, to be read."""
    text: str = _machine(target).emit_assembly(optimized(trace(function, constants, target), target))
    return text


_engines: list[Any] = []  # keep the kernels' code in memory


def load(source: str, target: Target, name: str = "kernel") -> int:
    """The address of a compiled function in a module's source."""
    with _lock:
        return _loaded(source, target, name)


def _loaded(source: str, target: Target, name: str) -> int:
    # `_machine`'s does not serve: the engine becomes its machine's owner.
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, jit=True
    )
    stored = _cache_file(source, target)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    if stored.exists():
        engine.add_object_file(llvm.ObjectFileRef.from_data(stored.read_bytes()))
    else:
        code = machine.emit_object(optimized(source, target))
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        _write(stored, code)
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(name)
    return address


def _cache_file(source: str, target: Target) -> Path:
    """The file with the code of a module."""
    root = os.environ.get("CALLBOARD_CACHE") or os.path.expanduser("~/.cache/callboard")
    key = hashlib.sha256("\n".join((llvmlite.__version__, repr(target), source)).encode()).hexdigest()[:32]
    return Path(root, "kernels", f"{key}.o")


def _write(path: Path, code: bytes) -> None:
    """Write a file in one piece; a cache that cannot be written is left alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(code)
        partial.replace(path)
    except OSError:
        return


Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
