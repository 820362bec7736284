"""copy_onto: gives an object the tensors of another with the same structure, at the addresses that it has.

CUDA graphs hold these addresses. Both objects come from the same code, so their tensors are pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch

from runtime.base.types import CallboardError

_PLAIN = (int, float, complex, str, bytes, bool, torch.dtype, torch.device, range)
_OPAQUE = (type(None), type, BuiltinFunctionType, BuiltinMethodType)


class InPlace:
    """Copies new objects' tensors onto the old objects' tensors, each once."""

    def __init__(self) -> None:
        self._met = set[tuple[int, int]]()
        self._kept: list[object] = []  # so that no id is used again
        self._copied = set[tuple[int, torch.Size]]()

    def copy_onto(self, old: Any, new: Any, where: str) -> None:
        """Copy. Raises CallboardError if the objects differ in structure; `where` names them."""
        todo = [(old, new, where)]
        while todo:
            old, new, where = todo.pop()
            if old is new or (id(old), id(new)) in self._met:
                continue
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                self._copy(old, new, where)
                continue
            self._met.add((id(old), id(new)))
            self._kept += (old, new)
            todo += self._pairs(old, new, where)

    def _copy(self, old: torch.Tensor, new: torch.Tensor, where: str) -> None:
        alike = (old.shape, old.dtype, old.device, old.stride()) == (new.shape, new.dtype, new.device, new.stride())
        if not alike:
            raise CallboardError(
                f"{where} is {old.dtype} {list(old.shape)}, and an update makes it {new.dtype} {list(new.shape)}; "
                "this is a bug in Callboard."
            )
        place = old.data_ptr(), old.shape
        if old.data_ptr() != new.data_ptr() and place not in self._copied:
            self._copied.add(place)
            old.copy_(new, non_blocking=True)

    def _pairs(self, old: Any, new: Any, where: str) -> list[tuple[Any, Any, str]]:
        """The parts of both objects."""
        if isinstance(old, _PLAIN) or isinstance(new, _PLAIN):
            if old != new:
                raise _differs(where, old, new)
            return []
        if isinstance(old, _OPAQUE) or isinstance(new, _OPAQUE):
            if _has_tensors(old) or _has_tensors(new):
                raise _differs(where, old, new)
            return []
        if type(old) is not type(new):
            raise _differs(where, old, new)
        own, other = dict(_parts(old)), dict(_parts(new))
        if own.keys() != other.keys():
            raise _differs(where, old, new)
        return [(own[key], other[key], f"{where}{key}") for key in own]


def tensors_of(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in an object, each once, in a fixed order."""
    met, todo = dict[int, Any](), [x]
    while todo:
        x = todo.pop(0)
        if id(x) in met or isinstance(x, (*_PLAIN, *_OPAQUE)):
            continue
        met[id(x)] = x
        if isinstance(x, torch.Tensor):
            yield x
        else:
            todo += [part for _, part in _parts(x)]


def _has_tensors(x: object) -> bool:
    return not (isinstance(x, _OPAQUE) or (isinstance(x, list | tuple | dict) and not x))


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object by their places in it."""
    if isinstance(x, list | tuple):
        yield from ((f"[{i}]", each) for i, each in enumerate(x))
    elif isinstance(x, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in x.items())
    elif isinstance(x, partial):
        yield from ((".func", x.func), (".args", x.args), (".keywords", x.keywords))
    elif isinstance(x, MethodType):
        yield from ((".__func__", x.__func__), (".__self__", x.__self__))
    elif isinstance(x, FunctionType):
        yield ".__code__", id(x.__code__)
        yield ".__defaults__", x.__defaults__
        yield ".__kwdefaults__", x.__kwdefaults__
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        yield from ((f".{name}", cell.cell_contents) for name, cell in cells)
    else:
        yield from _attributes(x)


def _attributes(x: Any) -> Iterator[tuple[str, Any]]:
    names = [field.name for field in fields(x)] if is_dataclass(x) else []
    for kind in type(x).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    names += getattr(x, "__dict__", {})
    for name in dict.fromkeys(names):
        if hasattr(x, name):
            yield f".{name}", getattr(x, name)


def _differs(where: str, old: object, new: object) -> CallboardError:
    kinds = type(old).__name__, type(new).__name__
    values = (str(old)[:40], str(new)[:40]) if kinds[0] == kinds[1] else kinds
    return CallboardError(f"An update changes {where} from {values[0]} to {values[1]}; this is a bug in Callboard.")
