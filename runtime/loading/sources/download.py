"""Files from the web, complete or not at all. An interrupted download resumes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.base.types import CallboardError

if TYPE_CHECKING:
    import httpx

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")
_TRIES = 4  # tries without a byte in between
_CONNECTIONS = 4  # downloads at the same time
_TIMEOUT_S = 20.0  # time without a byte that closes the connection


class DownloadRefused(CallboardError):
    """The server answers with an error."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url} cannot be fetched: the server answers {status}; check the address.")
        self.status = status


@dataclass(frozen=True, slots=True)
class Download:
    """A file to fetch."""

    url: str
    target: Path
    size: int | None = None  # bytes; None until the server reports it
    sha256: str = ""  # hex; empty if unknown
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def unfinished(self) -> Path:
        """The path of the incomplete file."""
        return self.target.with_name(f"{self.target.name}.incomplete")

    @property
    def num_stored(self) -> int:
        """The number of bytes that are already stored."""
        for path in (self.target, self.unfinished):
            with suppress(FileNotFoundError):
                return path.stat().st_size
        return 0


@contextmanager
def locked(path: Path, what: str, progress: bool) -> Iterator[None]:
    """Hold the lock file of `what`. The kernel releases it even if this process is killed."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print(f"Waiting for another process that is fetching {what}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(what)  # `stored.py` reads the name from here
        lock.flush()
        yield


def check_space(folder: Path, needed: int, what: str, setting: str) -> None:
    """Raise CallboardError if the disk of `folder` lacks `needed` bytes. `setting` selects another folder."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        raise CallboardError(
            f"{what} needs {size_text(needed)} of disk, but {existing} has {size_text(free)} free; "
            f"make room, or set {setting} to a folder on a larger disk."
        )


def size_text(num_bytes: int) -> str:
    """Return a size as text: 93 MB, 1.5 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{num_bytes} bytes"


def fetch_all(
    missing: Sequence[Download],
    what: str,
    progress: bool,
    store: Callable[[Download, Callable[[int], object], threading.Event], None],
) -> None:
    """Fetch files with known sizes by `store`, several at a time. The first error ends all.

    `store` gets a file, a function that takes the number of new bytes, and the event that ends the transfer."""
    from tqdm import tqdm

    stop, total = threading.Event(), sum(download.size or 0 for download in missing)
    with tqdm(
        total=total, initial=sum(download.num_stored for download in missing), desc=what, unit="B", unit_scale=True,
        disable=not progress, file=sys.stderr,
    ) as bar, ThreadPoolExecutor(_CONNECTIONS) as pool:  # fmt: skip
        try:
            for done in as_completed([pool.submit(store, download, bar.update, stop) for download in missing]):
                done.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def fetch(
    download: Download, advance: Callable[[int], object], check: Callable[[int], None], stop: threading.Event
) -> None:
    """Fetch `download.target`. The caller must hold a lock on it.

    Args:
    advance: called with the number of new bytes.
    check: called with the number of missing bytes before the transfer.
    stop: ends the transfer when set.

    Raises CallboardError if the server refuses, is unreachable or sends unexpected bytes. Received bytes are kept,
    unless their hash is wrong."""
    import httpx

    tries, most = 0, download.num_stored
    with httpx.Client(
        follow_redirects=True, timeout=_TIMEOUT_S, event_hooks={} if download.sha256 else {"request": [_check_address]}
    ) as client:
        while True:
            try:
                _transfer(client, download, advance, check, stop)
                break
            except (
                httpx.InvalidURL,
                httpx.UnsupportedProtocol,
                httpx.TooManyRedirects,
                ValueError,
                OverflowError,
            ) as e:
                raise CallboardError(f"{download.url} cannot be fetched ({e}); check the address.") from e
            except httpx.TransportError as e:
                tries = 0 if download.num_stored > most else tries + 1
                most = max(most, download.num_stored)
                if tries >= _TRIES:
                    reason = str(e) or type(e).__name__
                    raise CallboardError(
                        f"{download.url} cannot be fetched ({reason}); check the network, and try again: "
                        f"{size_text(download.num_stored)} are kept."
                    ) from e
                stop.wait(0.2 * 2**tries)
    finish(download)


def _check_address(request: httpx.Request) -> None:
    """Raise CallboardError for an address without encryption: the bytes could be changed in transit."""
    url = request.url
    if url.scheme != "https" and url.host not in ("127.0.0.1", "::1", "localhost"):
        raise CallboardError(f"{url} cannot be fetched safely without encryption; use an address with https.")


def _transfer(
    client: httpx.Client,
    download: Download,
    advance: Callable[[int], object],
    check: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Send one request for the missing bytes. Raises TransportError if bytes are missing after it."""
    import httpx

    path, stored = download.unfinished, download.num_stored
    if stored and stored == download.size:
        return
    etag_file = path.with_suffix(".etag")
    etag = etag_file.read_text() if etag_file.exists() else ""
    headers = {**download.headers, "Accept-Encoding": "identity"}
    if stored and (etag or download.sha256):  # either proves that the file has not changed
        headers |= {"Range": f"bytes={stored}-"} | ({"If-Range": etag} if etag else {})
    with client.stream("GET", download.url, headers=headers) as response:
        status, (first, total) = response.status_code, _range_of(response)
        is_same = not etag or response.headers.get("etag", etag) == etag
        if status == 416 and total == stored and is_same:
            return  # a process was killed between the last byte and the rename
        is_rest = status == 206 and first == stored and total is not None and is_same
        is_rest |= status == 206 and first is None and bool(download.sha256)
        if status == 416 or (status == 206 and not is_rest):
            path.unlink(missing_ok=True)
            advance(-stored)
            raise httpx.RemoteProtocolError(f"the server answers with another part than the rest after byte {stored}")
        if status >= 400:
            raise DownloadRefused(download.url, status)
        start = stored if is_rest else 0
        advance(start - stored)
        if total is None:
            total = int(response.headers.get("content-length", -1)) if not is_rest else -1
            total = total if total >= 0 else download.size
        if total is None:
            text = "without its length, so a part of it could pass for the whole"
            raise CallboardError(f"{download.url} is sent {text}; use another server.")
        if download.size not in (None, total):
            raise CallboardError(f"{download.url} has {total} bytes where {download.size} are announced; try again.")
        check(total - start)
        if not download.sha256 and (etag := response.headers.get("etag", "")) and not etag.startswith("W/"):
            etag_file.write_text(etag)
        with path.open("ab" if is_rest else "wb") as sink:
            for chunk in response.iter_raw():
                if stop.is_set():
                    raise KeyboardInterrupt
                sink.write(chunk)
                advance(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())  # the final name guarantees a complete file, also after a power loss
            if sink.tell() != total:
                raise httpx.RemoteProtocolError(f"the transfer ended after {sink.tell()} of {total} bytes")


def _range_of(response: httpx.Response) -> tuple[int | None, int | None]:
    """Return the first byte in an answer's Content-Range, and the whole file's size. None if unknown."""
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    first, total = match.groups() if match else (None, None)
    return (None if first is None else int(first)), (int(total) if total and total != "*" else None)


def finish(download: Download) -> None:
    """Check the hash and give the file its final name."""
    path = download.unfinished
    if download.sha256:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != download.sha256:
            path.unlink()
            raise CallboardError(
                f"{download.url} has SHA-256 {actual} where {download.sha256} is announced; "
                "it was deleted, so check where it comes from and try again."
            )
    path.replace(download.target)
    path.with_suffix(".etag").unlink(missing_ok=True)
