"""The tier on disk: a second region, and the keeper, a process that copies between it and the region in RAM.

Each engine starts a keeper, which ends with it. A keeper loads what its engine requests from disk into RAM. The
keeper that has the disk region's lock also copies new entries from RAM to disk. A keeper's death costs only this
traffic: an entry is READY only after its bytes, and each copy is checked by its sum."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime import start
from runtime.base.model_info import TierInfo
from runtime.base.types import CallboardError
from runtime.tier.disk.rate import read_rate
from runtime.tier.region import Region, RegionBusy
from runtime.tier.region_files import descriptor
from runtime.tier.sums import payload_sums

WRITE_RATE = 256 * 2**20  # bytes a second from RAM to disk
_BATCH_BYTES = 64 * 2**20
_PASS_S = 1.0  # pause between two looks for new entries
_RESTART_S = 1.0  # pause before a dead keeper is replaced
_LOCK_TRIES = 100
_MAX_KEYS = 4096  # keys in one message
_REQUEST = struct.Struct("<QQd")  # number, salt, expires; the keys follow
_NUMBER = struct.Struct("<Q")
_copiers = ThreadPoolExecutor(8)
logger = logging.getLogger(__name__)


class Disk:
    """The engine's side: look-ups in the disk region, and requests to its keeper. One thread uses it."""

    def __init__(self, ram: TierInfo, base: Path, write_rate: float = WRITE_RATE) -> None:
        """Open or create a region like `ram` in the folder `base`, and start a keeper.

        Raises:
            CallboardError: The folder cannot be used."""
        self._region = Region.open(base / Path(ram.folder).name, ram.layout, None, ram.slot_bytes, ram.num_ranks)
        self._region.figures()  # reads the index
        self._arguments = json.dumps(
            [ram.folder, str(self._region.folder), ram.layout, ram.num_slots, ram.slot_bytes, ram.num_ranks, write_rate]
        )
        self.read_rate = 0.0  # bytes per second of each rank; 0 until there are entries to measure it
        self._last = self._ended = 0  # the last request, and the last one that has ended
        self._closing = threading.Event()
        self._start()
        arguments = weakref.ref(self), self._process, self._closing
        threading.Thread(target=_keep_alive, args=arguments, name="tier-keeper", daemon=True).start()
        measured = weakref.ref(self), self._region.folder, ram, self._closing
        threading.Thread(target=_measure, args=measured, name="tier-disk-rate", daemon=True).start()

    def find(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which keys are READY on disk [n]."""
        return self._region.find(keys)

    def request(self, keys: bytes, salt: int, expires: float = 0) -> int:
        """Request copies of these keys in RAM. Returns a number for `has_ended`; 0 if the keeper is busy or dead."""
        self.has_ended(0)
        for at in range(0, len(keys), 16 * _MAX_KEYS):
            self._last += 1
            try:
                message = _REQUEST.pack(self._last, salt, expires) + keys[at : at + 16 * _MAX_KEYS]
                self._socket.send(message)
            except OSError:
                return 0
        return self._last

    def has_ended(self, number: int) -> bool:
        """Return whether a request has ended. All keys that it could copy are READY in RAM."""
        with contextlib.suppress(OSError):
            while reply := self._socket.recv(_NUMBER.size):
                self._ended = _NUMBER.unpack(reply)[0]
        return number <= self._ended

    def close(self) -> None:
        """End the keeper, and leave the disk region."""
        self._closing.set()
        self.restart()
        self._region.close()

    def restart(self) -> None:
        """Replace the keeper, which then finds another region at RAM's place."""
        self._process.kill()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._socket = ours  # requests wait in it until the keeper reads them
        with theirs:
            command = start.command("runtime.tier.disk.keeper", str(theirs.fileno()), self._arguments)
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def replace(self, code: int) -> subprocess.Popen[bytes]:
        """Start another keeper, since the last one has ended with this code."""
        logger.warning("The KV tier's keeper has ended (%d); another is started.", code)
        self._start()
        if self._closing.is_set():
            self._process.kill()
        return self._process

    def forget(self) -> None:
        """Requests of a dead keeper have ended."""
        self._ended = self._last


def _keep_alive(disk: weakref.ref[Disk], process: subprocess.Popen[bytes], closing: threading.Event) -> None:
    """Replace keepers that die. If its Disk is garbage, a keeper ends with its socket, and this thread ends, too."""
    while True:
        code = process.wait()
        if (found := disk()) is not None:
            found.forget()
        del found
        if closing.wait(_RESTART_S) or (found := disk()) is None:
            return
        process = found.replace(code)
        del found


def _measure(disk: weakref.ref[Disk], folder: Path, ram: TierInfo, closing: threading.Event) -> None:
    """Measure how fast a Disk is read, once it has enough entries."""
    with (
        contextlib.suppress(OSError, CallboardError),  # the rate then stays unknown
        contextlib.closing(Region.open(folder, ram.layout, None, ram.slot_bytes, ram.num_ranks)) as region,
    ):
        bypass_cache(region)
        while disk() is not None and not (rate := read_rate(region)):
            if closing.wait(_PASS_S):
                return
        if (found := disk()) is not None:
            found.read_rate = rate


def keeper_main(
    requests: socket.socket,
    ram_folder: str,
    disk_folder: str,
    layout: str,
    num_slots: int,
    slot_bytes: int,
    num_ranks: int,
    write_rate: float,
) -> None:
    """Serve requests until the engine ends, and copy new entries to disk."""
    ram = Region.open(Path(ram_folder), layout, num_slots, slot_bytes, num_ranks)
    disk = Region.open(Path(disk_folder), layout, None, slot_bytes, num_ranks)
    bypass_cache(disk)
    threading.Thread(target=_save_new, args=(ram, disk, write_rate), daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while message := requests.recv(_REQUEST.size + 16 * _MAX_KEYS):
            number, salt, expires = _REQUEST.unpack_from(message)
            keys, batch = message[_REQUEST.size :], 16 * _batch_slots(ram)
            for at in range(0, len(keys), batch):
                load(disk, ram, keys[at : at + batch], salt, expires)
            requests.send(_NUMBER.pack(number))


def load(disk: Region, ram: Region, keys: bytes, salt: int, expires: float) -> None:
    """Copy entries that are on disk and not in RAM."""

    def read(rank: int, source: int, target: int) -> NDArray[np.uint8]:
        row: NDArray[np.uint8] = ram.payload(rank)[target]
        os.preadv(disk.files[rank], [row.data], source * disk.slot_bytes)  # a short read does not fit the sum
        return row

    _copy(disk, ram, keys, salt, expires, read)
    disk.touch(keys)


def save(ram: Region, disk: Region, keys: bytes, salt: int, expires: float) -> None:
    """Copy entries that are in RAM and not on disk."""

    def write(rank: int, source: int, target: int) -> NDArray[np.uint8]:
        row: NDArray[np.uint8] = ram.payload(rank)[source]
        os.pwrite(disk.files[rank], row.data, target * disk.slot_bytes)
        return row

    _copy(ram, disk, keys, salt, expires, write)


def _reserved(target: Region, keys: bytes, salt: int, expires: float) -> NDArray[np.bool_]:
    """Return which keys have got a slot; none if another process has the lock for long."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(RegionBusy):
            return target.reserve(keys, salt, expires)
        time.sleep(0.001)
    return np.zeros(len(keys) // 16, np.bool_)


def _copy(
    source: Region,
    target: Region,
    keys: bytes,
    salt: int,
    expires: float,
    copy_slot: Callable[[int, int, int], NDArray[np.uint8]],
) -> None:
    """Copy READY entries to slots that are reserved here. `copy_slot` returns the payload in RAM, which is checked."""
    keys = _chosen(keys, source.find(keys))
    keys = _chosen(keys, _reserved(target, keys, salt, expires))
    old, new = source.slots_of(keys, ready=True), target.slots_of(keys, ready=False)
    sums = [source.sums(rank, old) for rank in range(source.num_ranks)]

    def has_failed(i: int) -> bool:
        """Copy one entry."""
        if min(old[i], new[i]) < 0:
            return True
        key = keys[16 * i : 16 * i + 16]
        rows = (copy_slot(rank, int(old[i]), int(new[i])) for rank in range(source.num_ranks))
        return any(payload_sums(row[None], key)[0] != right[i] for row, right in zip(rows, sums, strict=True))

    damaged = np.ones(len(old), np.bool_)
    try:
        damaged[:] = list(_copiers.map(has_failed, range(len(old))))
        for file in target.files:
            os.fdatasync(file)
    except OSError as e:
        logger.warning("The KV tier cannot copy to %s: %s.", target.folder, e.strerror)
        target.drop(keys)
        return
    is_there = source.has_keys(old, keys)  # the slot may have been given away meanwhile
    good = is_there & ~damaged
    for rank in range(source.num_ranks):
        target.commit(rank, new[good], _chosen(keys, good), sums[rank][good])
    target.drop(_chosen(keys, ~good))
    source.drop(_chosen(keys, is_there & damaged))


def _save_new(ram: Region, disk: Region, write_rate: float) -> None:
    """Copy each entry once to disk, those used longest ago first. Uses in RAM count on disk, too."""
    with descriptor(disk.folder / "sums-0", os.O_RDWR) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for the end of another keeper
        seen, last = np.zeros(ram.num_slots, np.uint64), 0.0  # low words of the keys that have been seen in each slot
        while True:
            now = time.time()
            found = ram.entries()
            keys, low = found.keys.tobytes(), found.keys[:, 0]
            on_disk = disk.find(keys)
            disk.touch(_chosen(keys, on_disk & (found.used > last)))
            rest = np.flatnonzero(~on_disk & (seen[found.slots] != low))
            seen[found.slots], last = low, now
            while rest.size:
                salt, expires = found.salts[rest[0]], found.expires[rest[0]]
                differs = (found.salts[rest] != salt) | (found.expires[rest] != expires)
                end = min(int(differs.argmax()) or rest.size, _batch_slots(ram))
                save(ram, disk, found.keys[rest[:end]].tobytes(), int(salt), float(expires))
                time.sleep(end * ram.slot_bytes * ram.num_ranks / write_rate)
                rest = rest[end:]
            time.sleep(_PASS_S)


def _batch_slots(region: Region) -> int:
    return max(1, _BATCH_BYTES // (region.slot_bytes * region.num_ranks))


def _chosen(keys: bytes, which: NDArray[np.bool_]) -> bytes:
    """Return the keys for which `which` is true."""
    return np.frombuffer(keys, "V16")[which].tobytes()


def bypass_cache(disk: Region) -> None:
    """Read and write payloads without the system's cache, if slots and file system permit: they are in RAM already."""
    for file in disk.files if disk.slot_bytes % mmap.PAGESIZE == 0 else ():
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C
    os.nice(5)
    keeper_main(socket.socket(fileno=int(sys.argv[1])), *json.loads(sys.argv[2]))
