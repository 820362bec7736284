"""An NCCL group's id as vLLM's trainers publish it: a pickled ctypes structure.

A pickle can run any code where it is loaded. So the bytes are taken out by its opcodes, and nothing is loaded."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterator
from typing import Any

from runtime.base.types import CallboardError

NUM_BYTES = 128
KEY = "broadcast_from/0/0"  # the store's key
_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
_CLASS = "ncclUniqueId"
_MOST_BYTES = 4096  # pickle size; vLLM's has 268
_STRUCTURE = (  # ctypes pickles a structure as a call: _unpickle(class, (attributes, memory))
    "_ctypes", "_unpickle", "STACK_GLOBAL", _MODULE, _CLASS, "STACK_GLOBAL", "EMPTY_DICT", bytes, "TUPLE2", "TUPLE2",
    "REDUCE", "STOP",
)  # fmt: skip
_IGNORED = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT"}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}


def unique_id_of(pickled: bytes) -> bytes:
    """Return the 128 bytes of a pickled `ncclUniqueId`, protocol 3 or later. Raises CallboardError for others."""
    found: list[Any] = []
    try:
        if len(pickled) <= _MOST_BYTES:
            found = list(_steps(pickled))
    except Exception:  # pickletools raises, for bytes that are not a pickle
        found = []
    memory = next((step for step in found if isinstance(step, bytes)), b"")
    if [bytes if isinstance(step, bytes) else step for step in found] != [*_STRUCTURE] or len(memory) != NUM_BYTES:
        raise CallboardError(
            f"The trainer's store has {len(pickled)} bytes under {KEY} that are not an ncclUniqueId as vLLM writes it; "
            "use vLLM's transport or nccl_unique_id_b64."
        )
    return memory


def pickled_unique_id(unique_id: bytes) -> bytes:
    """Return the pickle of protocol 4 that vLLM's workers load as an `ncclUniqueId`."""

    def text(value: str) -> bytes:
        return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()

    assert len(unique_id) == NUM_BYTES
    return b"".join(
        (
            pickle.PROTO, b"\x04",
            text("_ctypes"), text("_unpickle"), pickle.STACK_GLOBAL,
            text(_MODULE), text(_CLASS), pickle.STACK_GLOBAL,
            pickle.EMPTY_DICT, pickle.SHORT_BINBYTES, bytes([NUM_BYTES]), unique_id,
            pickle.TUPLE2, pickle.TUPLE2, pickle.REDUCE, pickle.STOP,
        )
    )  # fmt: skip


def _steps(pickled: bytes) -> Iterator[Any]:
    """The opcodes that matter: texts and bytes by their values, globals of protocol 3 as protocol 4 has them."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _TEXTS | _BYTES:
            yield argument
        elif opcode.name == "GLOBAL":
            yield from (*str(argument).split(" ", 1), "STACK_GLOBAL")
        elif opcode.name not in _IGNORED:
            yield opcode.name
