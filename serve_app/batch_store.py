"""Files and batches on a disk that all fronts see.

Everything is written so that a front can die at any byte: a record is replaced as a whole, results are appended a line
at a time, and a batch belongs to the front that holds the lock of its lock file, which the system lets go with its
process. All of it blocks, so it is called in threads.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from runtime.core.types import CallboardError
from runtime.output.fields import shortened
from serve_app.answers import encode_json
from serve_app.errors import ApiError

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass
class Record:
    """A file or a batch."""

    owner: str
    object: dict[str, Any]  # as clients see it
    results: list[str] = field(default_factory=list)  # of a batch: the ids of its files of answers and of errors


class Records:
    """The records of one kind in a folder, each a JSON by its id."""

    def __init__(self, folder: Path, prefix: str, noun: str) -> None:
        self._folder, self._prefix, self._noun = folder, prefix, noun
        self._id = re.compile(rf"{prefix}[0-9a-f]{{32}}")

    def new_id(self) -> str:
        """Ids sort by the time at which they were made."""
        return f"{self._prefix}{time.time_ns():016x}{secrets.token_hex(8)}"

    def path(self, record_id: str, suffix: str = "") -> Path:
        return self._folder / f"{record_id}{suffix}"

    def write(self, record: Record) -> None:
        path = self.path(record.object["id"], ".json")
        part = path.with_suffix(f".{secrets.token_hex(4)}.part")
        with open(part, "wb") as file:
            file.write(encode_json(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)

    def read(self, record_id: str, owner: str | None = None) -> Record:
        """Raises the 404 if there is none, or if it is not `owner`'s (None: of whomever)."""
        with suppress(FileNotFoundError):
            if self._id.fullmatch(record_id):
                record = msgspec.json.decode(self.path(record_id, ".json").read_bytes(), type=Record)
                if owner is None or record.owner == owner:
                    return record
        text = f"There is no {self._noun} {shortened(record_id)!r}: it was never made, or is no longer."
        raise ApiError(404, text, code=f"{self._noun}_not_found")

    def page(
        self, owner: str, after: str | None, limit: int, ascending: bool, wanted: Callable[[Record], bool]
    ) -> tuple[list[Record], bool]:
        """So many of an owner's records after an id, and whether there are more."""
        found: list[Record] = []
        for record_id in sorted((path.stem for path in self._folder.glob("*.json")), reverse=not ascending):
            if after is not None and (record_id == after or (record_id > after) != ascending):
                continue
            with suppress(ApiError):  # it is another's, or was deleted just now
                if wanted(record := self.read(record_id, owner)):
                    found.append(record)
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def with_suffix(self, suffix: str) -> list[str]:
        """The ids that have a file of this suffix, oldest first."""
        return sorted(path.name.removesuffix(suffix) for path in self._folder.glob(f"*{suffix}"))


class BatchStore:
    """The folder of files and batches."""

    def __init__(self, folder: str) -> None:
        """Raises CallboardError if the folder cannot be made."""
        root = Path(folder)
        try:
            for name in ("files", "batches"):
                (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise CallboardError(f"batch_folder {folder!r} cannot be made: {e}.") from e
        self.files = Records(root / "files", "file-", "file")
        self.batches = Records(root / "batches", "batch_", "batch")

    # ---- files -------------------------------------------------------------------------------------------------------

    def upload(self, source: IO[bytes], owner: str, filename: str) -> Record:
        file_id = self.files.new_id()
        with open(self.files.path(file_id), "wb") as file:
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        return self.add_file(file_id, owner, filename, "batch")

    def add_file(self, file_id: str, owner: str, filename: str, purpose: str) -> Record:
        """The content is there; from now on clients find it."""
        size = self.files.path(file_id).stat().st_size
        facts = {"bytes": size, "created_at": int(time.time()), "filename": filename, "purpose": purpose}
        record = Record(owner, {"id": file_id, "object": "file", **facts, "status": "processed", "expires_at": None})
        self.files.write(record)
        return record

    def delete_file(self, file_id: str, owner: str) -> None:
        self.files.read(file_id, owner)
        self.files.path(file_id, ".json").unlink(missing_ok=True)
        self.files.path(file_id).unlink(missing_ok=True)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: Record) -> None:
        """The batch keeps its input, even if the file is deleted. A front that dies before the record is there leaves a
        lock file that means nothing."""
        batch_id = record.object["id"]
        os.link(self.files.path(record.object["input_file_id"]), self.batches.path(batch_id, ".input"))
        self.batches.path(batch_id, ".lock").touch()
        self.batches.write(record)

    def batch(self, batch_id: str, owner: str) -> Record:
        """As clients see it: one that is to be cancelled says so from then on, whichever front runs it."""
        record = self.batches.read(batch_id, owner)
        if record.object["status"] not in ENDED and (cancelling_at := self.cancelling_at(batch_id)) is not None:
            record.object |= {"status": "cancelling", "cancelling_at": cancelling_at}
        return record

    def cancel(self, batch_id: str, owner: str) -> Record:
        record = self.batches.read(batch_id, owner)
        if (status := record.object["status"]) in ENDED:
            raise ApiError(400, f"This batch cannot be cancelled: it is {status}.", code="batch_ended")
        self.batches.path(batch_id, ".cancel").touch()
        return self.batch(batch_id, owner)

    def cancelling_at(self, batch_id: str) -> int | None:
        """When a batch was cancelled, if it was."""
        try:
            return int(self.batches.path(batch_id, ".cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def take(self, batch_id: str) -> IO[bytes] | None:
        """The lock of a batch, which is this process's until it is closed; None if it is another's or has ended."""
        try:
            lock = open(self.batches.path(batch_id, ".lock"), "r+b")  # noqa: SIM115  # its holder closes it
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

    def forget(self, batch_id: str) -> None:
        """The batch has ended: nobody needs to look at it any more."""
        for suffix in (".cancel", ".input", ".lock"):
            self.batches.path(batch_id, suffix).unlink(missing_ok=True)


# ---- the lines of files ----------------------------------------------------------------------------------------------


class Line(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    custom_id: str


@dataclass(slots=True)
class Place:
    """Where a request stands in its file."""

    custom_id: str
    start: int
    length: int


def places(path: Path, endpoint: str, most: int, longest: int) -> tuple[list[Place], list[dict[str, Any]]]:
    """All requests of a file, and the faults of lines that are none, in OpenAI's form."""
    found: dict[str, Place] = {}
    faults: list[dict[str, Any]] = []
    for number, start, line in _lines(path, longest):
        try:
            if len(line) > longest:
                raise msgspec.ValidationError(f"The line is over {longest} bytes")
            request = msgspec.json.decode(line, type=Line)
            msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
            if request.method != "POST" or request.url != endpoint:
                raise msgspec.ValidationError(f"The batch is for POST {endpoint}, and this line for another")
            if request.custom_id in found:
                raise msgspec.ValidationError(f"The custom_id {shortened(request.custom_id)!r} is another line's too")
            if len(found) == most:
                raise msgspec.ValidationError(f"This server allows {most} requests a batch")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            faults.append({"code": "invalid_line", "line": number, "message": f"{e}.", "param": None})
            if len(faults) == 20 or len(found) == most:
                break
        else:
            found[request.custom_id] = Place(request.custom_id, start, len(line))
    if not found and not faults:
        faults.append({"code": "empty_file", "line": None, "message": "The file has no requests.", "param": None})
    return list(found.values()), faults


def _lines(path: Path, longest: int) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not empty, with their numbers and places. Of one that is too long only a part is kept."""
    number = start = 0
    with open(path, "rb") as file:
        while line := file.readline(longest + 2):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(longest)):
                pass
            if line.strip():
                yield number, start, line.rstrip(b"\r\n")
            start = file.tell()


def append(path: Path, result: dict[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(encode_json(result) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def finished(path: Path) -> set[str]:
    """The custom_ids of a file of results. A last line that its front could not end is cut off."""
    done, whole = set[str](), 0
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                break
            done.add(msgspec.json.decode(line, type=_Result).custom_id)
            whole += len(line)
    return done
