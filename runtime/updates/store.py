"""WeightStore: the last update's weights in a folder on the node, for runners that start again.

    state.json                          version, the checkpoint's fingerprint, and each rank's files
    00000003-<identity>-1of2.weights    slices of rank 1 that update 3 brought
    .lock                               held while the others change

A version is there when all ranks have its file. The rank that finds it complete replaces state.json. An application's
engines share the folder: engines with the same identity write equal files, and the highest serial wins."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.base.weight_version import WeightVersion
from runtime.updates.slice_files import read_slices, write_slices
from runtime.updates.slices import SliceSet

logger = logging.getLogger(__name__)

_STATE, _LOCK, _ENDING, _UNFINISHED = "state.json", ".lock", ".weights", ".unfinished"
_FILE = re.compile(r"(\d{8,})-[0-9a-f]*-(\d+)of(\d+)\.weights")


class StoredSlices(NamedTuple):
    """Slices that are in a file of the store."""

    slices: SliceSet
    file: str


class Stored(NamedTuple):
    """A version in the store, as a rank reads it."""

    version: WeightVersion
    layers: list[StoredSlices]  # the oldest first


class WeightStore:
    """The folder of one model on one node, for one rank. One thread writes at a time."""

    def __init__(self, folder: Path, checkpoint: str, shard: Shard) -> None:
        """`checkpoint` is the fingerprint of the model's files."""
        self._folder, self._checkpoint, self._shard = folder, checkpoint, shard

    def read(self) -> Stored | None:
        """The stored version; None if there is none for this checkpoint and number of ranks, or it is damaged."""
        try:
            if not (self._folder / _STATE).exists():
                return None
            with self._locked():
                state = self._state()
                if state is None:
                    return None
                names = state["files"][self._shard.rank]
                try:
                    layers = [StoredSlices(read_slices(self._folder / name).slices, name) for name in names]
                except CallboardError as e:
                    logger.warning("the stored weights are not used: %s", e)
                    self._forget()
                    return None
                return Stored(WeightVersion(**state["version"]), layers)
        except OSError as e:
            logger.warning("the stored weights in %s are not used: %s", self._folder, e)
            return None

    def write(self, version: WeightVersion, layers: list[StoredSlices], newest: SliceSet) -> list[StoredSlices]:
        """Store a version: the slices from older updates, which have files, and the newest.

        Returns the version's layers: older ones that are not shadowed, and the newest as a mapped file. Raises
        CallboardError if the folder cannot be written."""
        name = self._name(version, self._shard.rank)
        unfinished = self._folder / f"{name}.{uuid.uuid4().hex}{_UNFINISHED}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            older = _not_shadowed(layers, newest)
            with self._locked():
                self._remove_abandoned()
                if not all((self._folder / layer.file).exists() for layer in older):
                    whole = SliceSet()  # another engine's newer version has removed files
                    for slices in (*(layer.slices for layer in older), newest):
                        whole.add(slices)
                    older, newest = [], whole
                file = unfinished.open("wb")
                fcntl.flock(file, fcntl.LOCK_EX)
            with file:
                metadata = {"older": json.dumps([layer.file for layer in older]), "checkpoint": self._checkpoint}
                write_slices(file, newest, metadata | {"version": json.dumps(asdict(version))})
                with self._locked():
                    if self._has(name):  # another engine's, with the same content
                        unfinished.unlink()
                    else:
                        os.replace(unfinished, self._folder / name)
                    own = StoredSlices(read_slices(self._folder / name).slices, name)
                    self._complete(version)
        except OSError as e:
            with suppress(OSError):
                unfinished.unlink()
            raise CallboardError(
                f"The weights of version {version.name} cannot be stored in {self._folder}: {e.strerror or e}; free "
                "space there, or name another folder as weight_store."
            ) from e
        return [*older, own]

    def forget(self) -> None:
        """Make the store empty. The next version is stored whatever its serial."""
        with suppress(OSError), self._locked():
            self._forget()

    def _forget(self) -> None:
        with suppress(OSError):
            (self._folder / _STATE).unlink()

    def _has(self, name: str) -> bool:
        """True if there is a file of this name that belongs to the checkpoint and is not damaged."""
        if not (self._folder / name).exists():
            return False
        try:
            return read_slices(self._folder / name).metadata["checkpoint"] == self._checkpoint
        except CallboardError:
            return False

    def _name(self, version: WeightVersion, rank: int) -> str:
        return f"{version.serial:08d}-{version.identity}-{rank}of{self._shard.size}{_ENDING}"

    def _complete(self, version: WeightVersion) -> None:
        """Make a version the stored one if all ranks have their files, unless a newer one is."""
        size = self._shard.size
        names = [self._name(version, rank) for rank in range(size)]
        if not all((self._folder / name).exists() for name in names):
            return
        before = self._state()
        if before is not None and before["version"]["serial"] >= version.serial:
            return
        files = []
        for name in names:
            older = json.loads(read_slices(self._folder / name).metadata["older"])
            if not all((self._folder / each).exists() for each in older):
                return
            files.append([*older, name])
        state = {
            "checkpoint": self._checkpoint,
            "tensor_parallel_size": size,
            "version": asdict(version),
            "files": files,
        }
        unfinished = self._folder / f"{_STATE}.{uuid.uuid4().hex}{_UNFINISHED}"
        unfinished.write_text(json.dumps(state))
        os.replace(unfinished, self._folder / _STATE)
        self._remove_shadowed(version.serial, {file for own in files for file in own})

    def _state(self) -> dict[str, Any] | None:
        """The content of state.json; None if there is none for this model."""
        path = self._folder / _STATE
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = json.loads(path.read_text())
            belongs = state["checkpoint"], state["tensor_parallel_size"]
            WeightVersion(**state["version"])
            state["files"][self._shard.size - 1]
        except (ValueError, KeyError, TypeError, IndexError):
            logger.warning("%s is damaged and not used", path)
            return None
        return state if belongs == (self._checkpoint, self._shard.size) else None

    def _remove_shadowed(self, serial: int, used: set[str]) -> None:
        """Remove files of older updates that the stored version does not need."""
        for path in self._folder.iterdir():
            match = _FILE.fullmatch(path.name)
            if match and path.name not in used and int(match[1]) <= serial:
                with suppress(OSError):
                    path.unlink()

    def _remove_abandoned(self) -> None:
        """Remove unfinished files that this rank left behind: it writes one at a time."""
        rank, size = self._shard
        for path in self._folder.glob(f"*-{rank}of{size}{_ENDING}.*{_UNFINISHED}"):
            if not _is_written(path):
                with suppress(OSError):
                    path.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """A context in which no other process changes the folder. The lock ends with its process."""
        with (self._folder / _LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _not_shadowed(layers: list[StoredSlices], newest: SliceSet) -> list[StoredSlices]:
    """The layers with a tensor that newer ones lack."""
    kept, newer = list[StoredSlices](), set(newest.of)
    for layer in reversed(layers):
        if not layer.slices.of.keys() <= newer:
            kept.insert(0, layer)
            newer |= layer.slices.of.keys()
    return kept


def _is_written(path: Path) -> bool:
    """True while a process writes an unfinished file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
