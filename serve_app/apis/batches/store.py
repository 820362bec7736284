"""Files and batches on a disk that all fronts share.

A front can die at any byte. Records are replaced as a whole, and results are appended line by line. A batch belongs to
the front that holds its lock file; the system releases the lock with the process. The folder's one lock, `store.lock`,
covers creation and removal, so two fronts cannot pass a limit together. All methods block, so threads call them.

- `files/ID`: a file. The front that receives it holds its lock.
- `files/ID.json`: its record.
- `batches/ID.json`: a batch's record.
- `batches/ID.lock`, `batches/ID.input`, `batches/ID.cancel`: an open batch's lock, requests and cancellation time.
- `keys/key-OWNER/ID.BYTES`: each key's index (`quota.py`)."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from runtime.base.types import CallboardError
from runtime.output.fields import shortened
from serve_app.apis.batches.disk import holding, part_of, replacing, try_lock
from serve_app.apis.batches.quota import KeyIndex, StorageUsage, excess
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import ApiError
from serve_app.settings import HttpSettings

logger = logging.getLogger(__name__)

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_OPEN_SUFFIXES = (".cancel", ".input", ".lock")  # the lock is removed last


@dataclass
class Record:
    """A file or a batch."""

    owner: str
    object: dict[str, Any]  # the JSON for clients
    results: list[str] = field(default_factory=list)  # a batch's file ids: answers and errors


class Records:
    """The records of one kind in a folder, each a JSON by its id."""

    def __init__(self, folder: Path, prefix: str, noun: str, index: KeyIndex) -> None:
        self.folder, self.prefix, self._noun, self._index = folder, prefix, noun, index
        self._id = re.compile(rf"{prefix}[0-9a-f]{{32}}")

    def new_id(self) -> str:
        """Return an id; ids sort by their time of creation."""
        return f"{self.prefix}{time.time_ns():016x}{secrets.token_hex(8)}"

    def path(self, record_id: str, suffix: str = "") -> Path:
        return self.folder / f"{record_id}{suffix}"

    def exists(self, record_id: str) -> bool:
        return self.path(record_id, ".json").exists()

    def write(self, record: Record) -> None:
        with replacing(self.path(record.object["id"], ".json")) as file:
            file.write(encode_json(record))

    def read(self, record_id: str, owner: str | None = None) -> Record:
        """Return a record. Raises the 404 without one, or if it belongs to another owner; None means any owner."""
        with suppress(FileNotFoundError):
            if self._id.fullmatch(record_id):
                record = self._decoded(self.path(record_id, ".json").read_bytes(), record_id)
                if record is not None and owner in (None, record.owner):
                    return record
        raise self.missing(record_id)

    def missing(self, record_id: str) -> ApiError:
        text = f"There is no {self._noun} {shortened(record_id)!r}: it was never made, or is no longer."
        return ApiError(404, text, code=f"{self._noun}_not_found")

    def _decoded(self, content: bytes, record_id: str) -> Record | None:
        try:
            return msgspec.json.decode(content, type=Record)
        except msgspec.DecodeError:
            logger.exception("the record of %s cannot be read", record_id)
            return None

    def page(
        self, owner: str, after: str | None, limit: int, ascending: bool, wanted: Callable[[Record], bool]
    ) -> tuple[list[Record], bool]:
        """Return up to `limit` of an owner's records after an id, and whether more follow."""
        found: list[Record] = []
        ids = self._index.ids(owner, self.prefix)
        for record_id in ids if ascending else reversed(ids):
            if after is not None and (record_id == after or (record_id > after) != ascending):
                continue
            with suppress(ApiError):  # it is being created or was just deleted
                if wanted(record := self.read(record_id, owner)):
                    found.append(record)
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def with_suffix(self, suffix: str) -> list[str]:
        """Return the ids with a file of this suffix, oldest first."""
        return sorted(name.removesuffix(suffix) for name in os.listdir(self.folder) if name.endswith(suffix))

    def names(self) -> dict[str, list[str]]:
        """Return the names of all files in the folder by their ids."""
        found: dict[str, list[str]] = {}
        for name in os.listdir(self.folder):
            found.setdefault(name.partition(".")[0], []).append(name)
        return found

    def remove(self, record_id: str, *suffixes: str) -> None:
        """Remove a record and its files of these suffixes, the record first."""
        for suffix in (".json", *suffixes):
            path = self.path(record_id, suffix)
            path.unlink(missing_ok=True)
            part_of(path).unlink(missing_ok=True)


class BatchStore:
    """The folder of files and batches."""

    def __init__(self, folder: str, settings: HttpSettings) -> None:
        """Raises CallboardError if the folder cannot be made."""
        root = Path(folder)
        try:
            for name in ("files", "batches", "keys"):
                (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise CallboardError(f"batch_folder {folder!r} cannot be made: {e}.") from e
        self._root, self._settings = root, settings
        self.index = KeyIndex(root / "keys")
        self.files = Records(root / "files", "file-", "file", self.index)
        self.batches = Records(root / "batches", "batch_", "batch", self.index)

    # ---- files -------------------------------------------------------------------------------------------------------

    def upload(self, source: IO[bytes], owner: str, filename: str) -> Record:
        """Store a file. Its bytes count from the start. Raises the 413 or 429 of a limit; an OSError leaves nothing."""
        file_id, size = self.files.new_id(), source.seek(0, os.SEEK_END)
        source.seek(0)
        try:
            with self._alone():
                self._check_room(owner, StorageUsage(files=1, bytes=size))
                self.index.set(owner, file_id, size)
                file = open(self.files.path(file_id), "wb")  # noqa: SIM115  # closed below, which releases its lock
                try_lock(file)
            with file:
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())
                return self._write_file(file_id, owner, filename, "batch")
        except BaseException:
            with suppress(OSError):  # the next sweep finds it
                self._drop_file(file_id, owner)
            raise

    def add_result(self, file_id: str, owner: str, filename: str) -> None:
        """Make the complete results of a batch visible to clients."""
        record = self._write_file(file_id, owner, filename, "batch_output")
        with self._alone():
            self.index.set(owner, file_id, record.object["bytes"])

    def _write_file(self, file_id: str, owner: str, filename: str, purpose: str) -> Record:
        size = self.files.path(file_id).stat().st_size
        facts = {"bytes": size, "created_at": int(time.time()), "filename": filename, "purpose": purpose}
        record = Record(owner, {"id": file_id, "object": "file", **facts, "status": "processed", "expires_at": None})
        self.files.write(record)
        return record

    def delete_file(self, file_id: str, owner: str) -> None:
        self.files.read(file_id, owner)
        self._drop_file(file_id, owner)

    def _drop_file(self, file_id: str, owner: str) -> None:
        with self._alone():
            self.files.remove(file_id, "")
            self.index.remove(owner, [file_id])

    def content(self, file_id: str, owner: str) -> tuple[Path, os.stat_result]:
        """Return the path of a file's content, and its size and times. Raises the 404."""
        self.files.read(file_id, owner)
        path = self.files.path(file_id)
        try:
            return path, path.stat()
        except FileNotFoundError:
            raise self.files.missing(file_id) from None

    # ---- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: Record) -> None:
        """Store a new batch, a link to its input, and index entries for its two results files.

        Deletes the key's oldest ended batches above their limit. Raises a limit's 429 or 413, and the 404 if the
        input was just deleted. An OSError leaves nothing."""
        batch_id, owner, input_id = record.object["id"], record.owner, record.object["input_file_id"]
        with self._alone():
            self._check_room(owner, StorageUsage(open=1, files=len(record.results), bytes=1))
            self._drop_oldest(owner)
            try:
                for entry in (batch_id, *record.results):
                    self.index.set(owner, entry, 0)
                self._keep_input(input_id, batch_id)
                self.batches.path(batch_id, ".lock").touch()
                self.batches.write(record)
            except BaseException:
                with suppress(OSError):  # the next sweep finds it
                    self._drop_batch(owner, batch_id, record.results)
                raise

    def _keep_input(self, file_id: str, batch_id: str) -> None:
        try:
            os.link(self.files.path(file_id), self.batches.path(batch_id, ".input"))
        except FileNotFoundError:
            raise self.files.missing(file_id) from None

    def batch(self, batch_id: str, owner: str) -> Record:
        """Return a batch for clients."""
        return self.seen(self.batches.read(batch_id, owner))

    def seen(self, record: Record) -> Record:
        """Return a record for clients. A cancelled batch is "cancelling" at once, even if another front runs it."""
        if record.object["status"] not in ENDED and (at := self.cancelling_at(record.object["id"])) is not None:
            record.object |= {"status": "cancelling", "cancelling_at": at}
        return record

    def cancel(self, batch_id: str, owner: str) -> Record:
        record = self.batches.read(batch_id, owner)
        if (status := record.object["status"]) in ENDED:
            raise ApiError(400, f"This batch cannot be cancelled: it is {status}.", code="batch_ended")
        self.batches.path(batch_id, ".cancel").touch()
        return self.batch(batch_id, owner)

    def cancelling_at(self, batch_id: str) -> int | None:
        """Return the time of a batch's cancellation; None without one."""
        try:
            return int(self.batches.path(batch_id, ".cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def take(self, batch_id: str) -> IO[bytes] | None:
        """Lock a batch until the returned file is closed; None if another process has the lock or the batch ended."""
        try:
            lock = open(self.batches.path(batch_id, ".lock"), "r+b")  # noqa: SIM115  # its holder closes it
        except FileNotFoundError:
            return None
        if try_lock(lock):
            return lock
        lock.close()
        return None

    def charge(self, record: Record) -> ApiError | None:
        """Count a batch's present results; return the error for a limit that they exceed, or None."""
        with self._alone():
            for file_id in record.results:
                self.index.set(record.owner, file_id, self.num_bytes(file_id))
            return next(excess(self._settings, *self._usage(record.owner), StorageUsage(bytes=1)), None)

    def num_bytes(self, file_id: str) -> int:
        """Return the length of a file's content; 0 without a file."""
        try:
            return self.files.path(file_id).stat().st_size
        except FileNotFoundError:
            return 0

    def forget(self, record: Record) -> None:
        """Remove an ended batch's lock and input, and the index entries for results that it does not have."""
        with self._alone():
            unused = [file_id for file_id in record.results if not self.files.exists(file_id)]
            for file_id in unused:
                self.files.remove(file_id, "")
            self.index.remove(record.owner, unused)
            for suffix in _OPEN_SUFFIXES:
                self.batches.path(record.object["id"], suffix).unlink(missing_ok=True)

    def _drop_oldest(self, owner: str) -> None:
        open_ids = set(self.batches.with_suffix(".lock"))
        ended = [batch_id for batch_id in self.index.ids(owner, self.batches.prefix) if batch_id not in open_ids]
        for batch_id in ended[: max(0, len(ended) - self._settings.batch_max_ended_per_key)]:
            self._drop_batch(owner, batch_id, [])

    def _drop_batch(self, owner: str, batch_id: str, results: list[str]) -> None:
        self.batches.remove(batch_id, *_OPEN_SUFFIXES)
        self.index.remove(owner, [batch_id, *results])

    # ---- limits ------------------------------------------------------------------------------------------------------

    def _alone(self) -> AbstractContextManager[None]:
        """Hold the lock for the creation and removal of files and batches."""
        return holding(self._root / "store.lock")

    def _check_room(self, owner: str, wanted: StorageUsage) -> None:
        for error in excess(self._settings, *self._usage(owner), wanted):
            raise error

    def _usage(self, owner: str) -> tuple[StorageUsage, StorageUsage]:
        """Return an owner's usage, and all owners'."""
        own, everything, open_ids = StorageUsage(), StorageUsage(), set(self.batches.with_suffix(".lock"))
        for each in self.index.owners():
            sizes = self.index.sizes(each)
            files = [num_bytes for record_id, num_bytes in sizes.items() if record_id.startswith(self.files.prefix)]
            inputs = [self._input_bytes(batch_id) for batch_id in sizes.keys() & open_ids]
            usage = StorageUsage(len(inputs), len(files), sum(files) + sum(inputs))
            everything += usage
            if each == owner:
                own = usage
        return own, everything

    def _input_bytes(self, batch_id: str) -> int:
        """Return the length of a batch's input if its file was deleted, else 0."""
        with suppress(FileNotFoundError):
            stat = self.batches.path(batch_id, ".input").stat()
            return stat.st_size if stat.st_nlink == 1 else 0
        return 0

    def sweep(self) -> None:
        """Remove what dead fronts left incomplete, and index records without an entry."""
        with self._alone():
            indexed = {record_id: owner for owner in self.index.owners() for record_id in self.index.sizes(owner)}
            self._sweep(self.batches, indexed, lambda batch_id: False)  # batches are created under this lock
            open_ids = self.batches.with_suffix(".lock")
            for batch_id in set(self.batches.with_suffix(".cancel")) - set(open_ids):
                self.batches.path(batch_id, ".cancel").unlink(missing_ok=True)
            results = set[str]()
            for batch_id in open_ids:
                with suppress(ApiError):  # its record cannot be read
                    record = self.batches.read(batch_id)
                    results.update(record.results)
                    for file_id in set(record.results) - set(indexed):
                        self.index.set(record.owner, file_id, self.num_bytes(file_id))
            self._sweep(self.files, indexed, lambda file_id: file_id in results or self._is_received(file_id))

    def _sweep(self, records: Records, indexed: dict[str, str], is_alive: Callable[[str], bool]) -> None:
        names = records.names()
        for record_id in names.keys() | {record_id for record_id in indexed if record_id.startswith(records.prefix)}:
            if f"{record_id}.json" in names.get(record_id, ()):
                if record_id not in indexed:
                    with suppress(ApiError):
                        record = records.read(record_id)
                        self.index.set(record.owner, record_id, record.object.get("bytes", 0))
            elif not is_alive(record_id):
                for name in names.get(record_id, ()):
                    records.folder.joinpath(name).unlink(missing_ok=True)
                if record_id in indexed:
                    self.index.remove(indexed[record_id], [record_id])

    def _is_received(self, file_id: str) -> bool:
        """Return whether a front holds the lock of a file, that is, still receives it."""
        try:
            with open(self.files.path(file_id), "r+b") as file:
                return not try_lock(file)
        except FileNotFoundError:
            return False
