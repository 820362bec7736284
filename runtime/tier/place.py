"""Where tiers lie, how large they are, and which ones are left over.

A region is the folder BASE/NAME-DIGEST, with the digest of its layout. So engines of one user and node that have the
same name and layout share it, and a new start finds it again. Regions outlive their servers; unused ones make room."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from runtime.base.config import EngineConfig
from runtime.base.errors import CallboardError
from runtime.base.model_info import TierInfo
from runtime.tier.region import Region, RegionFigures

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MEMORY = Path("/dev/shm")
_MOST_BYTES = {
    "cuda": 64 * _GIB,
    "cpu": 4 * _GIB,
}  # a tier without kv_tier_memory; a CPU computes as much in ten minutes
LEAST_BYTES = 64 << 20  # a default tier smaller than this is off
_DIGEST = "[0-9a-f]{16}"
_CREATION_S = 60.0  # limit for a region's creation; older ones that are not complete were left by killed processes


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A region of this user on this machine."""

    folder: Path
    num_bytes: int  # memory or disk that it takes now
    is_used: bool  # a process has it open, or creates it
    opened: float  # time of the last opening


def base_folder() -> Path:
    """Return the folder in memory with all regions of this user."""
    return Path(os.environ.get("CALLBOARD_TIER") or _MEMORY / f"callboard-{os.getuid()}")


def host() -> str:
    """Return this machine's or container's name."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    return socket.gethostname()


def open_region(
    config: EngineConfig, device: str, layout: str, slot_bytes: int, num_ranks: int, available: int
) -> Region | None:
    """Open the tier that the settings want for a device type; None for none. An obstacle is one line of the log.

    `available` has the bytes of free memory. All ranks call this; the first one decides on the size."""
    if config.kv_tier_name is None or config.kv_tier_memory == 0 or not config.prefix_cache:
        return None
    digest = hashlib.sha256(f"{layout} {slot_bytes} {num_ranks}".encode()).hexdigest()[:16]
    folder = base_folder() / f"{quote(config.kv_tier_name, safe='')}-{digest}"
    try:
        size = _size(config.kv_tier_memory, device, folder, num_ranks, available)
        region = Region.open(folder, layout, size // (slot_bytes * num_ranks), slot_bytes, num_ranks)
        os.utime(folder)
    except (CallboardError, OSError) as e:
        logger.warning("KV tier: off. %s", e)
        return None
    figures = region.figures()
    gib = f"{figures.total_bytes / _GIB:.2f} GiB (kv_tier_memory) in {folder}"
    logger.info("KV tier: %s, which has %.2f GiB of earlier requests", gib, figures.used_bytes / _GIB)
    return region


def attached(info: TierInfo) -> Region | None:
    """Return the region that a runner has described, or None if it is on another machine or gone."""
    if info.host != host():
        return None
    try:
        return Region.open(Path(info.folder), info.layout, info.num_slots, info.slot_bytes, info.num_ranks)
    except CallboardError as e:
        logger.warning("KV tier: off. %s", e)
        return None


def stored_regions(base: Path, name: str | None = None) -> list[StoredRegion]:
    """Return the regions in `base`, those with a tier's `name` or all, the one that was opened longest ago first.

    A folder that a killed process has left while it created a region counts as well."""
    pattern = re.compile(f"{'.*' if name is None else re.escape(quote(name, safe=''))}-{_DIGEST}(\\..*)?")
    found = list[StoredRegion]()
    with contextlib.suppress(OSError):
        for folder in base.iterdir():
            with contextlib.suppress(OSError):
                if pattern.fullmatch(folder.name) and folder.is_dir():
                    num_bytes = sum(file.stat().st_blocks for file in folder.iterdir()) * 512
                    opened = folder.stat().st_mtime
                    is_new = "." in folder.name.rpartition("-")[2] and time.time() - opened < _CREATION_S
                    found.append(StoredRegion(folder, num_bytes, is_new or _is_used(folder), opened))
    return sorted(found, key=lambda region: region.opened)


def forget(base: Path, name: str) -> int:
    """Delete a tier's regions, and return the bytes that they took. To processes that use them all is a miss."""
    regions = stored_regions(base, name)
    for region in regions:
        Region.wipe(region.folder)
    return sum(region.num_bytes for region in regions)


def default_bytes(device: str, base: Path, available: int) -> int:
    """Return the size of a tier without kv_tier_memory, 0 for none. Unused regions count as free."""
    free, unused = _free_bytes(base), sum(region.num_bytes for region in stored_regions(base) if not region.is_used)
    limits = [_MOST_BYTES[device], (free + unused) // 2]
    if base.is_relative_to(_MEMORY):
        limits.append((available + unused) // 4)
    return min(limits) if min(limits) >= LEAST_BYTES else 0


def _size(gib: float | None, device: str, folder: Path, num_ranks: int, available: int) -> int:
    """Return the bytes of a region: the setting's, an existing one's, or the default. Makes room for a new one.

    Raises CallboardError if the default is none."""
    with contextlib.suppress(OSError):
        if gib is None and (size := sum((folder / f"payload-{i}").stat().st_size for i in range(num_ranks))):
            return size
    base = folder.parent
    default = default_bytes(device, base, available)
    if gib is None and not default:
        raise CallboardError(
            f"{base} has {_free_bytes(base) / _GIB:.2f} GiB free for it, which is too little; start a container with a "
            "larger --shm-size, or set CALLBOARD_TIER to another folder."
        )
    size = default if gib is None else int(gib * _GIB)
    if not folder.exists():
        _make_room(base, size, default)
    return size


def _make_room(base: Path, size: int, most_unused: int) -> None:
    """Wipe unused regions, the oldest first, until `size` bytes are free and the others take at most `most_unused`."""
    unused = [region for region in stored_regions(base) if not region.is_used]
    for number, region in enumerate(unused):
        if _free_bytes(base) >= size and sum(other.num_bytes for other in unused[number:]) <= most_unused:
            return
        logger.info("KV tier: %s makes room, as no process uses it", region.folder)
        Region.wipe(region.folder)


def _free_bytes(base: Path) -> int:
    existing = next(path for path in (base, *base.parents) if path.exists())
    space = os.statvfs(existing)
    return space.f_bavail * space.f_frsize


def _is_used(folder: Path) -> bool:
    """Return True if a process has the region open, and so has a lock of its head."""
    with contextlib.suppress(FileNotFoundError), open(folder / "head", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class SharedRegion:
    """A region as an engine uses it. Without one, or after it is gone, all is a miss and nothing is stored."""

    def __init__(self, info: TierInfo | None) -> None:
        self._region: Region | None = None
        self.attach(info)

    def attach(self, info: TierInfo | None) -> None:
        """Use the region of fresh runners, which may be a new one."""
        before, self._region = self._region, None if info is None else attached(info)
        if before is not None:
            before.close()

    def find(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which keys are READY [n]."""
        return self._nothing(keys) if self._region is None else self._region.find(keys)

    def touch(self, keys: bytes, expires: float = 0) -> None:
        """Set the last use of READY keys to now, and with `expires` the time until which they are kept if possible."""
        if self._region is not None:
            self._region.touch(keys, expires)

    def reserve(self, keys: bytes, salt: int, expires: float = 0) -> NDArray[np.bool_]:
        """Give keys a slot to be written; return which ones have got it [n]."""
        return self._nothing(keys) if self._region is None else self._region.reserve(keys, salt, expires)

    def drop(self, keys: bytes) -> None:
        """Free the slots of damaged or spoilt keys."""
        if self._region is not None:
            self._region.drop(keys)

    def figures(self) -> RegionFigures:
        """Count entries and bytes."""
        return RegionFigures(0, 0, 0) if self._region is None else self._region.figures()

    @staticmethod
    def _nothing(keys: bytes) -> NDArray[np.bool_]:
        return np.zeros(len(keys) // 16, np.bool_)
