"""The lines in a batch's files: the requests in its input and the answers in its results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from runtime.output.fields import shortened
from serve_app.apis.batches.disk import replacing
from serve_app.protocol.answers import encode_json

_MAX_FAULTS = 20  # listed for a failed batch
_MAX_ID_CHARS = 512
_WINDOW = 64  # request positions in memory, for each batch


class Line(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CustomId(msgspec.Struct):
    custom_id: str


@dataclass(slots=True)
class Position:
    """The position of a request in its file, in bytes."""

    start: int
    length: int


# ---- the requests ----------------------------------------------------------------------------------------------------


def check(path: Path, endpoint: str, most: int, longest: int) -> list[dict[str, Any]]:
    """Return the faults in a request file, in OpenAI's form; none if the batch may run."""
    ids = set[str]()
    faults: list[dict[str, Any]] = []
    for number, _, line in _lines(path, longest):
        try:
            request = _request(line, endpoint, longest)
            if request.custom_id in ids:
                raise msgspec.ValidationError(f"The custom_id {shortened(request.custom_id)!r} is another line's too")
            if len(ids) == most:
                raise msgspec.ValidationError(f"This server allows {most} requests a batch")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            faults.append(fault("invalid_line", f"{e}.", number))
            if len(faults) == _MAX_FAULTS or len(ids) == most:
                break
        else:
            ids.add(request.custom_id)
    if not ids and not faults:
        faults.append(fault("empty_file", "The file has no requests."))
    return faults


def fault(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    """One of a batch's `errors`."""
    return {"code": code, "line": line, "message": message, "param": None}


def _request(line: bytes, endpoint: str, longest: int) -> Line:
    if len(line) > longest:
        raise msgspec.ValidationError(f"The line is over {longest} bytes")
    request = msgspec.json.decode(line, type=Line)
    msgspec.json.decode(request.body, type=dict[str, msgspec.Raw])
    if request.method != "POST" or request.url != endpoint:
        raise msgspec.ValidationError(f"The batch is for POST {endpoint}, and this line for another")
    if len(request.custom_id) > _MAX_ID_CHARS:
        raise msgspec.ValidationError(f"The custom_id is over {_MAX_ID_CHARS} characters")
    return request


@dataclass
class Requests:
    """The requests of a checked file. A byte for each request records whether it has a result."""

    path: Path
    longest: int
    is_done: bytearray = field(default_factory=bytearray)

    def mark(self, done: set[str]) -> None:
        """Record that the requests with these custom_ids have a result."""
        self.is_done = bytearray(custom_id in done for custom_id in self._custom_ids())

    def without_result(self) -> Iterator[str]:
        """Return the custom_ids of the requests without a result."""
        return (custom_id for custom_id, is_done in zip(self._custom_ids(), self.is_done, strict=True) if not is_done)

    def _custom_ids(self) -> Iterator[str]:
        for _, _, line in _lines(self.path, self.longest):
            yield msgspec.json.decode(line, type=_CustomId).custom_id

    def window(self, index: int, start: int) -> tuple[list[Position], int, int]:
        """Return the next requests without a result, from request `index` at byte `start` on.

        Also returns where the next window starts. The list is empty at the end of the file."""
        found: list[Position] = []
        for _, at, line in _lines(self.path, self.longest, start):
            if not self.is_done[index]:
                found.append(Position(at, len(line)))
            index, start = index + 1, at + len(line)
            if len(found) == _WINDOW:
                break
        return found, index, start


def read_line(path: Path, position: Position) -> Line:
    """Read one request."""
    with open(path, "rb") as file:
        file.seek(position.start)
        return msgspec.json.decode(file.read(position.length), type=Line)


def _lines(path: Path, longest: int, start: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield the non-empty lines from byte `start` on, with their numbers and positions.

    A line above `longest` bytes is cut."""
    number = 0
    with open(path, "rb") as file:
        file.seek(start)
        while line := file.readline(longest + 2):
            number += 1
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(longest)):
                pass
            if line.strip():
                yield number, start, line.rstrip(b"\r\n")
            start = file.tell()


# ---- the results -----------------------------------------------------------------------------------------------------


def append(path: Path, results: Iterable[dict[str, Any]]) -> None:
    """Append results to their file. After an OSError the file is unchanged."""
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        try:
            for result in results:
                rest = memoryview(encode_json(result) + b"\n")
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(start)
            raise


def finished(path: Path) -> set[str]:
    """Return the custom_ids in a results file, after removal of incomplete lines."""
    done, is_spoilt = set[str](), False
    if not path.exists():
        return done
    with open(path, "rb") as file:
        for line in file:
            if (custom_id := _whole(line)) is None:
                is_spoilt = True
            else:
                done.add(custom_id)
    if is_spoilt:
        with open(path, "rb") as old, replacing(path) as new:
            new.writelines(line for line in old if _whole(line) is not None)
    return done


def _whole(line: bytes) -> str | None:
    """Return the custom_id of a complete line; None for any other."""
    if not line.endswith(b"\n"):
        return None
    try:
        return msgspec.json.decode(line, type=_CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
