"""Checks of the lists that announce tensors, with their types' sizes. Errors name the request's field."""

from __future__ import annotations

import math
from typing import Any

from runtime.base.types import CallboardError
from runtime.base.weight_parts import TensorInfo

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
MAX_TENSORS = 1 << 20  # tensors in a part
MAX_NAME = 1024  # characters
MAX_DIMS = 8
MAX_BYTES = 1 << 44  # bytes in a tensor, and in a part


def num_bytes(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def tensor_infos(info: dict[str, Any], where: str) -> list[TensorInfo]:
    """Return the tensors of the fields `names`, `dtype_names` and `shapes`. Raises CallboardError."""
    names, dtypes, shapes = (list_field(info, field, where) for field in ("names", "dtype_names", "shapes"))
    for field, values in (("dtype_names", dtypes), ("shapes", shapes)):
        if len(values) != len(names):
            raise CallboardError(
                f"{where}.{field} has {len(values)} entries for {len(names)} names; send one entry for each name."
            )
    tensors, total, seen = [], 0, set[str]()
    for i, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        tensor = TensorInfo(
            _name(name, f"{where}.names[{i}]"),
            dtype_name(dtype, f"{where}.dtype_names[{i}]"),
            shape_of(shape, f"{where}.shapes[{i}]"),
        )
        if name in seen:
            raise CallboardError(f"{where}.names[{i}] repeats {name!r}; name each tensor once.")
        seen.add(name)
        total += num_bytes(tensor)
        if total > MAX_BYTES:
            raise CallboardError(f"{where}.shapes[{i}] makes {total} bytes in all; send at most {MAX_BYTES} in a part.")
        tensors.append(tensor)
    return tensors


def list_field(info: dict[str, Any], field: str, where: str) -> list[Any]:
    """Return a list that must be there and has 1 to MAX_TENSORS entries."""
    values = info.get(field)
    if values is None:
        raise CallboardError(f"{where}.{field} is missing; send a list with one entry for each tensor.")
    if not isinstance(values, list | tuple):
        raise CallboardError(f"{where}.{field} is {shown(values)}; send a list.")
    if not 1 <= len(values) <= MAX_TENSORS:
        raise CallboardError(f"{where}.{field} has {len(values)} entries; send 1 to {MAX_TENSORS}.")
    return list(values)


def integer(value: object, where: str, least: int, most: int) -> int:
    """Return `value` if it is an integer within bounds; True and False are none."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise CallboardError(f"{where} is {shown(value)}; send an integer from {least} to {most}.")
    return value


def text(value: object, where: str, most: int = MAX_NAME) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= most:
        raise CallboardError(f"{where} is {shown(value)}; send a text of 1 to {most} characters.")
    return value


def dtype_name(value: object, where: str) -> str:
    """Return torch's name of a type, without its module."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    if name not in DTYPE_BYTES:
        raise CallboardError(f"{where} is {shown(value)}; send one of {', '.join(DTYPE_BYTES)}.")
    return name


def shape_of(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMS:
        raise CallboardError(f"{where} is {shown(value)}; send a list of at most {MAX_DIMS} sizes.")
    return tuple(integer(size, f"{where}[{i}]", 0, MAX_BYTES) for i, size in enumerate(value))


def shown(value: object) -> str:
    """A value of a request as an error message shows it."""
    found = repr(value)
    return found if len(found) <= 80 else f"{found[:77]}..."


def _name(value: object, where: str) -> str:
    name = text(value, where)
    if not name.isprintable():
        raise CallboardError(f"{where} is {shown(value)}; send a name of printable characters.")
    return name
