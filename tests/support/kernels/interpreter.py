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
from triton.runtime import interpreter

_patch_language, _plain_load = interpreter._patch_lang, language.load
_init_block, _init_tensor, _equals = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
_plain_np_dtype, _plain_unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
_blocks: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
_shapes: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_np_dtypes: dict[str, np.dtype] = {}
_NO_CONSTEXPR = {int, float, bool, core.tensor, core.dtype, core.block_type, core.pointer_type}


@cache
def _languages(fn: Callable) -> list[ModuleType]:
    return [value for value in fn.__globals__.values() if value is language or value is core]


def _patch_language_once(fn: Callable) -> interpreter._LangPatchScope:
    """Triton patches its language again whenever a kernel calls a function."""
    is_patched = all(module.load is not _plain_load for module in _languages(fn))
    return interpreter._LangPatchScope() if is_patched else _patch_language(fn)


def _init_known_block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    key = (element_ty.name, *[s.value if isinstance(s, core.constexpr) else s for s in shape])
    if found := _blocks.get(key):
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found
    else:
        _init_block(self, element_ty, shape)
        _blocks[key] = self.shape, self.numel, self.name


def _init_tensor_of_known_shape(self: core.tensor, handle: Any, type: core.dtype) -> None:
    key = tuple(type.shape) if type.is_block() else ()
    if found := _shapes.get(key):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found
    else:
        _init_tensor(self, handle, type)
        _shapes[key] = self.numel, self.shape


def _has_name_of(self: core.dtype, other: Any) -> bool:
    return self.name == other.name if type(other) is core.dtype else _equals(self, other)


def _known_np_dtype(dtype: core.dtype) -> np.dtype:
    if dtype.name not in _np_dtypes:
        _np_dtypes[dtype.name] = _plain_np_dtype(dtype)
    return _np_dtypes[dtype.name]


def _unwrap(value: Any) -> Any:
    return value if type(value) in _NO_CONSTEXPR else _plain_unwrap(value)


interpreter._patch_lang = _patch_language_once
core.block_type.__init__, core.tensor.__init__ = _init_known_block, _init_tensor_of_known_shape
core.dtype.__eq__ = _has_name_of
interpreter._get_np_dtype, core._unwrap_if_constexpr = _known_np_dtype, _unwrap
# Sums of integers are computed a second time to find overflows, which matters only in a debugging session.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
