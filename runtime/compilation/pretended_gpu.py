"""PretendedGpu: a process computes as if on a GPU, without one. Its tensors have shapes and types, and no data.

A tensor on the device `cuda` is a `meta` tensor, and its attributes name the GPU. Copies to the host
leave the host's memory as it is. Graphs are not captured; their steps run. Kernels are launched by Triton, which
`recorded_launches` stops before the launch. A process that has pretended is not used for anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

_META, _CUDA, _CPU = torch.device("meta"), torch.device("cuda", 0), torch.device("cpu")


class GpuFacts(NamedTuple):
    """The facts about a GPU that choose kernels, and its free memory, which limits contexts."""

    name: str
    capability: tuple[int, int]
    multi_processor_count: int
    total_memory: int  # bytes
    free_memory: int  # bytes

    @classmethod
    def of(cls, device: torch.device) -> GpuFacts:
        """The facts about a GPU of this machine."""
        found, (free, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
        return cls(found.name, (found.major, found.minor), found.multi_processor_count, total, free)


@contextmanager
def pretended_gpu(facts: GpuFacts) -> Iterator[None]:
    """Let the process believe in this GPU."""
    capture = _Capture()
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: _Stub(),
        "get_device_capability": lambda device=None: facts.capability,
        "get_device_name": lambda device=None: facts.name,
        "get_device_properties": lambda device=None: facts,
        "mem_get_info": lambda device=None: (facts.free_memory, facts.total_memory),
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "empty_cache": lambda: None,
        "Event": _Stub,
        "Stream": _Stub,
        "CUDAGraph": _Stub,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph, pool=None: capture,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: capture.is_open,
    }
    usual, generator = {name: getattr(torch.cuda, name) for name in stubs}, torch.Generator
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    torch.Generator = lambda device=_CPU: generator()  # type: ignore[misc, assignment]
    if "torch._dynamo" not in sys.modules:  # ops on `meta` import it, for 3 s, and only switch it off
        sys.modules["torch._dynamo"] = torch._dynamo = ModuleType("torch._dynamo")
        torch._dynamo.disable = lambda function, *args, **options: function
    try:
        with _MetaForCuda():
            yield
    finally:
        for name, own in usual.items():
            setattr(torch.cuda, name, own)
        torch.Generator = generator  # type: ignore[misc]


class _Stub:
    """An event, a stream or a graph without work."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


class _Capture:
    """The context of a capture."""

    is_open = False

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *error: object) -> None:
        self.is_open = False


class _MetaForCuda(TorchFunctionMode):
    """Replaces the device `cuda` by `meta` in all calls of torch, and `meta` by `cuda` in attributes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (answer := _ANSWERS.get(func)) is not None and args[0].device == _META:
            return answer(args[0])
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_ and args[0].device == _CPU and args[1].device == _META:
            return args[0]
        options = {name: _pretended(value) for name, value in (kwargs or {}).items()}
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if options.pop("generator", None) is not None:
            options["device"] = _META  # random weights lack values, too
        if (product := _PRODUCTS.get(func)) is not None and args[0].device == _META:
            return product(*args, **options)
        return func(*map(_pretended, args), **options)


def _pretended(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _META if value.type == "cuda" else value
    return _META if isinstance(value, str) and value.startswith("cuda") else value


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: lambda tensor: _CUDA,
    torch.Tensor.cpu: lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype),
    torch.Tensor.item: lambda tensor: 0,
    torch.Tensor.tolist: lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).tolist(),
    torch.Tensor.__bool__: lambda tensor: False,
    torch.Tensor.__int__: lambda tensor: 0,
}


def _mm(x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
    return x.new_empty((len(x), y.shape[1]), dtype=out_dtype) if out is None else out


# Products of libraries. What torch does with them on `meta` lacks `out_dtype`, and takes long.
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.mm: _mm,
    torch.nn.functional.linear: lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], len(weight))),
    torch.Tensor.addmm_: lambda own, x, y: own,
}
