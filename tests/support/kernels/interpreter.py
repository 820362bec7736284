"""Triton's interpreter with caches for types, shapes and the patches of its language. Without them it derives these
anew at each operation, which takes longer than the operations. Importing this module changes the interpreter of the
process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic as Semantic
from triton.runtime import interpreter

_patch_language, _plain_load = interpreter._patch_lang, language.load
_init_block, _with_element, _equals = core.block_type.__init__, core.block_type.with_element_ty, core.dtype.__eq__
_init_tensor = core.tensor.__init__
_plain_np_dtype, _plain_unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
_check_types, _computation_type = Semantic.binary_op_type_checking_impl, Semantic.computation_type_impl
_broadcast, _cast = Semantic.broadcast_impl_value, Semantic.cast
_check_handle, _splat = interpreter.TensorHandle.__post_init__, interpreter.InterpreterBuilder.create_splat
_binary_op, _dot = interpreter.InterpreterBuilder.binary_op, interpreter.InterpreterBuilder.create_dot

Dims = tuple[int, ...]
_shapes: dict[Dims, tuple[Any, int]] = {}  # of block types
_block_names: dict[tuple[str, Dims], str] = {}
_blocks: dict[tuple[str, Dims], core.block_type] = {}
_of_tensors: dict[Dims, tuple[Any, Any]] = {}  # numel and shape of tensors
_common_dims: dict[tuple[Dims, Dims], Dims] = {}
_computation_types: dict[tuple[Any, ...], core.dtype] = {}
_np_dtypes: dict[str, np.dtype] = {}
_FLOATS = np.dtype(np.float16), np.dtype(np.float32)
_NO_CONSTEXPR = {int, float, bool, core.tensor, core.dtype, core.block_type, core.pointer_type}


@cache
def _languages(fn: Callable) -> list[ModuleType]:
    return [value for value in fn.__globals__.values() if value is language or value is core]


def _patch_language_once(fn: Callable) -> interpreter._LangPatchScope:
    """Triton patches its language again whenever a kernel calls a function."""
    is_patched = all(module.load is not _plain_load for module in _languages(fn))
    return interpreter._LangPatchScope() if is_patched else _patch_language(fn)


def _init_known_block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    """Blocks of equal dimensions share one shape, so that `is` compares shapes."""
    values = shape.values if type(shape) is core.tuple else shape
    self.dims = dims = tuple([s.value if isinstance(s, core.constexpr) else s for s in values])
    name = (element_ty.name, dims)
    if name in _block_names:
        self.element_ty, self.name = element_ty, _block_names[name]
    else:
        _init_block(self, element_ty, shape)
        _block_names[name] = self.name
        _shapes.setdefault(dims, (self.shape, self.numel))
    self.shape, self.numel = _shapes[dims]


def _known_block(self: core.block_type, element_ty: core.dtype) -> core.block_type:
    if type(element_ty) is not core.dtype:  # pointers differ by more than their names
        return _with_element(self, element_ty)
    name = (element_ty.name, self.dims)
    if name not in _blocks:
        _blocks[name] = _with_element(self, element_ty)
    return _blocks[name]


def _init_tensor_of_known_shape(self: core.tensor, handle: Any, type: core.dtype) -> None:
    dims = type.dims if type.__class__ is core.block_type else ()
    if found := _of_tensors.get(dims):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found
    else:
        _init_tensor(self, handle, type)
        _of_tensors[dims] = self.numel, self.shape


def _init_handle(self: interpreter.TensorHandle, data: Any, dtype: core.dtype, attr: dict | None = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not _fits(data, dtype):
        _check_handle(self)


def _fits(data: Any, dtype: core.dtype) -> bool:
    """True if an item of NumPy fits into the type. The smallest items have a byte."""
    size = data.itemsize
    return size == 1 or isinstance(dtype, core.pointer_type) or size * 8 <= dtype.primitive_bitwidth


def _known_computation_type(
    self: Semantic, a: core.dtype, a_is_scalar: bool, b: core.dtype, b_is_scalar: bool, div_or_mod: bool
) -> core.dtype:
    key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
    if key not in _computation_types:
        _computation_types[key] = _computation_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
    return _computation_types[key]


def _check_known_types(
    self: Semantic, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True, div_or_mod: bool = False,
) -> tuple[core.tensor, core.tensor]:  # fmt: skip
    """Two tensors of numbers have the usual types. All else is Triton's."""
    if not (
        type(lhs) is type(rhs) is core.tensor and type(lhs.dtype) is type(rhs.dtype) is core.dtype and arithmetic_check
    ):
        return _check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    dtype = _known_computation_type(self, lhs.dtype, False, rhs.dtype, False, div_or_mod)
    return self.broadcast_impl_value(self.cast(lhs, dtype), self.cast(rhs, dtype))


def _cast_to_other(self: Semantic, input: core.tensor, dst_ty: core.dtype, *rounding: Any) -> core.tensor:
    return input if input.dtype is dst_ty.scalar else _cast(self, input, dst_ty, *rounding)


def _broadcast_to_known(self: Semantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    a, b = lhs.type, rhs.type
    are_blocks = a.is_block() + b.is_block()
    if are_blocks == 0 or (are_blocks == 2 and a.shape is b.shape):
        return lhs, rhs
    if are_blocks == 1:
        return _broadcast(self, lhs, rhs)
    if (dims := _common_dims.get((a.dims, b.dims))) is None:
        lhs, rhs = _broadcast(self, lhs, rhs)
        if len(a.dims) == len(b.dims):
            _common_dims[a.dims, b.dims] = lhs.type.dims
        return lhs, rhs
    return tuple(
        value
        if value.type.dims == dims
        else core.tensor(self.builder.create_broadcast(value.handle, dims), core.block_type(value.dtype, list(dims)))
        for value in (lhs, rhs)
    )


def _splat_scalar(self: interpreter.InterpreterBuilder, ret_ty: Any, arg: Any) -> interpreter.TensorHandle:
    if isinstance(arg.dtype, core.block_type):
        return _splat(self, ret_ty, arg)
    data = np.full(ret_ty.dims, arg.data, dtype=_known_np_dtype(arg.dtype))
    return interpreter.TensorHandle(data, arg.dtype.scalar)


def _binary_op_of_numbers(self: interpreter.InterpreterBuilder, lhs: Any, rhs: Any, op: Callable) -> Any:
    if lhs.data.dtype.kind == "b":
        return _binary_op(self, lhs, rhs, op)
    output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
    if not _fits(output, dtype):
        output = output.astype(_known_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


def _dot_of_doubles(self: interpreter.InterpreterBuilder, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """The sums of a product are rounded to float32 once. On some CPUs, a row of NumPy's float32 product has other bits
    in another place of its matrix. Matrix instructions of a GPU ignore the place."""
    if a.data.dtype not in _FLOATS or b.data.dtype not in _FLOATS:
        return _dot(self, a, b, d, *options)
    product = np.matmul(a.data, b.data, dtype=np.float64)
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _patch_builtin(obj: object, name: str, member: Callable, _: object, scope: interpreter._LangPatchScope) -> None:
    """Replace a builtin by its function, which gets the interpreter's semantics. Its wrapper only checks for some."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _has_name_of(self: core.dtype, other: Any) -> bool:
    return self.name == other.name if type(other) is core.dtype else _equals(self, other)


def _known_np_dtype(dtype: core.dtype) -> np.dtype:
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _plain_np_dtype(dtype)
    return _np_dtypes[dtype.name]


def _unwrap(value: Any) -> Any:
    return value if type(value) in _NO_CONSTEXPR else _plain_unwrap(value)


interpreter._patch_lang, interpreter._patch_attr = _patch_language_once, _patch_builtin
core.block_type.__init__, core.block_type.with_element_ty = _init_known_block, _known_block
core.tensor.__init__ = _init_tensor_of_known_shape
core.dtype.__eq__ = _has_name_of
interpreter._get_np_dtype, core._unwrap_if_constexpr = _known_np_dtype, _unwrap
interpreter.TensorHandle.__init__, interpreter._validate_np_data_size = _init_handle, _fits
interpreter.InterpreterBuilder.create_splat = _splat_scalar
interpreter.InterpreterBuilder.binary_op = _binary_op_of_numbers
interpreter.InterpreterBuilder.create_dot = _dot_of_doubles
Semantic.computation_type_impl, Semantic.binary_op_type_checking_impl = _known_computation_type, _check_known_types
Semantic.cast, Semantic.broadcast_impl_value = _cast_to_other, _broadcast_to_known
# Sums of integers are computed a second time to find overflows, which matters only in a debugging session.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
