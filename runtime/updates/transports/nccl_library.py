"""NcclGroup: a rank in an NCCL group, over the library that torch has loaded.

The communicator does not block: a call starts its work in an NCCL thread, and `is_ready` shows whether it has ended.
So every wait has a time limit, and another thread can end it.

The calls are our own: `torch.cuda.nccl` has neither an abort nor asynchronous errors. The package nccl4py has both.
Seven functions do not justify two more packages in each installation (it needs cuda-core)."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from runtime.base.types import CallboardError
from runtime.updates.transports.packing import flat_bytes
from runtime.updates.transports.unique_id import NUM_BYTES

logger = logging.getLogger(__name__)

_SUCCESS, _INVALID_USAGE, _IN_PROGRESS = 0, 5, 7  # ncclResult_t
_UINT8, _FLOAT32 = 1, 7  # ncclDataType_t
_SUM = 0  # ncclRedOp_t
_ABORT_S = 20.0  # time limit for an abort
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400  # NCCL 2.14: the oldest with `blocking`, which all later ones read
_UNDEFINED = -(1 << 31)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * NUM_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14. `size` and `version` let later versions take their defaults for all else."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("padding", ctypes.c_int),
    )


class NcclLibrary:
    """The NCCL functions that weight transfers need. Raises CallboardError for NCCL's errors."""

    def __init__(self) -> None:
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        try:
            self._library = ctypes.CDLL(_path())
            for name, arguments in {
                "ncclGetVersion": [ctypes.POINTER(integer)],
                "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
                "ncclCommInitRankConfig": [
                    ctypes.POINTER(pointer), integer, _UniqueId, integer, ctypes.POINTER(_Config),
                ],
                "ncclCommGetAsyncError": [pointer, ctypes.POINTER(integer)],
                "ncclAllReduce": [pointer, pointer, size, integer, integer, pointer, pointer],
                "ncclBroadcast": [pointer, pointer, size, integer, integer, pointer, pointer],
                "ncclCommAbort": [pointer],
            }.items():  # fmt: skip
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, integer
            self._library.ncclGetErrorString.argtypes = [integer]
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as e:
            raise CallboardError(
                f"NCCL's library cannot be loaded ({e}); install a torch for CUDA, or send weights by files or IPC."
            ) from None

    @property
    def version(self) -> str:
        number = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(number))
        return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """Return the id of a new group. This process helps its ranks to find each other."""
        unique_id = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def init_rank(self, unique_id: bytes, rank: int, world_size: int) -> ctypes.c_void_p:
        """Begin to make a rank's communicator, on this thread's current device."""
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, _UNDEFINED)
        by_value = _UniqueId.from_buffer_copy(unique_id)
        self.call("ncclCommInitRankConfig", ctypes.byref(comm), world_size, by_value, rank, ctypes.byref(config))
        return comm

    def is_ready(self, comm: ctypes.c_void_p) -> bool:
        """Whether the last call on a communicator has ended. Raises CallboardError if the group has failed."""
        state = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        if state.value not in (_SUCCESS, _IN_PROGRESS):
            self._fail("The trainer's group", state.value)
        return state.value == _SUCCESS

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (_SUCCESS, _IN_PROGRESS):
            self._fail(name, code)

    def _fail(self, what: str, code: int) -> None:
        message = (self._library.ncclGetErrorString(code) or b"").decode().split(" (")[0]
        advice = "connect the trainer again"
        if code == _INVALID_USAGE:  # what NCCL reports if its versions differ, or if two ranks have one GPU
            advice = f"use NCCL {self.version} on both sides, and another GPU than the trainer's"
        raise CallboardError(f"{what} failed in NCCL ({message}, code {code}); {advice}.")


@cache
def library() -> NcclLibrary:
    return NcclLibrary()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all groups: torch's allocator would keep the buffers of each stream apart."""
    return torch.cuda.Stream(device)


class Group(Protocol):
    """A rank of a group that broadcasts, as NcclGroup documents it."""

    def begin(self, unique_id: bytes, rank: int, world_size: int) -> None: ...
    def is_ready(self) -> bool: ...
    def warm_up(self) -> None: ...
    def buffer(self, num_bytes: int) -> torch.Tensor: ...
    def joined(self, pieces: list[torch.Tensor]) -> torch.Tensor: ...
    def broadcast(self, buffer: torch.Tensor) -> None: ...
    def arrival(self) -> Callable[[], bool]: ...
    def follow(self) -> None: ...
    def abort(self) -> None: ...


class NcclGroup:
    """One rank in a group of GPUs. One thread sends or receives; any thread may call `abort`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._nccl = library()
        self._lock = threading.Lock()  # no call runs on a communicator that an abort frees
        self._comm: ctypes.c_void_p | None = None
        self._is_aborted = False

    def begin(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Begin to join the group. The caller waits until `is_ready`, and then calls `warm_up`."""
        with self._lock, torch.cuda.device(self._device):
            if self._is_aborted:
                raise CallboardError("The trainer was disconnected while it connected; connect it again.")
            self._comm = self._nccl.init_rank(unique_id, rank, world_size)

    def is_ready(self) -> bool:
        """Whether the last call has put its work on the stream. Only then may the next call come."""
        with self._lock:
            return self._nccl.is_ready(self._alive())

    def warm_up(self) -> None:
        """Sum one number over all ranks, as the communicators of vLLM do right after they are made."""
        with torch.cuda.stream(self._stream):
            self._number = torch.zeros(1, dtype=torch.float32, device=self._device)
        address = ctypes.c_void_p(self._number.data_ptr())
        self._call("ncclAllReduce", address, address, 1, _FLOAT32, _SUM)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory for a broadcast, uint8 [num_bytes]. The next buffer may reuse it after `follow`."""
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def joined(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """The memory of tensors that are on the caller's stream, end to end."""
        self.follow()
        with torch.cuda.stream(self._stream):
            flat = [flat_bytes(piece) for piece in pieces]
            return flat[0] if len(flat) == 1 else torch.cat(flat)

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Begin to send this memory from rank 0 to all others.

        NCCL broadcasts bytes, so the other ranks may name any type of the same size."""
        address = ctypes.c_void_p(buffer.data_ptr())
        self._call("ncclBroadcast", address, address, buffer.numel(), _UINT8, 0)

    def arrival(self) -> Callable[[], bool]:
        """A function that shows whether all work on the stream up to here has ended. It raises CallboardError if the
        group fails."""
        event = self._stream.record_event()

        def has_arrived() -> bool:
            self.is_ready()
            return bool(event.query())

        return has_arrived

    def follow(self) -> None:
        """Later work on the stream waits for the work that is on the caller's stream now."""
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    def abort(self) -> None:
        """End all work of this rank, also in other threads, and leave the group."""
        with self._lock:
            comm, self._comm, self._is_aborted = self._comm, None, True
        if comm is None:
            return
        # An abort waits for NCCL's kernels. Its own thread keeps the caller free if one does not end.
        thread = threading.Thread(target=self._abort, args=(comm,), name="nccl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def _abort(self, comm: ctypes.c_void_p) -> None:
        try:
            with torch.cuda.device(self._device):
                self._nccl.call("ncclCommAbort", comm)
        except CallboardError as e:
            logger.warning("a group of a trainer did not end cleanly: %s", e)

    def _call(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self._nccl.call(name, *arguments, self._alive(), ctypes.c_void_p(self._stream.cuda_stream))

    def _alive(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise CallboardError("The trainer was disconnected, and its transfer ended; connect it again.")
        return self._comm


def _path() -> str:
    """The library of NCCL that torch has loaded, or the system's."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if "/libnccl.so" in path:
                return path
    return "libnccl.so.2"
