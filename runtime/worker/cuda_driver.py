"""Calls of the CUDA driver that torch does not offer."""

from __future__ import annotations

import ctypes
from functools import cache

import torch


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object) -> None:
    """Raises OSError with the driver's name for the error.

    The driver uses the calling thread's context. A new thread gets one by its first runtime call, for
    example `torch.cuda.synchronize`."""
    if code := getattr(_driver(), name)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise OSError(code, f"{name} says {(text.value or b'nothing').decode()}")


class _Words:
    """Memory at an address, in a form that torch.as_tensor accepts."""

    def __init__(self, address: int, num_words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_words,), "typestr": "<i4", "version": 3,
        }  # fmt: skip


def words_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The memory at an address of a device, [num_bytes / 4] int32. The tensor does not own it."""
    return torch.as_tensor(_Words(address, num_bytes // 4), device=device)
